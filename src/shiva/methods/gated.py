"""Hard top-k forward with a soft gate behind it: what NeuralSort, SOFT and LapSum have in common.

All three share Shiva's router and run whole blocks on the k best tokens. They differ in the operator that
relaxes top-k: its gates g multiply the selected inputs by 1 + g - stopgrad(g), which changes no value and
lets the scores learn. The objective is the trainer's (diffusion loss and distillation), as for Shiva, so
that a comparison of the four compares estimators alone.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Place, unify_guidance
from shiva.core.options import Count, NotNegative, Positive, Ratio
from shiva.core.reduction import Reduction
from shiva.methods.routed import RoutedOptions, RoutedPruner
from shiva.ops.networks import logit, perturb
from shiva.ops.relaxed import Solver, lapsum_topk, neuralsort_topk, soft_topk
from shiva.ops.schedule import RatioSchedule
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
        counts = [
            ctx.tokens if dense_step or layer in self.config.dense else token_count(ratio, ctx.tokens)
            for layer, ratio in enumerate(ratios)
        ]
        return self.even(counts)

    def training_reduction(self, x: Tensor, age: Tensor, site: Place, ctx: StepContext) -> Reduction:
        layer, k = site.layer, ctx.counts[site.layer]
        scores = unify_guidance(self.training_scores(x, age, site, ctx), self.guidance, ctx)
        scores = perturb(scores, ctx.explore.score_noise)
        chosen = self.fill.trained(hard_topk(scores.detach(), k), x, age, layer, ctx)
        return input_gates(chosen, self.gates(scores, k, layer, ctx))


@dataclass(frozen=True)
class NeuralSort(GatedOptions):
    """NeuralSort (Grover et al., ICLR 2019, arXiv 1903.08850), as a straight-through token selector.

    It learns through a relaxed permutation; k is fixed, and has no gradient.
    The release has no diffusion objective and no tokens; the adaptation is the Shiva paper's. Its table fits
    a mean keep of 0.843 over whole blocks, which is the `paper` preset.
    """

    tau: Positive = 0.05
    """Temperature as a share of N: the operator's logits grow with N."""

    presets: ClassVar = {"paper": {"keep": 0.843}}
    fixed: ClassVar = GatedOptions.fixed | {"tau"}

    def build(self, spec: BackboneSpec) -> NeuralSortMethod:
        return NeuralSortMethod(self, spec)


class NeuralSortMethod(GatedTopK):
    config: NeuralSort

    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        return neuralsort_topk(scores, k, self.config.tau)


@dataclass(frozen=True)
class SoftTopK(GatedOptions):
    """SOFT top-k (Xie et al., NeurIPS 2020, arXiv 2002.06504), as a straight-through token selector.

    It learns through an entropic transport plan; k is fixed.
    The Shiva paper compares it as an operator only, so its `paper` preset is the release's own settings.
    """

    epsilon: Positive = 0.1
    """Weight of the entropy, relative to the largest cost."""
    solver: Solver = "sinkhorn"
    """How the plan is found: sinkhorn (as released) or closed_form (exact)."""
    iterations: Count = 200
    """Rounds of Sinkhorn."""

    fixed: ClassVar = GatedOptions.fixed | {"epsilon", "solver", "iterations"}

    def build(self, spec: BackboneSpec) -> SoftTopKMethod:
        return SoftTopKMethod(self, spec)


class SoftTopKMethod(GatedTopK):
    config: SoftTopK

    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        return soft_topk(scores, k, self.config.epsilon, self.config.solver, self.config.iterations)


@dataclass(frozen=True)
class LapSum(GatedOptions):
    """LapSum (Struski et al., ICML 2025, arXiv 2503.06242), as a straight-through selector with a learned k.

    Its soft budget is exact, so that each layer learns its own keep ratio in the same pass. `keep` is the mean over
    the reduced layers: a loss draws the learned ratios to it in training, and at inference one shift of all their
    logits meets it exactly. Not part of the Shiva paper's comparison.
    """

    alpha: Positive = 0.1
    """Width of the Laplace distribution, in units of the scores."""
    budget_weight: NotNegative = 10.0
    """Weight of the loss (mean keep - keep)^2."""

    fixed: ClassVar = GatedOptions.fixed | {"alpha", "budget_weight"}

    def build(self, spec: BackboneSpec) -> LapSumMethod:
        return LapSumMethod(self, spec)


@functools.lru_cache(maxsize=16)
def shifted_ratios(logits: tuple[float, ...], keep: float, dense: tuple[int, ...]) -> list[float]:
    """Each layer's ratio after the shift of all logits at which the reduced ones have the mean `keep`."""
    table = torch.tensor(logits, dtype=torch.float64, device="cpu")[None]  # (1, L)
    return RatioSchedule((1000.0,), table, dense=frozenset(dense)).shift(keep).ratios()[0].tolist()


class LapSumMethod(GatedTopK):
    config: LapSum

    def __init__(self, config: LapSum, spec: BackboneSpec):
        super().__init__(config, spec)
        start = logit(min(max(config.keep, 1e-3), 1 - 1e-3))
        self.ratio_logits = nn.Parameter(torch.full((spec.layers,), start))

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {**super().groups(), "policy": [self.ratio_logits]}

    @property
    def reduced(self) -> list[int]:
        return [layer for layer in range(self.spec.layers) if layer not in self.config.dense]

    def ratios(self) -> list[float]:
        if self.ratio_logits.is_meta:
            return super().ratios()
        if self.training:
            return torch.sigmoid(self.ratio_logits.detach()).tolist()
        return shifted_ratios(tuple(self.ratio_logits.tolist()), self.config.keep, self.config.dense)

    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        span = ctx.now.spans[layer]
        learned = torch.sigmoid(self.ratio_logits[span.start : span.stop]).mean() * ctx.tokens
        budget = learned if ctx.explore.ratio is None else float(k)
        return lapsum_topk(scores, budget, self.config.alpha)

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        if ctx.explore.ratio is not None:
            return {}
        mean = torch.sigmoid(self.ratio_logits[self.reduced]).mean()
        return {"budget": self.config.budget_weight * (mean - self.config.keep).square()}
