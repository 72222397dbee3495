"""A result as a table: on the screen, in a JSON file, and from there in the documentation."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from shiva.bench.environment import environment
from shiva.checkpoint import write_atomically
from shiva.core.needs import install

WIDE = 180
"""Columns of a table that is written to a file or a pipe."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], caption: str = "") -> Table:
        """From rows by heading; of the paper's columns only those that hold something."""
        columns = [name for name in rows[0] if not name.startswith("paper") or any(row[name] for row in rows)]
        return cls(title, tuple(columns), [tuple(row[name] for name in columns) for row in rows], caption)

    def rich(self) -> RichTable:
        table = RichTable(title=escape(self.title), caption=escape(self.caption) or None)
        for index, column in enumerate(self.columns):
            table.add_column(escape(column), justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)])]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", self.caption] if self.caption else lines)


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def seconds(value: float) -> str:
    """A time with three digits, in the unit that suits it."""
    if value != value:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def publish(
    name: str,
    folder: Path,
    tables: list[Table],
    results: Any,
    settings: dict[str, Any],
    draw: Callable[[dict[str, Any], Path], None] = lambda document, path: None,
    console: Console | None = None,
) -> Path:
    """Print the tables, write `<name>.json` with the environment, and draw `<name>.png` beside it."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=WIDE))
    for table in tables:
        console.print(table.rich())
    document = {
        "benchmark": name,
        "environment": environment(),
        "settings": settings,
        "tables": [asdict(table) for table in tables],
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_atomically(path, json.dumps(document, indent=1, allow_nan=True).encode() + b"\n")
    try:
        draw(document, path.with_suffix(".png"))
    except ImportError:
        console.print(f"no figure: it needs matplotlib, {install('report')}", markup=False)
    console.print(f"written: {path}")
    return path


PLACE = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill_tables(page: Path, folder: Path) -> list[str]:
    """Write the tables of every measured benchmark into a page's `<!-- bench:name -->` places; their names."""
    filled = []

    def fill(place: re.Match[str]) -> str:
        source = folder / f"{place['name']}.json"
        if not source.is_file():
            return place[0]
        document = json.loads(source.read_text())
        filled.append(place["name"])
        tables = [Table(**{**table, "columns": tuple(table["columns"])}) for table in document["tables"]]
        return place[1] + "\n" + "\n\n".join(table.markdown() for table in tables) + "\n" + place[3]

    text = PLACE.sub(fill, page.read_text())
    write_atomically(page, text.encode())
    return filled
