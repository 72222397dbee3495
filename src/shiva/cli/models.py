"""`shiva models`."""

from __future__ import annotations

from typing import Annotated

import typer


def models(
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/compatibility.md")] = False,
) -> None:
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
