"""The tables of docs/compatibility.md, from the tables that the tests run over.

python tests/compatibility.py           prints them
python tests/compatibility.py --write   writes them into the page; --write neighbours, only one of them
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shiva
from neighbours import NEIGHBOURS, TINY
from pipelines import PIPELINES
from pipelines_reach import REACH
from shiva.backbones.base import backbone_of
from shiva.backbones.known import as_markdown

from method_table import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
YES, REFUSED = "✓", "refused"
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
    "Refresh": "refresh-probe",
    "RAS": "ras",
    "ToCa": "toca",
    "CoReDiT": "coredit",
    "JiT": "jit",
    "DiffSparse": "diffsparse",
}


def classes() -> dict[str, list[str]]:
    """Tiny transformers of each class."""
    found: dict[str, list[str]] = {}
    for name, tiny in TINY.items():
        found.setdefault(type(tiny.make()).__name__, []).append(name)
    return dict(sorted(found.items()))


def tried(method: str, tiny: str) -> str:
    """Whether a method reduces tokens of a class and leaves it as it was, or refuses it by a reason."""
    row, model, call = METHODS[method], TINY[tiny].make(), TINY[tiny].call(2, 6, 10)
    dense = output(model, call)
    noisier = 100.0 if backbone_of(model).rises else 900.0
    try:
        with shiva.attach(model, row.on) as session:
            for step in range(row.dense_calls):
                output(model, TINY[tiny].call(2, 6, 10, timestep=noisier - step))
            reduced = output(model, call)
            counts = session.stats[-1].kept.values()
    except ValueError:
        return REFUSED
    finally:
        assert torch.equal(output(model, call), dense)
    assert reduced.isfinite().all()
    assert any(count < session.stats[-1].tokens for count in counts) or row.kept is None
    return YES


@torch.no_grad()
def output(model: Any, call: dict[str, Any]) -> Tensor:
    result = model(**call)[0]
    return torch.stack(result) if isinstance(result, list) else result


def runs(method: str, names: list[str]) -> str:
    """As `test_methods` has it for models of a class, or else as it is tried here."""
    row = METHODS[method]
    attention = any(TINY[name].attention for name in names)
    offered = row.everywhere and (attention or not row.needs_attention) and not set(names) <= set(row.not_on)
    if set(names) & set(row.backbones) or offered:
        return YES
    return tried(method, names[0])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def method_table() -> str:
    lines = [line(["class", *COLUMNS, "`attends='all'`"]), line(["---"] * (len(COLUMNS) + 2))]
    for cls, names in classes().items():
        cells = [runs(method, names) for method in COLUMNS.values()]
        keys = YES if any(TINY[name].keys for name in names) else REFUSED
        lines.append(line([f"`{cls}`", *cells, keys]))
    return "\n".join(lines) + "\n"


def neighbour_table() -> str:
    """One row a neighbour: where it was tried, and in which order it works."""
    by_tiny = {name: cls for cls, names in classes().items() for name in names}
    lines = [line(["neighbour", "before attach", "after attach", "tried on"]), line(["---"] * 4)]
    for name, row in NEIGHBOURS.items():
        orders = [YES if why is None else f"refused: {why}" for why in (row.before, row.after)]
        tried = sorted({by_tiny[tiny] for tiny in row.classes})
        untried = sorted(set(by_tiny.values()) - set(tried))
        few = tried if len(tried) < len(untried) else untried
        listed = ("" if few is tried else "all but ") + ", ".join(f"`{cls}`" for cls in few)
        lines.append(line([name, *orders, listed]))
    return "\n".join(lines) + "\n"


def pipeline_table() -> str:
    drawn = sorted(
        {type(tiny.make()).__name__ for tiny in PIPELINES.values()} | {tiny.name for tiny in REACH.values()}
    )
    return "Whole runs through the disk, dense and reduced: " + ", ".join(f"`{name}`" for name in drawn) + ".\n"


TABLES = {"models": as_markdown, "methods": method_table, "neighbours": neighbour_table, "pipelines": pipeline_table}


def written(page: str, tables: Collection[str] = TABLES) -> str:
    """The page with these tables made anew."""
    for name in tables:
        make = TABLES[name]
        place = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert place.search(page), name
        page = place.sub(lambda found, make=make: found[1] + make() + found[2], page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(), sys.argv[2:] or TABLES))
    else:
        print("\n".join(make() for make in TABLES.values()))
