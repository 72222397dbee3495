"""The stages of training as data: what trains, where ratios come from, what noise there is, how hard selection is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shiva.core.method import Exploration
from shiva.core.options import choice, share

RATIO_SOURCES = ("stratified", "policy")
SHAPES = ("exponential", "linear", "constant")


@dataclass(frozen=True)
class Stage:
    """One stretch of training with its own optimizer."""

    name: str
    """How logs and checkpoints call it."""
    steps: int
    """Optimizer steps; the paper does not give them."""
    trains: tuple[str, ...]
    """Groups that train: those the method names (router, policy, ...) and `adapter`; all else is frozen."""
    ratios: str = "policy"
    """Where keep ratios come from: `stratified` (drawn, the policy is bypassed) or `policy` (the method's own)."""
    logit_noise: float = 0.0
    """Deviation of the noise on the policy's logits."""
    score_noise: float = 0.0
    """Deviation of the noise on the router's scores."""
    warmup: int = 200
    """Steps over which learning rates rise linearly from zero."""
    cooldown: float = 0.25
    """Share of the steps, at the end, over which they fall linearly to zero: the budget settles instead of
    swinging about its target. The paper names none."""

    def __post_init__(self) -> None:
        choice("ratios", self.ratios, RATIO_SOURCES)
        share("cooldown", self.cooldown, zero=True)
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} of stage {self.name!r} is negative; pass 0 to leave the stage out")
        if not self.trains:
            raise ValueError(f"stage {self.name!r} trains nothing; name groups such as router, policy, adapter")

    def rate_factor(self, step: int) -> float:
        """What learning rates are multiplied by at a step of this stage."""
        rise = (step + 1) / self.warmup if self.warmup > 0 else 1.0
        fall = (self.steps - step) / (self.cooldown * self.steps) if self.cooldown > 0 else 1.0
        return min(1.0, rise, fall)


STAGES = (
    Stage("warmup", 10_000, ("router",), ratios="stratified"),
    Stage("policy", 10_000, ("policy",), logit_noise=1.0),
    Stage("joint", 20_000, ("router", "policy", "adapter")),
)
"""The paper's three: router warm-up, policy learning, joint tuning (app. Training Details)."""


@dataclass(frozen=True)
class Temperatures:
    """Softness of rank and inclusion, annealed over the whole of training; the paper gives only the starts."""

    rank_start: float = 0.1
    """Temperature of the soft rank at the first step; the paper's 0.2 measured worse (docs/paper-claims.md)."""
    rank_end: float = 0.05
    """The same at the last step; our choice, the paper is silent."""
    select_start: float = 0.1
    """Temperature of the inclusion, as a share of N, at the first step."""
    select_end: float = 0.05
    """The same at the last step; our choice, the paper is silent."""
    shape: str = "exponential"
    """How they move in between: exponential, linear or constant; our choice, the paper is silent."""

    def __post_init__(self) -> None:
        choice("shape", self.shape, SHAPES)
        for name in ("rank_start", "rank_end", "select_start", "select_end"):
            if not getattr(self, name) > 0:
                raise ValueError(f"temperatures.{name}={getattr(self, name)} must be above 0")

    def at(self, progress: float) -> tuple[float, float]:
        """(tau_rank, tau_sel) at a share of all steps."""
        return (
            self._between(self.rank_start, self.rank_end, progress),
            self._between(self.select_start, self.select_end, progress),
        )

    def _between(self, start: float, end: float, progress: float) -> float:
        if self.shape == "constant":
            return start
        if self.shape == "linear":
            return start + (end - start) * progress
        return start * math.exp(math.log(end / start) * progress)


@dataclass(frozen=True)
class Moment:
    """Where a run is: the stage, and the step within it."""

    stage: Stage
    index: int
    """Of the stage."""
    step: int
    """Steps of this stage already taken."""


def moment(stages: tuple[Stage, ...], step: int) -> Moment | None:
    """The stage that the global step falls in; None when all are done."""
    for index, stage in enumerate(stages):
        if step < stage.steps:
            return Moment(stage, index, step)
        step -= stage.steps
    return None


def exploration(
    now: Moment, temperatures: Temperatures, step: int, progress: float, index: int, ratio: float | None
) -> Exploration:
    """What a method is told about one micro-batch."""
    tau_rank, tau_sel = temperatures.at(progress)
    return Exploration(
        ratio=None if ratio is None else share("ratio", ratio),
        logit_noise=now.stage.logit_noise,
        score_noise=now.stage.score_noise,
        tau_rank=tau_rank,
        tau_sel=tau_sel,
        step=step,
        index=index,
    )
