"""Sweep: a band of rows that moves at every step and attends to all; the others reuse their last update.

Nothing is trained, and nothing looks at a token: the band of step i starts i golden ratios of the image further on, so
that bands of any width overlap least and no part waits long. This library's own; see docs/beyond-the-paper.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec
from shiva.core.options import Whole
from shiva.methods.counts import CountOptions, Table
from shiva.methods.fills import FillName
from shiva.methods.pruner import Attends, Pruner, PrunerOptions
from shiva.methods.scores import Band, Departure, Norm, Random, Score, Update


@dataclass(frozen=True)
class Sweep(PrunerOptions, CountOptions):
    """A moving band that attends to all, with nothing trained."""

    fill: FillName = "cached"
    attends: Attends = "all"

    presets: ClassVar = {"paper": {}}

    def build(self, spec: BackboneSpec) -> UntrainedPruner:
        return UntrainedPruner(self, spec, Band())


class UntrainedPruner(Pruner):
    """A score that needs no training, at a flat share of the tokens."""

    def __init__(self, config: Any, spec: BackboneSpec, score: Score, oldest_first: bool = False):
        super().__init__(config, spec, tracks_age=oldest_first)
        self.count, self.score = Table(config, spec, config.dense), score
        if oldest_first:
            self.age_weight = OLDEST_FIRST

    def turn(self, config: Any) -> None:
        super().turn(config)
        self.count.turn(config)

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        return self.count(ctx, timesteps, self.fill.dense_step)


OLDEST_FIRST = 1e3
"""Weight of age beside scores of unit deviation: large enough that age alone decides."""


@dataclass(frozen=True)
class Ranked(PrunerOptions, CountOptions):
    """Tokens by a rule: the yardsticks that a learned or moving choice is held against."""

    score: Literal["random", "norm", "age", "update", "departure"] = "random"
    """random, norm (longest features first), age (oldest first), update (largest last update first), or, in editing
    models, departure (where the picture departs from its reference)."""
    seed: Whole = 0
    """Of the random scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score in ("update", "departure") and self.fill != "cached":
            raise ValueError(f"score={self.score!r} ranks by what the step before it left; pass fill='cached' too")

    def make_score(self) -> Score:
        scores: dict[str, Score] = {"norm": Norm(), "update": Update(), "departure": Departure()}
        return scores.get(self.score, Random(self.seed))

    def build(self, spec: BackboneSpec) -> UntrainedPruner:
        return UntrainedPruner(self, spec, self.make_score(), self.score == "age")
