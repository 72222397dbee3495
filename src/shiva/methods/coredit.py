"""CoReDiT: spatial coherence-guided token pruning and reconstruction (Li et al., CVPR 2026; arXiv 2605.14191)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, unify_guidance
from shiva.core.options import Count, Positive, Share
from shiva.core.reduction import Reduction, flat_rows, gather
from shiva.methods.scores import cell_leaders
from shiva.methods.tomesd import check_merged
from shiva.ops.fill import filled
from shiva.ops.shortcut import find_neighbours
from shiva.ops.topk import hard_topk


@dataclass(frozen=True)
class CoReDiT(MethodConfig):
    """Tokens like their neighbours skip self-attention, and are rebuilt from neighbours that did not."""

    ratio: Share = 0.5
    """Share of tokens that skip, in the middle of a run and of the model."""
    growth: Share = 0.0
    """How much of that share grows with the steps of a run: 1 begins at none and ends at twice as many."""
    spread: Positive = 0.8
    """Deviation, in tokens, of the weights of neighbours, beside their likeness."""
    steps: Count = 28
    """Length of the run where no scheduler tells it (a bare transformer)."""
    guidance: Literal["per-sample", "shared"] = "per-sample"
    """Whether each sample chooses its own tokens, or the first guidance half chooses for both."""

    presets: ClassVar = {"paper": {"growth": 0.5}}
    steps_differ: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_merged("ratio * (1 + growth)", self.ratio * (1 + self.growth))

    def share(self, step: int, steps: int) -> float:
        progress = min(step / (steps - 1), 1.0) if steps > 1 else 0.5
        return self.ratio * (1 - self.growth + 2 * self.growth * progress)

    def turned(self, at: float) -> dict[str, Any]:
        return {"ratio": 0.74 * at / (1 + self.growth)}

    def build(self, spec: BackboneSpec) -> CoReDiTMethod:
        return CoReDiTMethod(self, spec)


def coherence(x: Tensor, layout: Layout) -> Tensor:
    """How alike each token of x (B, N, D) is to those beside it, above and below: (B, N), in linear time."""
    unit = F.normalize(x.float(), dim=-1).view(x.shape[0], *layout.shape, -1)
    total, count = unit.new_zeros(unit.shape[:-1]), unit.new_zeros(unit.shape[:-1])
    for axis, length in ((2, layout.rows), (3, layout.columns)):
        if length > 1:
            before, after = unit.narrow(axis, 0, length - 1), unit.narrow(axis, 1, length - 1)
            likeness = (before * after).sum(dim=-1)
            for start in (0, 1):
                total.narrow(axis, start, length - 1).add_(likeness)
                count.narrow(axis, start, length - 1).add_(1)
    return (total / count.clamp(min=1)).flatten(1)


def covering(scores: Tensor, layout: Layout) -> Tensor:
    """Scores (B, N) in which the best token of each 2x2 cell comes before all others, so that all have one near."""
    first = torch.zeros_like(scores).scatter(1, cell_leaders(scores, layout), 1.0)
    first[:, layout.windows(device=scores.device).outside] = 1.0
    return scores + 4 * first


@dataclass
class CoReDiTStep:
    k: int = 0
    """Tokens that attention runs on."""
    indices: dict[str, Tensor] = field(default_factory=dict)  # attention -> (B, k)


class CoReDiTMethod(Method):
    sites = frozenset({"attention"})
    requires = frozenset({"attention"})
    new_step = CoReDiTStep
    config: CoReDiT

    def begin_step(self, ctx: StepContext) -> None:
        ctx.now.k = ctx.tokens - int(self.config.share(*ctx.of_run(self.config.steps)) * ctx.tokens)

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        k, known = ctx.now.k, ctx.now.indices
        if k >= x.shape[1]:
            return None
        if not ctx.branch or self.guidance == "per-sample" or site.name not in known:
            with ctx.phase("router"):
                scores = unify_guidance(covering(-coherence(x, ctx.layout), ctx.layout), self.guidance, ctx)
                known[site.name] = hard_topk(scores, k)
        indices = known[site.name]
        return filled(indices, x.shape[1], lambda updates: self.rebuilt(updates, indices, x, ctx))

    def rebuilt(self, updates: Tensor, indices: Tensor, x: Tensor, ctx: StepContext) -> Tensor:
        """What every token would get of the computed neighbours' updates (B, k, D), by their place and likeness."""
        every = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        near = find_neighbours(indices, every, ctx.layout.shape, self.config.spread)
        unit = F.normalize(x.float(), dim=-1)
        own, chosen = unit.flatten(0, 1), gather(unit, flat_rows(indices, x.shape[1])).flatten(0, 1)
        # One neighbour of each token at a time: all at once would be 25 times the tokens, 75 of a clip.
        likeness = torch.stack([(chosen[rows] * own).sum(dim=-1) for rows in near.rows.unbind(dim=1)], dim=1)
        weights = near.weights * likeness.clamp(min=1e-3)
        return near._replace(weights=weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-12)).mean(updates)
