"""attends="all" with nothing kept: keys and values of all tokens are made anew, from the block's own norms.

The block is called on all tokens, and norms them. Inside it, queries and feed-forward run on the chosen tokens alone;
the projections to keys and values see all. So a skipped token costs norms and two projections, and each query N keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import Place, RunSite, SiteKind
from shiva.core.reduction import Reduction, Streams, flat_rows, gather, scatter

INSIDE: frozenset[SiteKind] = frozenset({"attention", "cross_attention", "ffn", "keys"})


@dataclass
class Fresh:
    """While a block runs."""

    rows: Tensor  # (B * k,), of the chosen tokens in (B * N, D)
    normed: Tensor | None = None  # (B, N, D), what the latest attention was given


def check_fresh(site: Place, backbone: str) -> None:
    """Refuse blocks whose feed-forward cannot be told apart from what keys need."""
    if site.single_stream:
        raise ValueError(
            f"attends='all' without a cache is not defined on {backbone}: its single blocks fuse attention with the "
            "feed-forward; pass attends='selected', fill='cached', or name those layers in dense="
        )


def around_block(run: RunSite, reduction: Reduction, x: Tensor, base: Tensor, ctx: StepContext) -> Streams:
    """A block that updates the chosen of x (B, N, D), with all others as keys."""
    rows = flat_rows(reduction.positions, x.shape[1])
    ctx.now.fresh = Fresh(rows)
    try:
        out = run(x, replace(reduction, whole_keys=True))
    finally:
        ctx.now.fresh = None
    with ctx.phase("scatter"):
        image = reduction.restore(gather(out.image, rows), base)
    return out._replace(image=image, ran=reduction.positions.shape[1])


def around_inside(run: RunSite, x: Tensor, site: Place, ctx: StepContext) -> Streams:
    """An attention, its keys or a feed-forward of the block, on normed tokens x; only the chosen are updated."""
    fresh: Fresh | None = ctx.now.fresh
    if fresh is None:
        return run(x, None)
    if site.kind == "keys":
        assert fresh.normed is not None
        return run(fresh.normed, None)
    fresh.normed = x
    out = run(gather(x, fresh.rows), None)
    return out._replace(image=scatter(out.image, out.image.new_zeros(x.shape), fresh.rows))
