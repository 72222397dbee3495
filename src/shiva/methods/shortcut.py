"""The fill of few steps: a small regression of each layer, and what computed neighbours tell beyond it.

It keeps nothing from step to step, so it serves runs of any length from their first step on. `shiva fit` solves the
regressions from a few dense runs; before that they add nothing, and the neighbours' mean update is what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Place
from shiva.core.options import Count, Positive, Whole
from shiva.core.reduction import Reduction
from shiva.methods.fills import FILLS, Fill, FillOptions
from shiva.ops.fill import FillFrom
from shiva.ops.shortcut import (
    SPREAD,
    Lin,
    Parts,
    Places,
    Shortcut,
    fill_updates,
    places_of,
    shortcut_fill,
    shortcut_flops,
)


@dataclass(frozen=True)
class ShortcutOptions(FillOptions):
    """Options of `fill="shortcut"`."""

    rank: Count = 32
    """Rank of each layer's regression."""
    degree: Whole = 1
    """Highest power of the noise level in the regression; 0 knows nothing of it."""
    spread: Positive = SPREAD
    """Deviation, in tokens, of the weights of computed neighbours."""
    parts: Parts = "both"
    """What a skipped token gets: both, or for ablations lin, neighbours, mean (of all computed) or identity."""

    fixed: ClassVar = frozenset({"rank", "degree", "span"})
    fills: ClassVar = (*FillOptions.fills, "shortcut")


class ShortcutFill(Fill):
    """A regression on the token's own value, and the residual of computed neighbours."""

    config: ShortcutOptions
    weights: Shortcut

    def __init__(self, config: ShortcutOptions, spec: BackboneSpec, tracks_age: bool = False):
        super().__init__(config, spec, tracks_age)
        self.weights = Shortcut(spec.layers, spec.width, min(config.rank, spec.width), config.degree)
        self._places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def begin_step(self, ctx: StepContext) -> None:
        """All layers at once, unless training may run some of them again."""
        if ctx.sigma is not None and not torch.is_grad_enabled():
            ctx.now.lins = self.weights.all_at(ctx.sigma)

    def lin(self, layer: int, ctx: StepContext) -> Lin:
        assert ctx.sigma is not None
        return self.weights.at(layer, ctx.sigma) if ctx.now.lins is None else ctx.now.lins[layer]

    def places(self, indices: Tensor, ctx: StepContext) -> Places:
        """Those of indices that come again are kept as long as the indices are."""
        shape, spread, parts = ctx.layout.shape, self.config.spread, self.config.parts
        if ctx.now.settled is None or torch.compiler.is_compiling():
            return places_of(indices, shape, spread, parts)
        if indices not in self._places:
            with torch.inference_mode(False):
                made = places_of(indices, shape, spread, parts)
                self._places[indices] = made._replace(computed=made.computed.clone())  # a view would hold its key
        return self._places[indices]

    def of(self, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        config = self.config
        lin, places = self.lin(site.layer, ctx), self.places(indices, ctx)
        return shortcut_fill(indices, x, lin, ctx.layout.shape, config.spread, config.parts, places)

    def from_selected(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> FillFrom | None:
        lin, config = self.lin(layer, ctx), self.config
        return lambda updates: fill_updates(updates, x, indices, lin, ctx.layout.shape, config.spread, config.parts)

    def flops(self, counts: Sequence[float], tokens: int) -> float:
        _, _, width, rank = self.weights.down.shape
        reduced = (count for count in counts if count < tokens)
        return sum(shortcut_flops(tokens, count, width, rank) for count in reduced)


FILLS["shortcut"] = ShortcutFill
