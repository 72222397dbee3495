"""`shiva bench`: a step and its FLOPs for any method; in a checkout the paper's benchmarks too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shiva.cli.terminal import Height, Output, Record, Threads, Width, folder_of, numbers, progress_line
from shiva.evaluate.checkout import reproduce

if TYPE_CHECKING:
    from shiva.bench.shapes import Shape

Model = Annotated[
    str, typer.Option(help="sd3-medium, flux-dev, pixart-sigma, emoji, or a local folder; random weights")
]
Layers = Annotated[int | None, typer.Option(min=1, help="A slice of this many blocks; all of them otherwise")]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch; as the pipeline runs it otherwise")]
Budgets = Annotated[str, typer.Option(help="Shiva's mean keeps, separated by commas")]
Flat = Annotated[bool, typer.Option("--flat", help="The same ratio everywhere, not the learned table's shape")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns each configuration takes")]
Name = Annotated[str | None, typer.Option(help="Name of the result's files; the benchmark's otherwise")]


class Commands(TyperGroup):
    """Those of this file, and in a checkout those of reproduce/bench."""

    def more(self) -> dict[str, Any]:
        papers = reproduce("bench.commands")
        return {} if papers is None else dict(typer.main.get_group(papers.app).commands)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self.more()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or self.more().get(cmd_name)


bench = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Measure speed, dense and reduced in turns, as ratios within one run."
)


@bench.callback()
def about() -> None:
    """Measure speed, dense and reduced in turns, as ratios within one run."""


def shape_of(model: str, layers: int | None, height: int | None, width: int | None, batch: int | None) -> Shape:
    from shiva.bench.shapes import shape

    wanted = {"height": height, "width": width, "batch": batch}
    chosen = shape(model, **{name: value for name, value in wanted.items() if value is not None})
    return chosen if layers is None else chosen.slice(layers)


def shiva_entries(budgets: str, flat: bool) -> dict[str, Any]:
    from shiva.bench.entries import shiva_entry

    return {f"shiva {keep:g}": shiva_entry(keep, flat) for keep in numbers("--budgets", budgets)}


def settings_of(chosen: Shape, **more: Any) -> dict[str, Any]:
    parts = ("name", "layers", "batch", "height", "width", "token")
    return {**{part: getattr(chosen, part) for part in parts}, "sliced": chosen.sliced, **more}


@bench.command()
def step(
    model: Model = "sd3-medium",
    layers: Layers = None,
    height: Height = None,
    width: Width = None,
    batch: Batch = None,
    budgets: Budgets = "0.9,0.8,0.7,0.6",
    flat: Flat = False,
    sweeps: Annotated[str, typer.Option(help="Budgets of Sweep")] = "0.6,0.4",
    lattices: Annotated[str, typer.Option(help="Budgets of Lattice, with its fill")] = "",
    baselines: Annotated[bool, typer.Option(help="Every other method too; in a checkout as the paper ran it")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compile dense and every method")] = False,
    rounds: Rounds = 3,
    threads: Threads = None,
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """One denoising step: dense against Shiva at several budgets, and the other methods."""
    from dataclasses import asdict

    from shiva.bench.entries import Entry, official_presets
    from shiva.bench.step import measure_step, step_table
    from shiva.bench.table import publish
    from shiva.methods import Lattice, Sweep
    from shiva.show.figures import draw_step

    folder, chosen = folder_of(output, record, "bench"), shape_of(model, layers, height, width, batch)
    entries = shiva_entries(budgets, flat)
    entries |= {f"sweep {keep:g}": Entry(Sweep(budget=keep)) for keep in numbers("--sweeps", sweeps)}
    # An unfitted Lattice computes all the same.
    entries |= {f"lattice {keep:g}": Entry(Lattice(budget=keep)) for keep in numbers("--lattices", lattices)}
    papers = reproduce("bench.presets")
    if baselines and papers is not None:
        entries |= papers.baseline_entries(sum(chosen.layers))
    elif baselines:
        entries |= {name: Entry(config) for name, config in official_presets().items()}
    with progress_line() as progress:
        quoted = {} if papers is None else papers.speedups(chosen)
        results, skipped = measure_step(chosen, entries, rounds, compiled=compiled, paper=quoted, progress=progress)
    how = f"{'flat' if flat else 'adaptive'} table, {'compiled' if compiled else 'eager'}"
    found = {"methods": [row.to_dict() for row in results], "skipped": [asdict(row) for row in skipped]}
    settings = settings_of(chosen, flat=flat, compiled=compiled, rounds=rounds)
    publish(name or "step", folder, [step_table(chosen, results, skipped, how)], found, settings, draw_step)


@bench.command()
def flops(
    model: Model = "sd3-medium",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run that is counted")] = 50,
    output: Output = None,
    record: Record = False,
    name: Name = None,
) -> None:
    """FLOPs of a run under every method at a model's real shape; counted, so no machine matters."""
    from dataclasses import asdict

    from shiva.bench.entries import official_presets
    from shiva.bench.shapes import shape
    from shiva.bench.step import flops_table, measure_flops
    from shiva.bench.table import publish
    from shiva.methods import Dense
    from shiva.show.figures import draw_flops

    folder, chosen = folder_of(output, record, "bench"), shape(model)
    papers = reproduce("bench.presets") if model == "sd3-medium" else None
    presets = {"dense": Dense(), **official_presets()} if papers is None else papers.flops_presets()
    with progress_line() as progress:
        results = measure_flops(chosen, presets, steps, None if papers is None else papers.TFLOPS, progress)
    found = {"methods": [asdict(row) for row in results]}
    publish(name or "flops", folder, [flops_table(chosen, results, steps)], found, {"steps": steps}, draw_flops)
