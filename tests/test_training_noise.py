"""Stratified sampling: the same global batch for any number of ranks; and how schedulers mix noise."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from shiva.training.draws import strata, stratified_ratios
from shiva.training.noise import FlowMatching, noise_process

from tiny import noise


@pytest.mark.parametrize("count", [1, 4, 16])
def test_every_interval_has_one_timestep_in_an_order_that_changes(count: int) -> None:
    for step in range(20):
        assert sorted(int(q * count) for q in strata(3, step, count)) == list(range(count))
    assert strata(3, 0, count) == strata(3, 0, count)
    assert strata(3, 0, count) != strata(3, 1, count)
    assert strata(3, 0, count) != strata(4, 0, count)


def test_ratios_cover_the_groups_evenly() -> None:
    ratios = stratified_ratios(0, 5, 8, 0.2, 0.9, 4)
    groups = sorted(int((r - 0.2) / 0.7 * 4) for r in ratios)
    assert groups == [0, 0, 1, 1, 2, 2, 3, 3]
    few = [stratified_ratios(0, step, 1, 0.2, 0.9, 4)[0] for step in range(4)]
    assert sorted(int((r - 0.2) / 0.7 * 4) for r in few) == [0, 1, 2, 3]


def test_flow_matching_agrees_with_the_scheduler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    process = noise_process(scheduler, "scheduler")
    clean, mixed = noise(2, 4, 3, 3), noise(2, 4, 3, 3, seed=2)
    index = 300
    timestep = float(scheduler.timesteps[index])
    quantile = 1 - index / 1000
    assert process.timestep(quantile, 64) == pytest.approx(timestep, rel=1e-4)
    expected = scheduler.scale_noise(clean, scheduler.timesteps[index : index + 1], mixed)
    torch.testing.assert_close(process.mix(clean, mixed, timestep), expected)
    torch.testing.assert_close(process.target(clean, mixed, timestep), mixed - clean)
    assert FlowMatching("uniform").timestep(0.25, 0) == 250
    assert FlowMatching("logit-normal").timestep(0.5, 0) == pytest.approx(500)


def test_a_dynamic_shift_follows_the_number_of_tokens() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    process = noise_process(scheduler, "scheduler")
    scheduler.set_timesteps(sigmas=[0.5], mu=1.15)
    assert process.timestep(0.5, 4096) == pytest.approx(float(scheduler.timesteps[0]), rel=1e-5)
    assert process.timestep(0.5, 256) < process.timestep(0.5, 4096)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_variance_preserving_agrees_with_the_scheduler(prediction: str) -> None:
    scheduler = DDIMScheduler(prediction_type=prediction)
    process = noise_process(scheduler, "uniform")
    clean, mixed = noise(2, 4, 3, 3), noise(2, 4, 3, 3, seed=2)
    times = torch.tensor([417])
    assert process.timestep(0.4175, 64) == 417
    torch.testing.assert_close(process.mix(clean, mixed, 417), scheduler.add_noise(clean, mixed, times))
    expected = mixed if prediction == "epsilon" else scheduler.get_velocity(clean, mixed, times)
    torch.testing.assert_close(process.target(clean, mixed, 417), expected)


def test_an_unknown_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match="prediction_type='sample'"):
        noise_process(EulerDiscreteScheduler(prediction_type="sample"), "uniform")


def test_a_density_of_noise_levels_is_not_of_whole_timesteps() -> None:
    with pytest.raises(ValueError, match="logit-normal is of noise levels, and DDIMScheduler .* uniform or scheduler"):
        noise_process(DDIMScheduler(), "logit-normal")
