"""What a rejected token receives: nothing (the paper), a near token's update, or its own last one.

All three keep shapes static and leave the selected tokens' results as the block computed them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.reduction import Reduction, flat_rows, gather, scatter


def spatially_nearest(indices: Tensor, grid: tuple[int, int]) -> Tensor:
    """For every token of the grid, which of the selected (B, k) is nearest to it: (B, N) of 0 to k - 1."""
    rows, columns = grid
    row, column = torch.meshgrid(
        torch.arange(rows, device=indices.device), torch.arange(columns, device=indices.device), indexing="ij"
    )
    places = torch.stack([row.flatten(), column.flatten()], dim=-1).float()  # (N, 2)
    return torch.cdist(places.expand(indices.shape[0], -1, -1), places[indices]).argmin(dim=-1)


def most_similar(x: Tensor, indices: Tensor) -> Tensor:
    """For every token of x (B, N, D), which of the selected (B, k) has the most similar features: (B, N)."""
    directions = F.normalize(x.float(), dim=-1)
    chosen = gather(directions, flat_rows(indices, x.shape[1]))
    return (directions @ chosen.transpose(1, 2)).argmax(dim=-1)


def near_updates(indices: Tensor, nearest: Tensor) -> Reduction:
    """A rejected token receives the update of the selected token that `nearest` (B, N) names."""
    tokens = nearest.shape[1]
    rows, sources = flat_rows(indices, tokens), flat_rows(nearest, indices.shape[1])

    def restore(values: Tensor, base: Tensor) -> Tensor:
        updates = values - gather(base, rows)
        return scatter(values, base + gather(updates, sources), rows)

    return Reduction(lambda x: gather(x, rows), restore, indices)


def cached_updates(indices: Tensor, cache: Tensor) -> Reduction:
    """A rejected token receives its own last update from cache (B, N, D), which is brought up to date in place."""
    rows = flat_rows(indices, cache.shape[1])

    def restore(values: Tensor, base: Tensor) -> Tensor:
        updates = values - gather(base, rows)
        cache.flatten(0, 1).index_copy_(0, rows, updates.flatten(0, 1).to(cache.dtype))
        return scatter(values, base + cache.to(base.dtype), rows)

    return Reduction(lambda x: gather(x, rows), restore, indices)


def grow_older(age: Tensor, indices: Tensor) -> Tensor:
    """Steps since each token (B, N) was last computed, after a step that computed those at indices (B, k)."""
    return (age + 1).scatter(1, indices, 0.0)


def with_age(scores: Tensor, age: Tensor, weight: float) -> Tensor:
    """Scores (B, N), brought to unit deviation, plus a bonus for each step a token has waited."""
    spread = scores.std(dim=-1, keepdim=True).clamp(min=1e-6)
    return (scores - scores.mean(dim=-1, keepdim=True)) / spread + weight * age
