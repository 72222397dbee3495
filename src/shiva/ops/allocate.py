"""Sharing out a budget: how many tokens each part of a run gets, by dynamic programming on measured errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

GRAIN = 2000
"""Parts that a budget is counted in."""


class Cell(NamedTuple):
    """A part of a run, some steps of some layers."""

    weight: float
    """Its share of what is counted; all cells have 1 together."""
    errors: tuple[tuple[float, float], ...]
    """Measured: keep ratios from the smallest to the largest, and the error at the end of the run with each."""

    def error(self, ratio: float) -> float:
        """On the line between what was measured; below the smallest it goes on."""
        pairs = list(itertools.pairwise(self.errors))
        (low, below), (high, above) = next((pair for pair in pairs if ratio <= pair[1][0]), pairs[-1])
        return below + (above - below) * (ratio - low) / (high - low)


def allocate(cells: Sequence[Cell], budget: float, ratios: Sequence[float]) -> list[float]:
    """A ratio for each cell, of least total error within a mean of `budget`, as if errors added up."""
    places = math.floor(budget * GRAIN)
    best: list[float] = [0.0] + [math.inf] * places
    chosen: list[list[int]] = []
    for cell in cells:
        prices = [round(cell.weight * ratio * GRAIN) for ratio in ratios]
        errors = [cell.error(ratio) for ratio in ratios]
        now, picks = [math.inf] * (places + 1), [-1] * (places + 1)
        for spent, error in enumerate(best):
            for pick, (price, more) in enumerate(zip(prices, errors, strict=True)):
                if error < math.inf and spent + price <= places and error + more < now[spent + price]:
                    now[spent + price], picks[spent + price] = error + more, pick
        best, chosen = now, [*chosen, picks]
    at = min(range(places + 1), key=best.__getitem__)
    if best[at] == math.inf:
        raise ValueError(f"a budget of {budget} is below the smallest ratio, {min(ratios)}; pass more")
    found: list[float] = []
    for cell, picks in zip(reversed(cells), reversed(chosen), strict=True):
        found.append(ratios[picks[at]])
        at -= round(cell.weight * ratios[picks[at]] * GRAIN)
    return found[::-1]
