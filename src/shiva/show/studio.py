"""What `shiva serve` shows, without the server: dense and reduced images of one prompt, their cost and their masks."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.api import attach
from shiva.checkpoint import ShivaCheckpoint
from shiva.core.context import StepContext
from shiva.core.cost import CostModel
from shiva.core.layout import Layout
from shiva.core.method import Method, MethodConfig
from shiva.evaluate.candidates import Candidate
from shiva.evaluate.checkout import checkpoint_for
from shiva.evaluate.drawing import Outcome, draw, generate, has_classes
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.methods import Sweep, ToMeSD
from shiva.methods.counts import CountOptions

LONGEST_PROMPT = 300
STEPS = (1, 50)
SEEDS = (0, 2**32 - 1)
BUDGETS = (0.3, 1.0)
REMEMBERED = 8
"""Dense images that are kept, so that dragging the budget draws only the reduced one."""
WARM = 2
"""Steps that a method runs before it is timed for the first time."""


# -- the menu --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to compute less: what it attaches at a share of the tokens, and in how many steps it draws."""

    source: ShivaCheckpoint | MethodConfig | None
    """None takes fewer steps."""

    def __post_init__(self) -> None:
        if not isinstance(self.config, (CountOptions, ToMeSD, type(None))):
            raise ValueError(
                f"{type(self.config).__name__} has no budget to drag; pass a checkpoint of Shiva, Lattice, "
                "Refresh or DiffSparse"
            )

    @property
    def config(self) -> MethodConfig | None:
        return self.source.method_config if isinstance(self.source, ShivaCheckpoint) else self.source

    def options(self, budget: float) -> dict[str, Any]:
        if isinstance(self.config, ToMeSD):
            return {"ratio": min(1 - budget, 0.75)}  # a stride of 2 x 2 keeps a quarter
        return {"budget": budget}

    def candidate(self, budget: float) -> Candidate:
        if self.source is None or budget >= 1:
            return Candidate()
        if isinstance(self.source, ShivaCheckpoint):
            return Candidate(checkpoint=self.source, options=self.options(budget))
        return Candidate(method=self.source, options=self.options(budget))

    def steps(self, steps: int, budget: float) -> int:
        return max(1, round(steps * budget)) if self.source is None else steps

    def method(self, budget: float, spec: Any) -> Method | None:
        """What settles its counts before a step; None where nothing does."""
        if not isinstance(self.config, CountOptions):
            return None
        if isinstance(self.source, ShivaCheckpoint):
            return self.source.method(budget=budget)
        return self.config.changed({"budget": budget}).build(spec)


def ways_for(model: str, checkpoint: str | None = None) -> dict[str, Way]:
    """The menu of a model: what needs no training, and what it has checkpoints of; the first is shown first."""
    ours = {"Shiva": checkpoint_for(model, "Shiva"), "Lattice": checkpoint_for(model, "Lattice")}
    trained = {name: str(path) for name, path in ours.items() if path is not None and path.is_dir()}
    found = {name: Way(ShivaCheckpoint.from_pretrained(path)) for name, path in trained.items()}
    if checkpoint is not None:
        own = Way(ShivaCheckpoint.from_pretrained(checkpoint))
        named = {type(own.config).__name__: own}
        found = {**named, **found, **named}
    few_steps = Path(model).name.lower().endswith("-turbo")  # where a sweep has too few to go round
    first = found if few_steps or checkpoint else {}
    return {**first, "Sweep": Way(Sweep()), **found, "Fewer steps": Way(None), "ToMeSD": Way(ToMeSD())}


# -- a request -------------------------------------------------------------------------------------------


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
    way: str = "Sweep"

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
    def read(cls, prompt: Any, seed: Any, steps: Any, budget: Any, way: Any = "Sweep") -> Request:
        """From a form, where an emptied field is None and a number may come as text."""
        counts = whole_number("seed", seed, *SEEDS), whole_number("steps", steps, *STEPS)
        return cls(str(prompt or ""), *counts, number("share", budget, *BUDGETS), str(way))


# -- drawing ---------------------------------------------------------------------------------------------


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
    """A pipeline and the ways to compute less of it; one drawing at a time."""

    def __init__(
        self, pipe: Any, ways: Mapping[str, Way] | None = None, guidance: float = 4.0, **arguments: Any
    ) -> None:
        self.ways = dict(ways or ways_for(""))
        self.pipe, self.guidance, self.arguments = pipe, guidance, arguments
        self._lock = threading.Lock()
        self._warm: set[str] = set()
        self._dense: OrderedDict[tuple[str, int, int], Outcome] = OrderedDict()
        self._costs: dict[str, CostModel] = {}
        with attach(pipe, Sweep(budget=0.6)) as session, session.trace() as trace:
            self._warm_up()
            self.spec, self.grid, self.cost = session.spec, trace.grid, session.cost_model()
            self.calls = len(session.stats) // WARM
            """Of the transformer a step: two where guidance takes a second."""

    @property
    def example(self) -> str:
        """A prompt that the pipeline takes."""
        return "0" if has_classes(self.pipe) else "tulip"

    def _warm_up(self) -> None:
        draw(self.pipe, [self.example], 0, [0], WARM, self.guidance, **self.arguments)

    def cost_of(self, name: str) -> CostModel:
        """What a method's layers cost by their tokens, read off a short run of it."""
        with self._lock:
            if name not in self._costs:
                with attach(self.pipe, self.way(name).source) as session:
                    self._warm_up()
                    self._costs[name] = session.cost_model()
            return self._costs[name]

    def way(self, name: str) -> Way:
        if name not in self.ways:
            raise ValueError(f"method {name!r} is not on the menu; choose one of {', '.join(self.ways)}")
        return self.ways[name]

    def timesteps(self, steps: int) -> list[float]:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        try:
            scheduler.set_timesteps(steps)
        except ValueError:  # a scheduler that shifts by resolution wants to know it: near enough for a picture
            return [1000.0 * (1 - step / steps) for step in range(steps)]
        return scheduler.timesteps.tolist()

    def plan(self, request: Request) -> Plan | None:
        """The table of ratios, shifted to the budget and resampled to the steps; None where it is not known before."""
        way, budget = self.way(request.way), request.budget
        steps = way.steps(request.steps, budget)
        timesteps, tokens = self.timesteps(steps), self.grid[0] * self.grid[1]
        if budget >= 1 or way.source is None:
            return Plan(torch.ones(steps, self.spec.layers), timesteps, steps / request.steps)
        method = way.method(budget, self.spec)
        if method is None:
            return None
        contexts = [StepContext(Layout(*self.grid), timestep=t, step=i, steps=steps) for i, t in enumerate(timesteps)]
        counts = [method.plan(ctx, timesteps) for ctx in contexts]
        return Plan(torch.tensor(counts) / tokens, timesteps, self.cost_of(request.way).share(counts))

    def draw(self, request: Request) -> Drawn:
        """Both images, from the same noise. At budget 1 nothing is attached: the reduced image is the dense one."""
        way = self.way(request.way)
        steps = way.steps(request.steps, request.budget)
        with self._lock:
            remembered = request.dense in self._dense
            dense = self._dense_outcome(request)
            name = request.way if request.budget < 1 else ""
            outcome = self._run(request, name, way.candidate(request.budget), steps)
        trace, summary = outcome.trace, outcome.summary
        every = torch.ones(steps, self.spec.layers, *self.grid, dtype=torch.bool)
        share = 1.0 if summary is None else summary.flops_share
        return Drawn(
            dense=dense.images[0],
            reduced=outcome.images[0],
            dense_seconds=dense.seconds,
            remembered=remembered,
            seconds=outcome.seconds,
            dense_tflops=self.cost.dense.true * self.calls * request.steps / 1e12,
            flops=share * steps / request.steps,
            masks=every if trace is None else trace.masks(),
        )

    def _run(self, request: Request, name: str, candidate: Candidate, steps: int) -> Outcome:
        """A timed run, on a pipeline that has run this method before."""

        def generated(count: int) -> Outcome:
            return generate(
                self.pipe,
                [request.prompt],
                {name: candidate},
                steps=count,
                guidance=self.guidance,
                seed=request.seed,
                trace=True,
                **self.arguments,
            )[name]

        if name not in self._warm:
            generated(min(WARM, steps))
            self._warm.add(name)
        return generated(steps)

    def _dense_outcome(self, request: Request) -> Outcome:
        key = request.dense
        if key not in self._dense:
            self._dense[key] = self._run(request, "", Candidate(), request.steps)
        self._dense.move_to_end(key)
        while len(self._dense) > REMEMBERED:
            self._dense.popitem(last=False)
        return self._dense[key]
