"""DiffCR holds what its paper says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiva
from baseline_tools import SPEC, output
from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.reduction import Streams
from shiva.methods.diffcr import DiffCRMethod, bin_count, bracket, nearest_bin

from tiny import BACKBONES, make_sd3, noise


def test_diffcr_bins() -> None:
    bins = shiva.DiffCR().bins
    assert bracket(1.0, bins) == (0.9, 1.0)
    assert bracket(0.73, bins) == (0.7, 0.8)
    assert bracket(0.7, bins) == (0.6, 0.7)
    assert bracket(0.1, bins) == (0.1, 0.2)
    assert [nearest_bin(r, bins) for r in (0.74, 0.75, 0.02)] == [0.7, 0.8, 0.1]
    assert [bin_count(b, 4096) for b in (0.1, 0.3, 1.0)] == [410, 1229, 4096]
    assert bin_count(0.7, 10) == 7


def diffcr_output(ratio: float, training: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Output of a model whose middle layer alone is reduced, and d(weighted output) / d(its ratio)."""
    model, call = make_sd3(layers=3), BACKBONES["sd3"].call(1, 8, 8)
    torch.manual_seed(0)
    with shiva.attach(model, shiva.DiffCR(dense=(0, 2), **options)) as session:
        method = session.method.train(training)
        with torch.no_grad():
            method.rho[1, 2] = ratio
        result = model(**call)[0]
        (result * noise(*result.shape, seed=6)).sum().backward()
        return result.detach(), method.rho.grad


def test_diffcr_bins_named_twice_are_one() -> None:
    assert shiva.DiffCR(bins=(1.0, 0.5, 0.5)).bins == (0.5, 1.0)


def test_diffcr_at_a_bin_equals_the_single_pass() -> None:
    for ratio in (0.1, 0.5, 0.6, 1.0):
        twice, _ = diffcr_output(ratio, training=True)
        once, _ = diffcr_output(ratio, training=False)
        torch.testing.assert_close(twice, once, atol=1e-5, rtol=1e-5)


def test_diffcr_mixes_image_and_text_of_both_passes_and_has_their_difference_as_gradient() -> None:
    """Inside a bin the model after the block is not linear, so the block's own output is compared."""
    method = shiva.DiffCR(gate=False).build(SPEC).train()
    x, text = noise(2, 10, 16), noise(2, 3, 16, seed=2)

    def run(image: Tensor, reduction: Any) -> Streams:
        return Streams(image * 2 + image.mean(1, keepdim=True), text * image.shape[1])

    class Place:
        name, kind, layer, module = "block", "block", 1, nn.Identity()

    ctx = StepContext(Layout(2, 5), timestep=600.0, now=method.new_step(), run=method.new_run())
    with torch.no_grad():
        method.rho.fill_(0.73)
    mixed = method.around(run, x, x, Place(), ctx)
    low, high = (
        method.single_pass(run, x, method.scores(x, 1, ctx), x.new_zeros(x.shape[:2]), k, Place(), ctx) for k in (7, 8)
    )
    for got, a, b in zip(mixed[:2], low[:2], high[:2], strict=True):
        torch.testing.assert_close(got, a + 0.3 * (b - a))
        weights = torch.rand_like(got)
        (gradient,) = torch.autograd.grad((got * weights).sum(), method.rho, retain_graph=True)
        torch.testing.assert_close(gradient[1, 2], ((b - a) * weights).sum() / 0.1, rtol=1e-4, atol=1e-4)
        assert gradient.count_nonzero() == 1


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("training", [False, True])
def test_diffcr_without_gate_at_ratio_one_is_dense_and_with_it_is_not(backbone: str, training: bool) -> None:
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    dense = output(model, call)
    for gate in (False, True):
        with shiva.attach(model, shiva.DiffCR(gate=gate)) as session:
            session.method.train(training)
            assert torch.allclose(output(model, call), dense, atol=1e-5) is not gate


def test_diffcr_forced_gate_of_one_is_dense() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    dense = output(model, call)
    with shiva.attach(model, shiva.DiffCR()) as session:
        session.method.scores = lambda x, layer, ctx: torch.full(x.shape[:2], 100.0)
        assert torch.equal(output(model, call), dense)


def test_diffcr_regions_have_their_own_ratios() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    with shiva.attach(model, shiva.DiffCR()) as session:
        with torch.no_grad():
            session.method.rho[2] = torch.tensor([1.0, 0.9, 0.52, 0.13])
        for timestep, kept in [(1000.0, 7), (750.0, 7), (749.0, 32), (250.0, 58), (0.0, 64)]:
            output(model, tiny.call(1, 8, 8, timestep))
            assert session.stats[-1].kept["transformer_blocks.2"] == kept
            assert "transformer_blocks.2.ff" not in session.stats[-1].kept


def test_diffcr_budget_loss_drives_the_mean_ratio_to_target() -> None:
    method = shiva.DiffCR(keep=0.7).build(SPEC).train()
    assert isinstance(method, DiffCRMethod)
    optimizer = torch.optim.SGD([method.rho], lr=0.01)
    ctx = StepContext(Layout(8, 8), timestep=300.0)
    with torch.no_grad():
        method.rho[0] = 1.7  # outside the bins: the gradient must still lead it back
    for _ in range(1500):
        optimizer.zero_grad()
        method.losses(ctx)["budget"].backward()
        optimizer.step()
    assert method.ratios().mean().item() == pytest.approx(0.7, abs=1e-3)
    assert method.rho[0, 0] < 1.7


def test_diffcr_clamp_lets_no_ratio_run_away() -> None:
    method = shiva.DiffCR().build(SPEC).train()
    (-method.ratios().sum()).backward()  # descent would raise the ratios, which stand at their top
    assert method.rho.grad.count_nonzero() == 0
