"""Matching and merging of similar tokens, as the package tomesd does it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tomesd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baseline_tools import cells_of, matched
from shiva.core.layout import Layout
from shiva.core.options import LARGEST
from shiva.ops import merging, seeded
from shiva.ops.merging import Matching, match, merge, unmerge

from tiny import noise

grids = st.tuples(st.integers(2, 9), st.integers(2, 9))


@given(grid=grids, share=st.floats(0.05, 0.75), random=st.booleans(), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_matching_and_merging_are_bit_equal_to_the_tomesd_package(
    grid: tuple[int, int], share: float, random: bool, seed: int
) -> None:
    rows, columns = grid
    x, removed = noise(2, rows * columns, 16, seed=seed), max(1, int(share * rows * columns))
    theirs = torch.Generator().manual_seed(seed)
    peer_merge, peer_unmerge = tomesd.merge.bipartite_soft_matching_random2d(
        x, columns, rows, 2, 2, removed, no_rand=not random, generator=theirs
    )
    ours = torch.Generator().manual_seed(seed) if random else None
    matching = match(x, *cells_of(grid, ours), removed)

    order = same_tokens(matching, peer_unmerge)
    assert torch.equal(merge(x, matching), peer_merge(x).gather(1, order.expand(-1, -1, 16)))
    results = noise(2, matching.positions.shape[1], 5, seed=seed + 1)
    assert torch.equal(unmerge(results.gather(1, order.expand(-1, -1, 5)), matching), peer_unmerge(results))


def same_tokens(matching: Matching, peer_unmerge: Callable[[Tensor], Tensor]) -> Tensor:
    """The peer's place of each of our reduced tokens, (B, K, 1), having checked that they group alike.

    Only the destinations' order may differ: the peer leaves it to an unstable sort, ours is the grid's.
    """
    count = matching.positions.shape[1]
    theirs = peer_unmerge(torch.arange(count).view(1, -1, 1).expand(2, -1, 1))[..., 0]  # (B, N)
    order = theirs.gather(1, matching.positions)
    assert torch.equal(theirs, order.gather(1, merging.slots(matching))), "other tokens are merged"
    assert torch.equal(order.sort(dim=1).values, torch.arange(count).expand(2, -1))
    alone = matching.kept.shape[1]
    assert torch.equal(order[:, :alone], torch.arange(alone).expand(2, -1)), "unmerged sources are ordered otherwise"
    return order[..., None]


@given(grid=grids, share=st.floats(0, 0.75), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_groups_that_agree_survive_merging(grid: tuple[int, int], share: float, seed: int) -> None:
    _, matching = matched(2, grid, share, seed)
    everyone = torch.cat([matching.positions, matching.sources], dim=1).sort(dim=1).values
    assert torch.equal(everyone, torch.arange(grid[0] * grid[1]).expand(2, -1))
    agreed = unmerge(noise(2, matching.positions.shape[1], 7), matching)
    for rule in ("mean", "mlerp", "prune"):
        torch.testing.assert_close(unmerge(merge(agreed, matching, rule), matching), agreed)


def test_merging_computes_on_half_precision_and_keeps_it() -> None:
    x, matching = matched(2, (8, 8), 0.5)
    for rule in ("mean", "mlerp", "prune"):
        assert merge(x.bfloat16(), matching, rule).dtype == torch.bfloat16


def test_a_grid_without_a_whole_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="1x8 grid holds no whole 2x2 cell"):
        Layout(1, 8).windows()


@pytest.mark.parametrize("seed", [2**53, LARGEST])
def test_any_seed_that_an_option_takes_makes_randomness(seed: int) -> None:
    assert not torch.equal(*(torch.rand(4, generator=seeded(seed, step)) for step in (0, 1)))
