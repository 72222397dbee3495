"""`shiva report`: one page from what the other commands left on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shiva.checkpoint import CONFIG_FILE, WEIGHTS_FILE, ShivaCheckpoint
from shiva.ops.schedule import RatioSchedule
from shiva.show import figures
from shiva.show.digest import Digest
from shiva.show.documents import add_documents, is_result, load
from shiva.show.eval_page import add_evaluation, is_evaluation
from shiva.show.page import Page, drawing

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
