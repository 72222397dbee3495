"""`shiva bench`: speed, measured as ratios within one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shiva.checkpoint import write_atomically
from shiva.core.method import MethodConfig
from shiva.measure.environment import environment
from shiva.measure.shapes import Shape, shape
from shiva.measure.step import StepResult, measure_step
from shiva.methods import Shiva

bench = typer.Typer(no_args_is_help=True, help="Measure speed, dense and reduced in turns, as ratios within one run.")

PAPER = {0.9: 1.09, 0.8: 1.25, 0.7: 1.37, 0.6: 1.54}
"""The paper's speed-ups on SD3-Medium, by budget (table main_results)."""


@bench.callback()
def about() -> None:
    """Measure speed, dense and reduced in turns, as ratios within one run."""


@bench.command()
def step(
    model: Annotated[str, typer.Option(help="sd3-medium, flux-dev or pixart-sigma; random weights")] = "sd3-medium",
    layers: Annotated[int | None, typer.Option(help="A slice of this many blocks; all of them otherwise")] = None,
    height: Annotated[int, typer.Option(help="Image height in pixels")] = 1024,
    width: Annotated[int, typer.Option(help="Image width in pixels")] = 1024,
    batch: Annotated[int | None, typer.Option(help="Batch; as the pipeline runs it otherwise")] = None,
    budgets: Annotated[str, typer.Option(help="Shiva's mean keeps, separated by commas")] = "0.9,0.8,0.7,0.6",
    rounds: Annotated[int, typer.Option(help="Turns each configuration takes")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice otherwise")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file")] = None,
) -> None:
    """One denoising step: dense against Shiva at several budgets."""
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = shape(model, height=height, width=width, **({} if batch is None else {"batch": batch}))
    if layers is not None:
        chosen = chosen.slice(layers)
    keeps = [float(keep) for keep in budgets.split(",")]
    results = run_step(chosen, {f"shiva {keep:g}": Shiva(budget=keep) for keep in keeps}, rounds)
    paper = {f"shiva {keep:g}": value for keep, value in PAPER.items()} if model == "sd3-medium" else {}
    Console().print(step_table(chosen, results, paper))
    if output is not None:
        write_atomically(output, json.dumps(step_report(chosen, results), indent=2).encode() + b"\n")


def run_step(chosen: Shape, methods: dict[str, MethodConfig], rounds: int) -> list[StepResult]:
    """Measure under a progress bar."""
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * (len(methods) + 1))

        def advance(name: str) -> None:
            progress.update(task, advance=1, description=name)

        return measure_step(chosen, methods, rounds=rounds, progress=advance)


def step_table(chosen: Shape, results: list[StepResult], paper: dict[str, float]) -> Table:
    blocks = sum(chosen.layers)
    part = f"a slice of {blocks} blocks" if chosen.sliced else f"{blocks} blocks"
    table = Table(
        title=f"{chosen.name}, {part}, {chosen.height}x{chosen.width}, batch {chosen.batch}, random weights",
        caption="limit: what FLOPs alone allow; eff.: speed-up over limit; paper: RTX 4090, whole model",
    )
    headings = ("method", "step", "±", "speed-up", "paper", "limit", "eff.", "TFLOPs", "overhead")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    dense = results[0]
    for row in results:
        overhead = sum(row.overhead.values()) / (1e3 * dense.seconds)
        table.add_row(
            row.name,
            f"{row.seconds:.2f} s",
            f"{row.spread:.1%}",
            f"{row.speedup:.2f}x",
            f"{paper[row.name]:.2f}x" if row.name in paper else "",
            f"{row.limit:.2f}x",
            f"{row.efficiency:.2f}",
            f"{row.tflops:.2f}",
            f"{overhead:.1%}" if row.overhead else "",
        )
    return table


def step_report(chosen: Shape, results: list[StepResult]) -> dict[str, Any]:
    return {
        "environment": environment(),
        "model": chosen.name,
        "layers": chosen.layers,
        "resolution": [chosen.height, chosen.width],
        "batch": chosen.batch,
        "results": [row.to_dict() for row in results],
    }
