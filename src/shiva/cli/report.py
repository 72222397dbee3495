"""`shiva report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiva.cli.terminal import check_folder


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
    from shiva.show.collect import collect

    check_folder(output.parent)
    write_atomically(output, str(collect(paths, prompts, seeds)).encode())
    typer.echo(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB)")
