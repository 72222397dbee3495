"""Commands of a few lines, whose work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiva.cli.terminal import Device, Dtype, Output, Record, check_folder


def demo(
    every: Annotated[bool, typer.Option("--all", help="Every method of the main table, not only eight rows")] = False,
    methods: Annotated[
        str | None, typer.Option(help="A YAML file of candidates; those of its main table are shown")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where images and page go")] = Path("outputs/demo"),
    steps: Annotated[int | None, typer.Option(help="Steps of the dense run; the model's own otherwise", min=2)] = None,
    prompts: Annotated[int, typer.Option(help="So many of the eight prompts", min=1, max=8)] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the noise", min=0)] = 0,
) -> None:
    """Draw eight prompts dense and by several methods on the embedded model, and show images, time and FLOPs.

    The model is in a checkout (models/), or in the package shiva-dit-models (`make wheels`); nothing is downloaded.
    """
    from shiva.evaluate.checkout import BASE, embedded

    embedded(*BASE)  # before anything heavy is loaded
    from shiva.show.demo import make_demo

    make_demo(methods, every, check_folder(output), steps, seed, prompts)


def models(markdown: Annotated[bool, typer.Option(help="Print the table of docs/compatibility.md")] = False) -> None:
    """List the transformers that can be reduced, and those that cannot, with the reason."""
    from shiva.backbones.base import REFUSED
    from shiva.backbones.known import absent, as_markdown, known

    if markdown:
        typer.echo(as_markdown(), nl=False)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="transformers that Shiva knows")
    table.add_column("class", no_wrap=True)
    table.add_column("reduced")
    table.add_column("notes")
    for entry in known():
        table.add_row(entry.name, entry.reduced, absent(entry.name) or entry.notes)
    console = Console()
    console.print(table)
    for name, reason in REFUSED.items():
        console.print(f"[bold]{name}[/bold] is refused: {reason}")


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML); see recipes/ and docs/training.md.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: outputs/ and the recipe's name.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the states in the output folder first.")] = False,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value, for example --set method.budget=0.8. May be repeated."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read the recipe, print it in full as JSON, and stop.")
    ] = False,
) -> None:
    """Train a method on a pipeline, as a recipe says.

    The same command continues a run that was stopped or killed, bit for bit on one device. On several GPUs:
    accelerate launch -m shiva train RECIPE. The output folder gets: checkpoint/ (what shiva.attach takes),
    metrics.json, metrics.jsonl and validation.jsonl, pictures/ (samples and the schedule), states/ (to continue
    from), latents/ (encoded data) and TensorBoard's files.

    Exit codes: 0 done, 1 a loss was not finite, 2 a mistake in recipe or data, 130 or 143 stopped by a signal with
    its state saved.
    """
    from shiva.files import to_json
    from shiva.training.recipe import load_recipe

    loaded = load_recipe(recipe, override or [])
    if check:
        typer.echo(to_json(loaded.to_dict()).decode())
        return
    from shiva.training.objectives import NonFiniteError
    from shiva.training.process import Interrupted
    from shiva.training.trainer import Trainer

    try:
        Trainer(loaded, output or Path("outputs") / recipe.stem).run(fresh)
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.code) from stop
    except NonFiniteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def validate(
    every: Annotated[bool, typer.Option("--all", help="All experiments at full size, the model's too")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Just this experiment; may be repeated")] = None,
    model: Annotated[Path, typer.Option(help="Folder of the embedded pipeline")] = Path("models/emoji"),
    output: Output = None,
    record: Record = False,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Run nothing; write docs/paper-claims.md from results/validate")
    ] = False,
) -> None:
    """Check the paper's claims: a verdict for each, with the paper's figure and ours."""
    from shiva.evaluate.checkout import reproduce

    claims = reproduce("claims.claims_page" if write_docs else "claims.checking")
    if claims is None:
        raise FileNotFoundError("reproduce/ is not here; run shiva validate in a checkout of the repository")
    if write_docs:
        typer.echo(f"wrote {claims.write()}")
    else:
        claims.check(every, only, model, output, record)


def report(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders of shiva eval, bench, validate, train, checkpoints; or JSON files")
    ],
    output: Annotated[Path, typer.Option(help="The page")] = Path("outputs/report.html"),
    prompts: Annotated[int, typer.Option(help="Prompts of an evaluation that the page shows", min=1)] = 24,
    seeds: Annotated[int, typer.Option(help="Seeds of each prompt that it shows", min=1)] = 1,
) -> None:
    """Write one self-contained HTML page: tables beside the paper's, figures, and images of all methods."""
    from shiva.checkpoint import write_atomically
    from shiva.show.report import collect

    check_folder(output.parent)
    write_atomically(output, str(collect(paths, prompts, seeds)).encode())
    typer.echo(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB)")


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id of a diffusers pipeline; the embedded turbo otherwise")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Folder or hub id of a checkpoint for it")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; the embedded model's own otherwise")] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 7860,
    steps: Annotated[int | None, typer.Option(help="Denoising steps to start with", min=1, max=50)] = None,
) -> None:
    """Open a page on this machine that draws a prompt dense and reduced, side by side."""
    from shiva.evaluate.checkout import TURBO, embedded, usual_run
    from shiva.show.server import run_server

    chosen = str(embedded(*TURBO)) if model is None else model
    usual_steps, usual_guidance = usual_run(chosen)
    scale, count = usual_guidance if guidance is None else guidance, usual_steps if steps is None else steps
    run_server(chosen, checkpoint, scale, device, dtype, host, port, count)
