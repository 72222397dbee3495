"""NeuralSort (Grover et al., ICLR 2019, arXiv 1903.08850), as a straight-through token selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec
from shiva.core.options import Positive
from shiva.methods.gated import GatedOptions, GatedTopK
from shiva.ops.neuralsort import neuralsort_topk


@dataclass(frozen=True)
class NeuralSort(GatedOptions):
    """Top-k selection trained through NeuralSort's relaxed permutation; k is fixed, and has no gradient.

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
