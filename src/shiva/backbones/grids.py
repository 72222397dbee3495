"""How a call's grid of image tokens is read: from the latents' shape, from position ids, or as it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiva.backbones.base import Call
from shiva.core.layout import Layout, Scattered


@dataclass(frozen=True)
class Latents:
    """From the shape of the latents and the transformer's patch size."""

    axes: str = "BCHW"
    """The latents' axes, F for frames."""
    argument: str = "hidden_states"
    text: str | None = "encoder_hidden_states"
    """The argument with text, where its length matters."""
    added_text: int = 0
    """Tokens that the transformer itself adds to the text."""
    patch: str = "patch_size"
    """Of the transformer's config: a side, or a number for each axis of the grid."""
    patch_t: str | None = None
    """Of the transformer's config: frames of a patch, or None for one."""

    def __call__(self, transformer: Any, call: Call) -> Layout:
        latents = call[self.argument]
        axes = "BCFHW" if latents.ndim == 5 and "F" not in self.axes else self.axes
        size = dict(zip(axes, latents.shape, strict=True))
        patch = getattr(transformer.config, self.patch)
        frames = (getattr(transformer.config, self.patch_t) if self.patch_t else None) or 1
        frames, rows, columns = (frames, patch, patch) if isinstance(patch, int) else (frames, *patch)[-3:]
        text = 0 if self.text is None else call[self.text].shape[1] + self.added_text
        return Layout(size["H"] // rows, size["W"] // columns, size.get("F", 1) // frames, text)


@dataclass(frozen=True)
class GivenFrames:
    """Another grid whose leading frames may be given: their timestep is 0, where each token or frame has its own."""

    grid: Callable[[Any, Call], Layout]

    def __call__(self, transformer: Any, call: Call) -> Layout:
        layout, times = self.grid(transformer, call), call["timestep"]
        if times.ndim < 2 or times.is_meta or times[0].numel() % layout.frames:
            return layout
        frames = times[0].reshape(layout.frames, -1)
        given = int((frames == 0).all(dim=1).int().cumprod(dim=0).sum())
        return first_given(layout, given) if given < layout.frames else layout


def first_given(layout: Layout, frames: int) -> Layout:
    """The layout where some leading frames are not the image's own."""
    return replace(layout, frames=layout.frames - frames, before=layout.before + frames * layout.rows * layout.columns)


@dataclass(frozen=True)
class PositionIds:
    """From ids (S, c) or (B, S, c): rows and columns are distinct values of columns 1 and 2 over the image's own.

    Column 0 is lowest for the image's own tokens, and higher for references before or after them.
    """

    argument: str = "img_ids"
    with_text: bool = False
    """The ids of the text come first."""

    def __call__(self, transformer: Any, call: Call) -> Layout:
        ids, text, total = call[self.argument], call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1]
        if ids.is_meta:
            return any_grid(total, text)
        ids = ids[0] if ids.ndim == 3 else ids
        return grid_of(ids[text:] if self.with_text else ids, total, text)


def any_grid(tokens: int, text: int) -> Layout:
    """A grid of as many tokens: meta ids have no values, and all such grids price alike."""
    rows = next(r for r in range(int(tokens**0.5), 0, -1) if tokens % r == 0)
    return Layout(rows, tokens // rows, text=text)


def grid_of(ids: Tensor, total: int, text: int) -> Layout:
    """The layout of tokens with ids (S, c); on no grid where they fill none, or fill it in another order."""
    own = ids[:, 0] == ids[:, 0].min()
    before, tokens = int(own.int().argmax()), int(own.sum())
    if total - tokens - before < 0 or not own[before : before + tokens].all():
        raise ValueError(
            f"of {total} tokens the position ids call {tokens} the image's own, and not in one piece; "
            "give those of references another number in the first column, before or after the image's"
        )
    places = ids[before : before + tokens, 1:3]
    (down, row), (across, column) = (places[:, axis].unique(return_inverse=True) for axis in range(2))
    around = {"text": text, "before": before, "after": total - tokens - before}
    grid = Layout(len(down), len(across), **around)
    in_order = torch.equal(row * grid.columns + column, torch.arange(tokens, device=ids.device))
    return grid if in_order and grid.tokens == tokens else Scattered(1, tokens, **around)


def told_by_shapes(transformer: Any, call: Call) -> Layout:
    """From `img_shapes`: (frames, rows, columns) of each picture in the sequence, the image's own first."""
    shapes, total = call["img_shapes"][0], call["hidden_states"].shape[1]
    shapes = [shapes] if isinstance(shapes[0], int) else list(shapes)
    own = shapes[: own_pictures(transformer, shapes)]
    (_, rows, columns), frames = own[0], sum(shape[0] for shape in own)
    if any(tuple(shape[1:]) != (rows, columns) for shape in own) or sum(map(prod, shapes)) != total:
        raise ValueError(f"img_shapes={shapes} does not describe the {total} tokens of the latents")
    text = call["encoder_hidden_states"].shape[1]
    return Layout(rows, columns, frames, text, after=total - frames * rows * columns)


def own_pictures(transformer: Any, shapes: list[Any]) -> int:
    """Pictures that are drawn: all but the last, a reference, where they are layers of one."""
    return max(len(shapes) - 1, 1) if getattr(transformer.config, "use_layer3d_rope", False) else 1


def told_by_sizes(transformer: Any, call: Call) -> Layout:
    """From `num_frames`, `height` and `width`, or from coordinates (B, 3, N) of every token where they do not hold."""
    total, text = call["hidden_states"].shape[1], call["encoder_hidden_states"].shape[1]
    told: list[int] = [call.get(name) or 0 for name in ("num_frames", "height", "width")]
    if 1 < prod(told) <= total:
        frames, rows, columns = told
        return Layout(rows, columns, frames, text, after=total - prod(told))
    places = call.get("video_coords")
    if places is None or places.is_meta:
        return any_grid(total, text)
    starts = places[0] if places.ndim == 3 else places[0, ..., 0]
    frames, rows, columns = (int(torch.unique(axis).numel()) for axis in starts)
    before = total - frames * rows * columns
    if before < 0:
        raise ValueError(f"video_coords describe {frames}x{rows}x{columns} tokens, but there are {total}")
    return Layout(rows, columns, frames, text, before=before)
