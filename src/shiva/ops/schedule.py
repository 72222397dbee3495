"""RatioSchedule: the ratio policy as a look-up table over [steps, layers], which inference reads alone.

`allocate` makes such a table from measured errors, by dynamic programming.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shiva.core.cost import CostModel
from shiva.core.options import share
from shiva.ops.networks import RatioPolicy
from shiva.ops.topk import token_count

GRID = tuple(float(t) for t in range(1000, -1, -1))
"""Timesteps a policy is tabulated at by default: its fastest sinusoid turns once in six of them."""

LARGEST_LOGIT = 30.0


@dataclass(frozen=True)
class RatioSchedule:
    """Keep ratios sigmoid(logits + bias) by timestep and layer; dense layers are not reduced at all.

    Every operation returns a new schedule. The mean keep is over the reduced layers and all steps.
    """

    timesteps: tuple[float, ...]
    """In the scheduler's units (1000 is noise) and its order."""
    logits: Tensor
    """(steps, layers), float64."""
    bias: float = 0.0
    dense: frozenset[int] = field(default_factory=lambda: frozenset({0}))
    """Layers that are never reduced; the paper bypasses the first block."""

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or not self.logits.numel():
            raise ValueError(f"the table is of shape {tuple(self.logits.shape)}; give it (steps, layers)")
        if self.logits.shape[0] != len(self.timesteps):
            raise ValueError(
                f"the table has {self.logits.shape[0]} rows for {len(self.timesteps)} timesteps; they must agree"
            )
        if not all(map(math.isfinite, self.timesteps)) or self.logits.isnan().any() or math.isnan(self.bias):
            raise ValueError("the table holds NaN, or a timestep that is not finite; compile it again")
        outside = [layer for layer in self.dense if not 0 <= layer < self.layers]
        if outside:
            raise ValueError(f"dense names layer {outside[0]}, but the table has {self.layers}; count from 0")
        if not self.reduced:
            raise ValueError(f"all {self.layers} layers are dense; leave at least one to be reduced")

    @classmethod
    def flat(cls, keep: float, layers: int, dense: Sequence[int] = (0,)) -> RatioSchedule:
        """The same ratio at every reduced layer and step."""
        logits = torch.zeros(1, layers, dtype=torch.float64, device="cpu")
        return cls((1000.0,), logits, dense=frozenset(dense)).shift(keep)

    @classmethod
    @torch.no_grad()
    def compile(
        cls, policy: RatioPolicy, timesteps: Sequence[float] = GRID, dense: Sequence[int] = (0,)
    ) -> RatioSchedule:
        """Tabulate a policy at the timesteps of a scheduler; without any, on a grid fit for all of them."""
        rows = torch.tensor(list(timesteps), dtype=torch.float32, device=policy.anchor.device)
        return cls(tuple(rows.tolist()), policy.logits(rows).double().cpu(), dense=frozenset(dense))

    @property
    def layers(self) -> int:
        return self.logits.shape[1]

    @property
    def reduced(self) -> list[int]:
        return [layer for layer in range(self.layers) if layer not in self.dense]

    def ratios(self) -> Tensor:
        """Keep ratios (steps, layers); 1 at dense layers."""
        ratios = torch.sigmoid(self.logits + self.bias)
        ratios[:, sorted(self.dense)] = 1.0
        return ratios

    @property
    def mean_keep(self) -> float:
        return float(self.ratios()[:, self.reduced].mean())

    def counts(self, tokens: int) -> list[list[int]]:
        """Tokens kept (steps, layers) of N: floor(N * r), at least 1."""
        return [[token_count(r, tokens) for r in row] for row in self.ratios().tolist()]

    def resample(self, timesteps: Sequence[float]) -> RatioSchedule:
        """The same schedule at other timesteps, logits interpolated linearly in time."""
        order = sorted(range(len(self.timesteps)), key=self.timesteps.__getitem__)
        known = [self.timesteps[i] for i in order]
        rows = []
        for t in timesteps:
            right = min(max(bisect_left(known, t), 1), len(known) - 1) if len(known) > 1 else 0
            left = max(right - 1, 0)
            span = known[right] - known[left]
            weight = min(max((t - known[left]) / span, 0.0), 1.0) if span else 0.0
            rows.append(torch.lerp(self.logits[order[left]], self.logits[order[right]], weight))
        return replace(self, timesteps=tuple(float(t) for t in timesteps), logits=torch.stack(rows))

    def tilted(self, amount: float) -> RatioSchedule:
        """The same mean keep, with the first step's logits above the last one's by `amount` more."""
        if not amount or len(self.timesteps) == 1:
            return self
        slope = amount * torch.linspace(0.5, -0.5, len(self.timesteps), dtype=torch.float64, device="cpu")
        return replace(self, logits=self.logits + slope[:, None]).shift(self.mean_keep)

    def shift(
        self, budget: float | None = None, *, flops: float | None = None, cost: CostModel | None = None
    ) -> RatioSchedule:
        """The one bias that brings the mean keep to `budget`, or the true FLOPs to a share of dense.

        The shape of the schedule stays: more budget moves every logit by the same amount.
        """
        if (budget is None) == (flops is None):
            raise ValueError("pass either a budget (mean keep) or flops (share of dense FLOPs), not both")
        if budget is not None:
            target = share("budget", budget)
            return self._solve(lambda schedule: schedule.mean_keep, target)
        assert flops is not None
        if cost is None:
            raise ValueError("flops= needs cost=, the prices of this model's layers: session.cost_model()")
        target, lowest = share("flops", flops), self.lowest_share(cost)
        if target < lowest:
            raise ValueError(
                f"flops={flops} cannot be reached: with every reduced layer empty {lowest:.3f} of the dense FLOPs "
                "remain; pass more, or let fewer layers be dense"
            )
        return self._solve(lambda schedule: schedule.flops_share(cost), target)

    def flops_share(self, cost: CostModel) -> float:
        """True FLOPs as a share of dense, where a share of a token costs its share."""
        return cost.share((self.ratios() * cost.tokens).tolist())

    def lowest_share(self, cost: CostModel) -> float:
        """What remains of the dense FLOPs with every reduced layer empty."""
        return replace(self, bias=-LARGEST_LOGIT - float(self.logits.max())).flops_share(cost)

    def _solve(self, measure: Callable[[RatioSchedule], float], target: float) -> RatioSchedule:
        low = -LARGEST_LOGIT - float(self.logits.max())
        high = LARGEST_LOGIT - float(self.logits.min())
        if target >= 1.0:
            return replace(self, bias=math.inf)
        for _ in range(80):
            middle = (low + high) / 2
            if measure(replace(self, bias=middle)) < target:
                low = middle
            else:
                high = middle
        return replace(self, bias=(low + high) / 2)

    def bucket(self, multiple: int, tokens: int) -> list[list[int]]:
        """Counts rounded to a multiple, such that the total stays that of the exact ratios; a ratio of 1 keeps all.

        Each count takes the multiple below; the largest remainders are then rounded up until the sum is met.
        """
        if multiple < 1 or multiple > tokens:
            raise ValueError(f"multiple={multiple} must be between 1 and the {tokens} image tokens")
        ratios = self.ratios()[:, self.reduced]
        exact, whole = ratios * tokens / multiple, ratios >= 1
        ceiling = tokens // multiple
        below = torch.where(whole, exact, exact.floor().clamp(1, ceiling))
        missing = round(float(exact.sum() - below.sum()))
        remainders = (exact - below).masked_fill(whole | (below >= ceiling), -1.0).flatten()
        raise_at = remainders.argsort(descending=True, stable=True)[: max(missing, 0)]
        raised = below.flatten()
        raised[raise_at[remainders[raise_at] > 0]] += 1
        counts = torch.full(self.logits.shape, tokens, dtype=torch.long, device="cpu")
        counts[:, self.reduced] = (raised.view_as(below) * multiple).round().long()
        return counts.tolist()

    def row(self, timestep: float) -> int:
        """Index of the row nearest to a timestep; the first where it is not known."""
        if timestep != timestep:
            return 0
        return min(range(len(self.timesteps)), key=lambda i: abs(self.timesteps[i] - timestep))

    def state(self) -> dict[str, Tensor]:
        """Tensors for a safetensors file."""
        return {
            "timesteps": torch.tensor(self.timesteps, dtype=torch.float64, device="cpu"),
            "logits": self.logits.clone(),
            "bias": torch.tensor(self.bias, dtype=torch.float64, device="cpu"),
            "dense": torch.tensor(sorted(self.dense), dtype=torch.long, device="cpu"),
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RatioSchedule:
        """The reverse of `state`, refusing what is not a table."""
        for name, dimensions in (("timesteps", 1), ("logits", 2), ("bias", 0), ("dense", 1)):
            if name not in state or state[name].ndim != dimensions:
                found = f"shape {tuple(state[name].shape)}" if name in state else "nothing"
                raise ValueError(f"the table has {found} for {name}, which has {dimensions} dimensions; save it again")
        if state["dense"].is_floating_point() or state["dense"].dtype == torch.bool:
            raise ValueError(f"the table's dense is {state['dense'].dtype}; save the layers as whole numbers")
        return cls(
            tuple(state["timesteps"].double().tolist()),
            state["logits"].double(),
            float(state["bias"]),
            frozenset(state["dense"].tolist()),
        )


# -- sharing out a budget by measured errors ----------------------------------------------------------

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
