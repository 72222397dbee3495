"""A session among others' hooks, samplers and guidance: what it tolerates, what it leaves alone, what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchHeunDiscreteScheduler,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
)
from torch import nn

import shiva
from pipelines import PIPELINES
from shiva.core.reduction import select
from shiva.methods.dydit import flat_selection
from shiva.ops.merging import group_mean, match
from shiva.progress import RunTracker

from method_table import METHODS
from tiny import call_flux, call_sd3, make_flux, make_sd3, noise

GUIDED = [name for name, row in METHODS.items() if "sd3" in row.backbones]


# -- guidance and samplers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GUIDED)
def test_the_extra_call_of_skip_layer_guidance_runs_dense(name: str, tmp_path: Path) -> None:
    tiny, skipping = PIPELINES["sd3"], {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0}
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, METHODS[name].on) as session:
        tiny.image(pipe, steps=3, skip_layer_guidance_stop=1.0, **skipping)
        assert len(session.stats) == 3
    dense = tiny.image(pipe, steps=3, skip_layer_guidance_stop=1.0, **skipping)
    with shiva.attach(pipe, METHODS[name].off):
        assert torch.equal(tiny.image(pipe, steps=3, skip_layer_guidance_stop=1.0, **skipping), dense)


def test_a_sampler_that_calls_each_timestep_twice_makes_one_run(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with shiva.attach(pipe, shiva.Shiva(budget=0.5, fill="cached")) as session:
        tiny.image(pipe, steps=5)
        summary = session.summary()
    assert len(summary.steps) == 9
    kept = [step.kept["transformer_blocks.2"] for step in summary.steps]
    assert kept[0] == summary.steps[0].tokens, "the first step fills the cache"
    assert all(count < kept[0] for count in kept[1:])


def test_timesteps_rounded_to_the_same_number_are_steps_of_one_run() -> None:
    schedule = 1000 * torch.linspace(1, 0.01, 100) ** 0.2
    tracker, latents = RunTracker("none"), [noise(1, 4, 8, 8, seed=step) for step in range(100)]
    rounded = schedule.to(torch.bfloat16).float().tolist()
    assert len(set(rounded)) < 90
    runs = [tracker.follow(timestep, x, schedule)[0] for timestep, x in zip(rounded, latents, strict=True)]
    assert all(run is runs[0] for run in runs)
    assert runs[0].step == 99


def test_a_pipeline_that_leaves_calls_out_is_followed() -> None:
    schedule, tracker = torch.linspace(1000, 100, 10), RunTracker("none")
    steps = [tracker.follow(t, noise(1, 4, seed=int(t)), schedule)[0].step for t in (1000.0, 900.0, 500.0, 400.0)]
    assert steps == [0, 1, 5, 6]


def test_told_that_guidance_is_sequential_the_second_call_at_a_timestep_is_its_other_branch() -> None:
    """Also with a copy of the latents for each branch, and where a sampler calls a timestep twice."""
    model, schedule = make_sd3(), torch.tensor([900.0, 600.0, 600.0, 300.0])
    pipe = SimpleNamespace(transformer=model, scheduler=SimpleNamespace(timesteps=schedule))
    config = shiva.Sweep(budget=0.5)
    with torch.no_grad(), shiva.attach(pipe, config, cfg="sequential") as session:
        branches = []
        for timestep in schedule.repeat_interleave(2).tolist():
            model(**call_sd3(1, 6, 6, timestep=timestep))
            branches.append((session.ctx.step, session.ctx.branch))
        assert branches == [(step, branch) for step in range(4) for branch in range(2)]
        kept = [record.kept["transformer_blocks.2"] for record in session.stats]
        assert kept[:2] == [36, 36]
        assert max(kept[2:]) < 36, "each branch finds its own cache"


def test_repeated_calls_open_one_branch_and_then_a_new_run() -> None:
    tracker, latents = RunTracker("auto"), noise(1, 4)
    seen = [tracker.follow(500.0, latents, None)[0] for _ in range(5)]
    assert [len({id(run) for run in seen[: i + 1]}) for i in range(5)] == [1, 1, 2, 2, 3]
    assert [run.branch for run in seen[1::2]] == [1, 1]
    tracker = RunTracker("none")
    assert tracker.follow(500.0, latents, None)[0] is not tracker.follow(500.0, latents, None)[0]


def test_one_noise_for_two_prompts_is_no_guidance_pair_where_the_pipeline_has_none(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    latents = noise(1, 4, 16, 12).repeat(2, 1, 1, 1)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        for guidance, paired in ((1.0, False), (3.0, True)):
            tiny.image(pipe, prompts=2, guidance=guidance, latents=latents)
            assert session.ctx.guidance_pairs == paired


@pytest.mark.parametrize("config", [shiva.Sweep(budget=0.5), shiva.SDTM()], ids=["sweep", "SDTM"])
def test_timesteps_that_rise_with_the_scheduler_make_one_run(config: Any) -> None:
    model, schedule = make_sd3(), torch.linspace(0, 900, 6)
    pipe = SimpleNamespace(transformer=model, scheduler=SimpleNamespace(timesteps=schedule))
    with torch.no_grad(), shiva.attach(pipe, config) as session:
        for _ in range(2):
            for step, timestep in enumerate(schedule.tolist()):
                model(**call_sd3(1, 6, 6, timestep=timestep))
                assert session.ctx.step == step
            assert len(session.stats) == 6, "the next inversion is a run of its own"


# -- others' hooks ---------------------------------------------------------------------------------------


class Counting(ModelHook):
    calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


def test_a_hook_put_over_the_session_outlives_it() -> None:
    model, call, counting = make_sd3(), call_sd3(1, 6, 6), Counting()
    with torch.no_grad():
        dense = model(**call)[0]
        with shiva.attach(model, shiva.Shiva(budget=0.5)):
            add_hook_to_module(model, counting)
            assert not torch.equal(model(**call)[0], dense)
        assert torch.equal(model(**call)[0], dense)
        assert counting.calls == 2
        accelerate.hooks.remove_hook_from_module(model)
        assert torch.equal(model(**call)[0], dense)
        assert counting.calls == 2


CACHES = {
    "FirstBlockCache": FirstBlockCacheConfig(threshold=10.0),
    "MagCache": MagCacheConfig(
        threshold=10.0, max_skip_steps=9, retention_ratio=0.0, num_inference_steps=3, mag_ratios=[1.0] * 3
    ),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_cache_enabled_over_the_session_outlives_it(cache: Any) -> None:
    model: Any = make_flux()
    ran, last = [], model.single_transformer_blocks[-1].attn

    def three_steps() -> tuple[int, list[torch.Tensor]]:
        ran.clear()
        model._reset_stateful_cache()
        with torch.no_grad(), model.cache_context("cond"):
            images = [model(**call_flux(1, 6, 6, timestep=timestep))[0] for timestep in (900.0, 600.0, 300.0)]
        return len(ran), images

    last.register_forward_hook(lambda *_: ran.append(True))
    _, dense = three_steps()
    model.enable_cache(cache)
    calls, alone = three_steps()
    assert calls < 3
    model.disable_cache()
    with shiva.attach(model, shiva.Shiva(budget=0.5)):
        model.enable_cache(cache)
        assert three_steps()[0] == calls
    after, images = three_steps()
    assert after == calls
    assert all(map(torch.equal, images, alone))
    model.disable_cache()
    assert all(map(torch.equal, three_steps()[1], dense))


def test_a_forward_from_before_the_session_is_there_after_it() -> None:
    model, call = make_sd3(), call_sd3(1, 6, 6)
    original, seen = model.forward, []

    def own(*args: Any, **kwargs: Any) -> Any:
        seen.append(True)
        return original(*args, **kwargs)

    model.forward = own
    with torch.no_grad(), shiva.attach(model, shiva.ToMeSD()):
        model(**call)
    model(**call)
    assert len(seen) == 2
    assert model.forward is own


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offload_comes_after_the_session_and_is_refused_before_it(offload: str) -> None:
    def switch_on(model: nn.Module) -> None:
        if offload == "model":
            accelerate.cpu_offload_with_hook(model, execution_device="cpu")
        else:
            accelerate.cpu_offload(model, execution_device="cpu")

    model, call = make_sd3(), call_sd3(1, 6, 6)
    with torch.no_grad(), shiva.attach(model, shiva.Shiva(flops=0.7)) as session:
        switch_on(model)
        model(**call)
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.03)

    model = make_sd3()
    switch_on(model)
    with pytest.raises(ValueError, match="CPU offload is on.*attach first"):
        shiva.attach(model, shiva.Shiva(flops=0.7))


def test_group_offload_after_the_session_can_be_priced() -> None:
    model, call = make_sd3(), call_sd3(1, 6, 6)
    with torch.no_grad(), shiva.attach(model, shiva.Shiva(flops=0.7)) as session:
        model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
        model(**call)
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.03)


def test_an_attention_cache_enabled_after_the_session_is_refused_at_the_next_run() -> None:
    model, call = make_flux(), call_flux(1, 6, 6)
    with torch.no_grad(), shiva.attach(model, shiva.Shiva(budget=0.5)):
        model.enable_cache(
            PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
            )
        )
        with pytest.raises(ValueError, match="caches attention outputs.*disable_cache"):
            model(**call)


def test_pairs_of_layers_open_where_a_controlnet_of_flux_adds_to_them() -> None:
    model, call = make_flux(), call_flux(1, 6, 6)
    call["controlnet_block_samples"] = [noise(1, 36, 32, seed=8)]
    call["controlnet_single_block_samples"] = [noise(1, 36, 32, seed=9)]
    with torch.no_grad(), shiva.attach(model, shiva.Shiva(budget=0.5, span=2)):
        assert model(**call)[0].isfinite().all()


# -- precision -------------------------------------------------------------------------------------------


def test_the_mean_of_a_large_group_is_right_in_bfloat16() -> None:
    same = torch.full((1, 1001, 4), 1.5, dtype=torch.bfloat16)
    mean = group_mean(same[:, :1], same[:, 1:], torch.zeros(1, 1000, dtype=torch.long))
    assert mean.dtype == torch.bfloat16
    torch.testing.assert_close(mean.float(), torch.full((1, 1, 4), 1.5))


def test_results_of_another_precision_than_the_input_are_put_back_in_theirs() -> None:
    """On CUDA autocast norms in float32 and multiplies in bfloat16; a CPU's autocast would hide a mismatch."""
    for reduction in (select(torch.tensor([[1, 3]]), 4), flat_selection(torch.tensor([[False, True, False, True]]))):
        restored = reduction.restore(torch.ones(1, 2, 3, dtype=torch.bfloat16), torch.zeros(1, 4, 3))
        assert restored.dtype == torch.bfloat16
        assert restored[0, :, 0].tolist() == [0, 1, 0, 1]


def test_near_ties_in_bfloat16_are_told_apart() -> None:
    """Cosines near 1 have eight bits in bfloat16; all of them are compared in float32."""
    x = (torch.ones(1, 256, 64) + 0.05 * noise(1, 256, 64)).bfloat16()
    destinations, sources = torch.arange(64), torch.arange(64, 256)
    exact = match(x.float(), destinations, sources, 96)
    assert torch.equal(match(x, destinations, sources, 96).sources, exact.sources)
