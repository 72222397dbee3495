"""Training where a few-step sampler stands: the run's own noise levels, the model's own states, a fitted start."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

import shiva
from shiva.fitting import fit
from shiva.training.call import as_trained, dense
from shiva.training.draws import MicroBatch, draw_batch, moment
from shiva.training.objectives import process_of
from shiva.training.recipe import lay_over, recipe_from
from shiva.training.sections import Sampling
from shiva.training.start import read_start
from shiva.training.state import load_state
from shiva.training.trainer import Trainer
from test_training_loop import run_steps, trainer_of
from training_tiny import CAPTIONS, make_folder, tiny_recipe

RUN: dict[str, Any] = {
    "method": {"budget": 0.5, "bottleneck": 8, "fill": "shortcut", "rank": 4},
    "sampling": {"density": "run", "steps": 3, "rollout": 1.0, "caption_dropout": 0.0},
    "weights": {"diffusion": 0.0, "distill": 0.0},
    "stages": [{"name": "all", "steps": 3, "trains": ["router", "fill"], "ratios": "stratified", "warmup": 0}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


@pytest.fixture
def trainer(folder: Path, tmp_path: Path) -> Trainer:
    return trainer_of(folder, tmp_path, **RUN)


def test_timesteps_are_those_of_the_pipelines_own_run(trainer: Trainer) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    scheduler.set_timesteps(3)
    process = trainer.objectives.process
    found = [process.timestep(quantile, 64) for quantile in (0.99, 0.6, 0.34, 0.0)]
    first, second, third = (1000 * scheduler.sigmas[:3]).tolist()
    assert found == pytest.approx([first, second, second, third], rel=1e-5)


def test_a_run_is_of_the_size_of_the_latents(folder: Path, tmp_path: Path) -> None:
    """SD3's pipeline draws no 35 pixels; images of it are cropped to 32."""
    assert len(trainer_of(folder, tmp_path, **RUN, data={"resolution": 35}).objectives.process.levels) == 3


def test_a_rollout_stands_where_the_reduced_pipeline_stands(trainer: Trainer) -> None:
    """From the same noise, without guidance, at the same uniform keep: the sampler and the rollout agree."""
    objectives, session = trainer.objectives, trainer.session
    batch = trainer.validator.batches()[0]
    last = objectives.process.levels[-1] * 1000
    exploration = replace(batch.exploration, ratio=0.5)
    batch = replace(batch, timestep=last, rolls_out=True, exploration=exploration)
    reached = objectives.rolled_out(batch).reached
    assert reached is not None
    here = batch.noise
    with as_trained(session), trainer.method.at_keep(0.5), torch.no_grad():
        for now, following in pairwise([level * 1000 for level in objectives.process.levels]):
            begins = now == objectives.process.levels[0] * 1000
            made, _ = objectives.call(replace(batch, timestep=now, reached=here), begins=begins)
            here = here + (following - now) / 1000 * made
    torch.testing.assert_close(reached, here)
    assert not torch.allclose(reached, batch.noise)


def test_steps_that_see_all_tokens_do_so_in_training_too(folder: Path, tmp_path: Path) -> None:
    """They are learned at all tokens, and a rollout passes them so: its first step is then the dense model's."""
    changed = {**RUN, "method": {**RUN["method"], "dense_steps": [0]}}
    trainer = trainer_of(folder, tmp_path, **changed)
    process, recipe = trainer.objectives.process, trainer.recipe
    now = moment(recipe.stages, 0)
    assert now is not None
    draws = [draw for step in range(8) for draw in draw_batch(recipe, process, now, step, [64] * 4, earlier=False)]
    first, second, _ = (level * 1000 for level in process.levels)
    assert {draw.timestep for draw in draws} > {first}
    assert all((draw.exploration.ratio == 1.0) == (draw.timestep == first) for draw in draws)

    batch = trainer.validator.batches()[0]
    batch = replace(batch, rolls_out=True, exploration=replace(batch.exploration, ratio=0.5))
    reached = trainer.objectives.rolled_out(replace(batch, timestep=second)).reached
    with dense(trainer.session), torch.no_grad():
        made, _ = trainer.objectives.call(replace(batch, timestep=first, reached=batch.noise))
    torch.testing.assert_close(reached, batch.noise + (second - first) / 1000 * made)


def test_router_and_fill_learn_from_rollouts_and_the_diffusion_loss_is_left_out(trainer: Trainer) -> None:
    before = {name: value.clone() for name, value in trainer.method.named_parameters()}
    numbers = run_steps(trainer, 2)
    assert all(row["diffusion"] == 0 and row["output"] > 0 for row in numbers)
    moved = {n.partition(".")[0] for n, v in trainer.method.named_parameters() if not torch.equal(v, before[n])}
    assert moved == {"routers", "shortcut"}


def test_a_rollout_that_follows_a_dense_run_is_led_back_to_it(folder: Path, tmp_path: Path) -> None:
    """Where the reduced run of 3 steps stands, the aim is the one prediction that meets the dense run of 5."""
    trainer = trainer_of(folder, tmp_path, **{**RUN, "sampling": {**RUN["sampling"], "follow": 5}})
    objectives, batch = trainer.objectives, trainer.validator.batches()[0]
    batch = replace(batch, rolls_out=True, exploration=replace(batch.exploration, ratio=0.5))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    scheduler.set_timesteps(5)
    dense_levels, levels = scheduler.sigmas.tolist(), [*objectives.process.levels, 0.0]
    for now, following in pairwise(levels):
        there = batch.noise
        with dense(trainer.session), torch.no_grad():
            for level, lower in pairwise(dense_levels):
                if level > following:
                    made, _ = objectives.call(replace(batch, timestep=1000 * level, reached=there))
                    there = there + (max(lower, following) - level) * made
        rolled = objectives.rolled_out(replace(batch, timestep=1000 * now))
        assert rolled.reached is not None
        if now < 0.02:  # the stock scheduler's last step gets nowhere: there the dense prediction is the target
            taught = objectives.teach(rolled)
            learned, _ = objectives.learn(rolled, taught)
            losses, _ = objectives.losses(replace(batch, timestep=1000 * now))
            assert rolled.aim is None
            torch.testing.assert_close(losses["output"], (learned - taught.prediction).square().mean())
            continue
        assert rolled.aim is not None
        torch.testing.assert_close(rolled.reached + (following - now) * rolled.aim, there, atol=1e-4, rtol=1e-4)
        losses, _ = objectives.losses(replace(batch, timestep=1000 * now))
        learned, _ = objectives.learn(rolled, objectives.teach(rolled))
        torch.testing.assert_close(losses["output"], (learned - rolled.aim).square().mean())


def test_a_run_is_validated_in_its_own_steps(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its first step dense: a single call would be taken for that step, and every keep measure the same."""
    options = {"validation": {"every": 0, "samples": 3, "keeps": [0.9, 0.3], "images": 0}}
    trainer = trainer_of(folder, tmp_path, **{**RUN, **options, "method": {**RUN["method"], "dense_steps": [0]}})
    distance, kept = trainer.validator._distance, []

    def noted(batch: MicroBatch) -> tuple[float, float]:
        found = distance(batch)
        kept.append(trainer.session.stats[-1].kept["transformer_blocks.1"])
        return found

    monkeypatch.setattr(trainer.validator, "_distance", noted)
    measured = trainer.validator.measure()
    assert 0 < measured["mse/keep_0.9"] < measured["mse/keep_0.3"]
    assert kept[-3:] == [16, 16, 64], "half of the tokens in all: a quarter of them in steps 2 and 3"


def test_a_run_starts_with_a_fitted_shortcut(folder: Path, tmp_path: Path) -> None:
    pipe = StableDiffusion3Pipeline.from_pretrained(folder / "pipeline", text_encoder_3=None, tokenizer_3=None)
    fitted = fit(pipe, CAPTIONS[:4], steps=(2,), guidance=0.0, rank=4, arguments={"max_sequence_length": 0})
    fitted.checkpoint().save_pretrained(tmp_path / "fit")
    started = trainer_of(folder, tmp_path / "out", **RUN)
    start = read_start(str(tmp_path / "fit"), print)
    started.start_from(start)
    for name, value in fitted.method.shortcut.state_dict().items():
        assert torch.equal(started.method.shortcut.state_dict()[name], value)
    other = trainer_of(folder, tmp_path / "other", **{**RUN, "method": {**RUN["method"], "rank": 2}})
    with pytest.raises(ValueError, match=r"has a \(4, 2, 32, 4\) shortcut.down"):
        other.start_from(start)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"density": "run"}, "steps"),
        ({"steps": 4}, "density"),
        ({"rollout": 0.5}, "density: run"),
        ({"density": "run", "steps": 3, "rollout": 0.5, "follow": 4}, "rollout: 1"),
    ],
)
def test_a_rollout_needs_a_run(folder: Path, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from(tiny_recipe(folder, sampling=sampling))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling": {"follow": 4}, "weights": {"distill": 1.0}},
            "set weights: {diffusion: 0, distill: 0, output: 1}",
        ),
        ({"method": {"fill": "cached"}}, "set method.fill to shortcut"),
        ({"weights": {"output": 0.0}}, "sampling.rollout=1.0 has no target but the dense model; set weights.output"),
        ({"weights": {"output": 0.0, "distill": 1.0}, "distill": {"every": 0}}, "has no target but the dense model"),
        ({"method": {"dense_steps": [0]}, "stages": {"all": {"ratios": "policy"}}}, "set its ratios: stratified"),
    ],
)
def test_what_does_not_go_with_a_run_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    run = lay_over(tiny_recipe(folder, **RUN), {"weights": {"diffusion": 0.0, "distill": 0.0}})
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe_from(lay_over(run, changes))


def test_a_run_is_of_a_flow_matching_scheduler() -> None:
    """Which is known before the pipeline runs."""
    family: Any = SimpleNamespace(pipe=SimpleNamespace(scheduler=DDIMScheduler()))
    with pytest.raises(ValueError, match="FlowMatch"):
        process_of(family, Sampling(density="run", steps=2), (16, 16))


def test_attending_to_all_trains_with_fresh_keys(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, **{**RUN, "method": {**RUN["method"], "attends": "all"}})
    assert all(torch.isfinite(torch.tensor(row["output"])) for row in run_steps(trainer, 1))
    assert isinstance(trainer.method.config, shiva.Shiva)


def test_a_run_in_half_precision_goes_on_with_its_scale(folder: Path, tmp_path: Path, trainer: Trainer) -> None:
    now = moment(trainer.recipe.stages, 0)
    assert now is not None
    trainer.enter(now)
    trainer.step = 1
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    trainer.save(now)
    other = trainer_of(folder, tmp_path / "other", **RUN)
    other.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert trainer.newest is not None
    other.restore(trainer.newest, load_state(trainer.newest))
    assert other.accelerator.scaler.get_scale() == 512.0
