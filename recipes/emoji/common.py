"""What every step of the recipe shares: where state lives, its files, the data set in memory."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shiva.checkpoint import write_atomically, write_image

HERE = Path(__file__).parent
SIZES = (64, 128)
"""Sides of the pictures, in pixels: one data set in two sizes, with the same rows and splits."""
MAX_TOKENS = 16
"""The tokenizers' model_max_length: the text tokens a prompt becomes when max_sequence_length is 0."""


def parquet(size: int = 64) -> Path:
    return HERE / "data" / f"fluent-emoji-{size}.parquet"


def state_folder(state: str | None = None) -> Path:
    """The folder that holds downloads and checkpoints: --state, else $SHIVA_CACHE/emoji, else ~/.cache/shiva."""
    root = Path(state) if state else Path(os.environ.get("SHIVA_CACHE", "~/.cache/shiva")) / "emoji"
    root = root.expanduser()
    root.mkdir(parents=True, exist_ok=True)
    return root


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


@dataclass(frozen=True)
class EmojiData:
    """The parquet file, decoded: one row per emoji."""

    images: Tensor  # (M, 3, S, S) uint8
    labels: list[str]
    tags: list[list[str]]
    groups: list[str]
    core: Tensor  # (M,) bool: the labels the transformer is trained on
    train: Tensor  # (M,) bool: not held out

    def rows(self, split: str, core_only: bool = True) -> Tensor:
        """Row numbers of "train" or "validation"."""
        mask = self.train if split == "train" else ~self.train
        return torch.nonzero(mask & self.core if core_only else mask).flatten()


def load_data(path: Path | None = None) -> EmojiData:
    """The set at 64x64, or the one in `path`."""
    import pyarrow.parquet as pq

    path = path or parquet()
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; build it with `python -m recipes.emoji.data --size 64` or 128")
    table = pq.read_table(path).to_pydict()
    pixels = np.stack(
        [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in table["image"]]
    )  # (M, S, S, 3)
    return EmojiData(
        images=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
        labels=table["label"],
        tags=table["tags"],
        groups=table["group"],
        core=torch.tensor(table["core"]),
        train=torch.tensor([split == "train" for split in table["split"]]),
    )


def to_unit(images: Tensor) -> Tensor:
    """uint8 pixels to floats in [-1, 1], as diffusers' autoencoders take them."""
    return images.float() / 127.5 - 1


def save_grid(images: Tensor, path: Path, columns: int) -> None:
    """(M, 3, H, W) uint8 images as one PNG."""
    count, _, height, width = images.shape
    rows = -(-count // columns)
    sheet = torch.full((rows * columns, 3, height, width), 255, dtype=torch.uint8)
    sheet[:count] = images
    sheet = sheet.reshape(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    array = sheet.reshape(rows * height, columns * width, 3).numpy()
    write_image(path, Image.fromarray(array))
