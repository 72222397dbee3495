"""Pruners whose choice of tokens is a rule, not learned: Sweep, Ranked, Lattice, DiffSparse. Dense leaves none out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, MethodConfig, Place, Trainable
from shiva.core.options import Share, Whole
from shiva.core.reduction import Reduction
from shiva.methods import scores
from shiva.methods.counts import CountOptions, Learned, Table
from shiva.methods.fills import FillName
from shiva.methods.pruner import Attends, Pruner, PrunerOptions

OLDEST_FIRST = 1e3
"""Weight of age beside scores of unit deviation: large enough that age alone decides."""


class RuledPruner(Pruner):
    """A score that needs no training, at the shares of a table."""

    config: Any

    def __init__(self, config: Any, spec: BackboneSpec, score: scores.Score, oldest_first: bool = False):
        super().__init__(config, spec, tracks_age=oldest_first)
        self.count, self.score = Table(config, spec, config.dense), score
        if oldest_first:
            self.age_weight = OLDEST_FIRST

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        return self.even(self.count(self.config, ctx, timesteps, self.fill.dense_step))


@dataclass(frozen=True)
class Sweep(PrunerOptions, CountOptions):
    """Sweep: a band of rows that moves at every step and attends to all; the others reuse their last update.

    Nothing is trained, and nothing looks at a token: the band of step i starts i golden ratios of the image further
    on, so that bands of any width overlap least and no part waits long. This library's own; docs/beyond-the-paper.md.
    """

    fill: FillName = "cached"
    attends: Attends = "auto"
    tilt: float = 2.0

    def build(self, spec: BackboneSpec) -> RuledPruner:
        return RuledPruner(self, spec, scores.Band())


@dataclass(frozen=True)
class Ranked(PrunerOptions, CountOptions):
    """Tokens by a rule: the yardsticks that a learned or moving choice is held against."""

    score: Literal["random", "norm", "age", "update", "departure"] = "random"
    """random, norm (longest features first), age (oldest first), update (largest last update first), or, in editing
    models, departure (where the picture departs from its reference)."""
    seed: Whole = 0
    """Of the random scores."""

    presets: ClassVar = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score in ("update", "departure") and self.fill != "cached":
            raise ValueError(f"score={self.score!r} ranks by what the step before it left; pass fill='cached' too")

    def make_score(self) -> scores.Score:
        by_name = {"norm": scores.Norm(), "update": scores.Update(), "departure": scores.Departure()}
        return by_name.get(self.score, scores.Random(self.seed))

    def build(self, spec: BackboneSpec) -> RuledPruner:
        return RuledPruner(self, spec, self.make_score(), self.score == "age")


@dataclass(frozen=True)
class Lattice(PrunerOptions, CountOptions):
    """Lattice: tokens in a Bayer order that turns over layers and steps; the others get a regression and neighbours.

    It suits runs of few steps, whose cached updates are stale. `shiva fit` solves the regressions in minutes. This
    library's own; see docs/methods.md.
    """

    fill: FillName = "shortcut"
    tilt: float = 4.0
    recall: Share = 0.75
    """Share of what the regression missed of a token at the step before that its estimate begins with."""
    steady: Share = 0.7
    """In the last span, share of the estimate that is what the token was there at the step before."""

    def build(self, spec: BackboneSpec) -> LatticeMethod:
        return LatticeMethod(self, spec)


class LatticeMethod(RuledPruner, Trainable):
    """A drawn score, and what a fit found for the others."""

    untrained = "fills by neighbours alone, as it was not fitted: run `shiva fit`, and attach the folder it writes"

    def __init__(self, config: Lattice, spec: BackboneSpec):
        super().__init__(config, spec, scores.Lattice(config.span))

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {} if self.shortcut is None else {"fill": list(self.shortcut.parameters())}


@dataclass(frozen=True)
class DiffSparse(CountOptions, PrunerOptions):
    """DiffSparse: learned token sparsity for feature caching (Zhu et al., 2026; arXiv 2604.03674).

    The tokens with the largest last updates run. How many, a table says, which is learned for the image at the end of
    whole runs: `shiva fit --table DiffSparse`; before that it is flat.
    """

    fill: FillName = "cached"
    attends: Attends = "all"
    age: float = 0.5
    """Bonus of each step a token has waited, in deviations of the scores."""

    def build(self, spec: BackboneSpec) -> DiffSparseMethod:
        return DiffSparseMethod(self, spec, scores.Update())


class DiffSparseMethod(RuledPruner, Learned):
    """A rule for which, a table for how many."""

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {}


@dataclass(frozen=True)
class Dense(MethodConfig):
    """Every token in every block; the paper's "Finetuned" row.

    Trained through the common loop it is plain fine-tuning: the same adapter on the same images, at dense cost. Its
    checkpoint attaches like any other.
    """

    def build(self, spec: BackboneSpec) -> DenseMethod:
        return DenseMethod(self, spec)


class DenseMethod(Trainable):
    config: Dense

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        return None
