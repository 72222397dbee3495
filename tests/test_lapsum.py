"""LapSum holds what its paper says of it."""

from __future__ import annotations

import pytest
import torch

import shiva
from baseline_tools import SPEC, scores
from shiva.core.context import Exploration, StepContext
from shiva.core.layout import Layout
from shiva.methods.gated import LapSumMethod
from shiva.ops.relaxed import lapsum_topk

from tiny import BACKBONES, make_sd3, noise


def test_lapsum_gradients_of_scores_budget_and_width() -> None:
    s = scores(3, 11).requires_grad_(True)
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([[0.2], [5.0], [10.7]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lapsum_topk, (s, k, alpha))


def test_lapsum_budget_derivative_by_finite_differences() -> None:
    s, k, h = scores(), torch.tensor(7.0, dtype=torch.float64, requires_grad=True), 1e-5
    weights = noise(2, 23, seed=9).double()
    (gradient,) = torch.autograd.grad((lapsum_topk(s, k, 0.2) * weights).sum(), k)
    quotient = ((lapsum_topk(s, 7 + h, 0.2) - lapsum_topk(s, 7 - h, 0.2)) * weights).sum() / (2 * h)
    torch.testing.assert_close(gradient, quotient, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 1.0, 1e6])
def test_lapsum_meets_its_budget_at_any_width_and_is_the_laplace_function(alpha: float) -> None:
    s, k = scores(2, 4096), 1234.5
    p = lapsum_topk(s, k, alpha)
    torch.testing.assert_close(p.sum(1), torch.full((2,), k, dtype=torch.float64), atol=1e-6, rtol=0)
    if alpha == 1.0:
        b = s - torch.distributions.Laplace(0.0, 1.0).icdf(p)
        torch.testing.assert_close(b, b[:, :1].expand_as(b))


def test_lapsum_learns_its_layers_ratios_and_meets_the_budget() -> None:
    method = shiva.LapSum(keep=0.6).build(SPEC).train()
    assert isinstance(method, LapSumMethod)
    with torch.no_grad():
        method.ratio_logits.copy_(torch.linspace(-2, 4, 6))
    optimizer = torch.optim.Adam(method.groups()["policy"], lr=0.05)
    ctx = StepContext(Layout(10, 10), timestep=500.0, now=method.new_step())
    for _ in range(300):
        optimizer.zero_grad()
        method.losses(ctx)["budget"].backward()
        optimizer.step()
    ratios = torch.sigmoid(method.ratio_logits.detach())
    assert ratios[1:].mean() == pytest.approx(0.6, abs=1e-3)
    assert ratios[5] > ratios[1] + 0.2
    counts = method.eval().plan(ctx, None)
    assert counts[0] == 100
    assert sum(counts[1:]) == pytest.approx(5 * 60, abs=5)
    assert len(set(counts)) > 3


def test_lapsum_is_built_and_run_in_inference_mode() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with torch.inference_mode(), shiva.attach(model, shiva.LapSum(keep=0.5)) as session:
        model(**call)
        assert session.stats[-1].kept["transformer_blocks.2"] == 32


def test_lapsum_blocks_hand_their_gradient_to_the_ratio() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.LapSum(keep=0.5)) as session:
        method = session.method.train()
        model(**BACKBONES["sd3"].call(2, 8, 8))[0].square().mean().backward()
        gradient = method.ratio_logits.grad
        assert gradient[0] == 0
        assert (gradient[1:] != 0).all()
        with torch.no_grad():
            session.call(BACKBONES["sd3"].call(2, 8, 8), explore=Exploration(ratio=0.25))
        assert session.stats[-1].kept["transformer_blocks.2"] == 16
        assert method.losses(session.ctx) == {}
