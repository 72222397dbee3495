"""ToMeSD: Token Merging for Fast Stable Diffusion (Bolya and Hoffman, 2023; arXiv 2303.17604)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place
from shiva.core.options import Count, Share, Whole
from shiva.core.reduction import Reduction
from shiva.ops import seeded
from shiva.ops.merging import (
    Combine,
    Matching,
    Matchings,
    block_matching,
    draw,
    match,
    merging,
    partition,
)

SubLayer = Literal["attention", "cross_attention", "ffn"]
"""A merged residual stream would lose tokens, so blocks are not among them."""


def check_sites(sites: tuple[SubLayer, ...]) -> None:
    if not sites:
        raise ValueError(
            f"sites={sites!r} names no sub-layer; pass some of {', '.join(map(repr, get_args(SubLayer)))}"
        )


def check_merged(name: str, value: float, cell: tuple[int, int] = (2, 2)) -> None:
    """Refuse a share of tokens to merge away above all but one of each cell."""
    limit = 1 - 1 / (cell[0] * cell[1])
    if value > limit:
        raise ValueError(
            f"{name}={value} is above {limit:g}, all tokens but one of each {cell[0]}x{cell[1]} cell; "
            "lower it or enlarge the cells"
        )


@dataclass(frozen=True)
class ToMeSD(MethodConfig):
    """Merge the most similar tokens before a sub-layer, copy its results back after it."""

    ratio: Share = 0.5
    """Share of image tokens merged away."""
    sx: Count = 2
    """Columns of a cell; each cell holds one destination."""
    sy: Count = 2
    """Rows of a cell."""
    random: bool = True
    """Draw each cell's destination at random for every block and step, not its top left token."""
    sites: tuple[SubLayer, ...] = ("attention",)
    """Sub-layers that run on merged tokens: attention, cross_attention, ffn."""
    metric: Literal["input", "normed"] = "input"
    """Features that are compared: the block's input, or the normed input of its first reduced sub-layer."""
    round_to: Count = 1
    """Round the number of merged tokens down to this multiple."""
    guidance: Literal["per-sample", "shared"] = "per-sample"
    """Whether each sample chooses its own tokens to merge, or the first guidance half chooses for both."""
    seed: Whole = 0
    """Seed of the random destinations."""

    presets: ClassVar = {"paper": {"ratio": 0.25}}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_merged("ratio", self.ratio, (self.sy, self.sx))
        check_sites(self.sites)

    def removed(self, tokens: int) -> int:
        """Tokens merged away out of N."""
        count = int(self.ratio * tokens)
        return count - count % self.round_to

    def turned(self, at: float) -> dict[str, Any]:
        return {"ratio": 0.75 * at}

    def build(self, spec: BackboneSpec) -> ToMeSDMethod:
        return ToMeSDMethod(self, spec)


@dataclass
class MergeStep:
    """What a merger keeps for the sites of one step."""

    partition: tuple[Tensor, Tensor] | None = None  # destinations (L, C) and sources (L, N - C)
    matchings: Matchings = field(default_factory=dict)


class ToMeSDMethod(Method):
    """One matching per block, shared by the sub-layers that are switched on."""

    config: ToMeSD
    new_step = MergeStep

    def __init__(self, config: ToMeSD, spec: BackboneSpec):
        super().__init__(config, spec)
        self.sites = frozenset(config.sites)

    def combine(self, layer: int) -> Combine:
        return "mean"

    def begin_step(self, ctx: StepContext) -> None:
        config = self.config
        if config.removed(ctx.tokens):
            cells = ctx.layout.windows((config.sy, config.sx))
            generator = seeded(config.seed, ctx.step) if config.random else None
            made = partition(cells, draw(cells, self.spec.layers, generator), ctx.tokens)
            ctx.now.partition = ctx.here(made[0]), ctx.here(made[1])

    def matching(self, metric: Tensor, layer: int, ctx: StepContext) -> Matching:
        destinations, sources = (part[layer].to(metric.device) for part in ctx.now.partition)
        removed = self.config.removed(ctx.tokens)
        return match(metric, destinations, sources, removed)

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        if not self.config.removed(ctx.tokens):
            return None
        metric = ctx.block_input if self.config.metric == "input" else x
        assert metric is not None
        make = partial(self.matching, layer=site.layer, ctx=ctx)
        matching = block_matching(ctx.now.matchings, site.layer, metric, self.guidance, ctx, make)
        return merging(matching, self.combine(site.layer))


@dataclass(frozen=True)
class ToFu(ToMeSD):
    """ToFu: Token Fusion, between token pruning and token merging (Kim et al., 2023; arXiv 2312.01026).

    ToMeSD's matching; early blocks prune the matched tokens, later ones merge them keeping their norm.
    """

    switch: Share = 0.5
    """Share of the depth that prunes; blocks after it merge."""
    rule: Literal["mlerp", "mean"] = "mlerp"
    """How a group merges: mlerp (its mean at the largest norm of its tokens) or mean."""

    presets: ClassVar = {"paper": {"ratio": 0.25}}

    def build(self, spec: BackboneSpec) -> ToFuMethod:
        return ToFuMethod(self, spec)


class ToFuMethod(ToMeSDMethod):
    """Pruned tokens also receive their best destination's result: the matching knows it."""

    config: ToFu

    def combine(self, layer: int) -> Combine:
        return "prune" if layer < self.config.switch * self.spec.layers else self.config.rule
