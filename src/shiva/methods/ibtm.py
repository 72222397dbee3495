"""IBTM: Importance-Based Token Merging (Wu et al., ICCV 2025; github.com/cvlab-stonybrook/importance-token-merge)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.layout import Layout, to_tokens
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place
from shiva.core.options import Count, Positive, Share, Whole
from shiva.core.reduction import Reduction
from shiva.methods.tomesd import MergeStep, SubLayer, check_merged, check_sites
from shiva.ops import seeded
from shiva.ops.fill import distances
from shiva.ops.merging import (
    Combine,
    Matching,
    best_destination,
    block_matching,
    draw,
    match,
    merge_best,
    merging,
    partition,
    split,
)

OUTSIDE_BONUS = 1e3
"""Added to the score of tokens outside the pool, so that they merge before any inside it."""
TIE_BREAK = 1e-3
"""Deviation of the destinations' coordinates, so that equally near ones are chosen among at random."""


@dataclass(frozen=True)
class IBTM(MethodConfig):
    """Merge the tokens that guidance changes least, into random ones among those it changes most."""

    ratio: Share = 0.5
    """Share of image tokens merged away."""
    pool: Positive = 1.0
    """Size of the pool of important tokens, relative to the number of tokens left after merging."""
    layers: tuple[Whole, Whole] = (7, 20)
    """First and last block that merges."""
    sites: tuple[SubLayer, ...] = ("attention", "cross_attention")
    """Sub-layers that run on merged tokens: attention, cross_attention, ffn."""
    similarity: Literal["position", "feature"] = "position"
    """Merge into the nearest destination on the grid (position), or the most similar block input (feature)."""
    merge_from: Share = 0.2
    """Share of the run, step 4 of 20, from which merged tokens are averaged; before it they are dropped, and receive
    their destination's result."""
    steps: Count = 20
    """Length of the run where no scheduler tells it (a bare transformer)."""
    first_step: Literal["partition", "dense"] = "partition"
    """The first step, which has no guidance difference yet: ToMeSD's random partition, or dense."""
    guidance: Literal["per-sample", "shared"] = "per-sample"
    """Pool and destinations are always common to both halves; per-sample lets each rank its own sources."""
    seed: Whole = 0
    """Seed of the random destinations."""

    presets: ClassVar = {"paper": {"ratio": 0.25, "sites": ("attention",), "first_step": "dense"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_merged("ratio", self.ratio)
        check_sites(self.sites)
        if self.layers[0] > self.layers[1]:
            raise ValueError(f"layers={self.layers} is no range; pass (first, last) with 0 <= first <= last")

    def removed(self, tokens: int) -> int:
        """Tokens merged away out of N."""
        return int(self.ratio * tokens)

    def turned(self, at: float) -> dict[str, Any]:
        return {"ratio": 0.75 * at}

    def build(self, spec: BackboneSpec) -> IBTMMethod:
        return IBTMMethod(self, spec)


def guidance_difference(first: Tensor, second: Tensor, layout: Layout, channels: int) -> Tensor:
    """Mean absolute difference of two predictions at each token: (B, N).

    Predictions are (B, C, H, W) or (B, C, F, H, W), of which only the latents' own channels count (a model that
    also predicts their variance returns twice as many), or (B, N, C).
    """
    difference = (first.float() - second.float()).abs()
    own = difference if difference.ndim == 3 else difference[:, :channels]
    return to_tokens(own, layout).mean(dim=-1)


def nearest_destination(destinations: Tensor, sources: Tensor, columns: int, jitter: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the distance on the grid of each source (B, S) to its nearest destination, and that one's index."""

    def coordinates(positions: Tensor) -> Tensor:
        return torch.stack([positions // columns, positions % columns], dim=-1).float()

    distance, target = distances(coordinates(sources), coordinates(destinations) + jitter).min(dim=-1)
    return -distance, target


@dataclass
class IBTMRun:
    begun: bool = False
    importance: Tensor | None = None  # (b, N), of the step before


@dataclass
class IBTMStep(MergeStep):
    combine: Combine = "mean"
    first_output: Tensor | None = None
    """The prediction of sequential guidance's first call."""
    pool: Tensor | None = None  # (b, M), of b images
    drawn: Tensor | None = None  # (L, K), places in the pool
    jitter: Tensor | None = None  # (K, 2)


class IBTMMethod(Method):
    """Ranks tokens by the previous step's guidance difference, which it sees in the model's output."""

    needs_guidance = True
    config: IBTM
    new_run = IBTMRun
    new_step = IBTMStep

    def __init__(self, config: IBTM, spec: BackboneSpec):
        super().__init__(config, spec)
        if config.layers[1] >= spec.layers:
            raise ValueError(
                f"layers={config.layers} ends behind the last of the {spec.layers} layers of {spec.name}; "
                f"pass (first, last) with last at most {spec.layers - 1}"
            )
        self.sites = frozenset(config.sites)

    def selects(self, site: Place) -> bool:
        first, last = self.config.layers
        return site.kind in self.sites and first <= site.layer <= last

    # -- importance ----------------------------------------------------------------------------------

    def end_step(self, output: Tensor, ctx: StepContext) -> None:
        now: IBTMStep = ctx.now
        ctx.run.begun = True
        if ctx.guidance_pairs:
            first, second = output.chunk(2)
        elif now.first_output is not None:
            first, second = now.first_output, output
        else:
            now.first_output = output
            return
        assert ctx.latents is not None
        ctx.run.importance = guidance_difference(first, second, ctx.layout, ctx.latents.shape[1])

    def begin_step(self, ctx: StepContext) -> None:
        """Draw the step's destinations by the map that the step before left; its second branch takes the first's."""
        step, steps = ctx.of_run(self.config.steps)
        now: IBTMStep = ctx.now
        now.combine = "mean" if step >= self.config.merge_from * steps else "prune"
        if ctx.branch or not self.config.removed(ctx.tokens):
            return
        generator = seeded(self.config.seed, ctx.step)
        if not ctx.run.begun:
            cells = ctx.layout.windows()
            made = partition(cells, draw(cells, self.spec.layers, generator), ctx.tokens)
            now.partition = ctx.here(made[0]), ctx.here(made[1])
            return
        importance, ctx.run.importance = ctx.run.importance, None  # used once, should guidance end within the run
        if importance is None:
            raise ValueError(
                "IBTM ranks tokens by the difference of the two guidance predictions, but the step before had only "
                "one: raise guidance_scale above 1 (Flux: true_cfg_scale, with a negative prompt) and keep it there "
                "to the last step, or, if both halves are in the batch, attach with cfg='batched'"
            )
        kept = ctx.tokens - self.config.removed(ctx.tokens)
        pool = min(int(self.config.pool * kept), ctx.tokens)
        order = importance.argsort(dim=1, descending=True, stable=True)
        now.pool = order[:, :pool]  # (b, M), b images
        drawn = torch.rand(self.spec.layers, pool, generator=generator, device="cpu").argsort(dim=1)
        now.drawn = ctx.here(drawn[:, : max(1, ctx.tokens // 4)])  # (L, K)
        jitter = torch.randn(drawn.shape[1], 2, generator=generator, device="cpu")
        now.jitter = ctx.here(TIE_BREAK * jitter)

    # -- merging -------------------------------------------------------------------------------------

    def matching(self, metric: Tensor, layer: int, ctx: StepContext) -> Matching:
        config, device, now = self.config, metric.device, ctx.now
        removed = config.removed(ctx.tokens)
        if now.partition is not None:
            destinations, sources = (part[layer].to(device) for part in now.partition)
            return match(metric, destinations, sources, removed)
        pool = now.pool.to(device)  # (b, M)
        destinations, sources = split(pool[:, now.drawn[layer].to(device)], ctx.tokens)
        outside = torch.ones_like(pool[:, :1]).expand(-1, ctx.tokens).scatter(1, pool, 0).gather(1, sources)
        halves = metric.shape[0] // pool.shape[0]
        if config.similarity == "position":
            jitter = now.jitter[: destinations.shape[1]].to(device)
            score, target = nearest_destination(destinations, sources, ctx.layout.columns, jitter)
            return merge_best(score + OUTSIDE_BONUS * outside, target, destinations, sources, removed).repeat(halves)
        destinations, sources, outside = (part.repeat(halves, 1) for part in (destinations, sources, outside))
        score, target = best_destination(metric, destinations, sources)
        return merge_best(score + OUTSIDE_BONUS * outside, target, destinations, sources, removed)

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        config, now = self.config, ctx.now
        if not config.removed(ctx.tokens) or (now.partition is not None and config.first_step == "dense"):
            return None
        make = partial(self.matching, layer=site.layer, ctx=ctx)
        assert ctx.block_input is not None
        matching = block_matching(now.matchings, site.layer, ctx.block_input, self.guidance, ctx, make)
        return merging(matching, now.combine)
