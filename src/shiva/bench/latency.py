"""Timing as ratios: configurations take turns, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Timing:
    """Seconds of one configuration, one entry per round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def interleave(
    calls: Mapping[str, Callable[[], Callable[[], Any]]],
    rounds: int = 5,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time each configuration once per round, in turn. Each entry prepares itself and returns the timed call."""
    timings = {name: Timing() for name in calls}
    for round_ in range(warmup + rounds):
        for name, prepare in calls.items():
            call = prepare()
            seconds = timed(call)
            if round_ >= warmup:
                timings[name].seconds.append(seconds)
            progress(name)
    return timings
