"""A probe of the first block: from how a token looks now, and how it looked when it last ran, how far its prediction
is off if it does not run."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.ops.seeds import seeded

FEATURES = 32
"""Directions in which a token is looked at: enough to tell how far it moved, and a quarter or less of its width."""


@functools.lru_cache(maxsize=16)
def directions(width: int) -> Tensor:
    """Random orthonormal columns (D, r), the same for every run: lengths are kept up to a common factor."""
    drawn = torch.randn(width, min(FEATURES, width), generator=seeded(0, width))
    basis = torch.linalg.qr(drawn).Q
    return F.pad(basis, (0, FEATURES - basis.shape[1]))


def look(x: Tensor) -> Tensor:
    """Tokens x (B, N, D) in few directions: (B, N, r)."""
    return F.layer_norm(x.float(), x.shape[-1:]) @ directions(x.shape[-1]).to(x.device)


class Probe(nn.Module):
    """Guesses the log of how far a token's prediction moved since it last ran."""

    def __init__(self, hidden: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * FEATURES + 4, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, now: Tensor, change: Tensor, age: Tensor, sigma: float) -> Tensor:
        """Looks (B, N, r), their change, steps waited (B, N) and the noise level -> (B, N)."""
        moved = change.norm(dim=-1, keepdim=True).clamp(min=1e-6).log()
        waited = (age[..., None] + 1).log()
        level = torch.full_like(moved, sigma)
        return self.layers(torch.cat([now, change, moved, waited, level, level * waited], dim=-1)).squeeze(-1)
