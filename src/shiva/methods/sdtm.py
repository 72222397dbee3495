"""SDTM: Structure-then-Detail Token Merging for DiTs (Fang et al., CVPR 2025; github.com/ICTMCG/SDTM)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.layout import Windows
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, RunSite
from shiva.core.options import Count, Ratio, Share, Whole
from shiva.core.reduction import Reduction, Streams
from shiva.methods.tomesd import check_merged
from shiva.ops import seeded
from shiva.ops.merging import (
    Matching,
    Matchings,
    block_matching,
    draw,
    match,
    merging,
    unit,
    unmerge,
)


@dataclass(frozen=True)
class SDTM(MethodConfig):
    """Merge whole windows while the structure forms, then single similar tokens while details do."""

    ratio: Share = 0.3
    """Share of image tokens merged away, at the middle of its range over the run."""
    deviation: Share = 0.2
    """The share falls along a cosine from ratio + deviation at the first step to ratio - deviation at the last."""
    switch: Share = 0.4
    """Share of the run at which the structure stage has its last step: step 20 of 50, counted from 0."""
    steps: Count = 50
    """Length of the run where no scheduler tells it (a bare transformer)."""
    random: bool = True
    """Draw the destination inside a merged window at random, not its top left token."""
    priority: float = 0.05
    """Weight, in a window's score, of how long its tokens have been merged."""
    cache_weight: Ratio = 0.1
    """Weight of a merged token's new result; the rest is its own result at the last protected step."""
    protect_every: Count | None = 3
    """Every n-th step runs dense and refreshes that cache; None never."""
    round_to: Count = 16
    """Round counts of merged windows and tokens down to this multiple."""
    guidance: Literal["per-sample", "shared"] = "per-sample"
    """Whether each sample chooses its own tokens to merge, or the first guidance half chooses for both."""
    seed: Whole = 0
    """Seed of the random destinations."""

    steps_differ: ClassVar = True
    presets: ClassVar = {"paper": {"ratio": 0.25, "cache_weight": 1.0, "protect_every": None}}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_merged("ratio + deviation", self.ratio + self.deviation)
        if self.deviation > self.ratio:
            raise ValueError(
                f"deviation={self.deviation} is above ratio={self.ratio}; the last steps would be below 0"
            )
        if self.cache_weight < 1 and self.protect_every is None:
            raise ValueError(
                f"cache_weight={self.cache_weight} needs protected steps to fill the cache; "
                "pass protect_every, or cache_weight=1"
            )

    def share(self, step: int, steps: int) -> float:
        """Share of tokens merged away at a step of a run."""
        progress = min(step / (steps - 1), 1.0) if steps > 1 else 0.0
        return self.ratio - self.deviation + 2 * self.deviation * math.cos(math.pi / 2 * progress)

    def is_structure(self, step: int, steps: int) -> bool:
        """Whether a step of a run merges whole windows."""
        return step <= self.switch * steps

    def merged_windows(self, share: float, tokens: int) -> int:
        """Windows merged in the structure stage; each removes three tokens."""
        return self.round_to * (int(share * tokens) // (3 * self.round_to))

    def merged_tokens(self, share: float, tokens: int) -> int:
        """Tokens merged in the detail stage."""
        return self.round_to * (int(share * tokens) // self.round_to)

    def turned(self, at: float) -> dict[str, Any]:
        """The range narrows with its middle, as in the presets, and stays between 0 and what a window can lose."""
        spread = self.deviation / self.ratio if self.ratio else 0.0
        ratio = 0.74 * at / (1 + spread)
        return {"ratio": ratio, "deviation": spread * ratio}

    def build(self, spec: BackboneSpec) -> SDTMMethod:
        return SDTMMethod(self, spec)


def ordered_members(cells: Windows, pick: Tensor) -> Tensor:
    """Members of each cell beginning with the picked one: pick (..., C) -> (..., C, m)."""
    size = cells.members.shape[1]
    turned = (pick[..., None] + torch.arange(size, device=pick.device)) % size
    return cells.members.expand(*pick.shape, size).gather(-1, turned)


def structure_matching(metric: Tensor, priority: Tensor, cells: Windows, pick: Tensor, merged: int) -> Matching:
    """Merge whole the windows whose tokens are most alike; priority (B, N) is added to that likeness.

    The mean of a window's cosine matrix is the squared length of its mean unit token.
    """
    likeness = unit(metric.float())[:, cells.members].mean(dim=2).square().sum(dim=-1)  # (B, C)
    order = (likeness + priority[:, cells.members].mean(dim=2)).argsort(dim=1, descending=True, stable=True)
    members = ordered_members(cells, pick)[order]  # (B, C, m), best windows first
    chosen, others = members[:, :merged], members[:, merged:]
    batch, siblings = metric.shape[0], members.shape[2] - 1
    target = torch.arange(merged, device=metric.device).repeat_interleave(siblings).expand(batch, -1)
    kept = torch.cat([others.flatten(1), cells.outside.expand(batch, -1)], dim=1)
    return Matching(kept, chosen[..., 0], chosen[..., 1:].flatten(1), target)


def detail_matching(metric: Tensor, counter: Tensor, cells: Windows, merged: int) -> Matching:
    """Merge the most similar tokens into the longest merged one of each window; counter is (B, N)."""
    members = ordered_members(cells, counter[:, cells.members].argmax(dim=2))  # (B, C, m)
    sources = torch.cat([members[..., 1:].flatten(1), cells.outside.expand(metric.shape[0], -1)], dim=1)
    return match(metric, members[..., 0], sources, merged)


@dataclass
class SDTMRun:
    """By guidance branch how long each token has been merged, (B, N), and by site too its last whole result."""

    merged: dict[int, Tensor] = field(default_factory=dict)
    results: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # (B, N, D)


@dataclass
class SDTMStep:
    structure: bool = False
    protected: bool = False
    merged: int = 0
    """Windows or tokens that this step merges."""
    cells: Windows | None = None
    """On the device, and made outside a compiled graph."""
    pick: Tensor | None = None  # (L, C)
    metrics: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """What a block's tokens are compared by, of a layer and a guidance branch."""
    matchings: Matchings = field(default_factory=dict)


class SDTMMethod(Method):
    """Structure stage around attention and FFN, detail stage around the FFN alone."""

    sites = frozenset({"attention", "ffn"})
    requires = frozenset({"attention"})
    config: SDTM
    new_run = SDTMRun
    new_step = SDTMStep

    def begin_step(self, ctx: StepContext) -> None:
        config = self.config
        step, steps = ctx.of_run(config.steps)
        share, structure = config.share(step, steps), config.is_structure(step, steps)
        now: SDTMStep = ctx.now
        now.structure = structure
        now.merged = (config.merged_windows if structure else config.merged_tokens)(share, ctx.tokens)
        now.protected = config.protect_every is not None and step % config.protect_every == 0
        if now.merged:
            generator = seeded(config.seed, ctx.step) if config.random else None
            cells = ctx.layout.windows()
            now.cells = Windows(*map(ctx.here, cells))
            now.pick = ctx.here(draw(cells, self.spec.layers, generator))
            now.merged = min(now.merged, cells.members.shape[0] * (1 if structure else 3))

    def matching(self, metric: Tensor, layer: int, ctx: StepContext) -> Matching:
        """Match the block's tokens and count how long each has been merged; all blocks share the counter."""
        device, now = metric.device, ctx.now
        cells: Windows = now.cells
        counter: Tensor | None = ctx.run.merged.get(ctx.branch)
        if counter is None or counter.shape != metric.shape[:2]:
            counter = torch.zeros(metric.shape[:2], device=device)
        if now.structure:
            priority = counter / counter.mean(dim=1, keepdim=True).clamp(min=1e-6)
            pick = now.pick[layer].to(device)
            weighted = self.config.priority * priority
            matching = structure_matching(metric, weighted, cells, pick, now.merged)
        else:
            matching = detail_matching(metric, counter, cells, now.merged)
        ctx.run.merged[ctx.branch] = (counter + 1).scatter(1, matching.kept, 0.0)
        return matching

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        now, block = ctx.now, (site.layer, ctx.branch)
        if site.kind == "attention" and block not in now.metrics:
            now.metrics = {block: x}  # the block's first attention; others of an earlier block are done with
        dense_here = site.kind == "attention" and not now.structure
        if not now.merged or dense_here:
            return None
        make = partial(self.matching, layer=site.layer, ctx=ctx)
        matching = block_matching(now.matchings, site.layer, now.metrics[block], self.guidance, ctx, make)
        cached: Tensor | None = ctx.run.results.get((site.name, ctx.branch))
        if cached is None or cached.shape != x.shape:
            return merging(matching)
        return blended(matching, cached, self.config.cache_weight)

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if not ctx.now.protected:
            return super().around(run, x, base, site, ctx)
        out = run(x, None)
        if self.config.cache_weight < 1:
            ctx.run.results[site.name, ctx.branch] = out.image.detach()
        return out


def blended(matching: Matching, cached: Tensor, weight: float) -> Reduction:
    """Merging after which merged tokens mix their new result with their cached one (B, N, D)."""

    def restore(values: Tensor, base: Tensor) -> Tensor:
        new = unmerge(values, matching)
        merged = torch.cat([matching.destinations, matching.sources], dim=1)
        weights = new.new_ones(new.shape[:2]).scatter(1, merged, weight)[..., None]
        return torch.where(weights < 1, torch.lerp(cached, new, weight), new)

    return Reduction(reduce=merging(matching).reduce, restore=restore, positions=matching.positions)
