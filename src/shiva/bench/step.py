"""What a method costs at a model's real shape: one denoising step timed, a whole run counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shiva.api import attach
from shiva.bench.entries import Attached, Entry, interleave, meta_step, twin
from shiva.bench.shapes import Shape
from shiva.bench.table import Table
from shiva.core.cost import Flops, count, total
from shiva.core.method import MethodConfig
from shiva.cost import StepRecord

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
    """A method that cannot run, or not compiled, at this shape, and why."""

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
            attached = Attached(entry, transformer, call)
            if compiled:
                attached.session.compile()
            running[name] = attached
        except ValueError as error:
            skipped.append(Skipped(name, str(error)))
    dense_model: Any = twin(transformer)
    if compiled:
        dense_model = torch.compile(dense_model)
    turns: dict[str, Callable[[], Callable[[], Any]]] = {DENSE: lambda: lambda: dense_model(**call)}
    turns |= {name: attached.prepare for name, attached in running.items()}
    with torch.inference_mode():
        timings = interleave(
            turns, rounds, warmup, progress, whole=lambda name: name in running and running[name].whole
        )
    dense = count(meta_step(shape, None))
    results = []
    for name, timing in timings.items():
        flops = dense
        if name in running:
            flops = flops_of(shape, entries[name], running[name], rounds)
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


def flops_of(shape: Shape, entry: Entry, attached: Attached, rounds: int) -> Flops:
    """Of the steps that were timed: counted on the meta device, or by prices where earlier steps matter."""
    if attached.step is not None:
        return attached.price(rounds)
    return count(meta_step(shape, entry) if attached.session.method.static else attached.prepare())


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
            "TFLOPs": f"{row.tflops:.3g}",
            "paper's count": f"{row.tflops_paper:.3g}",
            "overhead": f"{sum(row.overhead.values()) / (1e3 * dense.seconds):.2%}" if row.overhead else "",
        }
        for row in results
    ]
    left_out = "".join(f"; {row.name} left out: {row.reason}" for row in skipped)
    paper = "; paper: RTX 4090, whole model, 1024², 50 steps" if any(row.paper for row in results) else ""
    caption = "limit: what true FLOPs alone allow; eff.: speed-up over limit; overhead: the reduction path as a "
    caption += "share of the dense step; of a method that runs all tokens in some steps, one of the others is timed"
    caption += f"{paper}{left_out}"
    return Table.of(f"One step of {shape.described}, {how}", rows, caption)


TERA = 1e12


@dataclass(frozen=True)
class FlopsResult:
    """TFLOPs of a denoising step, the mean over a run."""

    name: str
    paper: float | None
    """The paper's figure."""
    convention: float
    """Ours as the paper counts: linear layers as multiply-accumulates, attention as FLOPs, matching left out."""
    with_own: float
    """The same with every matrix product of the method itself: router, similarities, merging."""
    true: float
    """All floating point operations, the method's own included."""
    share: float
    """Of the dense model's."""


def run_flops(transformer: nn.Module, chosen: Shape, config: MethodConfig, steps: int) -> tuple[Flops, Flops]:
    """FLOPs of a whole run: by the tokens each site ran on, and of every product that was asked for."""
    timesteps = torch.linspace(1000, 1000 / steps, steps)
    pipeline = SimpleNamespace(transformer=transformer, scheduler=SimpleNamespace(timesteps=timesteps))
    call = chosen.call("meta")
    with attach(pipeline, config, cfg=chosen.cfg) as session:
        if not session.method.static:
            raise ValueError("how many tokens it runs on is known only from data")
        transformer(**call)  # a meta timestep has no value to read: the context of each step is filled in below
        assert session.ctx is not None
        example, records, counted, carried = session.ctx, [], [], session.method.new_run()
        differ = config.steps_differ or getattr(config, "tilt", 0.0) != 0
        for step in range(steps if differ else min(steps, 2)):
            timestep = float(timesteps[step])
            now = session.method.new_step()
            ctx = replace(example, timestep=timestep, step=step, now=now, run=carried, kept={})
            ctx.counts = session.method.plan(ctx, timesteps.tolist())
            counted.append(count(partial(session.program(ctx), **call)))
            records.append(StepRecord(timestep, ctx.tokens, dict(ctx.kept)))
        repeated = steps - len(records)
        summary = replace(session.summary(), steps=records + records[-1:] * repeated)
        return summary.flops, total(counted + counted[-1:] * repeated)


def measure_flops(
    chosen: Shape,
    methods: Mapping[str, MethodConfig],
    steps: int = 50,
    paper: Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[FlopsResult]:
    """Count every method that can be counted; "dense" must be the first of them."""
    transformer = chosen.build("meta")
    results: list[FlopsResult] = []
    for name, config in methods.items():
        try:
            totals = run_flops(transformer, chosen, config, steps)
        except ValueError as error:
            progress(f"{name} left out: {error}")
            continue
        priced, counted = (flops.scaled(1 / steps / TERA) for flops in totals)
        dense = results[0].true if results else counted.true
        quoted = (paper or {}).get(name)
        results.append(FlopsResult(name, quoted, priced.paper, counted.paper, counted.true, counted.true / dense))
        progress(name)
    return results


def flops_table(chosen: Shape, results: list[FlopsResult], steps: int) -> Table:
    rows = [
        {
            "method": row.name,
            "paper": "" if row.paper is None else f"{row.paper:.2f}",
            "as the paper counts": f"{row.convention:.3f}",
            "with the method's own products": f"{row.with_own:.3f}",
            "true": f"{row.true:.3f}",
            "of dense": f"{row.share:.1%}",
        }
        for row in results
    ]
    return Table.of(
        f"TFLOPs a denoising step, {chosen.described.removesuffix(', random weights')}, {steps} steps",
        rows,
        "The paper counts linear layers as multiply-accumulates and attention as FLOPs. DiffCR runs at the "
        "bin nearest its mean ratio, Shiva at the same ratio everywhere; the paper's tables are not published.",
    )
