"""ToMeSD: Token Merging for Fast Stable Diffusion (Bolya and Hoffman, 2023; arXiv 2303.17604)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Method, MethodConfig, Place, SiteKind
from shiva.core.reduction import Reduction
from shiva.modules.merging import (
    Combine,
    Matching,
    block_matching,
    draw,
    match,
    merging,
    partition,
    seeded,
    windows,
)

SUBLAYERS: tuple[SiteKind, ...] = ("attention", "cross_attention", "ffn")


def sublayers(value: Any) -> tuple[SiteKind, ...]:
    """Check a config's sub-layers; a merged residual stream would lose tokens, so blocks are not among them."""
    kinds: tuple[Any, ...] = (value,) if isinstance(value, str) else tuple(value)
    if not kinds:
        raise ValueError(f"sites={value!r} names no sub-layer; pass some of {', '.join(map(repr, SUBLAYERS))}")
    for kind in kinds:
        options.choice("sites", kind, SUBLAYERS)
    return kinds


def merged_share(name: str, value: float, cell: tuple[int, int] = (2, 2)) -> float:
    """Check a share of tokens to merge away: at most all but one of each cell."""
    limit = 1 - 1 / (cell[0] * cell[1])
    if options.share(name, value, zero=True) > limit:
        raise ValueError(
            f"{name}={value} is above {limit:g}, all tokens but one of each {cell[0]}x{cell[1]} cell; "
            "lower it or enlarge the cells"
        )
    return value


@dataclass(frozen=True)
class ToMeSD(MethodConfig):
    """Merge the most similar tokens before a sub-layer, copy its results back after it."""

    ratio: float = 0.5
    """Share of image tokens merged away."""
    sx: int = 2
    """Columns of a cell; each cell holds one destination."""
    sy: int = 2
    """Rows of a cell."""
    random: bool = True
    """Draw each cell's destination at random for every block and step, not its top left token."""
    sites: tuple[SiteKind, ...] = ("attention",)
    """Sub-layers that run on merged tokens: attention, cross_attention, ffn."""
    metric: str = "input"
    """Features that are compared: the block's input, or the normed input of its first reduced sub-layer."""
    round_to: int = 1
    """Round the number of merged tokens down to this multiple."""
    guidance: GuidancePolicy = "per-sample"
    """Whether each sample chooses its own tokens to merge, or the first guidance half chooses for both."""
    seed: int = 0
    """Seed of the random destinations."""

    presets: ClassVar = {"paper": {"ratio": 0.25}}

    def __post_init__(self) -> None:
        for name in ("sx", "sy", "round_to"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        merged_share("ratio", self.ratio, (self.sy, self.sx))
        object.__setattr__(self, "sites", sublayers(self.sites))
        options.choice("metric", self.metric, ("input", "normed"))
        options.choice("guidance", self.guidance, ("per-sample", "shared"))

    def removed(self, tokens: int) -> int:
        """Tokens merged away out of N."""
        count = int(self.ratio * tokens)
        return count - count % self.round_to

    def build(self, spec: BackboneSpec) -> ToMeSDMethod:
        return ToMeSDMethod(self, spec)


class ToMeSDMethod(Method):
    """One matching per block, shared by the sub-layers that are switched on."""

    config: ToMeSD

    def __init__(self, config: ToMeSD, spec: BackboneSpec):
        super().__init__(config, spec)
        self.sites = frozenset(config.sites)
        self.guidance = config.guidance

    def combine(self, layer: int) -> Combine:
        return "mean"

    def begin_step(self, ctx: StepContext) -> None:
        config = self.config
        if config.removed(ctx.tokens):
            cells = windows(ctx.grid, (config.sy, config.sx))
            generator = seeded(config.seed, ctx.step) if config.random else None
            ctx.memory["partition"] = partition(cells, draw(cells, self.spec.layers, generator), ctx.tokens)

    def observe(self, x: Tensor, site: Place, ctx: StepContext) -> None:
        ctx.memory["input"] = x

    def matching(self, metric: Tensor, layer: int, ctx: StepContext) -> Matching:
        destinations, sources = (part[layer].to(metric.device) for part in ctx.memory["partition"])
        removed = self.config.removed(ctx.tokens)
        return match(metric, destinations, sources, removed)

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        if not self.config.removed(ctx.tokens):
            return None
        metric = ctx.memory["input"] if self.config.metric == "input" else x
        make = partial(self.matching, layer=site.layer, ctx=ctx)
        return merging(block_matching(site.layer, metric, self.guidance, ctx, make), self.combine(site.layer))
