"""What a rejected token receives."""

from __future__ import annotations

import torch
from torch import Tensor

from shiva.core.layout import Layout
from shiva.core.reduction import select
from shiva.methods.scores import with_bonus
from shiva.ops.fill import (
    cached_updates,
    filled,
    grow_older,
    most_similar,
    near_updates,
    spatially_nearest,
)

B, ROWS, COLUMNS, D, K = 2, 4, 5, 6, 7
N = ROWS * COLUMNS


def choose() -> Tensor:
    return torch.stack([torch.randperm(N)[:K].sort().values for _ in range(B)])


def block(x: Tensor) -> Tensor:
    return x + torch.sin(3 * x) + x.mean(dim=1, keepdim=True)


def test_the_nearest_are_nearest() -> None:
    indices = choose()
    nearest = spatially_nearest(indices, Layout(ROWS, COLUMNS))
    for b in range(B):
        for token in range(N):
            distances = [
                (token // COLUMNS - i // COLUMNS) ** 2 + (token % COLUMNS - i % COLUMNS) ** 2
                for i in indices[b].tolist()
            ]
            assert distances[nearest[b, token]] == min(distances)
    x = torch.randn(B, N, D)
    similar = most_similar(x, indices)
    for b in range(B):
        assert torch.equal(indices[b, similar[b, indices[b]]], indices[b]), "a selected token is most like itself"


def test_near_copies_the_named_update_and_leaves_selected_results_alone() -> None:
    x, indices = torch.randn(B, N, D), choose()
    nearest = spatially_nearest(indices, Layout(ROWS, COLUMNS))
    reduction = filled(indices, N, near_updates(indices, nearest))
    values = block(reduction.reduce(x))
    restored = reduction.restore(values, x)
    for b in range(B):
        assert torch.equal(restored[b, indices[b]], values[b])
        for token in set(range(N)) - set(indices[b].tolist()):
            source = indices[b, nearest[b, token]]
            expected = x[b, token] + (values[b, nearest[b, token]] - x[b, source])
            torch.testing.assert_close(restored[b, token], expected)


def test_cached_gives_the_last_update_and_keeps_it_current() -> None:
    x, cache = torch.randn(B, N, D), torch.randn(B, N, D)
    before, indices = cache.clone(), choose()
    reduction = cached_updates(indices, cache)
    values = block(reduction.reduce(x))
    restored = reduction.restore(values, x)
    plain = select(indices, N)
    expected = plain.restore(values, x + before)
    torch.testing.assert_close(restored, expected)
    updates = plain.restore(values - plain.reduce(x), before)
    torch.testing.assert_close(cache, updates)


def test_age_counts_steps_since_a_token_was_computed() -> None:
    age, waited = torch.zeros(B, N), [[0] * N for _ in range(B)]
    for _ in range(6):
        indices = choose()
        age = grow_older(age, indices)
        for b in range(B):
            chosen = set(indices[b].tolist())
            waited[b] = [0 if token in chosen else waited[b][token] + 1 for token in range(N)]
    assert age.tolist() == waited


def test_a_large_age_weight_goes_round_robin() -> None:
    """No token waits longer than it takes to serve all the others."""
    age = torch.zeros(1, N)
    for _ in range(12):
        indices = with_bonus(torch.randn(1, N), age, weight=100.0).topk(K).indices
        age = grow_older(age, indices)
        assert age.max() <= -(-N // K)
