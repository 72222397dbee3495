"""Results on a page: JSON files of benchmarks and claims, and an evaluation with its images, tables and fronts."""

from __future__ import annotations

import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiva.core.options import build, fitted
from shiva.evaluate.protocols import protocols
from shiva.show import figures
from shiva.show.page import PAPER, Page, drawing, meanings
from shiva.show.style import DENSE, colour, family


@dataclass(frozen=True)
class Grid:
    """A table as a document has it."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"table {self.title!r} has no columns")
        odd = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if odd is not None:
            raise ValueError(f"table {self.title!r} has a row of {len(odd)} for {len(self.columns)} columns")


@dataclass(frozen=True)
class Claim:
    claim: str
    paper: Any
    ours: Any
    verdict: str


@dataclass(frozen=True)
class Document:
    """What a page shows of a JSON file; the rest of it is left alone."""

    tables: list[Grid]
    claims: list[Claim]
    environment: dict[str, Any]
    title: str


def read_document(path: Path) -> Document:
    found = load(path)
    try:
        grids = [build(Grid, table, "tables", others=True) for table in tables_of(found)]
        claims = fitted(list[dict[str, Any]], found.get("claims", []), "claims")
        return Document(
            grids,
            [build(Claim, claim, "claims", others=True) for claim in claims],
            fitted(dict[str, Any], found.get("environment", {}), "environment"),
            str(found.get("title") or path.stem),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}; write it again with the command that made it") from error


def load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); write it again with the command that made it") from error


def own_image(path: Path, folder: Path) -> bytes | None:
    """An image that lies in the folder itself; None for what is not there, is elsewhere, or is none."""
    from PIL import Image

    real = os.path.realpath(path)
    if not os.path.isfile(real) or os.path.commonpath([real, root := os.path.realpath(folder)]) != root:
        return None
    data = Path(real).read_bytes()
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.verify()
    except Exception:  # PIL raises what it likes for a file that is no image
        return None
    return data


def is_result(document: Any) -> bool:
    return isinstance(document, dict) and ("claims" in document or bool(list(tables_of(document))))


def tables_of(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables of a document, as `bench.table.Table` writes them."""
    inside = document.get("tables")
    for table in [document, *(inside if isinstance(inside, list) else ())]:
        if isinstance(table, dict) and {"title", "columns", "rows"} <= table.keys():
            yield table


def add_documents(page: Page, name: str, paths: Sequence[Path]) -> None:
    """Tables, claims and figures of results, then where each was measured."""
    documents = [(path, read_document(path)) for path in paths]
    titles = {"bench": "Speed", "validate": "The paper's claims", "frontier": "What to do for less time"}
    page.heading(titles.get(name, name))
    claims = [(path.stem, claim) for path, document in documents for claim in document.claims]
    if claims:
        headings = ("experiment", "claim", "paper", "here", "verdict")
        rows = [(stem, claim.claim, claim.paper, claim.ours, claim.verdict) for stem, claim in claims]
        page.table(headings, rows)
    measured: dict[str, list[str]] = defaultdict(list)
    for path, document in documents:
        for grid in document.tables:
            page.table(grid.columns, grid.rows, grid.title, grid.caption)
        picture = own_image(path.with_suffix(".png"), path.parent)
        if picture is not None:
            page.figure(picture, document.title)
        measured[measured_on(document.environment)].append(path.stem)
    for where, stems in measured.items():
        page.note(where if len(measured) == 1 else f"{where} ({', '.join(stems)})")


def add_tables(page: Page, document: Mapping[str, Any]) -> None:
    for table in tables_of(document):
        grid = build(Grid, table, "tables", others=True)
        page.table(grid.columns, grid.rows, grid.title, grid.caption)


def measured_on(where: Mapping[str, Any]) -> str:
    device = where.get("gpu") or where.get("cpu")
    if not device:
        return "Where it was measured is not said."
    known = where.get("packages")
    packages = ", ".join(f"{package} {known[package]}" for package in known) if isinstance(known, dict) else ""
    return f"Measured on {device}, {where.get('threads')} threads, {where.get('date')}: {packages}."


COSTS = ("GFLOPs", "latency, s")
"""Columns that quality is drawn against."""
QUALITIES = ("Fréchet", "FID", "text-image", "CLIP score", "ImageReward", "PSNR to dense", "LPIPS to dense")
"""Columns that are drawn, by how their headings start; the table has all of them."""
SAME_COST = 0.1
"""Methods whose costs differ by less than this share of the largest were meant to cost the same."""
FIGURE = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
Column = tuple[str, dict[str, float]]


def is_evaluation(folder: Path) -> bool:
    return (folder / "run.json").is_file() and "candidates" in load(folder / "run.json")


def add_evaluation(page: Page, folder: Path, prompts: int, seeds: int) -> None:
    run = load(folder / "run.json")
    settings = run["settings"]
    documents = {path.stem: load(path) for path in sorted((folder / "tables").glob("*.json"), key=place)}
    page.heading(f"Evaluation: {folder.name}", opened=True)
    page.text(
        f"{settings['model']}, {settings['steps']} steps at guidance {settings['guidance']:g}, "
        f"{len(run['prompts'])} prompts of {settings['prompts']}: every method from the same noise."
    )
    if any((folder / "images").glob("*/*/*.png")):
        names = captions(run, documents.get("main", {}))
        page.gallery(list(names.values()), shots(folder, run, list(names), prompts, seeds))
    else:
        page.note(f"Its images are not here: they are not kept with the tables. Make them: {command(folder, run)}")
    for name, why in run.get("skipped", {}).items():
        page.note(f"Left out: {name}: {why}")
    for path in sorted(folder.glob("*.json")):
        if is_result(load(path)):  # as `shiva frontier` writes beside its images
            add_documents(page, path.stem, [path])
    for stem, document in documents.items():
        page.heading(question(stem))
        add_fronts(page, document)
        add_tables(page, document)
    words = [table for document in documents.values() for table in tables_of(document)]
    headings = [heading for table in words for heading in table["columns"]]
    if terms := meanings(headings, [str(row[0]) for table in words for row in table["rows"]]):
        page.heading("What the words mean")
        page.glossary(terms)
    page.note(measured_on(run.get("environment", {})))
    for variant in sorted((folder / "runs").glob("*/run.json")):
        if not variant.parent.is_symlink():  # which may lead back here
            add_evaluation(page, variant.parent, prompts, seeds)


# -- protocols -------------------------------------------------------------------------------------------


def protocol(stem: str) -> str | None:
    return next((name for name in protocols() if stem.startswith(name)), None)


def place(path: Path) -> tuple[int, str]:
    """Where a protocol's tables come on the page; those of no protocol come last."""
    name = protocol(path.stem)
    return len(protocols()) if name is None else list(protocols()).index(name), path.stem


def question(stem: str) -> str:
    """What a protocol asks, as a heading."""
    name = protocol(stem)
    asked = "" if name is None else (protocols()[name].__doc__ or "").partition("\n")[0].rstrip(".")
    return asked if stem == name else f"{asked} ({stem})" if asked else stem


# -- images ----------------------------------------------------------------------------------------------


def captions(run: Mapping[str, Any], main: Mapping[str, Any]) -> dict[str, str]:
    """What stands under each candidate's images: dense and ours side by side, then the others as in the main table."""
    costs = main.get("results", {}).get("cost", {})
    ordered = [*(name for name in costs if name in run["candidates"]), *run["candidates"]]
    ordered.sort(key=lambda name: (family(name).title != "dense", not family(name).ours))
    saved = {name: round(100 * (1 - cost["share"])) for name, cost in costs.items()}
    return {name: f"{name}, −{saved[name]} % FLOPs" if saved.get(name) else name for name in ordered}


def shots(
    folder: Path, run: Mapping[str, Any], names: Sequence[str], prompts: int, seeds: int
) -> Iterator[tuple[str, list[Any]]]:
    """For each prompt and seed shown, its images by candidate; None where one is not there."""
    for index in figures.spread(range(len(run["prompts"])), prompts):
        for seed in run["seeds"][:seeds]:
            slugs = [run["candidates"][name]["slug"] for name in names]
            files = [folder / "images" / slug / str(seed) / f"{index:05d}.png" for slug in slugs]
            images = [opened(file, folder) for file in files]
            if any(images):
                text = run["prompts"][index]["text"]
                yield (text if seeds == 1 else f"{text}, seed {seed}"), images


def opened(file: Path, folder: Path) -> Any:
    """An image of the evaluation's own; None where it is not there."""
    from PIL import Image

    data = own_image(file, folder)
    return None if data is None else Image.open(io.BytesIO(data))


def command(folder: Path, run: Mapping[str, Any]) -> str:
    """What makes an evaluation's images."""
    settings, seeds = run["settings"], ",".join(map(str, run["seeds"]))
    how = f"--steps {settings['steps']} --guidance {settings['guidance']:g}"
    how += f" --limit {len(run['prompts'])} --seeds {seeds}"
    for option, usual in (("batch", 1), ("height", None), ("width", None), ("dtype", "float32")):
        if settings.get(option, usual) != usual:
            how += f" --{option} {settings[option]}"
    if (folder / "frontier.json").is_file():  # whose methods and budgets are not told: what is recorded stays
        return f"shiva frontier {settings['model']} --prompts FILE {how} --output outputs/frontier/{folder.name}"
    how += f" --output {folder}"
    recipe = Path("recipes/eval") / f"{Path(settings['model']).name}.yaml"
    methods = f"--methods {recipe}" if recipe.is_file() else "--methods FILE --prompts FILE"
    stems = {path.stem.partition("-")[0] for path in (folder / "tables").glob("*.json")}
    asked = "".join(f" --protocol {name}" for name in protocols() if name in stems)
    return f"shiva eval {settings['model']} {methods}{asked} {how}"


# -- quality against cost --------------------------------------------------------------------------------


def add_fronts(page: Page, document: Mapping[str, Any]) -> None:
    """Metrics (columns marked ↑ or ↓) of the document's methods against each cost, with the Pareto front."""
    columns = [column for table in tables_of(document) for column in columns_of(table)]
    metrics = [column for start in QUALITIES for column in columns if column[0].startswith(start)]
    for cost, prices in columns:
        if cost not in COSTS or all_alike(prices):
            continue
        for metric in metrics:
            add_front(page, (cost, prices), metric)


def add_front(page: Page, cost: Column, quality: Column) -> None:
    """A metric against a cost, with what no other method beats."""
    (price, prices), (metric, values) = cost, quality
    points = [figures.Point(name, prices[name], value) for name, value in values.items() if name in prices]
    if len(points) < 2:
        return
    with drawing(page):
        label = metric.rstrip("↑↓ ")
        drawn = figures.quality_cost(points, price, label, higher_is_better=metric.endswith("↑"))
        page.figure(drawn, f"{label} against {price}; the line joins what no other method beats.")


def all_alike(prices: Mapping[str, float]) -> bool:
    """Whether the reduced methods cost the same, so that there is no front to draw."""
    reduced = [price for name, price in prices.items() if colour(name) != DENSE]
    return not reduced or max(reduced) - min(reduced) < SAME_COST * max(prices.values())


def texts_of(table: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """A table of methods as text: by heading, then by method; the paper's own and differences are left out."""
    columns = table["columns"]
    if columns[0] != "method" or "line between" in columns or table["title"].startswith("The paper's"):
        return {}
    return {
        heading: {str(row[0]): str(row[place]) for row in table["rows"]}
        for place, heading in enumerate(columns)
        if place and not PAPER.match(heading)
    }


def columns_of(table: Mapping[str, Any]) -> Iterator[Column]:
    """The columns of a table of methods that hold figures, each by method."""
    for heading, cells in texts_of(table).items():
        found = {method: figure for method, cell in cells.items() if (figure := figure_of(cell)) is not None}
        if found:
            yield heading, found


def figure_of(cell: Any) -> float | None:
    """The number that a cell starts with."""
    found = FIGURE.match(str(cell).strip().replace("−", "-"))
    return None if found is None else float(found[0])
