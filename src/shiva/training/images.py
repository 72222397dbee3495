"""Pictures of any shape to tensors of a few shapes: resize, crop, scale to [-1, 1]; and small pictures to draw."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.training.needs import need

Size = tuple[int, int]
"""Height and width in pixels."""
WIDEST = 2.0
"""Aspect ratio of the most oblong bucket."""


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


def open_image(source: Any) -> Any:
    """A PIL image from bytes, a path, an undecoded `datasets` image, or a PIL image. Only the header is read."""
    image = need("PIL.Image")
    if isinstance(source, dict):
        source = source["bytes"] if source.get("bytes") is not None else source["path"]
    if isinstance(source, bytes):
        return image.open(io.BytesIO(source))
    if isinstance(source, (str, Path)):
        return image.open(source)
    return source


def to_tensor(source: Any, size: Size) -> Tensor:
    """Pixels (3, H, W) in [-1, 1], the picture scaled to cover `size` and cropped at its centre; alpha on white."""
    pil, numpy = need("PIL.Image"), need("numpy")
    picture = open_image(source)
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


def save_grid(rows: list[list[Any]], path: Path) -> None:
    """PIL images in rows as one PNG."""
    pil = need("PIL.Image")
    width, height = rows[0][0].size
    sheet = pil.new("RGB", (width * max(len(row) for row in rows), height * len(rows)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * width, y * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def colour(value: float) -> tuple[int, int, int]:
    """A colour of the viridis map for a value in 0 to 1."""
    position = min(max(value, 0.0), 1.0) * (len(VIRIDIS) - 1)
    left = min(int(position), len(VIRIDIS) - 2)
    mixed = [a + (b - a) * (position - left) for a, b in zip(VIRIDIS[left], VIRIDIS[left + 1], strict=True)]
    return (round(mixed[0]), round(mixed[1]), round(mixed[2]))


def save_heat_map(ratios: Tensor, timesteps: tuple[float, ...], path: Path, cell: int = 14, rows: int = 50) -> None:
    """Keep ratios (steps, layers) as a PNG: layers to the right, time downwards from noise to image."""
    pil, draw_module = need("PIL.Image"), need("PIL.ImageDraw")
    shown = torch.linspace(0, len(ratios) - 1, min(rows, len(ratios))).round().long()
    ratios, timesteps = ratios[shown], tuple(timesteps[i] for i in shown.tolist())
    steps, layers = ratios.shape
    margin = 44
    sheet = pil.new("RGB", (max(margin + layers * cell + 60, 300), max(margin + steps * cell, 220)), "white")
    draw = draw_module.Draw(sheet)
    draw.text((4, 4), "keep by layer (right) and timestep (down)", fill="black")
    for y, row in enumerate(ratios.tolist()):
        for x, value in enumerate(row):
            corner = (margin + x * cell, margin + y * cell)
            draw.rectangle((*corner, corner[0] + cell - 1, corner[1] + cell - 1), fill=colour(value))
        if y % max(1, steps // 10) == 0:
            draw.text((4, margin + y * cell), f"{timesteps[y]:.0f}", fill="black")
    for x in range(0, layers, max(1, layers // 12)):
        draw.text((margin + x * cell, margin - 14), str(x), fill="black")
    left = margin + layers * cell + 10
    for i in range(11):
        top = margin + i * cell
        draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=colour(1 - i / 10))
        draw.text((left + cell + 4, top), f"{1 - i / 10:.1f}", fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
