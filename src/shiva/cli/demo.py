"""`shiva demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiva.cli.terminal import check_folder


def demo(
    model: Annotated[Path, typer.Option(help="Folder of the embedded pipeline")] = Path("models/emoji"),
    methods: Annotated[str, typer.Option(help="YAML file of candidates; those of its main table are shown")] = (
        "recipes/eval/emoji.yaml"
    ),
    output: Annotated[Path, typer.Option(help="Where images and page go")] = Path("outputs/demo"),
    steps: Annotated[int, typer.Option(help="Denoising steps", min=3)] = 20,
    guidance: Annotated[float, typer.Option(help="Guidance scale")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of the noise", min=0)] = 0,
) -> None:
    """Generate a grid of prompts dense and by every method, and show images, time and FLOPs side by side."""
    from shiva.show.side_by_side import make_demo

    make_demo(model, methods, check_folder(output), steps, guidance, seed)
