"""The stateless fill against its definition, and the fit against plain least squares."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shiva.core.reduction import select
from shiva.ops.shortcut import (
    WINDOW,
    Factors,
    Lin,
    Parts,
    Shape,
    Shortcut,
    fill_updates,
    find_neighbours,
    normed,
    shortcut_fill,
    shortcut_flops,
    skipped_tokens,
)
from shiva.ops.shortcut_fit import NormalEquations

B, D, RANK, SPREAD = 2, 6, 3, 0.65
SHAPES: list[Shape] = [(1, 5, 7), (1, 1, 6), (3, 4, 5), (1, 8, 8)]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Weights are float32 whatever the tokens are."""
FILLS: tuple[Parts, ...] = get_args(Parts)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def choose(tokens: int, k: int, seed: int = 0) -> Tensor:
    drawn = [torch.randperm(tokens, generator=seeded(seed + b))[:k].sort().values for b in range(B)]
    return torch.stack(drawn)


def factors(width: int = D, rank: int = RANK, terms: int = 2) -> Factors:
    return Factors(noise(terms, width, rank, seed=1), noise(rank, width, seed=2), noise(terms, width, seed=3))


def plain(made: Factors, x: Tensor, sigma: float) -> Tensor:
    """lin(x; sigma) as the docstring has it."""
    v, b = (sum(sigma**g * term for g, term in enumerate(terms)) for terms in (made.down, made.bias))
    return normed(x) @ v @ made.up + b


def weights_by_definition(indices: Tensor, shape: Shape, spread: float) -> Tensor:
    """(B, N, k) from loops over the grid."""
    places = [(f, r, c) for f in range(shape[0]) for r in range(shape[1]) for c in range(shape[2])]
    found = torch.zeros(len(indices), len(places), indices.shape[1], dtype=torch.float64)
    for b, chosen in enumerate(indices.tolist()):
        for i, here in enumerate(places):
            for slot, j in enumerate(chosen):
                away = [abs(p - q) for p, q in zip(here, places[j], strict=True)]
                if i != j and all(a <= most for a, most in zip(away, WINDOW, strict=True)):
                    found[b, i, slot] = math.exp(-sum(a * a for a in away) / (2 * spread**2))
    return found / found.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def fill_by_definition(
    fill: Parts, updates: Tensor, x: Tensor, indices: Tensor, made: Factors, shape: Shape
) -> Tensor:
    if fill == "identity":
        return torch.zeros_like(x)
    if fill == "mean":
        return updates.mean(dim=1, keepdim=True).expand_as(x)
    lin = torch.zeros_like(x) if fill == "neighbours" else plain(made, x, 0.3)
    if fill == "lin":
        return lin
    theirs = lin.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))
    return lin + weights_by_definition(indices, shape, SPREAD) @ (updates - theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_a_fill_is_its_definition(shape: Shape, fill: Parts, keep: float) -> None:
    tokens = math.prod(shape)
    x, indices, made = noise(B, tokens, D), choose(tokens, max(1, int(keep * tokens))), factors()
    reduction = shortcut_fill(indices, x, made.at(0.3), shape, SPREAD, fill)
    values = reduction.reduce(x) + noise(*indices.shape, D, seed=5)
    updates = values - reduction.reduce(x)
    expected = x + fill_by_definition(fill, updates, x, indices, made, shape)
    for b in range(B):
        expected[b, indices[b]] = values[b]
    torch.testing.assert_close(reduction.restore(values, x), expected, **CLOSE)
    filled = fill_updates(updates, x, indices, made.at(0.3), shape, SPREAD, fill)
    torch.testing.assert_close(filled, fill_by_definition(fill, updates, x, indices, made, shape), **CLOSE)


def test_the_computed_keep_their_results_to_the_bit() -> None:
    x, indices = noise(B, 35, D).float(), choose(35, 12)
    reduction = shortcut_fill(indices, x, factors().at(0.3), (1, 5, 7))
    values = torch.randn(B, 12, D)
    restored = reduction.restore(values, x)
    for b in range(B):
        assert torch.equal(restored[b, indices[b]], values[b])


def test_around_an_attention_the_base_is_zero() -> None:
    x, indices, made = noise(B, 35, D), choose(35, 12), factors()
    reduction = shortcut_fill(indices, x, made.at(0.3), (1, 5, 7), SPREAD)
    values = noise(B, 12, D, seed=4)
    restored = reduction.restore(values, torch.zeros_like(x))
    expected = fill_by_definition("both", values, x, indices, made, (1, 5, 7))
    skipped = skipped_tokens(indices, 35)
    for b in range(B):
        torch.testing.assert_close(restored[b, skipped[b]], expected[b, skipped[b]], **CLOSE)


def test_what_lin_explains_and_what_is_constant_is_filled_exactly() -> None:
    shape, made = (1, 6, 6), factors()
    x, indices = noise(B, 36, D), choose(36, 20)
    update = plain(made, x, 0.3) + noise(B, 1, D, seed=7)
    reduction = shortcut_fill(indices, x, made.at(0.3), shape)
    values = reduction.reduce(x + update)
    near = find_neighbours(indices, torch.arange(36).expand(B, -1), shape).weights.sum(dim=-1)
    assert bool((near > 0).all())
    torch.testing.assert_close(reduction.restore(values, x), x + update, **CLOSE)


def test_a_narrow_gaussian_is_the_nearest_neighbour_and_does_not_underflow() -> None:
    indices = torch.tensor([[0]])
    near = find_neighbours(indices, torch.tensor([[12, 1, 3]]), (1, 5, 5), spread=0.05)
    assert near.weights.sum(dim=-1).tolist() == [1, 1, 0], "one at (2, 2), one beside it, one out of reach"


def test_skipped_are_the_others_in_order() -> None:
    indices = choose(20, 7)
    for b, skipped in enumerate(skipped_tokens(indices, 20)):
        assert skipped.tolist() == sorted(set(range(20)) - set(indices[b].tolist()))


def test_samples_do_not_mix() -> None:
    x, indices, lin = noise(B, 35, D), choose(35, 12), factors().at(0.3)
    values = noise(B, 12, D, seed=4)
    both = shortcut_fill(indices, x, lin, (1, 5, 7)).restore(values, x)
    for b in range(B):
        one = slice(b, b + 1)
        alone = shortcut_fill(indices[one], x[one], lin, (1, 5, 7)).restore(values[one], x[one])
        torch.testing.assert_close(both[one], alone)


@pytest.mark.parametrize("fill", FILLS)
def test_gradients(fill: Parts) -> None:
    shape, made = (1, 3, 3), factors(width=4, rank=2)
    indices = choose(9, 4)

    def filled(x: Tensor, values: Tensor, *weights: Tensor) -> Tensor:
        return shortcut_fill(indices, x, Factors(*weights).at(0.4), shape, parts=fill).restore(values, x)

    inputs = (noise(B, 9, 4), noise(B, 4, 4, seed=9), *made)
    assert torch.autograd.gradcheck(filled, [tensor.clone().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_and_is_near(dtype: torch.dtype) -> None:
    x, indices, made = noise(B, 64, 32), choose(64, 30), factors(width=32)
    values = noise(B, 30, 32, seed=4)
    exact = shortcut_fill(indices, x, made.at(0.3), (1, 8, 8)).restore(values, x)
    half = Factors(*(tensor.to(dtype) for tensor in made)).at(torch.tensor(0.3))
    restored = shortcut_fill(indices, x.to(dtype), half, (1, 8, 8)).restore(values.to(dtype), x.to(dtype))
    assert restored.dtype == dtype
    assert float((restored.double() - exact).norm() / exact.norm()) < 0.02
    with torch.autocast("cpu", dtype):
        made_single, single = Factors(*(t.float() for t in made)), x.float()
        mixed = shortcut_fill(indices, single, made_single.at(0.3), (1, 8, 8)).restore(values.float(), single)
    assert mixed.dtype == torch.float32
    assert float((mixed.double() - exact).norm() / exact.norm()) < 0.02


def test_one_graph_serves_all_steps(graphs: Any) -> None:

    shortcut, x = Shortcut(2, D, RANK), noise(B, 35, D).float()

    def step(x: Tensor, indices: Tensor, sigma: Tensor) -> Tensor:
        reduction = shortcut_fill(indices, x, shortcut.at(1, sigma), (1, 5, 7))
        return reduction.restore(reduction.reduce(x).sin(), x)

    nn.init.normal_(shortcut.up)
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for turn in range(3):
        call = (x, choose(35, 12, seed=10 * turn), torch.tensor(0.2 * turn))
        torch.testing.assert_close(compiled(*call), step(*call))
    assert len(graphs.seen) == 1
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(*call), step(*call))


def test_flops_are_those_the_counter_sees() -> None:
    x, indices = torch.randn(1, 64, 16), choose(64, 40)[:1]
    shortcut = Shortcut(1, 16, 4)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shortcut_fill(indices, x, shortcut.at(0, 0.5), (1, 8, 8)).restore(torch.randn(1, 40, 16), x)
    assert counter.get_total_flops() == shortcut_flops(64, 40, 16, 4, neighbours=0)
    assert shortcut_flops(64, 40, 16, 4) - shortcut_flops(64, 40, 16, 4, neighbours=0) == 2 * 24 * 25 * 16


def test_unfitted_it_is_the_identity_and_fitted_it_goes_through_a_file(tmp_path: Path) -> None:
    x, indices, shortcut = torch.randn(B, 35, D), choose(35, 12), Shortcut(2, D, RANK)
    values = torch.randn(B, 12, D)
    filled = shortcut_fill(indices, x, shortcut.at(1, 0.5), (1, 5, 7), parts="lin").restore(values, x)
    assert torch.equal(filled, select(indices, 35).restore(values, x))
    shortcut.set_layer(1, Factors(*(tensor.float() for tensor in factors())))
    save_file(shortcut.state_dict(), tmp_path / "shortcut.safetensors")
    other = Shortcut(2, D, RANK)
    other.load_state_dict(load_file(tmp_path / "shortcut.safetensors"))
    torch.testing.assert_close(other.at(1, 0.5)(x), plain(factors(), x.double(), 0.5).float())


# -- the fit -----------------------------------------------------------------------------------------------


def batches(count: int = 4, tokens: int = 60, width: int = D) -> list[tuple[Tensor, Tensor, float]]:
    """Tokens whose updates are only in part linear in them."""
    made = []
    for i in range(count):
        x, sigma = noise(B, tokens, width, seed=20 + i), (i + 0.5) / count
        update = plain(factors(width, width), x, sigma) + x.sin() + 0.5 * noise(B, tokens, width, seed=40 + i)
        made.append((x, update, sigma))
    return made


def summed(rows: list[tuple[Tensor, Tensor, float]], degree: int = 1) -> NormalEquations:
    equations = NormalEquations(rows[0][0].shape[-1], degree)
    for x, update, sigma in rows:
        equations.add(x, update, sigma)
    return equations


def same(a: NormalEquations, b: NormalEquations) -> None:
    for name in ("gram", "cross", "power"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))


def predicted(made: Factors, rows: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    return torch.cat([plain(made, x, sigma).flatten(0, 1) for x, _, sigma in rows])


def truth(rows: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    return torch.cat([update.flatten(0, 1) for _, update, _ in rows])


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("rank", [1, 3, D])
def test_a_linear_map_is_recovered(degree: int, rank: int) -> None:
    made = factors(rank=rank, terms=degree + 1)
    rows = [(x, plain(made, x, sigma), sigma) for x, _, sigma in batches()]
    equations = summed(rows, degree)
    low = equations.reduce_rank(equations.solve(ridge=1e-12), rank)
    for sigma in (0.0, 0.6, 1.0):
        x = noise(B, 5, D, seed=90)
        torch.testing.assert_close(low.at(sigma)(x), plain(made, x, sigma), rtol=1e-6, atol=1e-6)
    assert equations.r_squared(low) == pytest.approx(1, abs=1e-9)


@given(st.integers(1, 8), st.integers(0, 2), st.integers(0, 5))
@settings(deadline=None, max_examples=25)
def test_r_squared_is_that_of_the_tokens(rank: int, degree: int, seed: int) -> None:
    rows = batches(3, 20)
    made = Factors(noise(degree + 1, D, rank, seed=seed), noise(rank, D), noise(degree + 1, D))
    held = summed(rows, degree)
    error = (truth(rows) - predicted(made, rows)).square().sum()
    assert held.r_squared(made) == pytest.approx(float(1 - error / truth(rows).square().sum()), rel=1e-9)
    assert held.tokens == len(truth(rows))


def test_the_full_map_is_least_squares() -> None:
    rows = batches()
    ones = [F.pad(normed(x), (0, 1), value=1.0).flatten(0, 1) for x, _, _ in rows]
    features = torch.cat([torch.cat([n, sigma * n], dim=1) for n, (_, _, sigma) in zip(ones, rows, strict=True)])
    best = features @ torch.linalg.lstsq(features, truth(rows), driver="gelsd").solution
    full = summed(rows).solve(ridge=1e-12)
    torch.testing.assert_close(predicted(full, rows), best, rtol=1e-6, atol=1e-6)


def test_a_reduced_rank_is_the_best_of_its_rank() -> None:
    """Descent on the tokens themselves, from several starts, finds none better."""
    rows = batches()
    equations = summed(rows)
    full = equations.solve(ridge=1e-12)
    shares = [equations.r_squared(equations.reduce_rank(full, rank)) for rank in range(1, D + 1)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(equations.r_squared(full), abs=1e-12)
    reached = [descend(rows, rank=2, seed=seed) for seed in range(3)]
    assert min(reached) >= 1 - shares[1] - 1e-9
    assert min(reached) == pytest.approx(1 - shares[1], rel=0.01), "descent finds its way there"


def descend(rows: list[tuple[Tensor, Tensor, float]], rank: int, seed: int) -> float:
    """The share of power that a map of a rank leaves, found by descent."""
    starts = (noise(2, D, rank, seed=seed), noise(rank, D, seed=seed + 9), noise(2, D, seed=seed + 19))
    weights = [tensor.requires_grad_() for tensor in starts]
    descent = torch.optim.LBFGS(weights, max_iter=400, line_search_fn="strong_wolfe")

    def left() -> Tensor:
        return (truth(rows) - predicted(Factors(*weights), rows)).square().sum() / truth(rows).square().sum()

    def closure() -> Tensor:
        descent.zero_grad()
        left().backward()
        return left()

    descent.step(closure)
    return left().item()


def test_full_rank_is_the_full_map() -> None:
    rows = batches()
    equations = summed(rows)
    full = equations.solve()
    for whole, cut in zip(full, equations.reduce_rank(full, D), strict=True):
        torch.testing.assert_close(cut, whole)


@given(st.permutations(range(60)))
@settings(deadline=None, max_examples=5)
def test_the_order_of_tokens_does_not_matter(order: list[int]) -> None:
    rows = batches()
    same(summed([(x[:, order], update[:, order], sigma) for x, update, sigma in rows[::-1]]), summed(rows))


def test_sums_may_take_every_so_many_tokens() -> None:
    x, update, _ = batches()[0]
    thinned = NormalEquations(D)
    thinned.add(x, update, 0.5, stride=7)
    same(thinned, summed([(x[:, ::7], update[:, ::7], 0.5)]))


def test_one_noise_level_leaves_nothing_undetermined() -> None:
    x, update, _ = batches()[0]
    constant = summed([(x, update, 0.5)])
    assert constant.r_squared(constant.solve()) == pytest.approx(
        summed([(x, update, 0.5)], 0).r_squared(summed([(x, update, 0.5)], 0).solve()), abs=1e-3
    )


def test_a_fit_is_called_as_it_is_used() -> None:
    made = factors().at(0.25)
    assert isinstance(made, Lin)
    torch.testing.assert_close(made(noise(1, 4, D)), plain(factors(), noise(1, 4, D), 0.25))
