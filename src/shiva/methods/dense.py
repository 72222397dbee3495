"""Dense: the model with nothing reduced, the reference that a trained method is compared with.

Trained through the common loop it is plain fine-tuning: the same adapter on the same images, at dense cost. Its
checkpoint attaches like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, MethodConfig, Place
from shiva.core.reduction import Reduction
from shiva.core.trainable import Trainable


@dataclass(frozen=True)
class Dense(MethodConfig):
    """Every token in every block; the paper's "Finetuned" row."""

    presets: ClassVar = {"paper": {}}

    def build(self, spec: BackboneSpec) -> DenseMethod:
        return DenseMethod(self, spec)


class DenseMethod(Trainable):
    config: Dense

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        return None
