"""The command line."""

from __future__ import annotations

import typer

from shiva.measure.command import bench
from shiva.training.command import train

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.command()(train)
app.add_typer(bench, name="bench")


@app.callback()
def shiva() -> None:
    """Faster Diffusion Transformers: learned token selection for diffusers pipelines."""


def main() -> None:
    app()
