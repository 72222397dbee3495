"""The fill of few steps: a small regression of each layer, and what computed neighbours tell beyond it.

It serves runs of any length from their first step on. `shiva fit` solves the regressions from a few dense runs; before
that they add nothing, and the neighbours' mean update is what is left.

What a regression misses of a token changes slowly from step to step. With `recall` its estimate begins with what was
missed of it before, and the neighbours tell how that has changed:

    fill_i = lin(x_i) + m_i + sum_j w_ij (update_j - lin(x_j) - m_j),   m = recall * missed at the step before

which keeps one tensor a span. After the last span tokens hardly differ from what they were there a step before, and
what they were has no noise of its own. So with `steady` a share of the estimate is that they become it again, but for
what computed neighbours tell: pictures get less grain. It keeps one tensor. Without both nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Place
from shiva.core.options import Count, Positive, Share, Whole
from shiva.core.reduction import Reduction
from shiva.methods.fills import FILLS, Fill, FillOptions, FillRun
from shiva.ops.fill import FillFrom, filled
from shiva.ops.shortcut import (
    SPREAD,
    Estimate,
    Lin,
    Parts,
    Places,
    Recalling,
    Shortcut,
    fill_updates,
    places_of,
    reach,
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
    recall: Share = 0.0
    """Share of what the regression missed of a token at the step before that its estimate begins with."""
    steady: Share = 0.0
    """In the last span, share of the estimate that is what the token was there at the step before."""
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
        estimates = config.parts in ("lin", "both")
        self.recalls, self.steadies = config.recall > 0 and estimates, config.steady > 0 and estimates
        self.carries = self.recalls or self.steadies

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

    # -- what is recalled ----------------------------------------------------------------------------

    def recalling(self, x: Tensor, layer: int, ctx: StepContext) -> Estimate:
        """The estimate of tokens x (B, N, D) at a layer, before any neighbour is asked."""
        lin, config = self.lin(layer, ctx), self.config
        if not (self.recalls or self.ends(layer, ctx)):
            return lin
        run: FillRun = ctx.run
        missed = same_tokens(run.missed.get((layer, ctx.branch)), x)
        ended = same_tokens(run.ended.get(ctx.branch), x) if self.ends(layer, ctx) else None
        return Recalling(lin, missed, config.recall, ended, config.steady)

    def ends(self, layer: int, ctx: StepContext) -> bool:
        """Whether a layer is of the last span, and what that makes of tokens is kept."""
        return self.steadies and ctx.now.spans[layer] == ctx.now.spans[max(ctx.now.spans)]

    def noting(self, reduction: Reduction, estimate: Estimate, layer: int, ctx: StepContext) -> Reduction:
        """The reduction, which leaves what was missed, and what tokens became, to the step after."""
        if not isinstance(estimate, Recalling):
            return reduction

        def restore(values: Tensor, base: Tensor) -> Tensor:
            restored = reduction.restore(values, base)
            if self.recalls:
                ctx.run.missed[layer, ctx.branch] = estimate.missed(restored, base)
            if self.ends(layer, ctx):
                ctx.run.ended[ctx.branch] = restored.detach()
            return restored

        return replace(reduction, restore=restore)

    def refresh(self, out: Tensor, base: Tensor, site: Place, ctx: StepContext) -> None:
        super().refresh(out, base, site, ctx)
        if ctx.ends_run:
            return
        run, span = ctx.run, ctx.now.spans[site.layer]
        if self.recalls and site.layer == span.start:
            run.begun[ctx.branch] = base
        if site.layer < span[-1]:
            return
        if self.recalls:
            begun = run.begun.pop(ctx.branch)
            run.missed[span.start, ctx.branch] = (out - begun - self.lin(span.start, ctx)(begun)).detach()
        if self.ends(site.layer, ctx):
            run.ended[ctx.branch] = out.detach()

    # -- the fill ------------------------------------------------------------------------------------

    def of(self, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        config = self.config
        estimate, places = self.recalling(x, site.layer, ctx), self.places(indices, ctx)
        made = shortcut_fill(indices, x, estimate, ctx.layout.shape, config.spread, config.parts, places)
        return made if ctx.ends_run else self.noting(made, estimate, site.layer, ctx)

    def from_selected(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> FillFrom | None:
        return self.told_by(indices, x, self.recalling(x, layer, ctx), ctx)

    def told_by(self, indices: Tensor, x: Tensor, estimate: Estimate, ctx: StepContext) -> FillFrom:
        """What each token would get if it were skipped, from the updates of those at indices (B, k)."""
        shape, spread, parts = ctx.layout.shape, self.config.spread, self.config.parts
        return lambda updates: fill_updates(updates, x, indices, estimate, shape, spread, parts)

    def trained(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> Reduction:
        estimate = self.recalling(x, layer, ctx)
        made = filled(indices, x.shape[1], self.told_by(indices, x, estimate, ctx))
        return self.noting(made, estimate, layer, ctx)

    def flops(self, counts: Sequence[float], layout: Layout) -> float:
        (_, _, width, rank), parts, tokens = self.weights.down.shape, self.config.parts, layout.tokens
        around = math.prod(2 * far + 1 for far in reach(layout.shape)) if parts in ("neighbours", "both") else 0
        reduced = (count for count in counts if count < tokens)
        return sum(shortcut_flops(tokens, count, width, rank, around) for count in reduced)


def same_tokens(kept: Tensor | None, x: Tensor) -> Tensor | None:
    """What was kept of tokens, if it is of as many as x."""
    return kept if kept is not None and kept.shape == x.shape else None


FILLS["shortcut"] = ShortcutFill
