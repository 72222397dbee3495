"""Fill the table of README.md from the newest committed evaluation: python -m reproduce.readme."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shiva.checkpoint import write_atomically
from shiva.show.documents import tables_of
from shiva.show.report import texts_of

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "results" / "eval"
EVALUATIONS = ("emoji-128-64", "emoji-128", "emoji-64")
"""The first that has a main table is shown."""
SHOWN = (
    r"dense",
    r"\d+ steps",
    r"turbo.*",
    r"Sweep (80|60|40)",
    r"Shiva (80|60)",
    r"Lattice( \d+)?",
    r"ToMeSD",
    r"ToMA",
    r"SDTM",
)
"""Rows, by their names."""
COLUMNS = {
    "saved": "FLOPs saved",
    "latency, s": "seconds an image",
    "speed-up": "speed-up",
    "PSNR to dense": "PSNR to dense, dB ↑",
    "LPIPS to dense": "LPIPS to dense ↓",
    "Fréchet": "Fréchet distance ↓",
    "top-1": "right label ↑",
}
"""The main table's columns by how their headings start, and what they are called here."""
PLACE = re.compile(r"(<!-- main: [^>]+ -->\n).*?(<!-- /main -->)", re.DOTALL)


def table_of(document: dict[str, Any]) -> list[str]:
    """The chosen rows and columns in Markdown; columns that nobody measured are left out."""
    every = {heading: cells for table in tables_of(document) for heading, cells in texts_of(table).items()}
    columns = {
        name: every[heading]
        for start, name in COLUMNS.items()
        for heading in every
        if heading.startswith(start) and "MACs" not in heading and any(every[heading].values())
    }
    methods = [name for wanted in SHOWN for name in next(iter(every.values())) if re.fullmatch(wanted, name)]
    rows = [[name, *(cells.get(name, "") for cells in columns.values())] for name in methods]
    lines = [["", *columns], ["---", *["---:"] * len(columns)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def text_of(folder: Path) -> str:
    document = json.loads((folder / "tables" / "main.json").read_text())
    settings, where = document["settings"], document["environment"]
    command = f"shiva eval {settings['model']} --methods recipes/eval/{Path(settings['model']).name}.yaml"
    about = (
        f"*{settings['model']}, {settings['count']} prompts in {settings['steps']} steps at guidance "
        f"{settings['guidance']:g}, on {where['cores']} cores of an {where['cpu']} CPU. The number behind a name "
        "is the percentage of tokens computed; Shiva is trained, Sweep, ToMeSD, ToMA and SDTM need no training. "
        f"`{command} --limit {settings['count']} --record` "
        "prints it.*"
    )
    return "\n".join([*table_of(document), "", about])


def evaluation() -> Path:
    return next(RESULTS / name for name in EVALUATIONS if (RESULTS / name / "tables" / "main.json").is_file())


def filled(page: str) -> str:
    return PLACE.sub(lambda place: f"{place[1]}\n{text_of(evaluation())}\n\n{place[2]}", page)


if __name__ == "__main__":
    write_atomically(README, filled(README.read_text()).encode())
