"""Where the time of a reduced step goes: each stage of the pruning path, attention and FFN."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from reproduce.paper import MAIN
from shiva.backbones.base import backbone_of
from shiva.bench.entries import Attached, Entry, interleave, meta_step, synchronize, twin
from shiva.bench.shapes import Shape
from shiva.bench.step import DENSE
from shiva.bench.table import Table

STAGES = {
    "lookup": "ratio lookup",
    "signals": "signals",
    "router": "router",
    "sort": "sort",
    "rejected": "index rows",
    "gather": "gather",
    "rope": "RoPE gather",
    "scatter": "scatter",
}
COMPUTE = {"attention": "attention", "ffn": "FFN"}
PAPER_STEPS = 50
PAPER_STAGES = {
    "lookup": 1.5,
    "router": 78.4,
    "sort": 23.7,
    "gather": 42.3,
    "rope": 13.0,
    "scatter": 50.7,
}
"""Milliseconds an image of Shiva-60% (table phase_breakdown)."""
PAPER_TOTAL = 209.6


@dataclass(frozen=True)
class Anatomy:
    """One configuration: milliseconds a step by stage."""

    name: str
    step: float
    stages: dict[str, float]
    operators: int
    """Calls that reach torch's dispatcher in a step: what a GPU's host has to launch."""

    @property
    def path(self) -> float:
        """Milliseconds a step of the whole pruning path."""
        return sum(self.stages.get(stage, 0.0) for stage in STAGES)


class OperatorCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def count_operators(call: Callable[[], Any]) -> int:
    with torch.no_grad(), OperatorCount() as counter:
        call()
    return counter.total


class ModuleClock:
    """Seconds inside a transformer's attention and FFN modules."""

    def __init__(self, transformer: nn.Module):
        self.seconds: dict[str, float] = defaultdict(float)
        for site in backbone_of(transformer).sites(transformer):
            if site.kind in COMPUTE:  # not "keys": those are inside of attention, whose time has them
                self._time(site.module, site.kind)

    def _time(self, module: nn.Module, kind: str) -> None:
        began = [0.0]

        def start(*args: Any) -> None:
            synchronize()
            began[0] = time.perf_counter()

        def stop(*args: Any) -> None:
            synchronize()
            self.seconds[kind] += time.perf_counter() - began[0]

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)


def measure_anatomy(
    shape: Shape,
    entries: Mapping[str, Entry],
    rounds: int = 3,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Anatomy]:
    """Stage times of a dense step and of each entry's, in turns."""
    transformer, call = shape.build(), shape.call()
    dense_model = twin(transformer)
    running = {name: Attached(entry, transformer, call) for name, entry in entries.items()}
    models = {DENSE: dense_model, **{name: attached.transformer for name, attached in running.items()}}
    clocks = {name: ModuleClock(model) for name, model in models.items()}
    turns: dict[str, Callable[[], Callable[[], Any]]] = {DENSE: lambda: lambda: dense_model(**call)}
    turns |= {name: attached.prepare for name, attached in running.items()}
    with torch.inference_mode():
        timings = interleave(turns, rounds, warmup, progress)
    results = []
    for name, timing in timings.items():
        taken = running[name].turns if name in running else rounds + warmup
        stages = {kind: 1e3 * spent / taken for kind, spent in clocks[name].seconds.items()}
        if name in running:
            stages |= running[name].overhead()
        operators = count_operators(meta_step(shape, entries.get(name)))
        results.append(Anatomy(name, 1e3 * timing.median, stages, operators))
    return results


def anatomy_table(shape: Shape, results: list[Anatomy]) -> Table:
    dense = results[0]
    rows = []
    for stage, label in {**STAGES, **COMPUTE}.items():
        times = [f"{row.stages.get(stage, 0.0):.1f} ms" for row in results]
        last = results[-1].stages.get(stage, 0.0) / dense.step
        rows.append((label, *times, f"{last:.2%}", _paper(PAPER_STAGES.get(stage))))
    rows.append(
        (
            "pruning path",
            *[f"{row.path:.1f} ms" for row in results],
            f"{results[-1].path / dense.step:.2%}",
            _paper(PAPER_TOTAL),
        )
    )
    rows.append(("step", *[f"{row.step:.0f} ms" for row in results], f"{results[-1].step / dense.step:.0%}", "65%"))
    rows.append(("operators", *[str(row.operators) for row in results], "", ""))
    return Table(
        title=f"Anatomy of a step, {shape.described}",
        columns=("stage", *[row.name for row in results], f"{results[-1].name} / dense step", "paper, Shiva-60%"),
        rows=rows,
        caption="mean over all turns; paper: RTX 4090, beside its share of the dense image of 7659.9 ms",
    )


def _paper(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds / PAPER_STEPS:.2f} ms a step, {milliseconds / MAIN['Vanilla'].latency:.2%}"
