"""Telling sampling runs, steps and guidance branches apart from nothing but the transformer's calls."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def read_timestep(timestep: Tensor) -> float:
    """The call's timestep on the host, the noisiest where tokens have their own; NaN for meta and fake tensors."""
    if timestep.is_meta or type(timestep).__name__ == "FakeTensor":
        return float("nan")
    return float(timestep.max())


def shape_of(value: Any) -> Any:
    """What pricing and layout depend on in an argument: shapes of tensors, whole numbers and names."""
    if isinstance(value, (list, tuple)):
        return tuple(shape_of(part) for part in value)
    return getattr(value, "shape", value if isinstance(value, (int, str)) or value is None else type(value))


class Seen:
    """Arguments of a call that may come again: tensors by identity while they live, all else by value."""

    def __init__(self, values: list[Any]) -> None:
        self._known = [weakref.ref(value) if isinstance(value, Tensor) else value for value in values]

    def still(self, values: list[Any]) -> bool:
        return all(
            isinstance(known, weakref.ref) and known() is value if isinstance(value, Tensor) else known == value
            for known, value in zip(self._known, values, strict=True)
        )


CFG = ("auto", "batched", "sequential", "none")
"""How classifier-free guidance may be run: as halves of a batch, as two calls, not at all, or as it looks."""


@dataclass
class Run:
    """One sampling run: what methods carry from step to step, and whether its batch is a guidance pair."""

    state: Any = None
    """The method's own."""
    paired: bool = False
    first: int = 0
    """The scheduler's step it began with, above 0 where it starts from an image."""
    step: int = 0
    branch: int = 0
    branches: int = 1
    """Calls that a step of it was seen to make."""
    announced: list[str] = field(default_factory=list)
    """Names under which the pipeline announced the calls of this step."""

    def is_over(self, steps: int | None) -> bool:
        """Whether the call just placed was its last."""
        return steps is not None and self.step >= steps - 1 and self.branch + 1 >= self.branches


class RunTracker:
    """Follows the calls of one transformer.

    Timesteps fall within a run, or rise where the scheduler's do (inversion), so one on the other side begins a new
    run, and so do a new `scheduler.timesteps` tensor whatever its values and latents of another size. The same
    timestep is another branch of guidance where it comes under another announced name (diffusers' `cache_context`) or,
    where nothing is announced, with the very same latents tensor (told that guidance is sequential, with any), once a
    step. Otherwise it is the next step if the scheduler has it twice (samplers of second order, timesteps rounded to
    the same bfloat16), and a new run if not.
    """

    def __init__(self, cfg: str) -> None:
        self.cfg = cfg
        self.run = Run()
        self._timestep = float("nan")
        self._shape: torch.Size | None = None
        self._size: tuple[int, ...] | None = None
        self._latents: weakref.ref[Tensor] | None = None
        self._schedule: weakref.ref[Tensor] | None = None
        self._timesteps: list[float] | None = None
        self._first: int | None = None

    def follow(
        self,
        timestep: float,
        latents: Tensor,
        schedule: Tensor | None,
        guided: bool | None = None,
        announced: str | None = None,
        size: tuple[int, ...] | None = None,
    ) -> tuple[Run, list[float] | None]:
        """Place this call in its run; also the scheduler's timesteps, read once a run.

        `guided` is what a pipeline says of its guidance, None where it does not; `announced` is the name it gives this
        call: "cond", "uncond", or "cond_uncond" for both in one batch; `size` is that of the image where the latents
        may hold more than it.
        """
        rescheduled = schedule is not None and (self._schedule is None or self._schedule() is not schedule)
        if rescheduled:
            assert schedule is not None
            self._schedule, self._timesteps = weakref.ref(schedule), schedule.tolist()
        elif schedule is None:
            self._schedule = self._timesteps = None
        again = timestep == self._timestep
        branches = again and self._is_other_branch(latents, announced)
        repeated = again and is_planned(self._timesteps, self.run.step + 1, timestep)
        rising = rises(self._timesteps, self.run.step)
        onward = timestep > self._timestep if rising else timestep < self._timestep
        size = size or tuple(latents.shape[1:])
        resized = self._size is not None and size != self._size
        if rescheduled or resized or not (onward or branches or repeated):
            self.run = Run(paired=self._pairs(latents, guided, announced))
            if self._timesteps is not None and timestep == timestep:
                self.run.step = nearest(self._timesteps, timestep)
                self.run.first = self.run.step if self._first is None else self._first
            self._first = None
        elif branches:
            self.run.branch += 1
            self.run.branches = max(self.run.branches, self.run.branch + 1)
        else:
            self.run.step = following(self._timesteps, self.run.step + 1, timestep)
            self.run.branch, self.run.announced = 0, []
            if latents.shape != self._shape:
                self.run.paired = self._pairs(latents, guided, announced)
        if announced is not None:
            self.run.announced.append(announced)
        self._timestep, self._shape, self._latents = timestep, latents.shape, weakref.ref(latents)
        self._size = size
        return self.run, self._timesteps

    @property
    def steps(self) -> int | None:
        """Number of the scheduler's, where it is known."""
        return None if self._timesteps is None else len(self._timesteps)

    def forget(self, first: int | None = None) -> None:
        """Whatever is called next begins a new run, which counts its steps from there or from `first`."""
        self._timestep, self._first = float("nan"), first

    def _is_other_branch(self, latents: Tensor, announced: str | None) -> bool:
        """Whether another call at a timestep is guidance's: as announced or told, or by the very same latents."""
        if announced is not None and self.cfg != "none":
            return announced not in self.run.announced
        if self.run.branch:
            return False
        if self.cfg == "sequential":
            return latents.shape == self._shape
        return self.cfg == "auto" and self._latents is not None and self._latents() is latents

    def _pairs(self, latents: Tensor, guided: bool | None, announced: str | None) -> bool:
        """Whether the batch is two guidance halves: as told or announced, or because both hold the same latents."""
        if self.cfg != "auto":
            if self.cfg == "batched" and latents.shape[0] % 2:
                raise ValueError(f"cfg='batched' needs an even batch, got {latents.shape[0]}")
            return self.cfg == "batched"
        if announced in ("cond", "uncond") or guided is False or latents.shape[0] % 2 or latents.is_meta:
            return False
        first, second = latents.chunk(2)
        return torch.equal(first, second)


ROUNDING = 2**-7
"""How far a timestep that went through bfloat16 may be from the scheduler's, as a share of it."""


def is_planned(timesteps: list[float] | None, place: int, timestep: float) -> bool:
    """Whether the scheduler has this timestep at this place."""
    return (
        timesteps is not None
        and place < len(timesteps)
        and abs(timesteps[place] - timestep) <= ROUNDING * abs(timesteps[place])
    )


def rises(timesteps: list[float] | None, step: int) -> bool:
    """Whether the scheduler's timesteps rise at this step, as they do when an image is inverted."""
    if timesteps is None or len(timesteps) < 2:
        return False
    place = min(step, len(timesteps) - 2)
    return timesteps[place + 1] > timesteps[place]


def following(timesteps: list[float] | None, expected: int, timestep: float) -> int:
    """The place of a run's next timestep: the expected one, unless calls were left out."""
    if timesteps is None or timestep != timestep or is_planned(timesteps, expected, timestep):
        return expected
    return nearest(timesteps, timestep)


def nearest(values: list[float], value: float) -> int:
    return min(range(len(values)), key=lambda i: abs(values[i] - value))
