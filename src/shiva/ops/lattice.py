"""Which tokens to compute when nothing is known of them: evenly over the grid, and each in its turn.

Ordered dither (Bayer, 1973) answers the first: its matrix numbers a grid so that the first k numbers, for every k,
lie evenly. The golden ratio answers the second: turned by it from layer to layer, no token waits long.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

Shape = tuple[int, int, int]
"""Frames, rows and columns of the image tokens; an image has one frame."""

GOLDEN = (math.sqrt(5) - 1) / 2


@functools.lru_cache(maxsize=64)
def lattice_ranks(shape: Shape, device: torch.device | None = None) -> Tensor:
    """Place of every token in the Bayer order of the grid: (N,), a permutation of 0 to N - 1.

    A token's lowest coordinate bits are its rank's highest digits: which corner of the 2x2x2 cell it is, then which
    corner of the 4x4x4 cell, and so on. Corners go by parity first, so that the first half is a checkerboard; in a
    single frame this is Bayer's matrix. Other sizes than powers of two are cut out of the next larger one.
    """
    axes = (torch.arange(length) for length in shape)
    frame, row, column = torch.meshgrid(*axes, indexing="ij")
    order = torch.zeros(shape, dtype=torch.long)
    for level in range((max(shape) - 1).bit_length()):
        f, r, c = ((place >> level) & 1 for place in (frame, row, column))
        order = order * 8 + 4 * (f ^ r ^ c) + 2 * (f ^ r) + f
    ranks = torch.empty(order.numel(), dtype=torch.long)
    ranks[order.flatten().argsort()] = torch.arange(order.numel())
    return ranks.to(device)


def turned(ranks: Tensor, turns: float) -> Tensor:
    """Scores (N,) in (0, 1] of ranks (N,) that are moved on by a number of turns; the lowest rank scores highest."""
    tokens = ranks.numel()
    moved = (ranks + round(turns % 1 * tokens)) % tokens
    return 1 - moved.float() / tokens


def lattice_scores(shape: Shape, step: int, layer: int, device: torch.device | None = None) -> Tensor:
    """Scores (N,) of the grid's tokens at a layer of a step, all different; the higher is computed first.

    The ranks are turned by the golden ratio, not the pattern moved over the grid: turned, a token waits at most 4, 2
    and 2 layers at a keep of .25, .4 and .6 whatever their number (moved by whole tokens, up to 24, 16 and 8 on odd
    grids, as which corner of its cell a token is hardly changes). Any run of Bayer ranks covers as evenly as the
    first ones: at those keeps no token of a grid of even sides is farther than 1.4, 1.4 and 1 from a computed one.

    A step counts as much as a layer, so that one layer waits no longer over the steps than a step over the layers.
    Make the scores before a step begins: a compiler would make a graph for every step and layer.
    """
    return turned(lattice_ranks(shape, device), GOLDEN * (layer + step))


def cover_bonus(scores: Tensor, lattice: Tensor, weight: float) -> Tensor:
    """A router's scores (B, N), brought to unit deviation, plus a bonus by the order of the lattice (N,).

    The bonus runs from 0 to `weight` deviations, so that of tokens that score alike the lattice picks an even cover.
    """
    spread = scores.std(dim=-1, keepdim=True).clamp(min=1e-6)
    return (scores - scores.mean(dim=-1, keepdim=True)) / spread + weight * lattice.to(scores.dtype)
