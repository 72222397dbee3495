"""One way to make randomness: a generator of a seed and the place where it is used."""

from __future__ import annotations

import torch


def seeded(seed: int, *places: int) -> torch.Generator:
    """The randomness of one place, such as a step: the same for every sample, guidance branch and device."""
    for place in places:
        seed = seed * 1_000_003 + place
    return torch.Generator().manual_seed(seed)
