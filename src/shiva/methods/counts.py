"""How many tokens a layer keeps: the first answer of a pruner, settled before a step starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, MethodConfig, Trainable
from shiva.core.options import Count, Ratio
from shiva.ops.schedule import RatioSchedule

DEFAULT = 0.6
"""Mean keep of a pruner that was given no budget and has no trained table."""


@dataclass(frozen=True)
class CountOptions(MethodConfig):
    """Options of the methods that keep a share of the tokens by layer and step."""

    budget: Ratio | None = None
    """Mean share of image tokens kept over reduced layers and steps; None leaves a trained table as it is."""
    flops: Ratio | None = None
    """Instead of a budget: true FLOPs of the run as a share of dense."""
    tilt: float = 0.0
    """How much more the first step of a run keeps than the last, as a difference of logits; the mean stays. An early
    error moves all that follows, a late one little: runs of many steps gain by about 2, of few by 3 to 6."""
    bucket: Count | None = None
    """Round token counts to this multiple, holding their mean; fewer distinct shapes to compile."""

    knob: ClassVar = "budget"
    either: ClassVar = frozenset({"budget", "flops"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and self.flops is not None:
            raise ValueError(f"budget={self.budget} and flops={self.flops} exclude each other; pass one")

    @property
    def target(self) -> float:
        """Mean keep of a table that was not learned."""
        return DEFAULT if self.budget is None else self.budget


class Table:
    """A schedule of ratios, brought to the budget at each run's own timesteps."""

    def __init__(self, config: CountOptions, spec: BackboneSpec, dense: Collection[int]):
        self.spec = spec
        self.schedule = RatioSchedule.flat(config.target, spec.layers, sorted(dense))
        self._tables: dict[Hashable, list[list[int]]] = {}

    def set(self, schedule: RatioSchedule) -> None:
        """Use another table, as a policy compiles to one."""
        if schedule.layers != self.spec.layers:
            raise ValueError(f"the schedule is for {schedule.layers} layers; {self.spec.name} has {self.spec.layers}")
        self.schedule = schedule
        self._tables.clear()

    def __call__(
        self,
        config: CountOptions,
        ctx: StepContext,
        timesteps: list[float] | None,
        dense_step: Callable[[int, StepContext], bool],
    ) -> tuple[int, ...]:
        """Tokens each layer keeps at this step; `dense_step` says which steps of the run see all tokens."""
        key = (config, ctx.layout, ctx.first, None if timesteps is None else tuple(timesteps))
        if key not in self._tables:
            self._tables[key] = self._table(config, ctx, timesteps, dense_step)
        table = self._tables[key]
        if timesteps is None and dense_step(ctx.step, ctx):
            return (ctx.tokens,) * self.spec.layers
        return tuple(table[ctx.step if timesteps is not None else self.schedule.row(ctx.timestep)])

    def _table(
        self,
        config: CountOptions,
        ctx: StepContext,
        timesteps: Sequence[float] | None,
        dense_step: Callable[[int, StepContext], bool],
    ) -> list[list[int]]:
        """Counts for a run: the schedule at the timesteps of its reduced steps, brought to the budget there."""
        whole = [ctx.tokens] * self.spec.layers
        if timesteps is None:
            return counts_of(at_budget(self.schedule, config, 0, 0, ctx), config, ctx.tokens)
        steps = range(ctx.first, len(timesteps))
        reduced = [step for step in steps if not dense_step(step, ctx)]
        table = [whole] * len(timesteps)
        if reduced:
            schedule = self.schedule.resample([timesteps[step] for step in reduced]).tilted(config.tilt)
            schedule = at_budget(schedule, config, len(steps), len(steps) - len(reduced), ctx)
            for step, counts in zip(reduced, counts_of(schedule, config, ctx.tokens), strict=True):
                table[step] = counts
        else:
            warnings.warn(
                f"each of this run's steps ({len(steps)}) sees all tokens under {config}, so nothing is saved; "
                "take more steps, or pass fill='near', which needs no earlier step",
                stacklevel=2,
            )
        return table


class Learned(Trainable):
    """A method whose table is learned, and saved with it."""

    count: Table

    def tables(self) -> dict[str, Tensor]:
        return self.count.schedule.state()

    def load_tables(self, tables: dict[str, Tensor]) -> None:
        self.count.set(replace(RatioSchedule.from_state(tables), dense=self.count.schedule.dense))


def counts_of(schedule: RatioSchedule, config: CountOptions, tokens: int) -> list[list[int]]:
    return schedule.bucket(config.bucket, tokens) if config.bucket else schedule.counts(tokens)


def at_budget(
    schedule: RatioSchedule, config: CountOptions, steps: int, dense: int, ctx: StepContext
) -> RatioSchedule:
    """The schedule of the reduced steps, such that a run with some dense steps meets its target as a whole."""
    if config.budget is not None:
        return schedule.shift(left_over(config.budget, steps, dense))
    if config.flops is not None:
        cost = ctx.cost()
        left = left_over(config.flops, steps, dense, schedule.lowest_share(cost))
        return schedule.shift(flops=left, cost=cost)
    return schedule


def left_over(target: float, steps: int, dense: int, lowest: float = 0.0) -> float:
    """The share that reduced steps may take so that a run with some dense steps meets its target; above the lowest."""
    if dense in (0, steps):
        return target
    left = (target * steps - dense) / (steps - dense)
    if left > lowest:
        return left
    warnings.warn(
        f"a share of {target} cannot be met in {steps} steps of which {dense} are dense; the others run at {target}",
        stacklevel=2,
    )
    return target
