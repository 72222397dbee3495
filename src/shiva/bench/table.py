"""A result as a table: on the screen, in a JSON file with what it was measured on, and from there in the docs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from shiva.checkpoint import write_atomically
from shiva.core.needs import install

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "torchao", "shiva-dit")


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Device, threads and versions of this process; a GPU that it does not use is not told."""
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "malloc": os.environ.get("GLIBC_TUNABLES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
        "packages": {name: found for name in PACKAGES if (found := version(name))},
    }


WIDE = 180
"""Columns of a table that is written to a file or a pipe."""
BORDER = 3
"""Columns that a cell takes beside its text."""


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

    def show(self, console: Console) -> None:
        """As one table, or where it does not fit as several, each with some of the columns: no figure is cut."""
        wide = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        tight = sum(wide) + BORDER * len(wide) >= console.width
        *others, last = self.parts(console.width) if tight else [list(range(len(wide)))]
        for places, caption in [*((part, "") for part in others), (last, self.caption)]:
            table = RichTable(title=escape(self.title), caption=escape(caption) or None)
            for place in places:
                width = self.width(place, console.width) if tight else None
                figures: dict[str, Any] = {"justify": "right", "width": width}
                table.add_column(escape(self.columns[place]), **(figures if place else {"overflow": "fold"}))
            for row in self.rows:
                table.add_row(*(escape(row[place]) for place in places))
            console.print(table)

    def parts(self, room: int) -> list[list[int]]:
        """Columns that fit side by side, the first one with all of them; its names may wrap, figures do not."""
        name = min(max(map(len, (row[0] for row in self.rows)), default=0), room // 3)
        found: list[list[int]] = []
        left = 0
        for place in range(1, len(self.columns)):
            taken = self.width(place, room) + BORDER
            if taken >= left:
                found.append([0])
                left = room - name - BORDER
            found[-1].append(place)
            left -= taken
        return found or [[0]]

    def width(self, place: int, room: int) -> int:
        """Of a column whose heading is wrapped between words, and whose cells only if they are sentences."""
        return min(room // 2, max(map(len, [*self.columns[place].split(), *(row[place] for row in self.rows)])))

    def markdown(self) -> str:
        columns = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, columns, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.caption] if self.caption else [])])


def printed() -> Console:
    """Where results are printed: the screen, or a file or pipe of WIDE columns."""
    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def publish(
    name: str,
    folder: Path,
    tables: list[Table],
    results: Any,
    settings: dict[str, Any],
    draw: Callable[[dict[str, Any], Path], None] = lambda document, path: None,
) -> Path:
    """Print the tables, write `<name>.json` with the environment, and draw `<name>.png` beside it."""
    console = printed()
    for table in tables:
        table.show(console)
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
