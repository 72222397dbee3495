"""A picture from wherever it is stored, to pixels of the shape that it is trained at."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.core.needs import need
from shiva.training.family import Size

WIDEST = 2.0
"""Aspect ratio of the most oblong bucket."""
ORIENTATION = 0x0112
"""The EXIF tag of how a picture is to be turned."""
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What brings a picture of that orientation upright, in PIL's words."""
SIDEWAYS = range(5, 9)
"""Orientations that exchange height and width."""


def bucket_sizes(resolution: int, multiple: int, buckets: bool) -> list[Size]:
    """Shapes to crop to: one square, or all shapes of about its area up to twice as wide as high."""
    side = max(multiple, resolution // multiple * multiple)
    if not buckets:
        return [(side, side)]
    sizes = []
    for height in range(multiple, 2 * side + 1, multiple):
        width = round(side * side / height / multiple) * multiple
        if width and max(height / width, width / height) <= WIDEST:
            sizes.append((height, width))
    return sizes


def nearest_size(height: int, width: int, sizes: list[Size]) -> Size:
    """The shape whose aspect ratio is nearest, by its logarithm."""
    aspect = math.log(height / width)
    return min(sizes, key=lambda size: abs(math.log(size[0] / size[1]) - aspect))


def source_of(source: Any) -> Any:
    """Bytes, a path or a PIL image, also of an undecoded `datasets` image."""
    if isinstance(source, dict):
        source = source["bytes"] if source.get("bytes") is not None else source["path"]
    if isinstance(source, str) and "://" in source:  # of a stream: on the hub, or inside an archive
        with need("fsspec", "train").open(source) as file:
            return file.read()
    return source


def open_image(source: Any) -> Any:
    """A PIL image from bytes, a path, an undecoded `datasets` image, or a PIL image. Only the header is read."""
    image, source = need("PIL.Image", "train"), source_of(source)
    if isinstance(source, bytes):
        return image.open(io.BytesIO(source))
    if isinstance(source, (str, Path)):
        return image.open(source)
    return source


def size_of(source: Any) -> Size:
    """Height and width of a picture as it is seen; a camera may have stored it on its side."""
    picture = open_image(source)
    return picture.size if orientation_of(picture) in SIDEWAYS else picture.size[::-1]


def orientation_of(picture: Any) -> int:
    """By the header alone: PIL's `getexif` decodes a PNG, and a TIFF is turned by PIL itself."""
    exif = need("PIL.Image", "train").Exif()
    try:
        exif.load(picture.info.get("exif"))
        return int(exif.get(ORIENTATION, 1))
    except Exception:  # what a broken EXIF raises is not told; the picture may be sound
        return 1


def to_tensor(source: Any, size: Size) -> Tensor:
    """Pixels (3, H, W) in [-1, 1], the picture scaled to cover `size` and cropped at its centre; alpha on white."""
    pil, numpy = need("PIL.Image", "train"), need("numpy", "train")
    picture = open_image(source)
    turn = TURNS.get(orientation_of(picture))
    if turn is not None:
        picture = picture.transpose(pil.Transpose[turn])
    if picture.mode.startswith("I"):
        picture = eight_bits(picture)
    if picture.mode in ("RGBA", "LA", "P"):
        picture = picture.convert("RGBA")
        picture = pil.alpha_composite(pil.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    height, width = size
    scale = max(height / picture.height, width / picture.width)
    covering = (max(width, round(picture.width * scale)), max(height, round(picture.height * scale)))
    if picture.size != covering:
        picture = picture.resize(covering, pil.Resampling.LANCZOS)
    left, top = (covering[0] - width) // 2, (covering[1] - height) // 2
    picture = picture.crop((left, top, left + width, top + height))
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).float() / 127.5 - 1


def eight_bits(picture: Any) -> Any:
    """Grey of 16 bits, or of integers, as grey of 8; PIL would clip it to white."""
    integers = picture.convert("I")
    deep = picture.mode != "I" or integers.getextrema()[1] > 255
    return (integers.point(lambda value: value * (1 / 257)) if deep else integers).convert("L")
