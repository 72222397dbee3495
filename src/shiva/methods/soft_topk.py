"""SOFT top-k (Xie et al., NeurIPS 2020, arXiv 2002.06504), as a straight-through token selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec
from shiva.methods._gated import GatedTopK, GatedTopKConfig
from shiva.modules.soft_topk import SOLVERS, Solver, soft_topk


@dataclass(frozen=True)
class SoftTopK(GatedTopKConfig):
    """Top-k selection trained through an entropic transport plan; k is fixed.

    The Shiva paper compares it as an operator only, so its `paper` preset is the release's own settings.
    """

    epsilon: float = 0.1
    """Weight of the entropy, relative to the largest cost."""
    solver: Solver = "sinkhorn"
    """How the plan is found: sinkhorn (as released) or closed_form (exact)."""
    iterations: int = 200
    """Rounds of Sinkhorn."""

    presets: ClassVar = {"paper": {}}
    fixed: ClassVar = GatedTopKConfig.fixed | {"epsilon", "solver", "iterations"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon > 0:
            raise ValueError(f"epsilon={self.epsilon} is not above 0; pass a temperature such as 0.1")
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} is below 1; pass 200 as released")
        options.choice("solver", self.solver, SOLVERS)

    def build(self, spec: BackboneSpec) -> SoftTopKMethod:
        return SoftTopKMethod(self, spec)


class SoftTopKMethod(GatedTopK):
    config: SoftTopK

    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        return soft_topk(scores, k, self.config.epsilon, self.config.solver, self.config.iterations)
