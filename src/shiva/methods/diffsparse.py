"""DiffSparse: learned token sparsity for feature caching (Zhu et al., 2026; arXiv 2604.03674).

Only the table is learned: how many tokens each layer runs at each step, for the image at the end of whole runs. Tokens
that do not run reuse their last update. `shiva fit --table DiffSparse` learns it; before that it is flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shiva.core.method import BackboneSpec
from shiva.core.trainable import Trainable
from shiva.methods.counts import CountOptions
from shiva.methods.fills import FillName
from shiva.methods.pruner import Attends, PrunerOptions
from shiva.methods.scores import Update
from shiva.methods.sweep import UntrainedPruner
from shiva.ops.schedule import RatioSchedule


@dataclass(frozen=True)
class DiffSparse(CountOptions, PrunerOptions):
    """The tokens with the largest last updates run; how many, a learned table says."""

    fill: FillName = "cached"
    attends: Attends = "all"
    age: float = 0.5
    """Bonus of each step a token has waited, in deviations of the scores."""

    presets: ClassVar = {"paper": {}}

    def build(self, spec: BackboneSpec) -> DiffSparseMethod:
        return DiffSparseMethod(self, spec)


class DiffSparseMethod(UntrainedPruner, Trainable):
    """A rule for which, a table for how many."""

    def __init__(self, config: DiffSparse, spec: BackboneSpec):
        super().__init__(config, spec, Update())

    def tables(self) -> dict[str, Tensor]:
        return self.count.schedule.state()

    def load_tables(self, tables: dict[str, Tensor]) -> None:
        self.count.set(RatioSchedule.from_state(tables))

    def groups(self) -> dict[str, list[object]]:  # type: ignore[override]
        return {}
