"""`shiva report`: one page from what the other commands left on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shiva.checkpoint import CONFIG_FILE, ShivaCheckpoint, write_atomically
from shiva.modules.schedule import RatioSchedule
from shiva.report import figures
from shiva.report.page import Page, drawing

STEPS = 28
"""Columns that a checkpoint's table is drawn with; it is resampled to any scheduler."""


def report(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders of shiva eval, bench, validate, train, checkpoints; or JSON files")
    ],
    output: Annotated[Path, typer.Option(help="The page")] = Path("outputs/report.html"),
    prompts: Annotated[int, typer.Option(help="Prompts of an evaluation that the page shows", min=1)] = 24,
    seeds: Annotated[int, typer.Option(help="Seeds of each prompt that it shows", min=1)] = 1,
) -> None:
    """Write one self-contained HTML page: tables beside the paper's, figures, and images of all methods."""
    page = Page("Shiva: measurements")
    for path in paths:
        add(page, path, prompts, seeds)
    write_atomically(output, str(page).encode())
    Console().print(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB)")


def add(page: Page, path: Path, prompts: int = 24, seeds: int = 1) -> None:
    """Whatever a path holds; an error says what was expected."""
    if path.suffix == ".json" and path.is_file():
        return add_documents(page, path.stem, [path])
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder nor a .json file; pass results of shiva's commands")
    documents = sorted(path.glob("*.json"))
    if is_evaluation(path):
        add_evaluation(page, path, prompts, seeds)
    elif (path / "metrics.jsonl").is_file():
        add_training(page, path)
    elif (path / CONFIG_FILE).is_file():
        add_checkpoint(page, path)
    elif any(is_result(load(document)) for document in documents):
        add_documents(page, path.name, documents)
    else:
        folders = sorted(inside for inside in path.iterdir() if inside.is_dir())
        added = [inside for inside in folders if holds_results(inside)]
        if not added:
            raise FileNotFoundError(
                f"{path} holds no results: expected run.json of an evaluation, metrics.jsonl, {CONFIG_FILE}, "
                "or JSON files with tables or claims"
            )
        for inside in added:
            add(page, inside, prompts, seeds)


def is_evaluation(folder: Path) -> bool:
    return (folder / "run.json").is_file() and "contenders" in load(folder / "run.json")


def holds_results(folder: Path) -> bool:
    marked = (folder / "metrics.jsonl").is_file() or (folder / CONFIG_FILE).is_file() or is_evaluation(folder)
    if marked or any(is_result(load(path)) for path in folder.glob("*.json")):
        return True
    return any(holds_results(inside) for inside in folder.iterdir() if inside.is_dir())


def load(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); write it again with the command that made it") from error


def is_result(document: Any) -> bool:
    return isinstance(document, dict) and ("claims" in document or bool(list(sheets(document))))


def sheets(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables of a document, as `measure.sheet.Sheet` writes them."""
    for sheet in [document, *document.get("tables", [])]:
        if isinstance(sheet, dict) and {"title", "columns", "rows"} <= sheet.keys():
            yield sheet


# -- benchmarks and claims -------------------------------------------------------------------------------


def add_documents(page: Page, name: str, paths: Sequence[Path]) -> None:
    """Tables and claims of JSON files, each with the figure beside it."""
    documents = [(path, document) for path in paths if is_result(document := load(path))]
    page.heading({"bench": "Speed", "validate": "The paper's claims"}.get(name, name))
    claims = [(path.stem, claim) for path, document in documents for claim in document.get("claims", [])]
    if claims:
        headings = ("experiment", "claim", "paper", "here", "verdict")
        rows = [(stem, claim["claim"], claim["paper"], claim["ours"], claim["verdict"]) for stem, claim in claims]
        page.table(headings, rows)
    for path, document in documents:
        add_sheets(page, document)
        picture = path.with_suffix(".png")
        if picture.is_file():
            page.figure(picture.read_bytes(), f"{document.get('title') or path.stem}")
    if documents:
        page.note(measured_on(documents[0][1].get("environment", {})))


def add_sheets(page: Page, document: Mapping[str, Any]) -> None:
    for sheet in sheets(document):
        page.table(sheet["columns"], sheet["rows"], sheet["title"], sheet.get("caption", ""))


def measured_on(where: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{package} {version}" for package, version in where.get("packages", {}).items())
    device = where.get("gpu") or where.get("cpu")
    return f"Measured on {device}, {where.get('threads')} threads, {where.get('date')}: {packages}." if device else ""


# -- an evaluation ---------------------------------------------------------------------------------------


def add_evaluation(page: Page, folder: Path, prompts: int, seeds: int) -> None:
    """Images of every contender by prompt, the tables, and quality against cost where a table has both."""
    run = load(folder / "run.json")
    settings = run["settings"]
    images = list(shots(folder, run, prompts, seeds))
    page.heading(f"Evaluation: {folder.name}")
    page.text(
        f"{settings['model']}, {settings['steps']} steps at guidance {settings['guidance']:g}, "
        f"{len(run['prompts'])} prompts of {settings['prompts']}: every method from the same noise."
    )
    if images:
        page.gallery(list(run["contenders"]), images)
    for name, why in run.get("skipped", {}).items():
        page.note(f"Left out: {name}: {why}")
    for path in sorted((folder / "tables").glob("*.json")):
        document = load(path)
        page.heading(f"{folder.name}: {path.stem}")
        add_fronts(page, document)
        add_sheets(page, document)
    page.note(measured_on(run.get("environment", {})))
    for variant in sorted((folder / "runs").glob("*/run.json")):
        add_evaluation(page, variant.parent, prompts, seeds)


def shots(folder: Path, run: Mapping[str, Any], prompts: int, seeds: int) -> Iterator[tuple[str, list[Any]]]:
    """For each prompt and seed shown, its images by contender; None where one is not there."""
    for index in figures.spread(range(len(run["prompts"])), prompts):
        for seed in run["seeds"][:seeds]:
            files = [
                folder / "images" / contender["slug"] / str(seed) / f"{index:05d}.png"
                for contender in run["contenders"].values()
            ]
            images = [opened(file) if file.is_file() else None for file in files]
            if any(images):
                text = run["prompts"][index]["text"]
                yield (text if seeds == 1 else f"{text}, seed {seed}"), images


def opened(file: Path) -> Any:
    """The image itself: one that is read later would keep its file open."""
    from PIL import Image

    with Image.open(file) as image:
        return image.copy()


COST = re.compile(r"flops|latency|seconds", re.IGNORECASE)
FIGURE = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
FRONTS = 4
"""Metrics of a protocol that are drawn; the table has all of them."""


def add_fronts(page: Page, document: Mapping[str, Any]) -> None:
    """Metrics (columns marked ↑ or ↓) of the document's methods against their cost, with the Pareto front."""
    columns = [column for sheet in sheets(document) for column in columns_of(sheet)]
    cost, prices = next(((name, cells) for name, cells in columns if COST.search(name)), ("", {}))
    for metric, values in [column for column in columns if column[0][-1:] in "↑↓"][:FRONTS] if prices else []:
        points = [figures.Point(name, prices[name], value) for name, value in values.items() if name in prices]
        if len(points) < 2:
            continue
        with drawing(page):
            label = metric.rstrip("↑↓ ")
            drawn = figures.quality_cost(points, cost, label, higher_is_better=metric.endswith("↑"))
            page.figure(drawn, f"{label} against {cost}; the line joins what no other method beats.")


def columns_of(sheet: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """The columns of a table of methods that hold our figures, each by method."""
    headings: Sequence[str] = sheet["columns"]
    if headings[0] != "method" or sheet["title"].startswith("The paper's"):
        return
    for index, heading in enumerate(headings[1:], start=1):
        cells = {row[0]: figure for row in sheet["rows"] if (figure := figure_of(row[index])) is not None}
        if heading and cells and "paper" not in heading.lower():
            yield heading, cells


def figure_of(cell: Any) -> float | None:
    """The number that a cell starts with."""
    found = FIGURE.match(str(cell).strip().replace("−", "-"))
    return None if found is None else float(found[0])


# -- training and checkpoints ----------------------------------------------------------------------------


def add_training(page: Page, folder: Path) -> None:
    page.heading(f"Training of {folder.name}")
    with drawing(page):
        page.figure(
            figures.training_curves(folder), "Losses, mean keep and error to dense. Dashed: a new stage begins."
        )
    if (folder / "checkpoint" / CONFIG_FILE).is_file():
        add_checkpoint(page, folder / "checkpoint", folder.name)


def add_checkpoint(page: Page, folder: Path, name: str | None = None) -> None:
    """The learned table of a checkpoint that has one."""
    checkpoint = ShivaCheckpoint.from_pretrained(folder)
    if not {"timesteps", "logits"} <= checkpoint.tables.keys():
        return
    page.heading(f"Schedule of {name or folder.name}")
    with drawing(page):
        schedule = RatioSchedule.from_state(checkpoint.tables)
        schedule = schedule.resample([1000.0 * (1 - step / STEPS) for step in range(STEPS)])
        drawn = figures.schedule_map(schedule.ratios(), schedule.timesteps)
        page.figure(drawn, f"Share of tokens kept by layer and step, mean {schedule.mean_keep:.3f}.")
