"""Lattice: tokens in a Bayer order that turns over layers and steps; the others get a regression and their neighbours.

Nothing is trained, and nothing is kept from step to step, so it suits runs of few steps, whose caches are stale and of
which none can be spared. `shiva fit` solves the regressions in minutes. This library's own; see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec
from shiva.core.trainable import Trainable
from shiva.methods.counts import CountOptions, Table
from shiva.methods.fills import FillName
from shiva.methods.pruner import Pruner, PrunerOptions
from shiva.methods.scores import Lattice as LatticeScore


@dataclass(frozen=True)
class Lattice(PrunerOptions, CountOptions):
    """An even part of the grid, turning over layers and steps; fitted, not trained."""

    fill: FillName = "shortcut"

    presets: ClassVar = {"paper": {}}

    def build(self, spec: BackboneSpec) -> LatticeMethod:
        return LatticeMethod(self, spec)


class LatticeMethod(Pruner, Trainable):
    """A drawn score, and what a fit found for the others."""

    untrained = "fills by neighbours alone, as it was not fitted: run `shiva fit`, and attach the folder it writes"
    config: Lattice

    def __init__(self, config: Lattice, spec: BackboneSpec):
        super().__init__(config, spec)
        self.count, self.score = Table(config, spec, config.dense), LatticeScore()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {} if self.shortcut is None else {"fill": list(self.shortcut.parameters())}

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        return self.count(ctx, timesteps, self.fill.dense_step)

    def turn(self, config: Lattice) -> None:
        super().turn(config)
        self.count.turn(config)
