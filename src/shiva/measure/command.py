"""`shiva bench`: speed, measured as ratios within one run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shiva.measure import figures
from shiva.measure.anatomy import anatomy_sheet, measure_anatomy
from shiva.measure.compiling import compile_sheet, count_graphs, export_sheet, export_steps, measure_compile
from shiva.measure.compose import attention_cache_refusals, compose_sheet, measure_compose, mixes_without
from shiva.measure.contenders import Entry, baseline_entries, shiva_entry, sweep_entry
from shiva.measure.flops import flops_sheet, measure_flops, paper_presets, to_dicts
from shiva.measure.roofline import predict, roofline_sheet
from shiva.measure.scale import LENGTHS, growth_sheet, measure_growth, measure_path, path_sheet
from shiva.measure.selector import LENGTHS as SELECTOR_LENGTHS
from shiva.measure.selector import measure_selector, selector_sheet
from shiva.measure.shapes import Shape, shape
from shiva.measure.sheet import RESULTS, fill_tables, publish
from shiva.measure.step import measure_step, step_sheet
from shiva.methods import DyDiT

bench = typer.Typer(no_args_is_help=True, help="Measure speed, dense and reduced in turns, as ratios within one run.")

Model = Annotated[str, typer.Option(help="sd3-medium, flux-dev, pixart-sigma or emoji; random weights")]
Layers = Annotated[int | None, typer.Option(help="A slice of this many blocks; all of them otherwise")]
Height = Annotated[int | None, typer.Option(help="Image height in pixels; the model's own otherwise")]
Width = Annotated[int | None, typer.Option(help="Image width in pixels; the model's own otherwise")]
Batch = Annotated[int | None, typer.Option(help="Batch; as the pipeline runs it otherwise")]
Budgets = Annotated[str, typer.Option(help="Shiva's mean keeps, separated by commas")]
Flat = Annotated[bool, typer.Option("--flat", help="The same ratio everywhere, not the learned table's shape")]
Rounds = Annotated[int, typer.Option(help="Turns each configuration takes")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's choice otherwise")]
Output = Annotated[Path, typer.Option(help="Folder for the JSON file and the figure")]
Name = Annotated[str | None, typer.Option(help="Name of the result's files; the benchmark's otherwise")]


@bench.callback()
def about() -> None:
    """Measure speed, dense and reduced in turns, as ratios within one run."""


def chosen_shape(model: str, layers: int | None, height: int | None, width: int | None, batch: int | None) -> Shape:
    wanted = {"height": height, "width": width, "batch": batch}
    chosen = shape(model, **{name: value for name, value in wanted.items() if value is not None})
    return chosen if layers is None else chosen.slice(layers)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def shiva_entries(budgets: str, flat: bool) -> dict[str, Entry]:
    return {f"shiva {budget:g}": shiva_entry(budget, flat) for budget in numbers(budgets)}


def settings_of(chosen: Shape, **more: Any) -> dict[str, Any]:
    return {**asdict(chosen), "sliced": chosen.sliced, **more}


@contextlib.contextmanager
def progress_line(threads: int | None) -> Iterator[Callable[[str], None]]:
    """Says what is being measured, and since when."""
    if threads is not None:
        torch.set_num_threads(threads)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("preparing", total=None)
        yield lambda name: progress.update(task, description=f"done: {name}")


@bench.command()
def step(
    model: Model = "sd3-medium",
    layers: Layers = None,
    height: Height = None,
    width: Width = None,
    batch: Batch = None,
    budgets: Budgets = "0.9,0.8,0.7,0.6",
    flat: Flat = False,
    sweeps: Annotated[str, typer.Option(help="Budgets of the moving band that attends to all tokens")] = "0.6,0.4",
    baselines: Annotated[bool, typer.Option(help="Every other method at its paper preset too")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compile dense and every method")] = False,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """One denoising step: dense against Shiva at several budgets, and the other methods."""
    chosen = chosen_shape(model, layers, height, width, batch)
    entries = shiva_entries(budgets, flat) | {f"sweep {budget:g}": sweep_entry(budget) for budget in numbers(sweeps)}
    entries |= baseline_entries(sum(chosen.layers)) if baselines else {}
    with progress_line(threads) as progress:
        results, skipped = measure_step(chosen, entries, rounds, compiled=compiled, progress=progress)
    how = f"{'flat' if flat else 'adaptive'} table, {'compiled' if compiled else 'eager'}"
    found = {"methods": [row.to_dict() for row in results], "skipped": [asdict(row) for row in skipped]}
    settings = settings_of(chosen, flat=flat, compiled=compiled, rounds=rounds)
    sheets = [step_sheet(chosen, results, skipped, how)]
    publish(name or "step", output, sheets, found, settings, figures.draw_step)


@bench.command()
def anatomy(
    model: Model = "sd3-medium",
    layers: Layers = None,
    height: Height = None,
    width: Width = None,
    batch: Batch = None,
    budgets: Budgets = "0.9,0.8,0.7,0.6",
    flat: Flat = False,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """Time of each stage of the pruning path, of attention and of FFN."""
    chosen = chosen_shape(model, layers, height, width, batch)
    with progress_line(threads) as progress:
        results = measure_anatomy(chosen, shiva_entries(budgets, flat), rounds, progress=progress)
    found = {"configurations": [{**asdict(row), "path": row.path} for row in results]}
    settings = settings_of(chosen, flat=flat, rounds=rounds)
    publish(name or "anatomy", output, [anatomy_sheet(chosen, results)], found, settings, figures.draw_anatomy)


@bench.command()
def selector(
    lengths: Annotated[str, typer.Option(help="Numbers of tokens")] = ",".join(map(str, SELECTOR_LENGTHS)),
    width: Annotated[int, typer.Option(help="Width of a token")] = 1536,
    batch: Annotated[int, typer.Option(help="Batch")] = 2,
    rounds: Rounds = 5,
    threads: Threads = None,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """Forward, backward and kept memory of the operators that relax top-k."""
    with progress_line(threads) as progress:
        results = measure_selector(whole_numbers(lengths), width, batch, rounds, progress=progress)
    found = {"operators": [asdict(row) for row in results]}
    settings = {"width": width, "batch": batch, "rounds": rounds}
    sheets = [selector_sheet(results, width, batch)]
    publish(name or "selector", output, sheets, found, settings, figures.draw_selector)


@bench.command(name="compile")
def compile_(
    model: Model = "sd3-medium",
    layers: Layers = 8,
    height: Height = None,
    width: Width = None,
    batch: Batch = None,
    budgets: Budgets = "0.6",
    flat: Flat = False,
    steps: Annotated[int, typer.Option(help="Steps of the run that is exported")] = 28,
    export_layers: Annotated[int, typer.Option(help="Blocks of the exported slice")] = 4,
    backend: Annotated[str, typer.Option(help="torch.compile's backend")] = "inductor",
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """Eager and compiled steps, graphs of a run, and the export of every step of a schedule."""
    chosen = chosen_shape(model, layers, height, width, batch)
    small = chosen.slice(min(export_layers, sum(chosen.layers)))
    with progress_line(threads) as progress:
        exported = {"shiva 0.6": export_steps(small, shiva_entry(0.6), steps, progress=progress)}
        exported["dydit"] = export_steps(small, Entry(DyDiT.preset("paper")), 1, progress=progress)
        results = measure_compile(chosen, shiva_entries(budgets, flat), rounds, backend=backend, progress=progress)
    tokens = chosen.grid[0] * chosen.grid[1]
    graphs = count_graphs(sum(chosen.layers), tokens, 0.6, 50, (None, 64, 256, 512))
    found = {
        "methods": [asdict(row) for row in results],
        "export": {key: [asdict(row) for row in rows] for key, rows in exported.items()},
        "graphs": [asdict(row) for row in graphs],
    }
    sheets = [compile_sheet(chosen, results), export_sheet(small, exported, graphs)]
    settings = settings_of(chosen, flat=flat, rounds=rounds, backend=backend, steps=steps)
    publish(name or "compile", output, sheets, found, settings, figures.draw_compile)


@bench.command()
def compose(
    model: Model = "flux-dev",
    layers: Layers = 4,
    height: Height = None,
    width: Width = None,
    batch: Batch = None,
    budget: Annotated[float, typer.Option(help="Shiva's mean keep")] = 0.8,
    steps: Annotated[int, typer.Option(help="Steps of the run; a cache saves from the second on")] = 4,
    without: Annotated[str, typer.Option(help="Parts to leave out, as int8: most CPUs have no fast one")] = "",
    rounds: Rounds = 2,
    threads: Threads = None,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """Shiva with INT8, a block-level cache and LoRA; what cannot compose is refused by name."""
    chosen, mixes = chosen_shape(model, layers, height, width, batch), mixes_without(without.split(","))
    with progress_line(threads) as progress:
        results = measure_compose(chosen, mixes, budget=budget, steps=steps, rounds=rounds, progress=progress)
        refusals = attention_cache_refusals(chosen)
    found = {"mixes": [{"name": row.name, **asdict(row)} for row in results], "refusals": refusals}
    settings = settings_of(chosen, budget=budget, steps=steps, rounds=rounds)
    sheets = [compose_sheet(chosen, results, refusals)]
    publish(name or "compose", output, sheets, found, settings, figures.draw_compose)


@bench.command()
def scale(
    lengths: Annotated[str, typer.Option(help="Numbers of tokens of the pruning path")] = ",".join(map(str, LENGTHS)),
    batches: Annotated[str, typer.Option(help="Batches of a whole step; empty leaves it out")] = "1,2,4",
    depths: Annotated[str, typer.Option(help="Blocks of a whole step")] = "2,4,8",
    height: Height = 512,
    width: Width = 512,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """Growth with tokens, batch and depth on this machine, and a roofline for GPUs."""
    whole = shape("sd3-medium")
    at = chosen_shape("sd3-medium", None, height, width, None)
    with progress_line(threads) as progress:
        path = measure_path(whole, whole_numbers(lengths), rounds=max(rounds, 3), progress=progress)
        sizes = whole_numbers(batches), whole_numbers(depths)
        growth = measure_growth(at, *sizes, rounds=rounds, progress=progress) if sizes[0] else []
        predictions, efficiency = predict(whole)
    found = {
        "path": [asdict(row) for row in path],
        "growth": [asdict(row) for row in growth],
        "roofline": [asdict(row) for row in predictions],
        "share_of_peak": efficiency,
    }
    sheets = [path_sheet(whole, path), *([growth_sheet(at, growth)] if growth else [])]
    sheets.append(roofline_sheet(whole, predictions, efficiency))
    publish(name or "scale", output, sheets, found, {"rounds": rounds}, figures.draw_scale)


@bench.command()
def flops(
    steps: Annotated[int, typer.Option(help="Steps of the run that is counted")] = 50,
    output: Output = RESULTS,
    name: Name = None,
) -> None:
    """FLOPs of every method's paper preset at SD3-Medium's real shape; counted, so no machine matters."""
    chosen = shape("sd3-medium")
    with progress_line(None) as progress:
        results = measure_flops(chosen, paper_presets(), steps, progress)
    sheets = [flops_sheet(chosen, results, steps)]
    publish(name or "flops", output, sheets, {"methods": to_dicts(results)}, {"steps": steps}, figures.draw_flops)


@bench.command()
def tables(
    page: Annotated[Path, typer.Argument(help="A page with <!-- bench:name --> places")] = Path("docs/performance.md"),
    results: Annotated[Path, typer.Option(help="Folder of the JSON files")] = RESULTS,
) -> None:
    """Write measured tables into the documentation."""
    filled = fill_tables(page, results)
    Console().print(f"{page}: {', '.join(filled) or 'nothing measured yet'}")
