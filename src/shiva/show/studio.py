"""What `shiva serve` shows, without the server: dense and reduced images of one prompt, their cost and their masks."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiva.api import attach
from shiva.checkpoint import ShivaCheckpoint
from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import Method
from shiva.evaluate.candidates import Candidate
from shiva.evaluate.drawing import Outcome, generate
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.methods import Sweep
from shiva.methods.counts import CountOptions

UNTRAINED = Sweep(budget=0.6)
"""What needs no training: a moving band runs, the others reuse their last update."""
LONGEST_PROMPT = 300
STEPS = (4, 50)
SEEDS = (0, 2**32 - 1)
BUDGETS = (0.4, 1.0)
REMEMBERED = 8
"""Dense images that are kept, so that dragging the budget draws only the reduced one."""


def number(name: str, value: Any, low: float, high: float) -> float:
    """A number from a form or a stranger, between its bounds."""
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {value!r} is none of the numbers {low} to {high}; fill it in") from error
    if not low <= found <= high:  # nor is NaN
        raise ValueError(f"{name} {found:g} is outside {low} to {high}; choose one inside")
    return found


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    found = number(name, value, low, high)
    if found != int(found):
        raise ValueError(f"{name} {found:g} is no whole number; choose one from {low} to {high}")
    return int(found)


@dataclass(frozen=True)
class Request:
    """What a person asked for, within bounds; whoever calls the server past its page meets them too."""

    prompt: str
    seed: int
    steps: int
    budget: float

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("the prompt is empty; type what to draw")
        if len(self.prompt) > LONGEST_PROMPT:
            raise ValueError(f"the prompt has {len(self.prompt)} characters; at most {LONGEST_PROMPT} are drawn")

    @property
    def dense(self) -> tuple[str, int, int]:
        """What its dense image depends on."""
        return self.prompt, self.seed, self.steps

    @classmethod
    def read(cls, prompt: Any, seed: Any, steps: Any, budget: Any) -> Request:
        """From a form, where an emptied field is None and a number may come as text."""
        counts = whole_number("seed", seed, *SEEDS), whole_number("steps", steps, *STEPS)
        return cls(str(prompt or ""), *counts, number("budget", budget, *BUDGETS))


@dataclass(frozen=True)
class Plan:
    """How many tokens each layer of each step will run on, before anything is drawn."""

    keep: Tensor  # (steps, layers)
    timesteps: list[float]
    flops: float
    """As a share of dense."""


@dataclass(frozen=True)
class Drawn:
    """The two images of a request."""

    dense: Any
    reduced: Any
    dense_seconds: float
    remembered: bool
    """Whether the dense image, and so its time, is of an earlier drawing."""
    seconds: float
    dense_tflops: float
    flops: float
    """Of the reduced one, as a share of dense."""
    masks: Tensor  # (steps, layers, rows, columns)

    @property
    def psnr(self) -> float:
        return image_psnr(self.reduced, self.dense)


class Studio:
    """A pipeline and a Shiva method for it; one drawing at a time."""

    def __init__(
        self, pipe: Any, source: ShivaCheckpoint | CountOptions = UNTRAINED, guidance: float = 4.0, **arguments: Any
    ) -> None:
        config = source.method_config if isinstance(source, ShivaCheckpoint) else source
        if not isinstance(config, CountOptions):
            raise ValueError(f"a checkpoint of {type(config).__name__} has no budget to drag; pass one of Shiva")
        self.pipe, self.source, self.guidance, self.arguments = pipe, source, guidance, arguments
        self._lock = threading.Lock()
        self._dense: OrderedDict[tuple[str, int, int], Outcome] = OrderedDict()
        with attach(pipe, source, budget=0.6) as session, session.trace() as trace:
            pipe(prompt="a", num_inference_steps=STEPS[0], guidance_scale=guidance, **arguments)  # warms up, too
            self.spec, self.grid, self.cost = session.spec, trace.grid, session.cost_model()

    def method(self, budget: float) -> Method:
        if isinstance(self.source, ShivaCheckpoint):
            return self.source.method(budget=budget)
        return self.source.changed({"budget": budget}).build(self.spec)

    def timesteps(self, steps: int) -> list[float]:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        try:
            scheduler.set_timesteps(steps)
        except ValueError:  # a scheduler that shifts by resolution wants to know it: near enough for a picture
            return [1000.0 * (1 - step / steps) for step in range(steps)]
        return scheduler.timesteps.tolist()

    def plan(self, budget: float, steps: int) -> Plan:
        """The table of ratios, shifted to the budget and resampled to the steps."""
        timesteps, tokens = self.timesteps(steps), self.grid[0] * self.grid[1]
        if budget >= 1:
            return Plan(torch.ones(steps, self.spec.layers), timesteps, 1.0)
        method = self.method(budget)
        contexts = [StepContext(Layout(*self.grid), timestep=t, step=i, steps=steps) for i, t in enumerate(timesteps)]
        counts = [method.plan(ctx, timesteps) for ctx in contexts]
        return Plan(torch.tensor(counts) / tokens, timesteps, self.cost.share(counts))

    def draw(self, request: Request) -> Drawn:
        """Both images, from the same noise. At budget 1 nothing is attached: the reduced image is the dense one."""
        with self._lock:
            remembered = request.dense in self._dense
            dense = self._dense_outcome(request)
            candidate = Candidate() if request.budget >= 1 else self._candidate(request.budget)
            outcome = self._run(request, candidate)
        trace, summary = outcome.trace, outcome.summary
        every = torch.ones(request.steps, self.spec.layers, *self.grid, dtype=torch.bool)
        return Drawn(
            dense=dense.images[0],
            reduced=outcome.images[0],
            dense_seconds=dense.median,
            remembered=remembered,
            seconds=outcome.median,
            dense_tflops=self.cost.dense.true * request.steps / 1e12,
            flops=1.0 if summary is None else summary.flops_share,
            masks=every if trace is None else trace.masks(),
        )

    def _candidate(self, budget: float) -> Candidate:
        trained = isinstance(self.source, ShivaCheckpoint)
        what: dict[str, Any] = {"checkpoint" if trained else "method": self.source}
        return Candidate(options={"budget": budget}, **what)

    def _run(self, request: Request, candidate: Candidate) -> Outcome:
        return generate(
            self.pipe,
            [request.prompt],
            {"image": candidate},
            steps=request.steps,
            guidance=self.guidance,
            seed=request.seed,
            trace=True,
            **self.arguments,
        )["image"]

    def _dense_outcome(self, request: Request) -> Outcome:
        key = request.dense
        if key not in self._dense:
            self._dense[key] = self._run(request, Candidate())
        self._dense.move_to_end(key)
        while len(self._dense) > REMEMBERED:
            self._dense.popitem(last=False)
        return self._dense[key]
