"""Tables of benchmarks as the documentation has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shiva.bench.table import Table
from shiva.checkpoint import write_atomically

PLACE = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def seconds(value: float) -> str:
    """A time with three digits, in the unit that suits it."""
    if value != value:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


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
