"""Differences of two contenders on the same prompts and noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Differences of a contender to a reference, one a pair; positive where the contender's value is larger."""

    count: int
    mean: float
    deviation: float
    """Of the single differences; NaN for a single one."""
    wins: float
    """Share of pairs in which the contender is better than the reference; ties count half."""

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.count)

    @classmethod
    def of(cls, values: Sequence[float], reference: Sequence[float], higher: bool) -> Paired:
        """Of values against the reference's, in the same order; `higher` says which direction is better."""
        gaps = [a - b for a, b in zip(values, reference, strict=True)]
        better = [gap if higher else -gap for gap in gaps]
        wins = sum((gap > 0) + 0.5 * (gap == 0) for gap in better) / len(gaps)
        return cls(len(gaps), statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else math.nan, wins)

    def to_dict(self) -> dict[str, float | None]:
        told = {"count": self.count, "mean": self.mean, "deviation": self.deviation, "error": self.error}
        return {name: None if math.isnan(value) else value for name, value in {**told, "wins": self.wins}.items()}

    def __str__(self) -> str:
        return f"{self.mean:+.3g}" if math.isnan(self.error) else f"{self.mean:+.3g} ± {self.error:.2g}"
