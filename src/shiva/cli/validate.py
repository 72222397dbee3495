"""`shiva validate`: the paper's claims, checked by what a checkout has in reproduce/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiva.cli.terminal import Output, Record


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

    checking = reproduce("claims.checking")
    if checking is None:
        raise FileNotFoundError("reproduce/ is not here; run shiva validate in a checkout of the repository")
    if write_docs:
        typer.echo(f"wrote {checking.write_page()}")
    else:
        checking.check(every, only, model, output, record)
