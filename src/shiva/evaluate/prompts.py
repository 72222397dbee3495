"""Prompt sets: readers of the files that others publish, and of our emoji set."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shiva.core import options
from shiva.core.needs import install

SPLITS = ("train", "validation", "all")


@dataclass(frozen=True)
class Prompt:
    """One text to draw."""

    text: str
    category: str = ""
    key: str = ""
    """What the set itself calls it: a file name, a code point, a number."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and the real images that belong to them where the set has any."""

    name: str
    prompts: tuple[Prompt, ...]
    labels: tuple[str, ...] = ()
    """All texts of the set, also those not drawn: retrieval has to find the right one among them."""
    image: Callable[[Prompt], bytes] | None = None
    """The file of a prompt's real image."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.prompts]

    def limited(self, count: int | None) -> PromptSet:
        """So many prompts, evenly spaced over the set and so over its categories; all for None."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise ValueError(f"--limit {count} leaves no prompt; pass at least 1")
        last = len(self) - 1
        places = sorted({round(place * last / max(1, count - 1)) for place in range(count)})
        return replace(self, prompts=tuple(self.prompts[place] for place in places))


def read_mjhq(path: Path) -> PromptSet:
    """MJHQ-30K: `meta_data.json`, with images beside it as `<category>/<key>.jpg`."""
    try:
        entries = json.loads(path.read_bytes())
        prompts = tuple(Prompt(entry["prompt"], entry["category"], key) for key, entry in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} has not MJHQ-30K\'s form, {{"key": {{"prompt": …, "category": …}}}} ({type(error).__name__}: '
            f"{error}); pass its meta_data.json, or prompts as a .txt file"
        ) from error
    folders = [path.parent, path.parent / "mjhq30k_imgs"]
    found = [f for f in folders for p in prompts[:1] if (f / p.category / f"{p.key}.jpg").is_file()]
    image = None if not found else lambda prompt: (found[0] / prompt.category / f"{prompt.key}.jpg").read_bytes()
    return PromptSet("MJHQ-30K", prompts, image=image)


def read_rows(path: Path, name: str, delimiter: str, column: str) -> PromptSet:
    """A file of rows under headings, one of them Category."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        quotes = None if delimiter == "\t" else '"'
        rows = list(csv.DictReader(file, delimiter=delimiter, quotechar=quotes, quoting=0 if quotes else 3))
    if rows and column not in rows[0]:
        raise ValueError(f"{path} has no column {column!r} but {', '.join(rows[0])}; is it the original file?")
    prompts = (Prompt(row[column], row.get("Category") or "", str(index)) for index, row in enumerate(rows))
    return PromptSet(name, tuple(prompts))


def read_text(path: Path) -> PromptSet:
    """One prompt a line."""
    lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    texts = [line for line in lines if line]
    return PromptSet(path.stem, tuple(Prompt(text, key=str(index)) for index, text in enumerate(texts)))


def read_parquet(path: Path, split: str = "train", core: bool = True) -> PromptSet:
    """Our emoji set: label, group as category, and the real image; `core` keeps only labels that are trained on."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow to be read: {install('metrics')}") from error
    options.choice("--split", split, SPLITS)
    columns: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    missing = {"label", "group", "split", "core", "codepoint", "image"} - columns.keys()
    if missing:
        raise ValueError(f"{path} has no column {sorted(missing)[0]!r}; `python -m recipes.emoji.data` builds it")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    images = {row["codepoint"]: row["image"]["bytes"] for row in rows}
    wanted = [row for row in rows if split in ("all", row["split"]) and (row["core"] or not core)]
    return PromptSet(
        f"emoji, {split} labels",
        tuple(Prompt(row["label"].lower(), row["group"], row["codepoint"]) for row in wanted),
        labels=tuple(row["label"].lower() for row in rows),
        image=lambda prompt: images[prompt.key],
    )


READERS: dict[str, Callable[[Path], PromptSet]] = {
    ".json": read_mjhq,
    ".csv": partial(read_rows, name="DrawBench", delimiter=",", column="Prompts"),
    ".tsv": partial(read_rows, name="PartiPrompts", delimiter="\t", column="Prompt"),
    ".txt": read_text,
}


def read_prompts(path: Path, split: str = "train", core: bool = True) -> PromptSet:
    """A prompt set by its file's ending; `split` and `core` are the emoji set's."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not here; pass --prompts a .txt, .json (MJHQ), .csv, .tsv or .parquet file"
        )
    if path.suffix == ".parquet":
        found = read_parquet(path, split, core)
    elif path.suffix in READERS:
        try:
            found = READERS[path.suffix](path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    else:
        raise ValueError(f"{path} ends in {path.suffix!r}; known are {', '.join([*READERS, '.parquet'])}")
    if not found.prompts:
        raise ValueError(f"{path} holds no prompt; pass --prompts a file with at least one")
    return found


def held_out_prompts(source: Path, given: Path | None, limit: int | None) -> PromptSet | None:
    """The set passed for it; of the emoji set, its own held-out labels."""
    if given is None and source.suffix != ".parquet":
        return None
    return read_prompts(given or source, "validation").limited(limit)
