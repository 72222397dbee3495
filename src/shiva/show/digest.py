"""The summary that a report opens with: what was measured, the front, and the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiva.show.documents import load, measured_on, read_document, tables_of
from shiva.show.eval_page import add_front, columns_of
from shiva.show.page import Page

COLUMNS = ("saved", "speed-up", "PSNR to dense", "LPIPS to dense", "Fréchet", "FID", "top-1", "ImageReward")
"""Of the main table, by how their headings start."""
VERDICTS = ("reproduced", "reproduced in direction")
"""Those that come first."""
FRONT = ("GFLOPs", "PSNR to dense")


@dataclass
class Digest:
    """What a report found, for its first screen."""

    evaluations: list[Path] = field(default_factory=list)
    documents: list[Path] = field(default_factory=list)

    def parts(self) -> list[str]:
        page = Page("")
        self._add_measured(page)
        for folder in self.evaluations:
            main = folder / "tables" / "main.json"
            if main.is_file():
                add_main(page, folder.name, load(main))
                break
        self._add_verdicts(page)
        return page.parts

    def _add_measured(self, page: Page) -> None:
        rows = []
        for folder in self.evaluations:
            run = load(folder / "run.json")
            settings = run["settings"]
            what = f"{settings['model']}, {settings['steps']} steps at guidance {settings['guidance']:g}"
            rows.append((folder.name, f"{what}, {len(run['prompts'])} prompts", f"{len(run['candidates'])} methods"))
        folders = Counter(path.parent.name for path in self.documents)
        rows += [(name, "tables and figures", f"{count} files") for name, count in folders.items()]
        if rows:
            page.table(("what was measured", "how", "how much"), rows)
        places = {measured_on(read_document(path).environment) for path in self.documents}
        if len(places) == 1:
            page.note(places.pop())

    def _add_verdicts(self, page: Page) -> None:
        claims = [(path.stem, claim) for path in self.documents for claim in read_document(path).claims]
        if not claims:
            return
        verdicts = sorted(
            {claim.verdict for _, claim in claims}, key=lambda verdict: (verdict not in VERDICTS, verdict)
        )
        by_name: dict[str, Counter[str]] = {}
        for name, claim in claims:
            by_name.setdefault(name, Counter())[claim.verdict] += 1
        rows = [(name, *(found[verdict] or "" for verdict in verdicts)) for name, found in by_name.items()]
        rows.append(("all", *(sum(found[verdict] for found in by_name.values()) for verdict in verdicts)))
        page.table(("the paper's claims, by experiment", *verdicts), rows)


def add_main(page: Page, name: str, document: Mapping[str, Any]) -> None:
    """The main table's most telling columns, and the front."""
    every = {heading: cells for table in tables_of(document) for heading, cells in texts_of(table).items()}
    filled = [heading for heading, cells in every.items() if any(cells.values()) and "MACs" not in heading]
    shown = [heading for start in COLUMNS for heading in filled if heading.startswith(start)]
    methods = list(next(iter(every.values()), {}))
    rows = [(method, *(every[heading].get(method, "") for heading in shown)) for method in methods]
    page.table(("method", *shown), rows, f"{name}: what is saved, and what is lost")
    figures = [column for table in tables_of(document) for column in columns_of(table)]
    cost, quality = (next((column for column in figures if column[0].startswith(start)), None) for start in FRONT)
    if cost is not None and quality is not None:
        add_front(page, cost, quality)


def texts_of(table: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """A table of methods as text: by heading, then by method; the paper's own are left out."""
    if table["columns"][0] != "method" or table["title"].startswith("The paper's"):
        return {}
    return {
        heading: {str(row[0]): str(row[place]) for row in table["rows"]}
        for place, heading in enumerate(table["columns"])
        if place and not heading.startswith("paper")
    }
