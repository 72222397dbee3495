"""What a skipped token gets: nothing (the paper), a near token's update, or its own last one.

All three keep shapes static and leave the selected tokens' results as the block computed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.layout import Layout
from shiva.core.reduction import Reduction, flat_rows, gather, overwrite

# -- near ------------------------------------------------------------------------------------------------


def distances(places: Tensor, others: Tensor) -> Tensor:
    """Between points on a grid, without the matrix product that TF32 would round."""
    return torch.cdist(places, others, compute_mode="donot_use_mm_for_euclid_dist")


def spatially_nearest(indices: Tensor, layout: Layout, *, apart: bool = False) -> Tensor:
    """For every token of the layout, which of the selected (B, k) is nearest to it: (B, N) of 0 to k - 1."""
    places = layout.places(indices.device)
    return nearest_of(-distances(places.expand(indices.shape[0], -1, -1), places[indices]), indices, apart)


def most_similar(x: Tensor, indices: Tensor, *, apart: bool = False) -> Tensor:
    """For every token of x (B, N, D), which of the selected (B, k) has the most similar features: (B, N)."""
    directions = F.normalize(x.float(), dim=-1)
    chosen = gather(directions, flat_rows(indices, x.shape[1]))
    return nearest_of(directions @ chosen.transpose(1, 2), indices, apart)


def nearest_of(closeness: Tensor, indices: Tensor, apart: bool) -> Tensor:
    """The closest of the selected (B, k) by closeness (B, N, k); `apart`, a selected token itself does not count.

    With one selected token there is no other, and it is named all the same.
    """
    if apart:
        tokens = torch.arange(closeness.shape[1], device=indices.device)
        closeness = closeness.masked_fill(tokens[:, None] == indices[:, None], -math.inf)
    return closeness.argmax(dim=-1)


FillFrom: TypeAlias = Callable[[Tensor], Tensor]
"""From the selected tokens' updates (B, k, D): what every token (B, N, D) gets if it is skipped."""


def near_updates(indices: Tensor, nearest: Tensor) -> FillFrom:
    """The update of the selected token (B, k) that `nearest` (B, N) names."""
    sources = flat_rows(nearest, indices.shape[1])
    return lambda updates: gather(updates, sources)


def filled(indices: Tensor, tokens: int, fill: FillFrom) -> Reduction:
    """A skipped token gets its row (B, N, D) of what `fill` makes of the selected updates (B, k, D)."""
    rows = flat_rows(indices, tokens)

    def restore(values: Tensor, base: Tensor) -> Tensor:
        return overwrite(base + fill(values - gather(base, rows)), values, rows)

    return Reduction(lambda x: gather(x, rows), restore, indices)


def nearest_masked(closeness: Tensor, mask: Tensor) -> Tensor:
    """For every token, the closest at which mask (B, N) holds, by closeness (B or 1, N, N); 0 where none does."""
    return closeness.masked_fill(~mask[:, None], -math.inf).argmax(dim=-1)


# -- cached ----------------------------------------------------------------------------------------------


def cached_updates(indices: Tensor, cache: Tensor) -> Reduction:
    """A skipped token gets its own last update from cache (B, N, D), which is brought up to date in place."""
    rows = flat_rows(indices, cache.shape[1])

    def restore(values: Tensor, base: Tensor) -> Tensor:
        updates = (values - gather(base, rows)).detach()
        cache.flatten(0, 1).index_copy_(0, rows, updates.flatten(0, 1).to(cache.dtype))
        return overwrite(base + cache.to(base.dtype), values, rows)

    return Reduction(lambda x: gather(x, rows), restore, indices)


def grow_older(age: Tensor, indices: Tensor) -> Tensor:
    """Steps each token (B, N) has waited since it was last computed, after a step that computed indices (B, k)."""
    return (age + 1).scatter(1, indices, 0.0)


# -- a cache without a run, for training -----------------------------------------------------------------


def geometric_age(uniform: Tensor, keep: float, oldest: float) -> Tensor:
    """Steps waited, P(a) = keep (1 - keep)^a, by inversion of uniform numbers: so does a random choice of tokens.

    An update that waited a steps was made a + 1 steps ago, which is `oldest` at most.
    """
    if keep >= 1:
        return torch.zeros_like(uniform)
    waited = torch.floor(torch.log(uniform.clamp(min=1e-12)) / math.log1p(-keep))
    return waited.clamp(max=max(oldest - 1, 0))


def stale_updates(now: Tensor, earlier: Tensor, age: Tensor, steps: float) -> Tensor:
    """Updates (B, N, D) as made age + 1 steps ago, on the line from now to `earlier`, which is `steps` ago."""
    share = ((age + 1) / steps).clamp(max=1)[..., None]
    return torch.lerp(now, earlier, share.to(now.dtype))
