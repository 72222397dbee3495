"""A probe of the first block: from how a token looks now, and how it looked when it last ran, how far its prediction
is off if it does not run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.ops import seeded

FEATURES = 32
"""Directions in which a token is looked at: enough to tell how far it moved, and a quarter or less of its width."""


@functools.lru_cache(maxsize=16)
def directions(width: int) -> Tensor:
    """Random orthonormal columns (D, r), the same for every run: lengths are kept up to a common factor."""
    drawn = torch.randn(width, min(FEATURES, width), generator=seeded(0, width), device="cpu")
    basis = torch.linalg.qr(drawn).Q
    return F.pad(basis, (0, FEATURES - basis.shape[1]))


def in_few(x: Tensor, basis: Tensor | None = None) -> Tensor:
    """x (B, N, D) in few directions: (B, N, r); `basis` is theirs on the device, where it is at hand."""
    return x.float() @ (directions(x.shape[-1]).to(x.device) if basis is None else basis)


def look(x: Tensor, basis: Tensor | None = None) -> Tensor:
    """How tokens x (B, N, D) look: (B, N, r)."""
    return in_few(F.layer_norm(x.float(), x.shape[-1:]), basis)


def distance(change: Tensor) -> Tensor:
    """Log length of a change (..., r)."""
    return change.float().norm(dim=-1).clamp(min=1e-6).log()


class Probe(nn.Module):
    """Guesses the log of how far a token's prediction moved since it last ran."""

    def __init__(self, hidden: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * FEATURES + 4, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, now: Tensor, change: Tensor, age: Tensor, sigma: float | Tensor) -> Tensor:
        """Looks (..., r), their change, steps waited (...) and the noise level -> (...)."""
        moved = distance(change)[..., None]
        waited = (age[..., None] + 1).log()
        level = torch.as_tensor(sigma, dtype=moved.dtype, device=moved.device).expand(age.shape)[..., None]
        return self.layers(torch.cat([now, change, moved, waited, level, level * waited], dim=-1)).squeeze(-1)


# -- its regression --------------------------------------------------------------------------------------

LONGEST = 6
"""Steps of waiting that the regression sees."""
SHARE = 4
"""Of so many tokens one is taken of each wait: neighbours tell the same."""
BATCH = 4096
"""Waits in an update."""


class Moves(NamedTuple):
    """Waits of tokens in dense runs: how they looked, and how far what they would have held was off."""

    now: Tensor  # (M, r)
    change: Tensor  # (M, r)
    age: Tensor  # (M,)
    sigma: Tensor  # (M,)
    target: Tensor  # (M,), log distance

    @classmethod
    def of(
        cls, looks: Sequence[Tensor], totals: Sequence[Tensor], levels: Sequence[float], generator: torch.Generator
    ) -> Moves:
        """Every wait of up to `LONGEST` steps in one run; looks and totals (B, N, r), one a step."""
        parts = []
        for later in range(1, len(looks)):
            for earlier in range(max(0, later - LONGEST), later):
                now, change = looks[later].flatten(0, 1), (looks[later] - looks[earlier]).flatten(0, 1)
                off = distance((totals[later] - totals[earlier]).flatten(0, 1))
                order = torch.randperm(len(now), generator=generator, device="cpu")
                some = order[: max(1, len(now) // SHARE)].to(now.device)
                age, sigma = torch.full_like(off[some], later - earlier - 1), torch.full_like(off[some], levels[later])
                parts.append(cls(now[some], change[some], age, sigma, off[some]))
        return cls.join(parts)

    @classmethod
    def join(cls, parts: Sequence[Moves]) -> Moves:
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def at(self, places: Tensor) -> Moves:
        return Moves(*(column[places] for column in self))


def explained(guess: Tensor, target: Tensor) -> float:
    """Share of the target's variance that a guess explains, up to a common factor and constant."""
    return float(torch.corrcoef(torch.stack([guess, target]))[0, 1] ** 2)


@torch.enable_grad()
def regress(probe: Probe, fitted: Moves, held: Moves, updates: int, generator: torch.Generator) -> tuple[float, float]:
    """Fit a probe by Adam; what it explains of the held-out waits, and what the moved look alone does."""
    probe.requires_grad_(True)
    mean = fitted.target.mean()
    optimizer = torch.optim.Adam(probe.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(updates):
        drawn = torch.randint(len(fitted.target), (BATCH,), generator=generator, device="cpu")
        batch = fitted.at(drawn.to(mean.device))
        loss = (probe(batch.now, batch.change, batch.age, batch.sigma) - (batch.target - mean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    probe.requires_grad_(False)
    with torch.no_grad():
        guess = probe(held.now, held.change, held.age, held.sigma)
    return explained(guess, held.target), explained(distance(held.change), held.target)
