"""FLOPs of a call, counted by torch itself, and the polynomial that prices any number of kept tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

ATTENTION_OPS = ("scaled_dot_product", "bmm", "baddbmm")


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one call, split as the paper's column needs it."""

    linear: float
    attention: float

    @property
    def true(self) -> float:
        return self.linear + self.attention

    @property
    def paper(self) -> float:
        """The paper's convention: linear layers as multiply-accumulates, attention as FLOPs."""
        return self.linear / 2 + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.attention + other.attention)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.linear - other.linear, self.attention - other.attention)

    def scaled(self, factor: float) -> Flops:
        return Flops(self.linear * factor, self.attention * factor)


ZERO = Flops(0.0, 0.0)


def count(call: Callable[[], Any]) -> Flops:
    """FLOPs of what `call` runs; on meta or fake tensors nothing is computed."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    linear = attention = 0.0
    for op, flops in counter.get_flop_counts().get("Global", {}).items():
        if any(name in str(op) for name in ATTENTION_OPS):
            attention += flops
        else:
            linear += flops
    return Flops(linear, attention)


@dataclass(frozen=True)
class SiteCost:
    """FLOPs of one site as a function of its image tokens: constant + slope * k + curve * k^2, exactly."""

    constant: Flops
    slope: Flops
    curve: Flops

    @classmethod
    def fit(cls, flops_at: Callable[[int], Flops]) -> SiteCost:
        """The parabola through three measured lengths."""
        a, b, c = flops_at(32), flops_at(64), flops_at(96)
        curve = (a - b.scaled(2) + c).scaled(1 / (2 * 32**2))
        slope = (b - a).scaled(1 / 32) - curve.scaled(96)
        constant = a - slope.scaled(32) - curve.scaled(32**2)
        return cls(constant, slope, curve)

    def __call__(self, tokens: float) -> Flops:
        return self.constant + self.slope.scaled(tokens) + self.curve.scaled(tokens**2)


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a whole step in which layer l runs on counts[l] of N image tokens."""

    outside: Flops
    """Embedding, output and everything else that always sees all tokens."""
    layers: tuple[SiteCost, ...]
    tokens: int

    def step(self, counts: Sequence[float]) -> Flops:
        total = self.outside
        for cost, kept in zip(self.layers, counts, strict=True):
            total = total + cost(kept)
        return total

    @property
    def dense(self) -> Flops:
        return self.step([self.tokens] * len(self.layers))

    def share(self, table: Sequence[Sequence[float]]) -> float:
        """True FLOPs of a [steps][layers] table of counts, as a share of the dense run's."""
        return sum(self.step(row).true for row in table) / (len(table) * self.dense.true)
