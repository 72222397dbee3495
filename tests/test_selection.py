"""Hard selection and the two estimators behind it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shiva.core.reduction import flat_rows, gather, scatter, select
from shiva.ops.softrank import soft_rank
from shiva.ops.topk import (
    Selection,
    guess_updates,
    hard_topk,
    inclusion,
    input_gated,
    output_gated,
    ridge_fit,
    select_tokens,
    token_count,
)

N, D = 12, 5


@given(st.floats(1e-6, 1.0), st.integers(1, 5000))
def test_token_count_is_the_floor_and_at_least_one(ratio: float, tokens: int) -> None:
    k = token_count(ratio, tokens)
    assert 1 <= k <= tokens
    assert k == 1 or k <= tokens * ratio + 1e-6
    assert k == tokens or k > tokens * ratio - 1


@given(st.integers(1, 300))
def test_a_ratio_that_names_a_whole_count_gives_it(tokens: int) -> None:
    assert [token_count(k / tokens, tokens) for k in range(1, tokens + 1)] == list(range(1, tokens + 1))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.data())
def test_hard_topk_takes_the_largest_ascending_and_the_earlier_of_equals(
    seed: int, n: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    scores = torch.randint(0, 4, (2, n), generator=torch.Generator().manual_seed(seed)).float()
    for row, chosen in zip(scores.tolist(), hard_topk(scores, k).tolist(), strict=True):
        assert chosen == sorted(sorted(range(n), key=lambda i: (-row[i], i))[:k])


def test_gather_and_scatter_match_plain_indexing() -> None:
    x, indices = torch.randn(3, N, D), torch.stack([torch.randperm(N)[:4].sort().values for _ in range(3)])
    rows = flat_rows(indices, N)
    expected = torch.stack([x[b, indices[b]] for b in range(3)])
    assert torch.equal(gather(x, rows), expected)
    written = scatter(expected + 1, x, rows)
    for b in range(3):
        mask = torch.zeros(N, dtype=torch.bool)
        mask[indices[b]] = True
        assert torch.equal(written[b, mask], x[b, mask] + 1)
        assert torch.equal(written[b, ~mask], x[b, ~mask])
    reduction = select(indices, N)
    assert torch.equal(reduction.restore(reduction.reduce(x), x), x)


def test_inclusion_follows_its_formula_and_reaches_scores_and_budget() -> None:
    scores = torch.randn(2, N, dtype=torch.float64, requires_grad=True)
    k = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    ranks = 1 + torch.sigmoid((scores[:, None, :] - scores[:, :, None]) / 0.2).sum(-1) - 0.5
    expected = torch.sigmoid((k - ranks) / (0.1 * N))
    torch.testing.assert_close(inclusion(scores, k, 0.2, 0.1), expected)
    assert torch.autograd.gradcheck(lambda s, b: inclusion(s, b, 0.2, 0.1), (scores, k))


def block(x: Tensor) -> Tensor:
    """A residual block that mixes tokens."""
    weights = torch.linspace(-1, 1, D * D, dtype=x.dtype).view(D, D)
    return x + torch.tanh(x @ weights) + 0.1 * x.mean(dim=1, keepdim=True)


def prepared() -> tuple[Tensor, Tensor, Selection, Tensor]:
    x = torch.randn(2, N, D, dtype=torch.float64)
    scores = torch.randn(2, N, dtype=torch.float64)
    pi = torch.rand(2, N, dtype=torch.float64, requires_grad=True)
    selection = Selection(hard_topk(scores, 5), pi)
    mask = torch.zeros(2, N, dtype=torch.bool).scatter_(1, selection.indices, True)
    return x, pi, selection, mask


def test_the_forward_of_both_estimators_is_the_hard_one() -> None:
    x, _, selection, _ = prepared()
    plain = select(selection.indices, N)
    hard = plain.restore(block(plain.reduce(x)), x)
    teacher = torch.randn_like(x)
    gated = [input_gated(selection, N)]
    gated += [output_gated(selection, x, guess, teacher) for guess in ("zero", "mean", "ridge", "teacher")]
    for reduction in gated:
        assert torch.equal(reduction.restore(block(reduction.reduce(x)), x), hard)


def test_the_input_estimator_is_the_papers() -> None:
    """dL/dpi = <dL/dx, x> through the block for selected tokens, -<dL/dx, x> on the identity path for the others."""
    x, pi, selection, mask = prepared()
    target = torch.randn_like(x)
    reduction = input_gated(selection, N)
    (reduction.restore(block(reduction.reduce(x)), x) - target).square().sum().backward()

    plain = select(selection.indices, N)
    chosen = plain.reduce(x).requires_grad_(True)
    skipped = x.clone().requires_grad_(True)
    (plain.restore(block(chosen), skipped) - target).square().sum().backward()
    selected_gradient = plain.restore(chosen.grad, torch.zeros_like(x))
    expected = torch.where(mask, (selected_gradient * x).sum(-1), -(skipped.grad * x).sum(-1))
    torch.testing.assert_close(pi.grad, expected)


@pytest.mark.parametrize("guess", ["zero", "mean", "ridge", "teacher"])
def test_the_output_estimator_weighs_updates(guess: str) -> None:
    """dL/dpi = <dL/dy, update>, the true update where the block ran and the guess where it did not."""
    x, pi, selection, _ = prepared()
    target, teacher = torch.randn_like(x), torch.randn_like(x)
    reduction = output_gated(selection, x, guess, teacher)  # type: ignore[arg-type]
    y = reduction.restore(block(reduction.reduce(x)), x)
    y.retain_grad()
    (y - target).square().sum().backward()

    plain = select(selection.indices, N)
    inputs = plain.reduce(x)
    updates = block(inputs) - inputs
    guessed = guess_updates(guess, updates, inputs, x, teacher)  # type: ignore[arg-type]
    update = plain.restore(updates, guessed)
    torch.testing.assert_close(pi.grad, (y.grad * update).sum(-1))


def test_guesses_are_what_they_say() -> None:
    inputs, full = torch.randn(2, 40, D, dtype=torch.float64), torch.randn(2, 60, D, dtype=torch.float64)
    linear = torch.randn(D, D, dtype=torch.float64)
    updates = inputs @ linear + 3.0
    ridge = ridge_fit(inputs, updates, full, 1e-9)
    torch.testing.assert_close(ridge, full @ linear + 3.0, rtol=1e-3, atol=1e-3)
    few = ridge_fit(inputs[:, :5], updates[:, :5], full, 1.0)
    larger = ridge_fit(10 * inputs[:, :5], updates[:, :5], 10 * full, 1.0)
    torch.testing.assert_close(larger, few, rtol=1e-4, atol=1e-4)  # its strength is a share of the inputs' power
    mean = guess_updates("mean", updates, inputs, full, None)
    torch.testing.assert_close(mean[:, 7], updates.mean(dim=1))
    with pytest.raises(ValueError, match="session.call"):
        guess_updates("teacher", updates, inputs, full, None)


def test_gradients_reach_scores_and_budget_and_sum_to_zero_over_scores() -> None:
    """A soft rank only reorders: whatever arrives, the scores' gradients sum to nothing."""
    scores = torch.randn(2, N, requires_grad=True)
    budget = torch.tensor(5.2, requires_grad=True)
    x = torch.randn(2, N, D)
    selection = select_tokens(scores, 5, budget)
    reduction = output_gated(selection, x, "mean")
    reduction.restore(block(reduction.reduce(x)), x).square().sum().backward()
    assert scores.grad is not None
    assert scores.grad.abs().max() > 0
    torch.testing.assert_close(scores.grad.sum(-1), torch.zeros(2), atol=1e-5, rtol=0)
    assert budget.grad is not None
    assert budget.grad != 0
    assert soft_rank(scores, 0.2).shape == scores.shape
