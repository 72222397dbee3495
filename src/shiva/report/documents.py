"""JSON files of benchmarks and claims on a page, each with the figure beside it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shiva.report.page import Page


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


def add_documents(page: Page, name: str, paths: Sequence[Path]) -> None:
    """Tables, claims and figures of results, then where each was measured."""
    documents = [(path, load(path)) for path in paths]
    page.heading({"bench": "Speed", "validate": "The paper's claims"}.get(name, name))
    claims = [(path.stem, claim) for path, document in documents for claim in document.get("claims", [])]
    if claims:
        headings = ("experiment", "claim", "paper", "here", "verdict")
        rows = [(stem, claim["claim"], claim["paper"], claim["ours"], claim["verdict"]) for stem, claim in claims]
        page.table(headings, rows)
    measured: dict[str, list[str]] = defaultdict(list)
    for path, document in documents:
        add_sheets(page, document)
        picture = path.with_suffix(".png")
        if picture.is_file():
            page.figure(picture.read_bytes(), f"{document.get('title') or path.stem}")
        measured[measured_on(document.get("environment", {}))].append(path.stem)
    for where, stems in measured.items():
        page.note(where if len(measured) == 1 else f"{where} ({', '.join(stems)})")


def add_sheets(page: Page, document: Mapping[str, Any]) -> None:
    for sheet in sheets(document):
        page.table(sheet["columns"], sheet["rows"], sheet["title"], sheet.get("caption", ""))


def measured_on(where: Mapping[str, Any]) -> str:
    device = where.get("gpu") or where.get("cpu")
    if not device:
        return "Where it was measured is not said."
    packages = ", ".join(f"{package} {version}" for package, version in where.get("packages", {}).items())
    return f"Measured on {device}, {where.get('threads')} threads, {where.get('date')}: {packages}."
