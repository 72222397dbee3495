"""`shiva train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
