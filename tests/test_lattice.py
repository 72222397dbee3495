"""The lattice: every beginning covers the grid evenly, and no token waits long for its turn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shiva.methods.scores import lattice_ranks, lattice_scores, with_bonus
from shiva.ops.fill import distances
from shiva.ops.shortcut import Shape
from shiva.ops.topk import hard_topk

SHAPES = [(1, 16, 16), (1, 33, 47), (1, 7, 64), (5, 9, 14)]
WAITS = {0.25: 4, 0.4: 2, 0.6: 2}
"""The three-distance theorem allows no more at these keeps."""


def computed(shape: Shape, step: int, layer: int, keep: float) -> Tensor:
    """Whether each token (N,) is."""
    scores = lattice_scores(shape, step, layer)
    chosen = hard_topk(scores[None], int(keep * scores.numel()))[0]
    return torch.zeros_like(scores, dtype=torch.bool).index_fill(0, chosen, True)


def longest_wait(turns: list[Tensor]) -> int:
    """The most turns running that a token was not computed in."""
    waited = longest = torch.zeros(turns[0].shape)
    for chosen in turns:
        waited = torch.where(chosen, 0, waited + 1)
        longest = torch.maximum(longest, waited)
    return int(longest.max())


def farthest(chosen: Tensor, shape: Shape) -> float:
    """The largest distance of a skipped token to the nearest computed one."""
    axes = [torch.arange(length) for length in shape]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3).double()
    return float(distances(places[~chosen], places[chosen]).amin(dim=1).max())


@given(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20)))
@settings(deadline=None, max_examples=40)
def test_ranks_are_a_permutation(shape: Shape) -> None:
    ranks = lattice_ranks(shape)
    assert torch.equal(ranks.sort().values, torch.arange(math.prod(shape)))
    assert ranks[0] == 0


def test_a_square_of_four_is_bayers_matrix() -> None:
    assert lattice_ranks((1, 4, 4)).view(4, 4).tolist() == [
        [0, 8, 2, 10],
        [12, 4, 14, 6],
        [3, 11, 1, 9],
        [15, 7, 13, 5],
    ]


def test_half_of_a_grid_is_a_checkerboard() -> None:
    for shape in ((1, 8, 8), (4, 4, 8)):
        first = (lattice_ranks(shape) < math.prod(shape) // 2).view(shape)
        frame, row, column = torch.meshgrid(*(torch.arange(length) for length in shape), indexing="ij")
        assert torch.equal(first, (frame + row + column) % 2 == 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", WAITS)
def test_no_token_waits_long_in_depth_or_over_the_steps(shape: Shape, keep: float) -> None:
    for layers in (8, 24, 57):
        turns = [computed(shape, step, layer, keep) for step in range(2) for layer in range(layers)]
        assert longest_wait(turns[:layers]) <= min(WAITS[keep], layers)
        assert longest_wait(turns) <= 2 * WAITS[keep]
        share = torch.stack(turns).float().mean(dim=0)
        assert share.min() >= 0.5 * keep
        assert share.max() <= 1.5 * keep
    assert longest_wait([computed(shape, step, 3, keep) for step in range(16)]) <= WAITS[keep]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_turn_covers_the_grid(shape: Shape) -> None:
    """On even sides a cell is never left empty; on odd ones its neighbour, still within the window of a fill."""
    bounds = {0.25: 2**0.5, 0.4: 2**0.5, 0.6: 1.0}
    odd = any(length % 2 for length in shape if length > 1)
    for keep, bound in bounds.items():
        for layer in range(24):
            assert farthest(computed(shape, 1, layer, keep), shape) <= (8**0.5 if odd else bound) + 1e-9


def test_scores_differ_between_tokens_and_turns() -> None:
    scores = lattice_scores((1, 6, 7), 2, 3)
    assert scores.unique().numel() == 42
    assert scores.min() > 0
    assert scores.max() <= 1
    assert torch.equal(scores, lattice_scores((1, 6, 7), 2, 3))
    assert not torch.equal(scores, lattice_scores((1, 6, 7), 2, 4))


@given(st.floats(1e-3, 1e3), st.floats(-10, 10))
@settings(deadline=None, max_examples=20)
def test_the_bonus_weighs_the_same_whatever_the_scores_scale(scale: float, shift: float) -> None:
    scores = torch.randn(2, 42, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lattice = lattice_scores((1, 6, 7), 0, 1)
    torch.testing.assert_close(with_bonus(scores * scale + shift, lattice, 0.5), with_bonus(scores, lattice, 0.5))


def test_the_bonus_runs_from_the_routers_order_to_the_lattices() -> None:
    scores, lattice = torch.randn(2, 42), lattice_scores((1, 6, 7), 0, 1)
    assert torch.equal(hard_topk(with_bonus(scores, lattice, 0.0), 20), hard_topk(scores, 20))
    assert torch.equal(hard_topk(with_bonus(scores, lattice, 1e4), 20), hard_topk(lattice.expand(2, -1), 20))
    assert torch.equal(
        hard_topk(with_bonus(torch.zeros(2, 42), lattice, 0.1), 20), hard_topk(lattice.expand(2, -1), 20)
    )
