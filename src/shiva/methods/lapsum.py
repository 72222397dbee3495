"""LapSum (Struski et al., ICML 2025, arXiv 2503.06242), as a straight-through selector with a learned k."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec
from shiva.core.options import NotNegative, Positive
from shiva.methods.gated import GatedOptions, GatedTopK
from shiva.ops.lapsum import lapsum_topk
from shiva.ops.policy import logit
from shiva.ops.schedule import RatioSchedule


@dataclass(frozen=True)
class LapSum(GatedOptions):
    """Top-k selection with an exact soft budget; each layer learns its own keep ratio in the same pass.

    `keep` is the mean over the reduced layers: a loss draws the learned ratios to it in training, and at
    inference one shift of all their logits meets it exactly. Not part of the Shiva paper's comparison.
    """

    alpha: Positive = 0.1
    """Width of the Laplace distribution, in units of the scores."""
    budget_weight: NotNegative = 10.0
    """Weight of the loss (mean keep - keep)^2."""

    presets: ClassVar = {"paper": {}}
    fixed: ClassVar = GatedOptions.fixed | {"alpha", "budget_weight"}

    def build(self, spec: BackboneSpec) -> LapSumMethod:
        return LapSumMethod(self, spec)


@functools.lru_cache(maxsize=16)
def shifted_ratios(logits: tuple[float, ...], keep: float, dense: tuple[int, ...]) -> list[float]:
    """Each layer's ratio after the shift of all logits at which the reduced ones have the mean `keep`."""
    table = torch.tensor(logits, dtype=torch.float64)[None]  # (1, L)
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
        learned = torch.sigmoid(self.ratio_logits[layer]) * ctx.tokens
        budget = learned if ctx.explore.ratio is None else float(k)
        return lapsum_topk(scores, budget, self.config.alpha)

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        if ctx.explore.ratio is not None:
            return {}
        mean = torch.sigmoid(self.ratio_logits[self.reduced]).mean()
        return {"budget": self.config.budget_weight * (mean - self.config.keep).square()}
