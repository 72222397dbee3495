"""Layout: where the image tokens of a call lie, in space, in time, and beside text and reference tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

HOST = torch.device("cpu")


class Windows(NamedTuple):
    """Equal cells that tile each frame of a grid, and what is left over at its right and bottom."""

    members: Tensor  # (C, m) positions of each cell, row-major
    outside: Tensor  # (O,) positions in no whole cell


@dataclass(frozen=True)
class Layout:
    """The tokens of one call. Methods see the image's own, frame by frame and row by row; the rest always runs.

    A video has frames above 1; an editing model has reference tokens before or after the image in its argument.
    """

    rows: int
    columns: int
    frames: int = 1
    text: int = 0
    """Text tokens of a joint sequence."""
    before: int = 0
    """Reference tokens that precede the image in its argument."""
    after: int = 0
    """Reference tokens that follow it."""

    @property
    def tokens(self) -> int:
        """N, the image's own."""
        return self.frames * self.rows * self.columns

    @property
    def reference(self) -> int:
        return self.before + self.after

    def alone(self) -> Layout:
        """The same without reference tokens."""
        return replace(self, before=0, after=0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the grid; methods that need one ask for it here."""
        return self.frames, self.rows, self.columns

    @property
    def grid(self) -> tuple[int, int]:
        """Frames under each other: rows and columns of one tall picture of all tokens."""
        return self.frames * self.rows, self.columns

    def places(self, device: torch.device) -> Tensor:
        """Frame, row and column of every token: (N, 3)."""
        axes = [torch.arange(length, device=device) for length in self.shape]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2).float()

    def windows(self, cell: tuple[int, int] = (2, 2), device: torch.device = HOST) -> Windows:
        """Cells of (rows, columns) tokens."""
        return _windows(self.shape, cell, device)


@dataclass(frozen=True)
class Scattered(Layout):
    """Tokens on no grid, such as a part of one or several joined: one long row, which has no neighbours."""

    @property
    def shape(self) -> tuple[int, int, int]:
        raise ValueError(
            f"the position ids of these {self.tokens} tokens describe no grid, whose rows and columns this method "
            "needs; Shiva, Sweep and the other methods that rank tokens one by one do without"
        )


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _windows(shape: tuple[int, int, int], cell: tuple[int, int], device: torch.device) -> Windows:
    frames, rows, columns = shape
    down, across = rows // cell[0], columns // cell[1]
    if not down * across:
        raise ValueError(f"a {rows}x{columns} grid holds no whole {cell[0]}x{cell[1]} cell; use smaller cells")
    positions = torch.arange(frames * rows * columns, device=HOST).view(shape)
    covered = positions[:, : down * cell[0], : across * cell[1]]
    members = covered.reshape(frames, down, cell[0], across, cell[1]).transpose(2, 3)
    right, below = positions[:, : down * cell[0], across * cell[1] :], positions[:, down * cell[0] :]
    outside = torch.cat([right.flatten(), below.flatten()]).sort().values
    return Windows(members.reshape(frames * down * across, -1).to(device), outside.to(device))


# -- a prediction, token by token: pictures (B, C, H, W), clips (B, C, F, H, W) or tokens (B, N, C) --------------


def given_frames(clip: Tensor, layout: Layout) -> int:
    """How many frames of a clip (B, C, F, H, W) precede those that are the image's own."""
    given = layout.before // (layout.rows * layout.columns)
    return clip.shape[2] * given // (given + layout.frames)


def to_tokens(prediction: Tensor, layout: Layout) -> Tensor:
    """A prediction as (B, N, features): what a token's patch holds, references left out."""
    if prediction.ndim == 3:
        return prediction[:, layout.before : layout.before + layout.tokens]
    clip = prediction[:, :, None] if prediction.ndim == 4 else prediction  # (B, C, F, H, W)
    clip = clip[:, :, given_frames(clip, layout) :]
    batch, channels, *sizes = clip.shape
    counts = layout.shape
    cut = [part for size, count in zip(sizes, counts, strict=True) for part in (count, size // count)]
    patches = clip.reshape(batch, channels, *cut)  # (B, C, f, pf, h, ph, w, pw)
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, layout.tokens, -1)


def to_prediction(tokens: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """The reverse of `to_tokens`, in the form of another prediction, whose references stay."""
    if like.ndim == 3:
        after = like[:, layout.before + layout.tokens :]
        return torch.cat([like[:, : layout.before], tokens, after], dim=1) if layout.reference else tokens
    clip = like[:, :, None] if like.ndim == 4 else like  # (B, C, F, H, W)
    given, own = clip.tensor_split([given_frames(clip, layout)], dim=2)
    patch = [size // count for size, count in zip(own.shape[2:], layout.shape, strict=True)]
    cut = tokens.view(tokens.shape[0], *layout.shape, like.shape[1], *patch)  # (B, f, h, w, C, pf, ph, pw)
    made = cut.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(own.shape)
    return torch.cat([given, made], dim=2).view(like.shape) if given.shape[2] else made.view(like.shape)


def token_mask(mask: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """A mask (B, N) over tokens as one over a prediction; its references count as masked."""
    if like.ndim == 3:
        return F.pad(mask, (layout.before, layout.after), value=True)[..., None]
    clip = like[:, :, None] if like.ndim == 4 else like  # (B, C, F, H, W)
    given = given_frames(clip, layout)
    grid = mask.view(mask.shape[0], 1, *layout.shape).float()
    spread = F.interpolate(grid, size=(clip.shape[2] - given, *clip.shape[3:]), mode="nearest") > 0
    spread = F.pad(spread, (0, 0, 0, 0, given, 0), value=True)
    return spread if like.ndim == 5 else spread[:, :, 0]
