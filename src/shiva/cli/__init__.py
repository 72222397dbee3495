"""The command line: a file a command, the short ones in one; each imports what it needs when it runs."""

from __future__ import annotations

import io
import logging
import os
import sys

import typer

from shiva import __version__
from shiva.cli.bench import bench
from shiva.cli.eval import evaluate
from shiva.cli.fit import fit
from shiva.cli.frontier import frontier
from shiva.cli.generate import generate
from shiva.cli.short import demo, models, report, serve, train, validate
from shiva.cli.terminal import explain

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (demo, generate, frontier, fit, models, train, validate, report, serve):
    app.command()(command)
app.command(name="eval")(evaluate)
app.add_typer(bench, name="bench")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shiva {__version__}")
        raise typer.Exit


@app.callback()
def shiva(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=print_version, help="Print the version."),
) -> None:
    """Faster Diffusion Transformers: each block computes only some of the image's tokens."""


def main() -> None:
    """Run a command; what a person did wrong is one line, not a traceback."""
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # their notices at import would stand before it
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # one that cannot write ↑ must not cost a table
    try:
        app()
    except Exception as error:
        raise SystemExit(explain(error)) from error
