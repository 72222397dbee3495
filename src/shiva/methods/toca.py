"""ToCa: token-wise feature caching for diffusion transformers (Zou et al., ICLR 2025; arXiv 2410.05317).

Every few steps all tokens run, and what attention and FFN gave each is kept. Between, only the tokens run again that a
cache would harm most; the others take what they last had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, RunSite, unify_guidance
from shiva.core.options import Count, NotNegative, Share
from shiva.core.reduction import Streams
from shiva.methods.fills import Key, key_of
from shiva.methods.scores import cell_leaders
from shiva.ops.fill import cached_updates, grow_older
from shiva.ops.topk import hard_topk


@dataclass(frozen=True)
class ToCa(MethodConfig):
    """Caches of attention and FFN, token by token."""

    interval: Count = 3
    """Of so many steps one runs all tokens."""
    fresh: Share = 0.3
    """Share of tokens that the FFN, and attention to the text, runs again between, on the mean over layers."""
    attention: Share = 0.0
    """The same of self-attention, which the paper caches whole."""
    slope: Share = 0.5
    """How much larger that share is in the first layers, and smaller in the last: 0 is the same in all."""
    waiting: NotNegative = 0.25
    """Weight of the steps a token has waited, over the interval."""
    even: NotNegative = 0.6
    """Bonus of the best token of each 2x2 cell."""
    guidance: Literal["per-sample", "shared"] = "shared"
    """Whether the first guidance half chooses tokens for both, or each sample its own."""

    steps_differ: ClassVar = True

    def share(self, kind: str, layer: int, layers: int) -> float:
        """Share of tokens that a site runs between two whole steps."""
        mean = self.attention if kind == "attention" else self.fresh
        depth = layer / (layers - 1) if layers > 1 else 0.5
        return min(1.0, mean * (1 + self.slope - 2 * self.slope * depth))

    def turned(self, at: float) -> dict[str, Any]:
        return {"interval": 8, "fresh": 1 - at, "attention": max(0.0, 1 - 2 * at)}

    def build(self, spec: BackboneSpec) -> ToCaMethod:
        return ToCaMethod(self, spec)


@dataclass
class ToCaRun:
    """Of each site and guidance branch: what it last gave, and how long tokens have waited."""

    updates: dict[Key, Tensor] = field(default_factory=dict)  # (B, N, D)
    others: dict[Key, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    """Text (B, T, D), and what is beside the image in its argument."""
    ages: dict[Key, Tensor] = field(default_factory=dict)  # (B, N)


@dataclass
class ToCaStep:
    whole: bool = False
    """All tokens run."""
    indices: dict[str, Tensor] = field(default_factory=dict)  # site -> (B, k)


def even_bonus(scores: Tensor, layout: Layout, bonus: float) -> Tensor:
    """Scores (B, N) of unit range, those of the best token of each 2x2 cell raised."""
    best = cell_leaders(scores, layout)
    return scores.scatter_add(1, best, torch.full_like(best, bonus, dtype=scores.dtype))


class ToCaMethod(Method):
    sites = frozenset({"attention", "cross_attention", "ffn"})
    new_run, new_step = ToCaRun, ToCaStep
    config: ToCa

    def begin_step(self, ctx: StepContext) -> None:
        ctx.now.whole = (ctx.step - ctx.first) % self.config.interval == 0

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        kept, key = ctx.run, key_of(site, ctx)
        k = round(self.config.share(site.kind, site.layer, self.spec.layers) * x.shape[1])
        known = kept.updates.get(key)
        whole = ctx.now.whole or known is None or known.shape != x.shape
        if whole or k >= x.shape[1]:
            out = run(x, None)
            if k < x.shape[1]:
                kept.updates[key] = out.image.detach().clone()
                text, rest = (None if part is None else part.detach() for part in (out.text, out.rest))
                kept.others[key] = text, rest
                kept.ages[key] = x.new_zeros(x.shape[:2], dtype=torch.float32)
            return out
        if k == 0:
            text, rest = kept.others[key]
            return Streams(known, text, rest, ran=0)
        indices = self.choose(known, k, site, ctx)
        reduction = cached_updates(indices, known)
        out = run(reduction.reduce(x), reduction)
        return out._replace(image=reduction.restore(out.image, base))

    def choose(self, known: Tensor, k: int, site: Place, ctx: StepContext) -> Tensor:
        """The k tokens that a cache would harm most: those with much to say, that waited, evenly over the grid."""
        now: ToCaStep = ctx.now
        ages, key = ctx.run.ages, key_of(site, ctx)
        if ctx.reruns(site.name) and site.name in now.indices:
            return now.indices[site.name]
        if site.name not in now.indices or not ctx.branch or self.guidance == "per-sample":
            with ctx.phase("router"):
                size = known.float().norm(dim=-1)
                scores = size / size.amax(dim=-1, keepdim=True).clamp(min=1e-12)
                scores = scores + self.config.waiting * ages[key] / self.config.interval
                scores = unify_guidance(even_bonus(scores, ctx.layout, self.config.even), self.guidance, ctx)
                now.indices[site.name] = hard_topk(scores, k)
        ages[key] = grow_older(ages[key], now.indices[site.name])
        return now.indices[site.name]
