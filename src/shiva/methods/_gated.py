"""Hard top-k forward with a soft gate behind it: what NeuralSort, SOFT and LapSum have in common.

All three share Shiva's router and run whole blocks on the k best tokens. They differ in the operator that
relaxes top-k: its gates g multiply the selected inputs by 1 + g - stopgrad(g), which changes no value and
lets the scores learn. The objective is the trainer's (diffusion loss and distillation), as for Shiva, so
that a comparison of the four compares estimators alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import Place, unify_guidance
from shiva.core.reduction import Reduction
from shiva.methods._select import SelectConfig, SelectMethod, shared_indices
from shiva.modules.router import perturb
from shiva.modules.topk import hard_topk, straight_through, token_count


@dataclass(frozen=True)
class GatedTopKConfig(SelectConfig):
    """What the gated selectors have in common."""

    keep: float = 0.8
    """Share of image tokens each reduced block runs on."""

    knob: ClassVar = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.share("keep", self.keep)


def input_gates(chosen: Reduction, gates: Tensor) -> Reduction:
    """The chosen tokens, entering the block as x * (1 + g - stopgrad(g)), g of gates (B, N)."""
    gate = chosen.reduce(straight_through(gates))  # (B, k, 1), zero in value
    return replace(chosen, reduce=lambda x: chosen.reduce(x) * (1 + gate.to(x.dtype)))


class GatedTopK(SelectMethod):
    """Router scores, hard top-k, and in training the gates of a subclass."""

    config: GatedTopKConfig

    @abstractmethod
    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        """Relaxed inclusion (B, N) of scores (B, N) among the k best, differentiable."""

    def ratios(self) -> list[float]:
        """Keep ratio of every layer; dense layers are ignored."""
        return [self.config.keep] * self.spec.layers

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        explored = self.exploration.ratio if self.training else None
        ratios = self.ratios() if explored is None else [explored] * self.spec.layers
        dense_step = not self.training and self.dense_step(ctx.step, ctx)
        return tuple(
            ctx.tokens if dense_step or layer in self.config.dense else token_count(ratio, ctx.tokens)
            for layer, ratio in enumerate(ratios)
        )

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        layer = site.layer
        k = ctx.counts[layer]
        if self.training:
            self.simulate_age(x, k / x.shape[1], layer, ctx)
            scores = unify_guidance(self.scores(x, layer, ctx), self.guidance, ctx)
            scores = perturb(scores, self.exploration.score_noise)
            indices = hard_topk(scores.detach(), k)
            chosen = self.fill_trained(indices, x, layer, ctx)
            return input_gates(chosen, self.gates(scores, k, layer, ctx))
        if self.runs_dense(x, layer, ctx):
            return None

        def choose() -> Tensor:
            scores = unify_guidance(self.scores(x, layer, ctx), self.guidance, ctx)
            return hard_topk(self.waited(scores, x, layer, ctx), k)

        return self.fill(shared_indices(layer, self.guidance, ctx, choose), x, layer, ctx)
