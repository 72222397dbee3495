"""What a benchmark compares: methods by their configs, each on a twin of the transformer, taking turns."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shiva
from shiva.api import attach
from shiva.backbones import backbone_of
from shiva.bench.shapes import Shape
from shiva.core.cost import Flops, total
from shiva.core.method import Method, MethodConfig
from shiva.cost import StepRecord, tensor_bytes
from shiva.methods import Shiva, ShivaMethod
from shiva.ops.networks import logit
from shiva.ops.schedule import RatioSchedule
from shiva.session import Session

WHOLE_STEPS = 8
"""Steps in a row that may run all tokens before others reuse them, such as four of RAS."""


@dataclass
class Timing:
    """Seconds of one configuration, one entry per round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def interleave(
    calls: Mapping[str, Callable[[], Callable[[], Any]]],
    rounds: int = 5,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda name: None,
    whole: Callable[[str], bool] = lambda name: False,
) -> dict[str, Timing]:
    """Time each configuration once per round, in turn. Each entry prepares itself and returns the timed call.

    A step that turns out to be a `whole` one stands for no reduced one, so the next is timed in its place.
    """
    timings = {name: Timing() for name in calls}
    for round_ in range(warmup + rounds):
        for name, prepare in calls.items():
            seconds = timed(prepare())
            for _ in range(WHOLE_STEPS):
                if not whole(name):
                    break
                seconds = timed(prepare())
            if round_ >= warmup:
                timings[name].seconds.append(seconds)
            progress(name)
    return timings


KEEP_AT_NOISE, KEEP_AT_IMAGE = 0.4, 0.8
"""Mean keep at the first and last timestep of the paper's learned table (sec. Impact of Adaptive Ratio Policy)."""
DEPTH_SPAN = 1.0
"""Logits from the first reduced layer down to the last: the paper's table preserves shallow layers; our figure."""


def learned_shape(layers: int) -> RatioSchedule:
    """A table of the learned one's shape: structure first (shallow layers), detail later (small timesteps)."""
    time = torch.tensor([logit(KEEP_AT_NOISE), logit(KEEP_AT_IMAGE)], dtype=torch.float64)[:, None]
    depth = torch.linspace(DEPTH_SPAN / 2, -DEPTH_SPAN / 2, layers, dtype=torch.float64)[None]
    return RatioSchedule((1000.0, 0.0), time + depth, dense=frozenset({0}))


def typical_row(schedule: RatioSchedule, budget: float) -> RatioSchedule:
    """The one step of a run whose mean keep is nearest the run's own: what a single timed step stands for."""
    run = schedule.resample([1000.0 * (1 - step / 50) for step in range(50)]).shift(budget)
    means = run.ratios()[:, run.reduced].mean(dim=1)
    row = int((means - budget).abs().argmin())
    return dataclasses.replace(run, timesteps=run.timesteps[row : row + 1], logits=run.logits[row : row + 1])


@dataclass(frozen=True)
class Entry:
    """A method as it enters a comparison."""

    config: MethodConfig
    setup: Callable[[Any], None] = lambda method: None
    """What makes the untrained method run as a trained one would: a table of ratios, masks of some share."""

    def build(self, transformer: nn.Module) -> Method:
        method = self.config.build(backbone_of(transformer).spec(transformer))
        self.setup(method)
        return method


def shiva_entry(budget: float, flat: bool = False, **options: Any) -> Entry:
    """Shiva under a table of this mean keep: flat, or of the learned one's shape."""

    def set_table(method: ShivaMethod) -> None:
        layers = method.spec.layers
        table = RatioSchedule.flat(budget, layers) if flat else typical_row(learned_shape(layers), budget)
        method.set_schedule(table)

    return Entry(Shiva(**options), set_table)


def official_presets() -> dict[str, MethodConfig]:
    """Every other method of ours at its official preset, untrained."""
    ours = [name for name in MethodConfig.known if name in shiva.__all__ and name not in ("Dense", "Shiva")]
    return {name.lower(): MethodConfig.known[name].preset("official") for name in ours}


def twin(transformer: nn.Module) -> nn.Module:
    """A second module tree over the very same weights, so that each keeps its own hooks and graphs."""
    shared = {id(t): t for t in [*transformer.parameters(), *transformer.buffers()]}
    return copy.deepcopy(transformer, shared)


class Attached:
    """An entry attached to a twin of the transformer, ready to take turns."""

    def __init__(self, entry: Entry, transformer: nn.Module, call: dict[str, Any], cfg: str = "auto"):
        self.transformer = twin(transformer)
        self.session: Session = attach(self.transformer, entry.build(transformer), cfg=cfg)
        self.call = call
        self.turns = 0
        self.step: int | None = None
        """Of one run whose steps the turns are; None where each is a run of its own."""

    def prepare(self) -> Callable[[], Any]:
        """One turn: a run of its own, or the next step of a run that began with a whole one."""
        if self.step is not None or self.whole:
            self.step = (self.step or 0) + 1
        self.turns += 1
        call = new_run(self.call, self.session.backbone.latents)
        if self.step is not None:
            call["timestep"] = call["timestep"] * (1 - self.step / 1000)
        return lambda: self.transformer(**call)

    @property
    def whole(self) -> bool:
        """Whether the latest turn ran all tokens and kept something for steps that do not, as the first of Sweep."""
        ctx, stats = self.session.ctx, self.session.stats
        return bool(ctx is not None and stats and tensor_bytes(ctx.run)) and not reduced(stats[-1])

    def price(self, turns: int) -> Flops:
        """Median FLOPs of the latest turns, whole ones only where all are, by the session's prices without routers."""
        priced = list(zip(self.session.stats, self.session.summary().step_flops(), strict=True))
        latest = [flops for ran, flops in priced if reduced(ran)] or [flops for _, flops in priced]
        ordered = sorted(latest[-turns:], key=lambda flops: flops.true)
        middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
        return total(middle).scaled(1 / len(middle))

    def overhead(self) -> dict[str, float]:
        """Milliseconds in each phase of the reduction path, of all turns, by turn that was not whole."""
        turns = self.turns if self.step is None else sum(map(reduced, self.session.stats)) or self.turns
        return {name: 1e3 * spent / max(1, turns) for name, spent in self.session.phases().items()}


def reduced(ran: StepRecord) -> bool:
    return bool(ran.skipped) or min(ran.kept.values()) < ran.tokens


def new_run(call: dict[str, Any], latents: str = "hidden_states") -> dict[str, Any]:
    """New latents begin a new run, as they do for the session in a pipeline; unless the timestep falls."""
    given = call[latents]
    return {**call, latents: [part.clone() for part in given] if isinstance(given, list) else given.clone()}


def meta_step(shape: Shape, entry: Entry | None, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """A step on the meta device, dense or with a method: what it would run is counted there, the method's included."""
    transformer, call = shape.build("meta", dtype), shape.call("meta", dtype)
    if entry is None:
        return lambda: transformer(**call)
    return Attached(entry, transformer, call, shape.cfg).prepare()
