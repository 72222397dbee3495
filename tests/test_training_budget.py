"""The budget controller: it reaches its target, and one global batch has one mean however it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shiva
from shiva.core.context import Exploration
from shiva.core.method import BackboneSpec
from shiva.methods.shiva import ShivaMethod
from shiva.ops.networks import BudgetController
from shiva.ops.schedule import RatioSchedule
from shiva.training.draws import strata
from shiva.training.sections import Stage

SPEC = BackboneSpec("Tiny", layers=6, width=8, time_width=8, prompt_width=8)


def method(**options: object) -> ShivaMethod:
    torch.manual_seed(0)
    built = shiva.Shiva(budget=0.6, bottleneck=4, **options).build(SPEC)  # type: ignore[arg-type]
    return built.train()


def steer(built: ShivaMethod, steps: int, pull: float, noise: float, weight: float, start: float = 0.0) -> float:
    """Train the policy at the paper's rate against a task that pulls towards more tokens.

    Returns the deterministic mean keep at the end, where the rate has cooled down.
    """
    policy, stage = built.policy, Stage("policy", steps, ("policy",), warmup=20)
    with torch.no_grad():
        policy.anchor.add_(start)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    for step in range(steps):
        timesteps = [1000 * q for q in strata(0, step, 8)]
        optimizer.param_groups[0]["lr"] = 1e-4 * stage.rate_factor(step)
        built.begin_batch(timesteps, Exploration(logit_noise=noise))
        logits = policy.logits(torch.tensor(timesteps))  # (M, L)
        noisy = torch.sigmoid(logits + built._logit_noise)[:, 1:]
        tracked = torch.sigmoid(logits)[:, 1:] if built.config.noise_free else noisy
        loss = weight * tracked.mean() * built.controller.pressure + pull * (1 - noisy).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return RatioSchedule.compile(policy).mean_keep


def micro(shiva_method: ShivaMethod, timestep: float, index: int, noise: float) -> tuple[Tensor, Tensor]:
    """Ratios (L,) and the tracked mean of one micro-batch."""
    from shiva.core.context import StepContext
    from shiva.core.layout import Layout

    explore = Exploration(logit_noise=noise, index=index)
    ctx = StepContext(Layout(4, 4), timestep, now=shiva_method.new_step(), explore=explore)
    return shiva_method.training_ratios(ctx), ctx.now.mean_keep


def test_without_a_task_the_papers_controller_reaches_the_target() -> None:
    mean = steer(method(dual=0.0, noise_free=False), 300, pull=0.0, noise=0.0, weight=1.0, start=0.5)
    assert mean == pytest.approx(0.6, abs=0.005)


def test_under_a_task_the_dual_term_removes_the_offset() -> None:
    papers = steer(method(dual=0.0, noise_free=False), 400, pull=3.0, noise=1.0, weight=10.0)
    ours = steer(method(dual=0.02), 400, pull=3.0, noise=1.0, weight=10.0)
    assert papers > 0.65
    assert ours == pytest.approx(0.6, abs=0.01)


def test_micro_batches_add_up_to_the_global_batch() -> None:
    """The mean over micro-batches of losses() has the gradient of Eq. budget_loss on the whole batch."""
    timesteps = [900.0, 600.0, 300.0, 20.0]
    built = method()
    with torch.no_grad():
        for parameter in built.policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    built.begin_batch(timesteps, Exploration(logit_noise=1.0))
    parts = [micro(built, t, i, 1.0)[1] for i, t in enumerate(timesteps)]
    (sum(parts) / 4 * built.controller.pressure).backward()  # type: ignore[union-attr]
    accumulated = built.policy.anchor.grad

    whole = torch.sigmoid(built.policy.logits(torch.tensor(timesteps)))[:, 1:].mean()
    controller = BudgetController(0.6, beta=0.2, dual=0.02).train()
    loss = controller(whole)
    torch.testing.assert_close(controller.mu, built.controller.mu)
    torch.testing.assert_close(controller.nu, built.controller.nu)
    expected = torch.autograd.grad(loss, built.policy.anchor)[0]
    torch.testing.assert_close(accumulated, expected, rtol=1e-4, atol=1e-7)


def test_the_noisy_mean_is_the_one_the_micro_batches_used() -> None:
    timesteps = [800.0, 100.0]
    built = method(noise_free=False, dual=0.0, beta=1.0)
    built.begin_batch(timesteps, Exploration(logit_noise=1.0))
    used = torch.stack([micro(built, t, i, 1.0)[0][1:] for i, t in enumerate(timesteps)]).mean()
    torch.testing.assert_close(built.controller.mu, used.detach())


def test_router_warm_up_leaves_the_controller_alone() -> None:
    built = method()
    built.begin_batch([500.0], Exploration(ratio=0.3))
    assert float(built.controller.mu) == pytest.approx(0.6)
