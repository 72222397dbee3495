"""JiT: Just-in-Time, spatial acceleration of diffusion transformers (Sun et al., 2026; arXiv 2603.10744).

Early steps, which only lay out the picture, run on a strided part of the tokens. What that part becomes is lifted to
the others, each of which keeps its own noise. It leaves the dense model's path, so it is judged by quality alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shiva.core.context import NOISE, StepContext
from shiva.core.layout import to_prediction, to_tokens
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place
from shiva.core.options import Count, Positive, Ratio, Share
from shiva.core.reduction import Reduction, flat_rows, gather, scatter, select
from shiva.methods.scores import lattice_scores
from shiva.ops.shortcut import find_neighbours
from shiva.ops.topk import hard_topk


@dataclass(frozen=True)
class JiT(MethodConfig):
    """Few tokens while the layout forms, more as details do."""

    stages: tuple[tuple[Share, Ratio], ...] = ((0.35, 0.25), (0.35, 0.5))
    """Shares of the run, one after the other, and the share of tokens that each runs; after them all tokens run."""
    steps: Count = 28
    """Length of the run where no scheduler tells it (a bare transformer)."""
    spread: Positive = 0.8
    """Deviation, in tokens, of the weights by which a token is lifted from those that ran."""

    steps_differ: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        total = sum(share for share, _ in self.stages)
        if total > 1:
            raise ValueError(f"stages take {total:g} of a run in all; pass shares of at most 1 together")

    def keep(self, step: int, steps: int) -> float:
        """Share of tokens that a step of a run sees."""
        end = 0.0
        for share, keep in self.stages:
            end += share * steps
            if step < round(end):
                return keep
        return 1.0

    def turned(self, at: float) -> dict[str, Any]:
        return {"stages": ((0.5 * at, 0.25), (0.5 * at, 0.5))}

    def build(self, spec: BackboneSpec) -> JiTMethod:
        return JiTMethod(self, spec)


@dataclass
class JiTStep:
    anchors: Tensor | None = None  # (B, k), the tokens that ran


class JiTMethod(Method):
    sites = frozenset({"model"})
    new_step = JiTStep
    config: JiT

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        keep = self.config.keep(*ctx.of_run(self.config.steps))
        return (max(1, math.ceil(keep * ctx.tokens)),) * self.spec.layers

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        k = ctx.counts[site.layer]
        if k >= x.shape[1]:
            return None
        anchors = hard_topk(lattice_scores(ctx.layout.shape, 0, 0)[None], k).to(x.device).expand(x.shape[0], -1)
        ctx.now.anchors = anchors
        return select(anchors, x.shape[1])

    def end_step(self, output: Tensor, ctx: StepContext) -> Tensor | None:
        """Lift the prediction of those that ran. In a flow, what is lifted is the clean estimate x - sigma v."""
        anchors: Tensor | None = ctx.now.anchors
        if anchors is None or ctx.latents is None:
            return None
        layout, sigma = ctx.layout, ctx.toward * ctx.timestep / NOISE
        found = to_tokens(output, layout)
        flows = ctx.latents.shape == output.shape and sigma != 0
        noisy = to_tokens(ctx.latents, layout).to(found.dtype) if flows else found
        clean = noisy - sigma * found if flows else found
        everywhere = lifted(clean, anchors, layout.shape, self.config.spread)
        prediction = (noisy - everywhere) / sigma if flows else everywhere
        rows = flat_rows(anchors, layout.tokens)
        return to_prediction(scatter(gather(found, rows), prediction, rows), output, layout)


def lifted(values: Tensor, anchors: Tensor, shape: tuple[int, int, int], spread: float) -> Tensor:
    """Values (B, N, F) at the anchors (B, k), carried to all tokens by their neighbours' weighted mean."""
    known = gather(values, flat_rows(anchors, values.shape[1]))
    every = torch.arange(values.shape[1], device=values.device).expand(values.shape[0], -1)
    near = find_neighbours(anchors, every, shape, spread)
    alone = (near.weights.sum(dim=-1) == 0).view(values.shape[0], -1, 1)
    return near.mean(known).where(~alone, known.mean(dim=1, keepdim=True))
