"""`shiva bench flops`: what a sampling run under each method costs at a model's real shape, on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from shiva.api import attach
from shiva.bench.shapes import Shape
from shiva.bench.table import Table
from shiva.core.cost import Flops, count, total
from shiva.core.method import MethodConfig
from shiva.cost import StepRecord

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
        for step in range(steps if config.steps_differ else min(steps, 2)):
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
