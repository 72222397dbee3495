"""A span: layers in a row that run on one choice of tokens, which stay gathered between them.

Choosing, gathering and filling are paid once a span, and a regression estimates what all its layers add. Spans begin
at multiples of their length; a dense layer at the beginning of one is left out of it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shiva.core.context import Held, StepContext
from shiva.core.method import RunSite
from shiva.core.reduction import Reduction, Streams


@functools.lru_cache(maxsize=256)
def spans_of(layers: int, dense: frozenset[int], span: int) -> dict[int, range]:
    """Of each reduced layer, the layers that run on one choice with it."""
    spans: dict[int, range] = {}
    for layer in range(layers):
        if layer not in dense:
            joins = layer - 1 in spans and layer % span
            first = spans[layer - 1].start if joins else layer
            spans |= dict.fromkeys(range(first, layer + 1), range(first, layer + 1))
    return spans


def check_whole(spans: dict[int, range], layers: int, span: int) -> None:
    """Refuse dense layers in the middle or at the end of a span: a regression knows what all its layers add."""
    for layer, found in spans.items():
        end = min((layer // span + 1) * span, layers)
        if found.stop != end:
            raise ValueError(
                f"dense layer {found.stop} cuts a span of {span} in two, whose fill is fitted as a whole; leave dense "
                f"layers at the beginning of spans, such as {found.start}, or pass span=1 and fit again"
            )


def begin_span(run: RunSite, reduction: Reduction, x: Tensor, base: Tensor, first: int, ctx: StepContext) -> Streams:
    """The first layer: its tokens stay gathered."""
    ctx.now.held[first] = Held(reduction, base)
    with ctx.phase("gather"):
        reduced = reduction.reduce(x)
    return run(reduced, reduction)


def within_span(run: RunSite, x: Tensor, layer: int, span: range, ctx: StepContext) -> Streams:
    """A layer after it, on gathered tokens x (B, k, D); after the last all tokens are there again."""
    held = ctx.now.held[span.start]
    out = run(x, held.reduction)
    if layer < span[-1]:
        return out
    if not torch.is_grad_enabled():  # gradient checkpointing will run the layers again
        del ctx.now.held[span.start]
    with ctx.phase("scatter"):
        return out._replace(image=held.reduction.restore(out.image, held.base))
