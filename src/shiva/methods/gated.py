"""Hard top-k forward with a soft gate behind it: what NeuralSort, SOFT and LapSum have in common.

All three share Shiva's router and run whole blocks on the k best tokens. They differ in the operator that
relaxes top-k: its gates g multiply the selected inputs by 1 + g - stopgrad(g), which changes no value and
lets the scores learn. The objective is the trainer's (diffusion loss and distillation), as for Shiva, so
that a comparison of the four compares estimators alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import Place, unify_guidance
from shiva.core.options import Ratio
from shiva.core.reduction import Reduction
from shiva.methods.pruner import RoutedOptions, RoutedPruner
from shiva.ops.router import perturb
from shiva.ops.topk import hard_topk, straight_through, token_count


@dataclass(frozen=True)
class GatedOptions(RoutedOptions):
    """Options of the gated selectors."""

    keep: Ratio = 0.8
    """Share of image tokens each reduced block runs on."""

    knob: ClassVar = "keep"

    def turned(self, at: float) -> dict[str, Any]:
        return {"keep": 1.0 - 0.95 * at}


def input_gates(chosen: Reduction, gates: Tensor) -> Reduction:
    """The chosen tokens, entering the block as x * (1 + g - stopgrad(g)), g of gates (B, N)."""
    gate = chosen.reduce(straight_through(gates))  # (B, k, 1), zero in value
    return replace(chosen, reduce=lambda x: chosen.reduce(x) * (1 + gate.to(x.dtype)))


class GatedTopK(RoutedPruner):
    """Router scores, hard top-k, and in training the gates of a subclass."""

    config: GatedOptions

    @abstractmethod
    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        """Relaxed inclusion (B, N) of scores (B, N) among the k best, differentiable."""

    def ratios(self) -> list[float]:
        """Keep ratio of every layer; dense layers are ignored."""
        return [self.config.keep] * self.spec.layers

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        explored = ctx.explore.ratio if self.training else None
        ratios = self.ratios() if explored is None else [explored] * self.spec.layers
        dense_step = not self.training and self.fill.dense_step(ctx.step, ctx)
        return tuple(
            ctx.tokens if dense_step or layer in self.config.dense else token_count(ratio, ctx.tokens)
            for layer, ratio in enumerate(ratios)
        )

    def training_reduction(self, x: Tensor, age: Tensor, site: Place, ctx: StepContext) -> Reduction:
        layer, k = site.layer, ctx.counts[site.layer]
        scores = unify_guidance(self.training_scores(x, age, site, ctx), self.guidance, ctx)
        scores = perturb(scores, ctx.explore.score_noise)
        chosen = self.fill.trained(hard_topk(scores.detach(), k), x, age, layer, ctx)
        return input_gates(chosen, self.gates(scores, k, layer, ctx))
