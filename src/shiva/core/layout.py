"""Layout: where the image tokens of a call lie, in space, in time, and beside text and reference tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor


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

    def windows(self, cell: tuple[int, int] = (2, 2)) -> tuple[Tensor, Tensor]:
        """Cells of (rows, columns) tokens that tile each frame, (C, m), and the tokens in no whole cell, (O,)."""
        return _windows(self.shape, cell)


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
def _windows(shape: tuple[int, int, int], cell: tuple[int, int]) -> tuple[Tensor, Tensor]:
    frames, rows, columns = shape
    down, across = rows // cell[0], columns // cell[1]
    if not down * across:
        raise ValueError(f"a {rows}x{columns} grid holds no whole {cell[0]}x{cell[1]} cell; use smaller cells")
    positions = torch.arange(frames * rows * columns).view(shape)
    covered = positions[:, : down * cell[0], : across * cell[1]]
    members = covered.reshape(frames, down, cell[0], across, cell[1]).transpose(2, 3)
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[:, : down * cell[0], : across * cell[1]] = True
    return members.reshape(frames * down * across, -1), positions[~inside]
