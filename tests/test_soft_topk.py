"""SOFT top-k holds what its paper says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baseline_tools import scores
from shiva.ops.relaxed import largest_cost, soft_topk

from tiny import noise


@pytest.mark.parametrize("solver", ["sinkhorn", "closed_form"])
def test_gradient_of_soft_topk_by_implicit_differentiation(solver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = scores(tokens=9).requires_grad_(True)
    scale = largest_cost(s - s.mean(1, keepdim=True))  # has no gradient by definition, so it is held fixed
    monkeypatch.setattr("shiva.ops.relaxed.largest_cost", lambda scores: scale)
    assert torch.autograd.gradcheck(lambda s: soft_topk(s, 4, 0.1, solver, 2000), (s,))


def test_soft_topk_is_the_transport_plan_of_plain_sinkhorn() -> None:
    """The scaling algorithm on the n x 2 plan itself."""
    s, k, epsilon = scores(1, 12)[0], 5, 0.1
    centred = -(s - s.mean())
    cost = torch.stack([(centred + 1).square(), centred.square()], dim=1)  # (n, 2): selected, rejected
    kernel = torch.exp(-cost / cost.max() / epsilon)
    rows = torch.full((12,), 1 / 12, dtype=torch.float64)
    columns = torch.tensor([k / 12, 1 - k / 12], dtype=torch.float64)
    u, v = torch.ones(12, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for _ in range(3000):
        u = rows / (kernel @ v)
        v = columns / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    torch.testing.assert_close(soft_topk(s[None], k, epsilon, iterations=3000)[0], 12 * plan[:, 0])


def test_sinkhorn_converges_to_the_closed_form() -> None:
    s = scores()
    torch.testing.assert_close(
        soft_topk(s, 7, iterations=5000), soft_topk(s, 7, solver="closed_form"), atol=1e-12, rtol=0
    )


def test_only_the_closed_form_of_soft_gives_k_a_gradient() -> None:
    s, weights = scores(), noise(2, 23, seed=9).double()
    k = torch.tensor(7.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: soft_topk(s, k, solver="closed_form"), (k,))
    (gradient,) = torch.autograd.grad((soft_topk(s, k) * weights).sum() + 0 * k, k)
    assert gradient == 0
