"""`shiva fit`: the fill of Lattice, the probe of Refresh, or a table, from a few runs of any pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiva.cli.terminal import (
    Device,
    Dtype,
    Height,
    Threads,
    Width,
    check_folder,
    listed,
    numbers,
    progress_line,
    settings_from,
)

if TYPE_CHECKING:
    from rich.table import Table

    from shiva.fitting import Fit, Fitted


def fit(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")],
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint that attach and generate take")],
    prompts: Annotated[
        str, typer.Option(help="So many everyday prompts (for DiT: classes), or a file: txt, csv, tsv, json, parquet")
    ] = "48",
    limit: Annotated[int, typer.Option(min=2, help="Prompts taken of a file, evenly spaced over it")] = 48,
    steps: Annotated[str, typer.Option(help="Steps of the runs, as the model will be used; several as 4,8")] = "4",
    guidance: Annotated[float, typer.Option(help="Guidance scale, as the model will be used")] = 4.5,
    height: Height = None,
    width: Width = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of each layer's map; 16 to 64 do alike")] = 32,
    degree: Annotated[int, typer.Option(min=0, max=3, help="Highest power of the noise level that it knows")] = 1,
    span: Annotated[int, typer.Option(min=1, help="Layers in a row that run on one choice of tokens; 1 to 4")] = 1,
    stride: Annotated[int, typer.Option(min=1, help="Fit on every n-th token only; for large images")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Prompts a call")] = 4,
    probe: Annotated[
        bool, typer.Option("--probe", help="Fit the probe of Refresh instead, for runs of many steps")
    ] = False,
    table: Annotated[
        str | None, typer.Option(help="Learn how many tokens each step runs instead: of Refresh or DiffSparse")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, max=1, help="--table: mean share of tokens; else 0.5")] = None,
    cells: Annotated[
        str | None, typer.Option(help="--table: parts of run and layers that are told apart; else 16,1")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="--table: an option of the method, such as score=band")
    ] = None,
    layers_at_once: Annotated[
        int | None, typer.Option(min=1, help="Layers a pass over the prompts; else as many as 4 GiB of sums allow")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise")] = 0,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Fit what skipped tokens get, or which are skipped (--probe), or how many (--table): minutes, and no data set.

    Runs the prompts dense, and solves for each block a small linear map from a token to what the block, and those
    after it in its span, add to it.
    Four fifths of the prompts are fitted on, the others say how much is explained (R² by layer). Then:

    shiva generate MODEL "a fox" --checkpoint OUTPUT --budget 0.66 --set "dense_steps=[0]" --steps 3 --guidance 0,
    with guidance and steps as they were fitted, or a step less; or in Python
    shiva.attach(pipe, "OUTPUT", budget=0.66, dense_steps=(0,)).
    """
    import dataclasses

    from rich.console import Console

    from shiva.evaluate import drawing
    from shiva.evaluate.candidates import method_named
    from shiva.fitting import fit as fit_pipeline
    from shiva.fitting import fit_probe
    from shiva.fitting.table import fit_table

    drawing.check_device(device)
    check_folder(output)
    runs = numbers("--steps", steps, int)
    if not runs or min(runs) < 1:
        raise ValueError(f"--steps {steps} names no run; pass such as 4, or 4,8")
    check_table(table, probe, runs, {"--budget": budget, "--cells": cells, "--set": override})
    parts = cells_of(cells or "16,1")
    drawing.quiet()
    pipe, arguments = drawing.load_with_arguments(model, dtype, device)
    asked = {"height": height, "width": width}
    arguments |= drawing.accepted(pipe, asked)
    texts = texts_of(pipe, prompts, limit)
    settings: dict[str, Any] = {"model": model, "prompts": texts}
    how: dict[str, Any] = {"steps": runs, "guidance": guidance, "seed": seed, "batch": batch}
    if table is not None:
        config = method_named(table)().changed(settings_from(override))
        how |= {"steps": runs[0], "budget": 0.5 if budget is None else budget, "arguments": arguments}
        how |= {"step_cells": parts[0], "layer_cells": parts[1]}
        with progress_line() as progress:
            tabled = fit_table(pipe, config, texts, progress=progress, **how)
        ratios = tabled.ratios.tolist()
        write_fit(tabled, output, settings | how, ratios=ratios, flat=tabled.flat, learned=tabled.learned)
        for row in ratios:
            typer.echo("  ".join(f"{ratio:.2f}" for ratio in row))
        told = f"squared error of final latents on held-out prompts: {tabled.learned:.4g}, flat {tabled.flat:.4g}"
        typer.echo(f"{told}; {tabled.seconds:.0f} s\n{output}: shiva.attach(pipe, {str(output)!r})")
        return
    if probe:
        how |= {"arguments": arguments}
        with progress_line() as progress:
            probed = fit_probe(pipe, texts, progress=progress, **how)
        found = {"explained": probed.explained, "alone": probed.alone, "samples": probed.samples}
        write_fit(probed, output, settings | how, **found)
        told = f"R² {probed.explained:.3f} of log distances on held-out prompts, {probed.alone:.3f} by the first "
        typer.echo(f"{told}block's change alone; {probed.samples} waits in {probed.seconds:.0f} s")
        typer.echo(f"{output}: shiva.attach(pipe, {str(output)!r}, budget=0.5)")
        return
    how |= {"rank": rank, "degree": degree, "span": span, "stride": stride, "layers_at_once": layers_at_once}
    with progress_line() as progress:
        fitted = fit_pipeline(pipe, texts, progress=progress, arguments=arguments, **how)
    explained = [dataclasses.asdict(row) for row in fitted.layers]
    settings |= {**how, **asked, "dtype": dtype}
    write_fit(fitted, output, settings, r_squared=explained, tokens=fitted.tokens)
    console = Console()
    console.print(table_of(fitted, rank))
    console.print(
        f"{output}: shiva.attach(pipe, {str(output)!r}, budget=0.66, dense_steps=(0,))", markup=False, soft_wrap=True
    )
    if fitted.weak:
        listed = ", ".join(map(str, fitted.weak))
        instead = "a smaller --span" if span > 1 else "these layers dense (attach with dense=...)"
        advice = f"more prompts, a higher --rank, or {instead} may help"
        typer.secho(f"warning: little of layers {listed} is explained on held-out prompts; {advice}", err=True)


def check_table(table: str | None, probe: bool, runs: Sequence[int], given: Mapping[str, object]) -> None:
    """Refuse options that would be of no effect with --table, or without it."""
    if table is None:
        for option in (name for name, value in given.items() if value is not None):
            raise ValueError(f"{option} is of a table, and none is learned; pass --table Refresh, or leave it out")
    elif probe:
        raise ValueError(f"--probe and --table {table} exclude each other; pass one")
    elif len(runs) > 1:
        raise ValueError(f"--table {table} is learned on runs of one length; pass --steps {runs[0]}")


def cells_of(text: str) -> tuple[int, int]:
    """Parts of the run, and of the layers."""
    parts = listed("--cells", text, int)
    if len(parts) not in (1, 2) or min(parts) < 1:
        raise ValueError(f"--cells {text} is not one or two numbers of at least 1; pass such as 16,1")
    return parts[0], parts[-1] if len(parts) == 2 else 1


def write_fit(fitted: Fit, output: Path, settings: dict[str, Any], **found: Any) -> None:
    """The checkpoint, and beside it how it was made and how well it is."""
    from shiva.bench.table import environment
    from shiva.checkpoint import to_json, write_atomically

    fitted.checkpoint(settings["model"]).save_pretrained(output)
    report = {"environment": environment(), "settings": settings, **found, "seconds": round(fitted.seconds, 1)}
    write_atomically(output / "fit.json", to_json(report))


def texts_of(pipe: Any, prompts: str, limit: int) -> list[str]:
    """The prompts that were asked for, by number or by file."""
    from shiva.evaluate.drawing import has_classes
    from shiva.evaluate.prompts import read_prompts
    from shiva.fitting import everyday_prompts

    if not prompts.isdecimal():
        return read_prompts(Path(prompts)).limited(limit).texts
    if not has_classes(pipe):
        return everyday_prompts(int(prompts))
    classes = pipe.transformer.config.num_embeds_ada_norm
    return [str(place * classes // int(prompts)) for place in range(int(prompts))]


def table_of(fitted: Fitted, rank: int) -> Table:
    from rich.table import Table

    title = f"R² on held-out prompts; fitted on {fitted.tokens} tokens in {fitted.seconds:.0f} s"
    table = Table("layer", "constant", "full rank", f"rank {rank}", title=title)
    for column in table.columns:
        column.justify = "right"
    for row in fitted.layers:
        table.add_row(str(row.layer), f"{row.constant:.3f}", f"{row.full:.3f}", f"{row.low:.3f}")
    return table
