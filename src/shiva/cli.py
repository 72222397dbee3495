"""The command line."""

from __future__ import annotations

import typer

from shiva.core.options import REFUSALS
from shiva.measure.command import bench
from shiva.measure.evaluation.command import evaluate
from shiva.report.command import generate
from shiva.report.demo import demo
from shiva.report.report import report
from shiva.report.serve import serve
from shiva.report.train_cost import train as train_cost
from shiva.report.validate import validate
from shiva.training.command import train

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(generate)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(validate)
app.command()(report)
app.command()(serve)
bench.command(name="train")(train_cost)
app.add_typer(bench, name="bench")


@app.callback()
def shiva() -> None:
    """Faster Diffusion Transformers: learned token selection for diffusers pipelines."""


def main() -> None:
    """Run a command; what a person did wrong is one line, not a traceback."""
    try:
        app()
    except REFUSALS as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(2) from error
