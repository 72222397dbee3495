"""FLOPs of a call, counted by torch itself, and the polynomial that prices any number of kept tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


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


def total(flops: Iterable[Flops]) -> Flops:
    return sum(flops, ZERO)


class AttentionCounter(TorchFunctionMode):
    """FLOPs of attention by its shapes, as it is asked for, and what torch counted meanwhile.

    Below that level nothing is sure: a fused CPU kernel counts as nothing, a meta one as batched products,
    and a linear layer on a strided input as a batched product too.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counter = counter
        self.flops = 0.0
        self.counted = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3]
        self.flops += sdpa_flop_count(query.shape, key.shape, value.shape)
        before = self.counter.get_total_flops()
        result = func(*args, **kwargs)
        self.counted += self.counter.get_total_flops() - before
        return result


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], Flops]]:
    """Counts what runs inside this context; what it gives says how much it is so far."""
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(False), torch.no_grad(), counter, AttentionCounter(counter) as attention:
        yield lambda: Flops(counter.get_total_flops() - attention.counted, attention.flops)


def count(call: Callable[[], Any]) -> Flops:
    """FLOPs of what `call` runs; on meta or fake tensors nothing is computed."""
    with counting() as so_far:
        call()
    return so_far()


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
    own: Callable[[Sequence[float]], Flops] = field(default=lambda counts: ZERO, compare=False, repr=False)
    """What the method itself spends at these counts."""

    def step(self, counts: Sequence[float]) -> Flops:
        total = self.outside + self.own(counts)
        for cost, kept in zip(self.layers, counts, strict=True):
            total = total + cost(kept)
        return total

    @property
    def dense(self) -> Flops:
        return self.step([self.tokens] * len(self.layers))

    def share(self, table: Sequence[Sequence[float]]) -> float:
        """True FLOPs of a [steps][layers] table of counts, as a share of the dense run's."""
        return sum(self.step(row).true for row in table) / (len(table) * self.dense.true)
