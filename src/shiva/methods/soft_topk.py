"""SOFT top-k (Xie et al., NeurIPS 2020, arXiv 2002.06504), as a straight-through token selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec
from shiva.core.options import Count, Positive
from shiva.methods.gated import GatedOptions, GatedTopK
from shiva.ops.soft_topk import Solver, soft_topk


@dataclass(frozen=True)
class SoftTopK(GatedOptions):
    """Top-k selection trained through an entropic transport plan; k is fixed.

    The Shiva paper compares it as an operator only, so its `paper` preset is the release's own settings.
    """

    epsilon: Positive = 0.1
    """Weight of the entropy, relative to the largest cost."""
    solver: Solver = "sinkhorn"
    """How the plan is found: sinkhorn (as released) or closed_form (exact)."""
    iterations: Count = 200
    """Rounds of Sinkhorn."""

    presets: ClassVar = {"paper": {}}
    fixed: ClassVar = GatedOptions.fixed | {"epsilon", "solver", "iterations"}

    def build(self, spec: BackboneSpec) -> SoftTopKMethod:
        return SoftTopKMethod(self, spec)


class SoftTopKMethod(GatedTopK):
    config: SoftTopK

    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        return soft_topk(scores, k, self.config.epsilon, self.config.solver, self.config.iterations)
