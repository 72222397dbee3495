"""The tables of docs/compatibility.md, from the tables that the tests run over.

python tests/compatibility.py           prints them
python tests/compatibility.py --write   writes them into the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from neighbours import NEIGHBOURS, NO_WHOLE_GRAPH, TINY
from pipelines import PIPELINES
from pipelines_reach import REACH
from shiva.backbones.known import as_markdown

from method_table import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
YES, UNTRIED = "✓", "·"
COLUMNS = {
    "Shiva": "shiva",
    "Sweep": "sweep",
    "Lattice": "lattice",
    "ToMeSD": "tomesd",
    "ToFu": "tofu",
    "ToMA": "toma-block",
    "SDTM": "sdtm",
    "IBTM": "ibtm",
    "DyDiT": "dydit",
    "DiffCR": "diffcr",
    "SparseDiT": "sparsedit",
    "NeuralSort, SoftTopK, LapSum": "neuralsort",
}


def classes() -> dict[str, list[str]]:
    """Tiny transformers of each class."""
    found: dict[str, list[str]] = {}
    for name, tiny in TINY.items():
        found.setdefault(type(tiny.make()).__name__, []).append(name)
    return dict(sorted(found.items()))


def runs(method: str, tiny: str) -> str:
    """As `test_methods` and `test_whole_keys` have it."""
    row = METHODS[method]
    if tiny in row.backbones:
        return YES
    if not row.everywhere:
        return UNTRIED
    if row.needs_attention and not TINY[tiny].attention:
        return "no: its attention takes no fewer tokens"
    return YES


def best(answers: list[str]) -> str:
    """Of several models of a class: what works on one."""
    return min(answers, key=lambda answer: (answer != YES, answer == UNTRIED))


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def method_table() -> str:
    lines = [line(["class", *COLUMNS, "`attends='all'`"]), line(["---"] * (len(COLUMNS) + 2))]
    for cls, names in classes().items():
        cells = [best([runs(method, name) for name in names]) for method in COLUMNS.values()]
        keys = YES if any(TINY[name].keys for name in names) else "refused"
        lines.append(line([f"`{cls}`", *cells, keys]))
    return "\n".join(lines) + "\n"


def neighbour_table() -> str:
    """One row a neighbour: where it was tried, and in which order it works."""
    by_tiny = {name: cls for cls, names in classes().items() for name in names}
    lines = [line(["neighbour", "before attach", "after attach", "tried on"]), line(["---"] * 4)]
    for name, row in NEIGHBOURS.items():
        orders = [YES if why is None else f"refused: {why}" for why in (row.before, row.after)]
        tried = sorted({by_tiny[tiny] for tiny in row.classes})
        many = len(tried) > 12
        listed = f"all but {', '.join(f'`{by_tiny[n]}`' for n in NO_WHOLE_GRAPH)} and DiT" if many else ""
        lines.append(line([name, *orders, listed or ", ".join(f"`{cls}`" for cls in tried)]))
    return "\n".join(lines) + "\n"


def pipeline_table() -> str:
    drawn = sorted(
        {type(tiny.make()).__name__ for tiny in PIPELINES.values()} | {tiny.name for tiny in REACH.values()}
    )
    return "Whole runs through the disk, dense and reduced: " + ", ".join(f"`{name}`" for name in drawn) + ".\n"


TABLES = {"models": as_markdown, "methods": method_table, "neighbours": neighbour_table, "pipelines": pipeline_table}


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, make in TABLES.items():
        place = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert place.search(page), name
        page = place.sub(lambda found, make=make: found[1] + make() + found[2], page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print("\n".join(make() for make in TABLES.values()))
