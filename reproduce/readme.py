"""Fill the tables of README.md and of the pages on few steps, many steps and evaluation from the committed results:
python -m reproduce.readme."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shiva.checkpoint import write_atomically
from shiva.evaluate.frontier import Kind, Point
from shiva.show.documents import tables_of, texts_of

ROOT = Path(__file__).parents[1]
EVALUATION = ROOT / "results" / "eval" / "emoji-128-turbo-16" / "tables" / "floor.json"
LARGE = ROOT / "results" / "eval" / "emoji-128-32" / "tables" / "main.json"
FRONTIER = ROOT / "results" / "frontier" / "emoji-128-16" / "frontier.json"
COMMAND = (
    "shiva eval models/emoji-128-turbo --methods recipes/eval/emoji-128-turbo.yaml --protocol floor --limit 16 "
    "--seeds 0,1,2 --rounds 9 --record"
)
SHORT = (
    r"dense",
    r"\d+ steps(, trained)?",
    r"Shiva (66 in 3|70 in 2) steps",
    r"identity .*",
    r"Lattice 66 in 3 steps",
    r"Sweep \d+ in 3 steps",
    r"ToMeSD",
    r"ToMA",
)
"""Rows of the README, by their names."""
WHOLE = (
    r"dense",
    r"\d+ steps(, trained)?",
    r"Shiva \d+ in \d steps(, .*)?",
    r"identity .*",
    r"(NeuralSort|DyDiT) in 3 steps",
    r"Lattice \d+ in 3 steps(, .*)?",
    r"Sweep .*",
    r"ToMeSD|ToFu|ToMA|SDTM",
)
EVERY = (r".*",)
COLUMNS = {
    "saved": "FLOPs saved",
    "latency, s": "seconds an image",
    "speed-up": "speed-up",
    "PSNR to dense": "PSNR to dense, dB ↑",
    "SSIM to dense": "SSIM ↑",
    "LPIPS to dense": "LPIPS to dense ↓",
    "Fréchet": "Fréchet distance ↓",
    "top-1": "right label ↑",
}
"""The main table's columns by how their headings start, and what they are called here."""
SHARES = (0.5, 0.38, 0.35, 0.25)
"""Of the dense run's FLOPs, that the best of each kind is shown for."""
KINDS: dict[Kind, str] = {
    "fewer steps": "fewer steps",
    "even steps": "fewer steps, evenly spaced",
    "multistep": "fewer steps, second order (UniPC)",
    "cache": "a step cache",
    "tokens": "fewer tokens, alone or with these",
}
PLAIN = re.compile(r"[\d.]+")
PLACE = re.compile(r"(<!-- main: [^>]+ -->\n).*?(<!-- /main -->)", re.DOTALL)


def table_of(document: dict[str, Any], chosen: Sequence[str]) -> list[str]:
    """The chosen rows and columns in Markdown; columns that nobody measured are left out."""
    every = {heading: cells for table in tables_of(document) for heading, cells in texts_of(table).items()}
    columns = {
        name: every[heading]
        for start, name in COLUMNS.items()
        for heading in every
        if heading.startswith(start) and "MACs" not in heading and any(every[heading].values())
    }
    methods = [name for wanted in chosen for name in max(every.values(), key=len) if re.fullmatch(wanted, name)]
    shown = [aligned([cells.get(name, "") for name in methods]) for cells in columns.values()]
    rows = [list(row) for row in zip(methods, *shown, strict=True)]
    lines = [["", *columns], ["---", *["---:"] * len(columns)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def aligned(cells: Sequence[str]) -> Sequence[str]:
    """A column's plain numbers to as many decimals as its largest has in four digits; others as they are."""
    figures = [float(cell) for cell in cells if PLAIN.fullmatch(cell)]
    if len(figures) < sum(map(bool, cells)) or not any(figures):
        return cells
    decimals = max(0, 3 - math.floor(math.log10(max(figures))))
    return [cell and f"{float(cell):.{decimals}f}" for cell in cells]


def on_the_turbo(shown: Sequence[str]) -> str:
    document = json.loads(EVALUATION.read_text())
    about = (
        f"*{measured_on(document)}, no guidance. "
        "The number behind a name is the percentage of tokens computed. What is trained has the same adapter, target "
        "and images; identity is the paper's: a skipped token gets nothing. Lattice is fitted in a minute; Sweep and "
        "what merges tokens need neither. "
        f"`{COMMAND}` prints it.*"
    )
    return "\n".join([*table_of(document, shown), "", about])


def on_the_base() -> str:
    document = json.loads(LARGE.read_text())
    return "\n".join([*table_of(document, EVERY), "", f"*{measured_on(document)}.*"])


def measured_on(document: dict[str, Any]) -> str:
    settings, where = document["settings"], document["environment"]
    seeds = "one seed" if len(settings["seeds"]) == 1 else f"{len(settings['seeds'])} seeds"
    return (
        f"{settings['model']}, {settings['count']} prompts and {seeds}, {where['cores']} cores of an {where['cpu']}, "
        f"{settings['steps']} steps where no other number stands"
    )


def front() -> str:
    """The best of each kind for some shares of the FLOPs."""
    document = json.loads(FRONTIER.read_text())
    points = [Point(**point) for point in document["results"]["points"]]
    lines = [["", *(f"{share:.0%} of FLOPs" for share in SHARES)], ["---"] * (1 + len(SHARES))]
    for kind, name in KINDS.items():
        cells = []
        for share in SHARES:
            able = [p for p in points if p.kind == kind and p.flops < share + 0.005]
            best = max(able, key=lambda point: point.to_dense, default=None)
            quality = "" if best is None else f"{best.to_dense:.1f} dB, Fréchet {best.quality['frechet']:.0f}"
            cells.append("–" if best is None else f"{best.name}: {quality}, {best.time:.0%} of the time")
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "README.md": lambda: on_the_turbo(SHORT),
    ROOT / "docs" / "how-to" / "few-steps.md": lambda: on_the_turbo(WHOLE),
    ROOT / "docs" / "how-to" / "many-steps.md": front,
    ROOT / "docs" / "evaluation.md": on_the_base,
}


def filled(page: Path) -> str:
    """The page's text with the table that the results have for it."""
    return PLACE.sub(lambda place: f"{place[1]}\n{PAGES[page]()}\n\n{place[2]}", page.read_text())


if __name__ == "__main__":
    for page in PAGES:
        write_atomically(page, filled(page).encode())
