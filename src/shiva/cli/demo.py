"""`shiva demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiva.cli.terminal import check_folder


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

    The model is in a checkout (models/), or comes with `pip install shiva-dit-models`; nothing is downloaded.
    """
    from shiva.evaluate.checkout import BASE, embedded

    embedded(*BASE)  # before anything heavy is loaded
    from shiva.show.side_by_side import make_demo

    make_demo(methods, every, check_folder(output), steps, seed, prompts)
