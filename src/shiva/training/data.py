"""Captioned images from parquet, folders, WebDataset shards, the hub, MJHQ-30K, or prompts alone; and as tensors."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.core.needs import need
from shiva.core.options import unknown_key
from shiva.training.family import Family, Size, Text
from shiva.training.pictures import nearest_size, size_of, source_of, to_tensor
from shiva.training.sections import Data

Grid = tuple[int, int]
"""Height and width of latents; samples of one micro-batch share it."""
WEBDATASET_IMAGES = ("jpg", "jpeg", "png", "webp")
WEBDATASET_CAPTIONS = ("txt", "json")


@dataclass(frozen=True)
class Example:
    """One row, its image not yet decoded; None where there is none."""

    caption: str
    image: Any = None
    row: int | None = None
    """Its number, of sources that have one."""

    def size(self, sizes: list[Size]) -> Size:
        """The shape it is cropped to."""
        if self.image is None or len(sizes) == 1:
            return nearest_size(1, 1, sizes)
        with self._read():
            return nearest_size(*size_of(self.image), sizes)

    def pixels(self, sizes: list[Size]) -> Tensor:
        """The picture (3, H, W), cropped."""
        size = self.size(sizes)
        with self._read():
            return to_tensor(self.image, size)

    def stored(self) -> bytes:
        """The picture as it is in the source."""
        with self._read():
            source = source_of(self.image)
            if isinstance(source, (str, Path)):
                return Path(source).read_bytes()
            return source if isinstance(source, bytes) else source.tobytes()

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except ImportError:
            raise
        except Exception as error:  # PIL raises what it likes for bytes that are no picture
            row = "" if self.row is None else f"row {self.row}, "
            raise ValueError(
                f"the image of {row}{self.caption[:80]!r} cannot be read ({str(error) or type(error).__name__}); mend "
                "it, or take it out of the data"
            ) from error


class Rows(Sequence[Example]):
    """A `datasets.Dataset` as examples."""

    def __init__(self, table: Any, image: str, caption: str):
        self.table, self.image, self.caption = table, image, caption

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        row = self.table[int(index)]
        return Example(caption_of(row[self.caption]), row[self.image], int(index))

    def captions(self) -> Iterator[str]:
        """All of them, without reading the pictures beside them."""
        return map(caption_of, self.table[self.caption])


def caption_of(text: Any) -> str:
    """The caption in a column's value; what is absent is the empty prompt."""
    if isinstance(text, dict):  # WebDataset's json member
        text = text.get("caption") or text.get("prompt") or text.get("text") or ""
    if isinstance(text, list):
        text = text[0] if text else ""
    return "" if text is None else str(text)


def files_of(path: str) -> list[str]:
    """Files that a path, folder or glob means."""
    found = sorted(glob.glob(path, recursive=True))
    if len(found) == 1 and Path(found[0]).is_dir():
        found = sorted(str(p) for p in Path(found[0]).rglob("*") if p.is_file())
    if not found:
        raise FileNotFoundError(f"data.path={path!r} matches no file; paths are relative to the current folder")
    return found


def open_table(data: Data) -> Any:
    """The rows as a `datasets` object, map-style or iterable, images undecoded."""
    datasets = need("datasets", "train")
    source, where = str(data.kind), dict[str, Any](split="train")
    if data.kind == "hub":
        source, where = data.path, {"split": data.split, "name": data.config}
    elif data.kind == "imagefolder":
        if not Path(data.path).is_dir():
            raise FileNotFoundError(
                f"data.path={data.path!r} is not a folder; it should hold images and a metadata file"
            )
        where["data_dir"] = data.path
    else:
        suffix = ".tar" if data.kind == "webdataset" else ".parquet"
        files = [name for name in files_of(data.path) if name.endswith(suffix)]
        if not files:
            raise FileNotFoundError(f"data.path={data.path!r} holds no {suffix} file")
        where["data_files"] = {"train": files}
    with readable(data):
        return datasets.load_dataset(source, **where, streaming=data.streaming)


@contextlib.contextmanager
def readable(data: Data) -> Iterator[None]:
    """What cannot be read is told by the options that name it."""
    try:
        yield
    except Exception as error:  # datasets raises what it likes, and hides a full disk behind an error of its own
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno:
            raise cause from None
        told = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        mend = "check data.path, data.config, data.split and the network" if data.kind == "hub" else "mend its files"
        raise ValueError(
            f"data.path={data.path!r} does not read as data.kind={data.kind} ({told}); {mend}, or data.kind"
        ) from error


def columns_of(data: Data, names: Sequence[str]) -> tuple[str, str]:
    """The image and caption columns, and those of `where` are there; WebDataset's are named by file endings."""
    image, caption = data.image, data.caption
    if data.kind == "webdataset":
        image = next((n for n in (image, *WEBDATASET_IMAGES) if n in names), image)
        caption = next((n for n in (caption, *WEBDATASET_CAPTIONS) if n in names), caption)
    for option, column in (("image", image), ("caption", caption)):
        if column not in names:
            captions = "; captions of an imagefolder are in its metadata.jsonl or .csv, beside file_name"
            hint = captions if data.kind == "imagefolder" and option == "caption" else ""
            raise ValueError(f"data.{option}={column!r}: {unknown_key(column, names, 'the data set')}{hint}")
    for column in data.where:
        if column not in names:
            raise ValueError(f"data.where: {unknown_key(column, names, 'the data set')}")
    return image, caption


def read_examples(data: Data) -> Sequence[Example]:
    """All rows of a map-style source."""
    if data.kind == "mjhq":
        rows: Sequence[Example] = read_mjhq(Path(data.path))[: data.limit]
    elif data.kind == "prompts":
        rows = read_prompts(Path(data.path))[: data.limit]
    else:
        table = open_table(data)
        image, caption = columns_of(data, table.column_names)
        for column, value in data.where.items():
            table = table.filter(lambda v, wanted=value: v == wanted, input_columns=[column])
        if data.limit is not None:
            table = table.select(range(min(data.limit, len(table))))
        rows = Rows(table.cast_column(image, need("datasets", "train").Image(decode=False)), image, caption)
    if not len(rows):
        raise ValueError(f"data.path={data.path!r} has no rows; check data.where={data.where}")
    return rows


def stream_examples(data: Data, seed: int, epoch: int) -> Iterator[Example]:
    """One epoch of a stream, shuffled within a buffer; the order is a function of (seed, epoch)."""
    table = open_table(data)
    with readable(data):
        names = table.column_names or list(next(iter(table), ()))
    if not names:
        raise ValueError(f"data.path={data.path!r} has no rows")
    image, caption = columns_of(data, names)
    table = table.cast_column(image, need("datasets", "train").Image(decode=False))
    table = table.filter(lambda row: all(row.get(column) == value for column, value in data.where.items()))
    if data.limit is not None:
        table = table.take(data.limit)
    table = table.shuffle(seed=seed, buffer_size=data.shuffle_buffer)
    table.set_epoch(epoch)
    rows = iter(table)
    while True:
        with readable(data):
            row = next(rows, None)
        if row is None:
            return
        yield Example(caption_of(row[caption]), row[image])


def read_mjhq(folder: Path) -> list[Example]:
    """MJHQ-30K's own layout: meta_data.json, and one folder of <id>.jpg per category, beside it or one deeper."""
    path = folder / "meta_data.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; data.path must be the unpacked MJHQ-30K folder")
    images = {p.stem: p for p in sorted(folder.rglob("*")) if p.suffix.lower() in (".jpg", ".jpeg", ".png")}
    try:
        entries = json.loads(path.read_bytes())
        captions = {key: str(entry["prompt"]) for key, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"data.path={str(folder)!r} does not read as mjhq ({type(error).__name__}: {error}); mend meta_data.json, "
            "which maps the key of each image to a mapping with its 'prompt'"
        ) from error
    missing = [key for key in entries if key not in images]
    if missing:
        where = f"{entries[missing[0]].get('category', '')}/{missing[0]}.jpg"
        raise FileNotFoundError(f"{len(missing)} of {len(entries)} images are missing, first {where}; unpack them all")
    return [Example(caption, str(images[key])) for key, caption in sorted(captions.items())]


def read_prompts(path: Path) -> list[Example]:
    """One prompt a line, or the strings (or `prompt` values) of a JSON or JSON-lines file."""
    if not path.exists():
        raise FileNotFoundError(f"data.path={str(path)!r} does not exist; give a file with one prompt a line")
    try:
        text = path.read_text("utf-8-sig")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            found = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
        values = list(found.values()) if isinstance(found, dict) else found
        return [Example(value if isinstance(value, str) else value["prompt"]) for value in values]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"data.path={str(path)!r} does not read as prompts ({type(error).__name__}: {error}); give one a line, or "
            "in JSON texts or mappings with a 'prompt'"
        ) from error


def digest(examples: Sequence[Example]) -> str:
    """What a cache remembers of the rows it was made from."""
    state = hashlib.blake2b(digest_size=8)
    for caption in examples.captions() if isinstance(examples, Rows) else (example.caption for example in examples):
        state.update(caption.encode() + b"\0")
    return state.hexdigest()


def digest_images(examples: Sequence[Example], sample: int = 16) -> str:
    """The same of their pictures, of which some stand for all."""
    state = hashlib.blake2b(digest_size=8)
    for index in range(0, len(examples), -(-len(examples) // sample)):
        state.update(examples[index].stored())
    return state.hexdigest()


# -- pictures to tensors -----------------------------------------------------------------------------


class Images:
    """Examples to tensors, encoded anew each time."""

    def __init__(self, family: Family, sizes: list[Size]):
        self.family, self.sizes = family, sizes

    def grid_of(self, example: Example) -> Grid:
        height, width = example.size(self.sizes)
        return height // self.family.factor, width // self.family.factor

    def read_all(self, examples: Sequence[Example]) -> tuple[Tensor, list[str]]:
        """Pixels (B, 3, H, W) and captions of examples that share a shape."""
        pixels = torch.stack([example.pixels(self.sizes) for example in examples])
        return pixels, [example.caption for example in examples]

    def encode(self, raw: Any) -> tuple[Tensor, Text]:
        pixels, captions = raw
        return self.family.latents(pixels), self.family.encode(captions)


class ImageItems(Images):
    """The same by number."""

    def __init__(self, examples: Sequence[Example], family: Family, sizes: list[Size]):
        super().__init__(family, sizes)
        self.examples = examples
        self._grids: dict[int, Grid] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def grid(self, index: int) -> Grid:
        if index not in self._grids:  # where all have one shape, no row is read for it, and no picture beside it
            self._grids[index] = self.grid_of(Example("") if len(self.sizes) == 1 else self.examples[index])
        return self._grids[index]

    def read(self, indices: Sequence[int]) -> Any:
        return self.read_all([self.examples[index] for index in indices])
