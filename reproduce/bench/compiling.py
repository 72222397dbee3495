"""Compiled steps, how many graphs they take, and the proof by `torch.export` that no shape depends on data."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from reproduce.bench.pages import seconds
from shiva.api import attach
from shiva.bench.entries import Attached, Entry, Timing, interleave, learned_shape, new_run, twin
from shiva.bench.shapes import Shape
from shiva.bench.step import DENSE
from shiva.bench.table import Table
from shiva.methods import ShivaMethod
from shiva.ops.schedule import RatioSchedule

PAPER = {DENSE: (7912.7, 6823.1), "shiva 0.9": (7315.3, 6903.6), "shiva 0.8": (6740.8, 6330.9)}
PAPER |= {"shiva 0.7": (5974.1, 5626.1), "shiva 0.6": (5625.5, 5304.7)}
"""Milliseconds an image, eager and compiled, on an RTX 4090 (table compilation)."""


@dataclass(frozen=True)
class CompileResult:
    """One configuration, eager and compiled in the same turns."""

    name: str
    eager: float
    compiled: float
    graphs: int
    """Graphs that the timed step became; 1 means nothing broke it."""
    compile_seconds: float
    deviation: float
    """Largest difference of compiled from eager output, relative to the output's largest value."""


def measure_compile(
    shape: Shape,
    entries: Mapping[str, Entry],
    rounds: int = 3,
    warmup: int = 1,
    backend: str = "inductor",
    progress: Callable[[str], None] = lambda name: None,
) -> list[CompileResult]:
    """Dense and each entry, eager and compiled with fullgraph, all in turns."""
    transformer, call = shape.build(), shape.call()
    turns: dict[str, Callable[[], Callable[[], Any]]] = {}
    facts: dict[str, tuple[int, float, float]] = {}
    eager_dense, dense = twin(transformer), twin(transformer)
    dense.forward = torch.compile(dense.forward, fullgraph=True, backend=backend)
    turns[DENSE] = lambda: lambda: eager_dense(**call)
    turns[f"{DENSE}, compiled"] = lambda: lambda: dense(**call)
    for name, entry in entries.items():
        torch.manual_seed(0)
        eager = Attached(entry, transformer, call)
        torch.manual_seed(0)
        compiled = Attached(entry, transformer, call)
        compiled.session.compile(fullgraph=True, backend=backend)
        turns[name], turns[f"{name}, compiled"] = eager.prepare, compiled.prepare
    with torch.inference_mode():
        for name in [DENSE, *entries]:
            before, began = counters["stats"]["unique_graphs"], time.perf_counter()
            output = turns[f"{name}, compiled"]()()[0]
            spent = time.perf_counter() - began
            expected = turns[name]()()[0]
            graphs = counters["stats"]["unique_graphs"] - before
            facts[name] = graphs, spent, float((output - expected).abs().max() / expected.abs().max())
            progress(f"compiling {name}")
        timings: dict[str, Timing] = interleave(turns, rounds, warmup, progress)
    return [
        CompileResult(name, timings[name].median, timings[f"{name}, compiled"].median, *facts[name])
        for name in [DENSE, *entries]
    ]


def compile_table(shape: Shape, results: list[CompileResult]) -> Table:
    dense = results[0]
    rows = []
    for row in results:
        eager, compiled = PAPER.get(row.name, (None, None))
        paper_eager, paper_compiled = PAPER[DENSE]
        rows.append(
            (
                row.name,
                seconds(row.eager),
                f"{dense.eager / row.eager:.2f}x",
                "" if eager is None else f"{paper_eager / eager:.2f}x",
                seconds(row.compiled),
                f"{dense.compiled / row.compiled:.2f}x",
                "" if compiled is None else f"{paper_compiled / compiled:.2f}x",
                str(row.graphs),
                f"{row.compile_seconds:.0f} s",
            )
        )
    return Table(
        title=f"Compiled with fullgraph=True, {shape.described}",
        columns=("method", "eager", "of dense", "paper", "compiled", "of dense", "paper", "graphs", "compiling"),
        rows=rows,
        caption="speed-ups are eager over eager dense and compiled over compiled dense; paper: RTX 4090, whole model",
    )


@dataclass(frozen=True)
class GraphCount:
    """Distinct rows of a run's table, each of which is a graph."""

    bucket: int | None
    steps: int
    graphs: int


def count_graphs(
    layers: int, tokens: int, budget: float, steps: int, buckets: tuple[int | None, ...]
) -> list[GraphCount]:
    """Graphs of a whole run under the learned table's shape, by the multiple that counts are rounded to."""
    table = run_table(layers, budget, steps)
    counted = []
    for bucket in buckets:
        counts = table.counts(tokens) if bucket is None else table.bucket(bucket, tokens)
        counted.append(GraphCount(bucket, steps, len({tuple(row) for row in counts})))
    return counted


def run_table(layers: int, budget: float, steps: int) -> RatioSchedule:
    times = [1000.0 * (1 - step / steps) for step in range(steps)]
    return learned_shape(layers).resample(times).shift(budget)


@dataclass(frozen=True)
class ExportResult:
    """One step of a schedule, exported or refused."""

    step: int
    tokens: int
    """Kept by all layers together."""
    operators: int = 0
    refused: str = ""


def export_steps(
    shape: Shape,
    entry: Entry,
    steps: int,
    progress: Callable[[str], None] = lambda name: None,
) -> list[ExportResult]:
    """Export each step of a run with torch.export; an operator whose shape is not a number refuses it."""
    transformer, call = shape.build(), shape.call()
    method = entry.build(transformer)
    table = run_table(method.spec.layers, 0.6, steps) if isinstance(method, ShivaMethod) else None
    results = []
    with attach(transformer, method, cfg=shape.cfg) as session, torch.no_grad():
        for step in range(steps):
            if table is not None and isinstance(method, ShivaMethod):
                row = slice(step, step + 1)
                method.set_schedule(
                    dataclasses.replace(table, timesteps=table.timesteps[row], logits=table.logits[row])
                )
            progress(f"export of step {step}")
            arguments = new_run(call)
            program = session.program(**arguments)
            tokens = sum(program.ctx.counts)
            try:
                with quiet_logs():
                    graph = torch.export.export(program, (), kwargs=arguments).graph
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                results.append(ExportResult(step, tokens, refused=f"{type(error).__name__}: {reason}"))
                continue
            open_shapes = [node.name for node in graph.nodes if not static(node.meta.get("val"))]
            refused = f"shapes of {', '.join(open_shapes[:3])} depend on data" if open_shapes else ""
            results.append(ExportResult(step, tokens, len(graph.nodes), refused))
    return results


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """torch prints a whole graph for an export that fails; the error itself is what we report."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def static(value: Any) -> bool:
    """Whether a traced value's shape is made of plain numbers."""
    if isinstance(value, (list, tuple)):
        return all(static(part) for part in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return not isinstance(value, Tensor) or all(isinstance(size, int) for size in value.shape)


def export_table(shape: Shape, results: Mapping[str, list[ExportResult]], graphs: list[GraphCount]) -> Table:
    rows = []
    for name, steps in results.items():
        refused = [step for step in steps if step.refused]
        answer = f"{len(steps) - len(refused)} of {len(steps)} steps export"
        rows.append((name, answer, refused[0].refused if refused else "every shape is a number"))
    for count in graphs:
        how = "exact counts" if count.bucket is None else f"counts in multiples of {count.bucket}"
        rows.append((f"shiva, {how}", f"{count.graphs} graphs", f"a run of {count.steps} steps"))
    return Table(f"Shapes known beforehand, {shape.described}", ("method", "result", "detail"), rows)
