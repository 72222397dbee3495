"""Functions and thin modules that methods are made of."""

from __future__ import annotations

import torch


def seeded(seed: int, *places: int) -> torch.Generator:
    """A method's randomness: that of a place, such as a step, is the same for every sample and device."""
    for place in places:
        seed = seed * 1_000_003 + place
    return torch.Generator("cpu").manual_seed(seed % 2**63)
