"""One denoising step, dense against any set of methods, at a real shape with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shiva.core.cost import count
from shiva.core.method import MethodConfig
from shiva.measure.latency import interleave
from shiva.measure.shapes import Shape
from shiva.session import Session, attach, backbone_of

DENSE = "dense"


@dataclass(frozen=True)
class StepResult:
    """One row of the table."""

    name: str
    seconds: float
    spread: float
    tflops: float
    tflops_paper: float
    speedup: float
    limit: float
    """The speed-up that the FLOPs alone would allow."""
    overhead: dict[str, float]
    """Milliseconds a step in each phase of the reduction path."""

    @property
    def efficiency(self) -> float:
        return self.speedup / self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "efficiency": self.efficiency}


class Contender:
    """A method that is attached for its own turns only; its weights are made once."""

    def __init__(self, config: MethodConfig, transformer: Any, call: dict[str, Any]):
        self.method = config.build(backbone_of(transformer).spec(transformer))
        self.transformer, self.call = transformer, call
        self.seconds: dict[str, float] = {}
        self.turns = 0

    def run(self, session: Session) -> None:
        self.transformer(**self.call)
        session.detach()
        self.turns += 1
        for phase, seconds in session.phases().items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def prepare(self) -> Callable[[], Any]:
        session = attach(self.transformer, self.method)
        return lambda: self.run(session)

    def overhead(self) -> dict[str, float]:
        return {phase: 1e3 * seconds / self.turns for phase, seconds in self.seconds.items()}


def measure_step(
    shape: Shape,
    methods: Mapping[str, MethodConfig],
    rounds: int = 3,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> list[StepResult]:
    """Times and FLOPs of one step at the shape: dense first, then each method, in turns."""
    transformer, call = shape.build(), shape.call()
    contenders = {name: Contender(config, transformer, call) for name, config in methods.items()}
    turns: dict[str, Callable[[], Callable[[], Any]]] = {DENSE: lambda: lambda: transformer(**call)}
    turns |= {name: contender.prepare for name, contender in contenders.items()}
    with torch.inference_mode():
        timings = interleave(turns, rounds, warmup, progress)
    dense = count_step(shape, None)
    results = []
    for name, timing in timings.items():
        flops = dense if name == DENSE else count_step(shape, methods[name])
        results.append(
            StepResult(
                name=name,
                seconds=timing.median,
                spread=timing.spread,
                tflops=flops.true / 1e12,
                tflops_paper=flops.paper / 1e12,
                speedup=timings[DENSE].median / timing.median,
                limit=dense.true / flops.true,
                overhead={} if name == DENSE else contenders[name].overhead(),
            )
        )
    return results


def count_step(shape: Shape, config: MethodConfig | None) -> Any:
    """FLOPs of a step, the method's own included, on the meta device."""
    transformer, call = shape.build("meta"), shape.call("meta")
    if config is None:
        return count(lambda: transformer(**call))
    with attach(transformer, config, guidance="batched" if shape.batch % 2 == 0 else "none"):
        return count(lambda: transformer(**call))
