"""Trace: which tokens each layer ran on and how they scored, for pictures of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """What one sampling run chose, by (step, layer); a new run starts it afresh. Layers that ran dense are absent.

    Rows of the batch are the transformer's: under batched guidance its second half is the prompt's own (DiT's
    first). Under sequential guidance the last call of a step is what stays.
    """

    grid: tuple[int, int] = (0, 0)
    """Rows and columns; the frames of a video lie under each other."""
    layers: int = 0
    timesteps: dict[int, float] = field(default_factory=dict)
    """Of each step seen so far."""
    positions: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)  # (K,) of each sample
    scores: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (B, N)
    """Of the methods that score tokens."""

    def begin(self, step: int, timestep: float, grid: tuple[int, int], layers: int, fresh: bool) -> None:
        """A transformer call starts; `fresh` if it is the first of a sampling run."""
        if fresh:
            self.timesteps, self.positions, self.scores = {}, {}, {}
        self.grid, self.layers = grid, layers
        self.timesteps[step] = timestep

    def note(self, step: int, layer: int, positions: Tensor, batch: int) -> None:
        """A layer runs on positions (B, K) of a batch, or on rows (1, M) of it flattened."""
        if len(positions) == batch:
            self.positions[step, layer] = tuple(positions)
        else:
            rows, tokens = positions[0], math.prod(self.grid)
            self.positions[step, layer] = tuple(rows[rows // tokens == sample] % tokens for sample in range(batch))

    def mask(self, step: int, layer: int, row: int = -1) -> Tensor:
        """Which tokens (rows, columns) of one sample a layer ran on; all of them where it ran dense."""
        if not self.timesteps:
            raise ValueError("nothing was run; call the pipeline inside `with session.trace() as trace:`")
        if step not in self.timesteps or not 0 <= layer < self.layers:
            raise ValueError(
                f"step {step}, layer {layer} was not run; steps are {sorted(self.timesteps)}, layers 0 to "
                f"{self.layers - 1}"
            )
        chosen = self.positions.get((step, layer))
        if chosen is None:
            return torch.ones(self.grid, dtype=torch.bool)
        mask = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.bool)
        mask[chosen[row].cpu()] = True
        return mask.view(self.grid)

    def masks(self, row: int = -1) -> Tensor:
        """All masks of one sample: (steps, layers, rows, columns)."""
        return torch.stack(
            [torch.stack([self.mask(step, layer, row) for layer in range(self.layers)]) for step in self.timesteps]
        )

    def score_map(self, step: int, layer: int, row: int = -1) -> Tensor:
        """Scores (rows, columns) of one sample's tokens."""
        if (step, layer) not in self.scores:
            raise ValueError(f"step {step}, layer {layer} scored no tokens; pass a reduced layer of a scoring method")
        return self.scores[step, layer][row].float().cpu().view(self.grid)

    def keep(self) -> Tensor:
        """Share of tokens kept (steps, layers)."""
        return self.masks().float().mean(dim=(-2, -1))
