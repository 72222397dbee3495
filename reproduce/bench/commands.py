"""`shiva bench` in a checkout: the benchmarks of the paper's tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from reproduce.bench import figures
from reproduce.bench.anatomy import anatomy_table, measure_anatomy
from reproduce.bench.compiling import compile_table, count_graphs, export_steps, export_table, measure_compile
from reproduce.bench.compose import attention_cache_refusals, compose_table, measure_compose, mixes_without
from reproduce.bench.pages import fill_tables
from reproduce.bench.reach import chosen_reach, measure_reach, reach_table
from reproduce.bench.roofline import predict, roofline_table
from reproduce.bench.scale import LENGTHS, growth_table, measure_growth, measure_path, path_table
from reproduce.bench.selector import LENGTHS as SELECTOR_LENGTHS
from reproduce.bench.selector import measure_selector, selector_table
from reproduce.bench.train_cost import measure_train, train_table, trained_methods
from shiva.bench.entries import Entry, shiva_entry
from shiva.bench.shapes import shape
from shiva.bench.table import publish
from shiva.cli.bench import (
    Batch,
    Budgets,
    Flat,
    Layers,
    Model,
    Name,
    Rounds,
    settings_of,
    shape_of,
    shiva_entries,
)
from shiva.cli.terminal import Height, Output, Record, Threads, Width, folder_of, numbers, progress_line, some
from shiva.methods import DyDiT

app = typer.Typer()


@app.command()
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
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Time of each stage of the pruning path, of attention and of FFN."""
    folder = folder_of(output, record, "bench")
    chosen = shape_of(model, layers, height, width, batch)
    with progress_line() as progress:
        results = measure_anatomy(chosen, shiva_entries(budgets, flat), rounds, progress=progress)
    found = {"configurations": [{**asdict(row), "path": row.path} for row in results]}
    settings = settings_of(chosen, flat=flat, rounds=rounds)
    publish(name or "anatomy", folder, [anatomy_table(chosen, results)], found, settings, figures.draw_anatomy)


@app.command()
def selector(
    lengths: Annotated[str, typer.Option(help="Numbers of tokens")] = ",".join(map(str, SELECTOR_LENGTHS)),
    width: Annotated[int, typer.Option(help="Width of a token")] = 1536,
    batch: Annotated[int, typer.Option(help="Batch")] = 2,
    rounds: Rounds = 5,
    threads: Threads = None,
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Forward, backward and kept memory of the operators that relax top-k."""
    folder, tokens = folder_of(output, record, "bench"), some("--lengths", lengths, least=1)
    with progress_line() as progress:
        results = measure_selector(tokens, width, batch, rounds, progress=progress)
    found = {"operators": [asdict(row) for row in results]}
    settings = {"width": width, "batch": batch, "rounds": rounds}
    tables = [selector_table(results, width, batch)]
    publish(name or "selector", folder, tables, found, settings, figures.draw_selector)


@app.command(name="compile")
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
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Eager and compiled steps, graphs of a run, and the export of every step of a schedule."""
    folder = folder_of(output, record, "bench")
    chosen = shape_of(model, layers, height, width, batch)
    small = chosen.slice(min(export_layers, sum(chosen.layers)))
    with progress_line() as progress:
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
    tables = [compile_table(chosen, results), export_table(small, exported, graphs)]
    settings = settings_of(chosen, flat=flat, rounds=rounds, backend=backend, steps=steps)
    publish(name or "compile", folder, tables, found, settings, figures.draw_compile)


@app.command()
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
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Shiva with INT8, a block-level cache and LoRA; what cannot compose is refused by name."""
    folder = folder_of(output, record, "bench")
    chosen, mixes = shape_of(model, layers, height, width, batch), mixes_without(without.split(","))
    with progress_line() as progress:
        results = measure_compose(chosen, mixes, budget=budget, steps=steps, rounds=rounds, progress=progress)
        refusals = attention_cache_refusals(chosen)
    found = {"mixes": [{"name": row.name, **asdict(row)} for row in results], "refusals": refusals}
    settings = settings_of(chosen, budget=budget, steps=steps, rounds=rounds)
    tables = [compose_table(chosen, results, refusals)]
    publish(name or "compose", folder, tables, found, settings, figures.draw_compose)


@app.command()
def scale(
    lengths: Annotated[str, typer.Option(help="Numbers of tokens of the pruning path")] = ",".join(map(str, LENGTHS)),
    batches: Annotated[str, typer.Option(help="Batches of a whole step; empty leaves it out")] = "1,2,4",
    depths: Annotated[str, typer.Option(help="Blocks of a whole step")] = "2,4,8",
    height: Height = 512,
    width: Width = 512,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Growth with tokens, batch and depth on this machine, and a roofline for GPUs."""
    folder = folder_of(output, record, "bench")
    whole = shape("sd3-medium")
    at = shape_of("sd3-medium", None, height, width, None)
    tokens, layers = some("--lengths", lengths, least=1), some("--depths", depths, least=2)
    sizes = numbers("--batches", batches, int), layers
    with progress_line() as progress:
        path = measure_path(whole, tokens, rounds=max(rounds, 3), progress=progress)
        growth = measure_growth(at, *sizes, rounds=rounds, progress=progress) if sizes[0] else []
        predictions, efficiency = predict(whole)
    found = {
        "path": [asdict(row) for row in path],
        "growth": [asdict(row) for row in growth],
        "roofline": [asdict(row) for row in predictions],
        "share_of_peak": efficiency,
    }
    tables = [path_table(whole, path), *([growth_table(at, growth)] if growth else [])]
    tables.append(roofline_table(whole, predictions, efficiency))
    publish(name or "scale", folder, tables, found, {"rounds": rounds}, figures.draw_scale)


@app.command()
def reach(
    models: Annotated[
        str, typer.Option(help="Names between commas, such as qwen-image,z-image; all ten otherwise")
    ] = "",
    layers: Annotated[int, typer.Option(min=2, help="Blocks of each slice")] = 4,
    budget: Annotated[float, typer.Option(min=0.01, max=1.0, help="Shiva's keep")] = 0.6,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="At most so many image tokens: videos lose frames, as memory allows")
    ] = None,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Speed-up over what FLOPs allow, on slices of the ten transformers people run most, images and videos."""
    folder, chosen = folder_of(output, record, "bench"), chosen_reach(models)
    with progress_line() as progress:
        rows = measure_reach(chosen, budget, layers, tokens, rounds, progress)
    settings = {"layers": layers, "budget": budget, "tokens": tokens, "rounds": rounds}
    found = {"models": [row.to_dict() for row in rows]}
    publish(name or "reach", folder, [reach_table(rows, budget, layers)], found, settings)


@app.command()
def tables(
    page: Annotated[Path, typer.Argument(help="A page with <!-- bench:name --> places")] = Path("docs/performance.md"),
    results: Annotated[Path, typer.Option(help="Folder of the JSON files")] = Path("results/bench"),
) -> None:
    """Write measured tables into the documentation."""
    filled = fill_tables(page, results)
    typer.echo(f"{page}: {', '.join(filled) or 'nothing measured yet'}")


@app.command()
def train(
    model: Annotated[str, typer.Option(help="sd3-medium or emoji; random weights")] = "sd3-medium",
    layers: Annotated[int, typer.Option(min=2, help="Blocks of the slice; the first is dense")] = 4,
    height: Height = None,
    width: Width = None,
    batch: Annotated[int, typer.Option(help="Samples of a step")] = 1,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward pass")] = False,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """Time and memory of an optimizer step: DoRA by PEFT and as one product, Shiva, and the trained baselines."""
    folder = folder_of(output, record, "bench")
    if model not in ("sd3-medium", "emoji"):
        raise ValueError(
            f"model={model!r} must be sd3-medium or emoji: the trained baselines are measured on SD3's class"
        )
    chosen = shape_of(model, layers, height, width, batch)
    with progress_line() as progress:
        results, skipped = measure_train(chosen, trained_methods(), rounds, checkpointing, progress)
    found = {"methods": [asdict(row) for row in results], "skipped": skipped}
    settings = settings_of(chosen, rounds=rounds, checkpointing=checkpointing)
    tables = [train_table(chosen, results, skipped)]
    publish(name or "train", folder, tables, found, settings, figures.draw_train)
