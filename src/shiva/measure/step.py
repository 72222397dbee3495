"""One denoising step, dense against any set of methods, at a real shape with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shiva.core.cost import Flops, count
from shiva.measure.contenders import Contender, Entry, count_step, twin
from shiva.measure.latency import interleave
from shiva.measure.shapes import Shape
from shiva.measure.sheet import Sheet

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
    """Milliseconds a step in each phase of the reduction path; empty when compiled into the rest."""
    paper: float | None = None
    """The paper's speed-up."""

    @property
    def efficiency(self) -> float:
        return self.speedup / self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "efficiency": self.efficiency}


@dataclass(frozen=True)
class Skipped:
    """A method that cannot run at this shape, and why."""

    name: str
    reason: str


def measure_step(
    shape: Shape,
    entries: Mapping[str, Entry],
    rounds: int = 3,
    warmup: int = 1,
    compiled: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[list[StepResult], list[Skipped]]:
    """Times and FLOPs of one step at the shape: dense first, then each method, in turns."""
    transformer, call = shape.build(), shape.call()
    contenders, skipped = {}, []
    for name, entry in entries.items():
        try:
            contenders[name] = Contender(entry, transformer, call)
        except ValueError as error:
            skipped.append(Skipped(name, str(error)))
    dense_model: Any = twin(transformer)
    if compiled:
        dense_model = torch.compile(dense_model)
        for contender in contenders.values():
            contender.compile()
    turns: dict[str, Callable[[], Callable[[], Any]]] = {DENSE: lambda: lambda: dense_model(**call)}
    turns |= {name: contender.prepare for name, contender in contenders.items()}
    with torch.inference_mode():
        timings = interleave(turns, rounds, warmup, progress)
    dense = count_step(shape, None)
    results = []
    for name, timing in timings.items():
        flops = dense
        if name in contenders:
            flops = flops_of(shape, entries[name], contenders[name])
        results.append(
            StepResult(
                name=name,
                seconds=timing.median,
                spread=timing.spread,
                tflops=flops.true / 1e12,
                tflops_paper=flops.paper / 1e12,
                speedup=timings[DENSE].median / timing.median,
                limit=dense.true / flops.true,
                overhead=contenders[name].overhead() if name in contenders else {},
                paper=entries[name].paper if name in contenders else 1.0,
            )
        )
    return results, skipped


def flops_of(shape: Shape, entry: Entry, contender: Contender) -> Flops:
    """Of the step that was timed: counted on the meta device, where neither data nor earlier steps matter."""
    if entry.carries:
        return contender.priced()
    return count(contender.prepare()) if entry.keep_ffn is not None else count_step(shape, entry)


def step_sheet(shape: Shape, results: list[StepResult], skipped: list[Skipped], how: str) -> Sheet:
    dense, rows = results[0], []
    in_paper = (shape.name, shape.height, shape.width) == ("sd3-medium", 1024, 1024)
    for row in results:
        overhead = sum(row.overhead.values()) / (1e3 * dense.seconds)
        rows.append(
            (
                row.name,
                f"{row.seconds:.2f} s",
                f"{row.spread:.1%}",
                f"{row.speedup:.2f}x",
                f"{row.paper:.2f}x" if in_paper and row.paper is not None else "",
                f"{row.limit:.2f}x",
                f"{row.efficiency:.2f}",
                f"{row.tflops:.2f}",
                f"{row.tflops_paper:.2f}",
                f"{overhead:.2%}" if row.overhead else "",
            )
        )
    left_out = "".join(f"; {row.name} left out: {row.reason}" for row in skipped)
    return Sheet(
        title=f"One step of {shape.described}, {how}",
        columns=("method", "step", "±", "speed-up", "paper", "limit", "eff.", "TFLOPs", "paper's count", "overhead"),
        rows=rows,
        caption="limit: what true FLOPs alone allow; eff.: speed-up over limit; overhead: the reduction path as a "
        f"share of the dense step; paper: RTX 4090, whole model, 1024², 50 steps{left_out}",
    )
