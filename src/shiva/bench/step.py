"""One denoising step, dense against any set of methods, at a real shape with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shiva.bench.entries import Attached, Entry, count_step, twin
from shiva.bench.latency import interleave
from shiva.bench.shapes import Shape
from shiva.bench.table import Table
from shiva.core.cost import Flops, count

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
    paper: Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[list[StepResult], list[Skipped]]:
    """Times and FLOPs of one step at the shape: dense first, then each method, in turns."""
    transformer, call = shape.build(), shape.call()
    running, skipped = {}, []
    for name, entry in entries.items():
        try:
            running[name] = Attached(entry, transformer, call)
        except ValueError as error:
            skipped.append(Skipped(name, str(error)))
    dense_model: Any = twin(transformer)
    if compiled:
        dense_model = torch.compile(dense_model)
        for attached in running.values():
            attached.session.compile()
    turns: dict[str, Callable[[], Callable[[], Any]]] = {DENSE: lambda: lambda: dense_model(**call)}
    turns |= {name: attached.prepare for name, attached in running.items()}
    with torch.inference_mode():
        timings = interleave(turns, rounds, warmup, progress)
    dense = count_step(shape, None)
    results = []
    for name, timing in timings.items():
        flops = dense
        if name in running:
            flops = flops_of(shape, entries[name], running[name])
        results.append(
            StepResult(
                name=name,
                seconds=timing.median,
                spread=timing.spread,
                tflops=flops.true / 1e12,
                tflops_paper=flops.paper / 1e12,
                speedup=timings[DENSE].median / timing.median,
                limit=dense.true / flops.true,
                overhead=running[name].overhead() if name in running else {},
                paper=(paper or {}).get(name),
            )
        )
    return results, skipped


def flops_of(shape: Shape, entry: Entry, attached: Attached) -> Flops:
    """Of the step that was timed: counted on the meta device, where neither data nor earlier steps matter."""
    if entry.carries:
        return attached.price()
    return count_step(shape, entry) if attached.session.method.static else count(attached.prepare())


def step_table(shape: Shape, results: list[StepResult], skipped: list[Skipped], how: str) -> Table:
    dense = results[0]
    rows = [
        {
            "method": row.name,
            "step": f"{row.seconds:.2f} s",
            "±": f"{row.spread:.1%}",
            "speed-up": f"{row.speedup:.2f}x",
            "paper": "" if row.paper is None else f"{row.paper:.2f}x",
            "limit": f"{row.limit:.2f}x",
            "eff.": f"{row.efficiency:.2f}",
            "TFLOPs": f"{row.tflops:.2f}",
            "paper's count": f"{row.tflops_paper:.2f}",
            "overhead": f"{sum(row.overhead.values()) / (1e3 * dense.seconds):.2%}" if row.overhead else "",
        }
        for row in results
    ]
    left_out = "".join(f"; {row.name} left out: {row.reason}" for row in skipped)
    paper = "; paper: RTX 4090, whole model, 1024², 50 steps" if any(row.paper for row in results) else ""
    caption = "limit: what true FLOPs alone allow; eff.: speed-up over limit; overhead: the reduction path as a "
    caption += f"share of the dense step{paper}{left_out}"
    return Table.of(f"One step of {shape.described}, {how}", rows, caption)
