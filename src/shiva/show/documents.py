"""JSON files of benchmarks and claims on a page, each with the figure beside it."""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiva.core.options import build, fitted
from shiva.show.page import Page


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
        return json.loads(path.read_text())
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
    page.heading({"bench": "Speed", "validate": "The paper's claims"}.get(name, name))
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
