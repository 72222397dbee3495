"""`shiva bench flops`: what a sampling run under each method costs at a model's real shape, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shiva.core.cost import Flops, count
from shiva.core.method import MethodConfig
from shiva.measure.shapes import Shape
from shiva.measure.sheet import Sheet
from shiva.methods import IBTM, SDTM, Dense, DiffCR, NeuralSort, Shiva, SparseDiT, ToFu, ToMA, ToMeSD
from shiva.session import attach
from shiva.summary import StepRecord, total

TERA = 1e12
VARYING = (SDTM, SparseDiT)
"""Methods whose counts follow the step; the others repeat their second one to the end."""


def paper_presets() -> dict[str, tuple[MethodConfig, float]]:
    """Each method as the paper ran it on SD3-Medium, and the TFLOPs a step of its table main_results.

    DyDiT is not among them: how many tokens it runs on is known only from data.
    """
    shiva_points = {0.9: 10.19, 0.8: 8.92, 0.7: 7.38, 0.6: 6.96}
    return {
        "dense": (Dense(), 11.80),
        "tomesd": (ToMeSD.preset("paper"), 8.98),
        "tofu": (ToFu.preset("paper"), 8.98),
        "sdtm": (SDTM.preset("paper"), 8.83),
        "toma": (ToMA.preset("paper"), 8.23),
        "ibtm": (IBTM.preset("paper"), 10.18),
        "neuralsort": (NeuralSort.preset("paper"), 9.47),
        "diffcr": (DiffCR.preset("paper", initial=0.876), 9.93),
        "sparsedit": (SparseDiT.preset("paper"), 8.95),
        **{f"shiva {budget:g}": (Shiva(budget=budget), paper) for budget, paper in shiva_points.items()},
    }


@dataclass(frozen=True)
class FlopsResult:
    """TFLOPs of a denoising step, the mean over a run."""

    name: str
    paper: float
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
    call, carried = chosen.call("meta"), dict[Any, Any]()
    with attach(pipeline, config, cfg=chosen.cfg) as session:
        transformer(**call)  # a meta timestep has no value to read: the context of each step is filled in below
        assert session.ctx is not None
        example, records, counted = session.ctx, [], []
        for step in range(steps if isinstance(config, VARYING) else min(steps, 2)):
            timestep = float(timesteps[step])
            ctx = replace(example, timestep=timestep, step=step, memory={}, run=carried, kept={})
            ctx.counts = session.method.plan(ctx, timesteps.tolist())
            counted.append(count(partial(session.program(ctx), **call)))
            records.append(StepRecord(timestep, ctx.tokens, dict(ctx.kept)))
        repeated = steps - len(records)
        summary = replace(session.summary(), steps=records + records[-1:] * repeated)
        return summary.flops, total(counted + counted[-1:] * repeated)


def measure_flops(
    chosen: Shape,
    methods: dict[str, tuple[MethodConfig, float]],
    steps: int = 50,
    progress: Callable[[str], None] = lambda name: None,
) -> list[FlopsResult]:
    """Count every method; "dense" must be the first of them."""
    transformer = chosen.build("meta")
    results: list[FlopsResult] = []
    for name, (config, paper) in methods.items():
        priced, counted = (flops.scaled(1 / steps / TERA) for flops in run_flops(transformer, chosen, config, steps))
        dense = results[0].true if results else counted.true
        results.append(FlopsResult(name, paper, priced.paper, counted.paper, counted.true, counted.true / dense))
        progress(name)
    return results


def flops_sheet(chosen: Shape, results: list[FlopsResult], steps: int) -> Sheet:
    rows = [
        (
            row.name,
            f"{row.paper:.2f}",
            f"{row.convention:.3f}",
            f"{row.with_own:.3f}",
            f"{row.true:.3f}",
            f"{row.share:.1%}",
        )
        for row in results
    ]
    return Sheet(
        title=f"TFLOPs a denoising step, {chosen.described.removesuffix(', random weights')}, {steps} steps",
        columns=("method", "paper", "as the paper counts", "with the method's own products", "true", "of dense"),
        rows=rows,
        caption="The paper counts linear layers as multiply-accumulates and attention as FLOPs. DiffCR runs at the "
        "bin nearest its mean ratio, Shiva at the same ratio everywhere; the paper's tables are not published.",
    )


def to_dicts(results: list[FlopsResult]) -> list[dict[str, Any]]:
    return [asdict(row) for row in results]
