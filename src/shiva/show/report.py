"""`shiva report`: one page from what the other commands left on disk, opened by a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiva.checkpoint import CONFIG_FILE, WEIGHTS_FILE, ShivaCheckpoint
from shiva.ops.schedule import RatioSchedule
from shiva.show import figures
from shiva.show.documents import (
    add_documents,
    add_evaluation,
    add_front,
    columns_of,
    is_evaluation,
    is_result,
    load,
    measured_on,
    read_document,
    tables_of,
    texts_of,
)
from shiva.show.page import Page, drawing

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
        rows += [(name, "tables and figures", f"{count} file{'s' * (count > 1)}") for name, count in folders.items()]
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
    measured = [column for table in tables_of(document) for column in columns_of(table)]
    cost, quality = (next((column for column in measured if column[0].startswith(start)), None) for start in FRONT)
    if cost is not None and quality is not None:
        add_front(page, cost, quality)


STEPS = 28
"""Columns that a checkpoint's table is drawn with; it is resampled to any scheduler."""


def collect(paths: Iterable[Path], prompts: int = 24, seeds: int = 1) -> Page:
    """A page of all that the paths hold: a summary, then each question in a fold of its own."""
    page, digest = Page("Shiva: measurements", folded=True), Digest()
    for path in paths:
        add(page, path, prompts, seeds, digest)
    page.lead = digest.parts()
    return page


def add(page: Page, path: Path, prompts: int = 24, seeds: int = 1, digest: Digest | None = None) -> None:
    """Whatever a path holds; an error says what was expected."""
    digest = digest or Digest()
    if path.suffix == ".json" and path.is_file():
        if not is_result(load(path)):
            raise ValueError(f"{path} has neither tables nor claims; pass a result of shiva bench or validate")
        digest.documents.append(path)
        return add_documents(page, path.stem, [path])
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder nor a .json file; pass results of shiva's commands")
    before, passed = len(page.parts), add_folder(page, path, prompts, seeds, digest)
    if len(page.parts) == before:
        raise FileNotFoundError(
            f"{path} holds no results: expected run.json of an evaluation, metrics.jsonl, {CONFIG_FILE} beside "
            f"{WEIGHTS_FILE}, or JSON files with tables or claims"
        )
    if passed:
        page.note(f"Not shown, having neither tables nor claims: {', '.join(map(str, passed))}.")


def add_folder(page: Page, folder: Path, prompts: int, seeds: int, digest: Digest) -> list[Path]:
    """What a folder holds, and the folders inside it but linked ones; the JSON files that are not shown."""
    if is_evaluation(folder):
        digest.evaluations.append(folder)
        add_evaluation(page, folder, prompts, seeds)
    elif (folder / "metrics.jsonl").is_file():
        add_training(page, folder)
    elif is_checkpoint(folder):
        add_checkpoint(page, folder)
    elif not is_pipeline(folder):
        files = sorted(folder.glob("*.json"))
        results = [file for file in files if is_result(load(file))]
        if results:
            digest.documents += results
            add_documents(page, folder.name, results)
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        deeper = [file for path in inside for file in add_folder(page, path, prompts, seeds, digest)]
        return [file for file in files if file not in results] + deeper
    return []


def is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file()


def is_pipeline(folder: Path) -> bool:
    return (folder / "model_index.json").is_file()


def add_training(page: Page, folder: Path) -> None:
    page.heading(f"Training of {folder.name}")
    with drawing(page):
        page.figure(
            figures.training_curves(folder), "Losses, mean keep and error to dense. Dashed: a new stage begins."
        )
    if is_checkpoint(folder / "checkpoint"):
        add_checkpoint(page, folder / "checkpoint")


def add_checkpoint(page: Page, folder: Path) -> None:
    """What a checkpoint was trained for, and its learned table if it has one."""
    checkpoint = ShivaCheckpoint.from_pretrained(folder)
    method, budget = type(checkpoint.method_config).__name__, checkpoint.origin.budget
    page.heading(f"Checkpoint {folder}")
    page.text(
        f"{method} for {checkpoint.origin.base_model}{'' if budget is None else f', trained to keep {budget:.0%}'}."
    )
    if not {"timesteps", "logits"} <= checkpoint.tables.keys():
        return
    with drawing(page):
        schedule = RatioSchedule.from_state(checkpoint.tables)
        schedule = schedule.resample([1000.0 * (1 - step / STEPS) for step in range(STEPS)])
        drawn = figures.schedule_map(schedule.ratios(), schedule.timesteps)
        page.figure(drawn, f"Share of tokens kept by layer and step, mean {schedule.mean_keep:.3f}.")
