"""The relaxations of top-k side by side, and the gates that they share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shiva
from baseline_tools import scores
from shiva.core.context import Exploration
from shiva.core.reduction import select
from shiva.methods.gated import input_gates
from shiva.ops.relaxed import lapsum_topk, neuralsort_topk, soft_topk
from shiva.ops.topk import hard_topk, inclusion

from method_table import METHODS
from tiny import BACKBONES, make_sd3, noise

Gates = Callable[[Tensor, int, float], Tensor]
SELECTORS: dict[str, Gates] = {
    "neuralsort": neuralsort_topk,
    "sinkhorn": lambda s, k, tau: soft_topk(s, k, tau, "sinkhorn", 2000),
    "closed_form": lambda s, k, tau: soft_topk(s, k, tau, "closed_form"),
    "lapsum": lapsum_topk,
    "shiva": lambda s, k, tau: inclusion(s, torch.tensor(k + 0.5), tau, tau),
}
EXACT = ("neuralsort", "sinkhorn", "closed_form", "lapsum")


@pytest.mark.parametrize("name", SELECTORS)
def test_gates_follow_the_order_and_become_the_hard_mask(name: str) -> None:
    s, k = scores(), 7
    hard = torch.zeros_like(s).scatter(1, hard_topk(s, k), 1.0)
    soft = SELECTORS[name](s, k, 0.1)
    assert torch.equal(hard_topk(soft, k), hard_topk(s, k))
    torch.testing.assert_close(SELECTORS[name](s, k, 1e-4), hard, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", SELECTORS)
def test_gates_are_equivariant_to_order_and_blind_to_a_shift(name: str) -> None:
    s, order = scores(), torch.randperm(23)
    gates = SELECTORS[name](s, 7, 0.1)
    torch.testing.assert_close(SELECTORS[name](s[:, order], 7, 0.1), gates[:, order], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(SELECTORS[name](s + 3.0, 7, 0.1), gates, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("k", [1, 7, 22])
def test_gates_sum_to_k(name: str, k: int) -> None:
    gates = SELECTORS[name](scores(), k, 0.1)
    torch.testing.assert_close(gates.sum(1), torch.full((2,), float(k), dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", EXACT)
def test_half_precision_scores_and_equal_scores_are_handled(name: str) -> None:
    gates = SELECTORS[name](torch.zeros(1, 8, dtype=torch.bfloat16), 2, 0.1)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, torch.full((1, 8), 0.25))
    assert SELECTORS[name](noise(1, 8) * 1e4, 3, 0.1).isfinite().all()


@pytest.mark.parametrize("name", ["neuralsort", "lapsum"])
def test_gradient_of_the_scores(name: str) -> None:
    s = scores(tokens=9).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda s: SELECTORS[name](s, 4, 0.3), (s,))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["diffcr", "lapsum", "neuralsort", "shiva", "soft-topk"])
def test_all_methods_choose_the_same_tokens_for_the_same_scores(name: str, training: bool) -> None:
    model, call, s = make_sd3(), BACKBONES["sd3"].call(2, 8, 8), noise(2, 64, seed=3)
    with shiva.attach(model, METHODS[name].on, cfg="none") as session, session.trace() as trace:
        method = session.method.train(training)
        method.scores = lambda x, layer, ctx: s
        method.training_scores = lambda x, age, site, ctx: s
        with torch.no_grad():
            session.call(call, explore=Exploration(ratio=0.5))
    for layer in (1, 2, 3):
        assert torch.equal(torch.stack([*trace.positions[0, layer]]), hard_topk(s, 32))


def test_gates_change_no_value() -> None:
    x, s = noise(2, 12, 4), noise(2, 12, seed=3)
    expected = hard_topk(s, 5)
    for gates in SELECTORS.values():
        reduction = input_gates(select(expected, s.shape[1]), gates(s, 5, 0.1))
        assert torch.equal(reduction.reduce(x), x.gather(1, expected[..., None].expand(-1, -1, 4)))
        assert torch.equal(reduction.restore(reduction.reduce(x), x), x)


def test_the_straight_through_gate_hands_each_selected_token_its_inner_product() -> None:
    x, gates, upstream = noise(1, 6, 3), torch.rand(1, 6, requires_grad=True), noise(1, 2, 3, seed=8)
    indices = torch.tensor([[1, 4]])
    (input_gates(select(indices, gates.shape[1]), gates).reduce(x) * upstream).sum().backward()
    expected = torch.zeros(1, 6)
    expected[0, indices[0]] = (x[0, indices[0]] * upstream[0]).sum(-1)
    torch.testing.assert_close(gates.grad, expected)
