"""The loop: what each stage changes, what a kill leaves, and ranks that agree with one process."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, distributed

import forked
import shiva
from kills import contents, differences
from shiva.core.method import BackboneSpec
from shiva.training.draws import moment
from shiva.training.feed import load_ahead
from shiva.training.objectives import NonFiniteError
from shiva.training.process import Sharding, sharding_of
from shiva.training.recipe import recipe_from
from shiva.training.start import part_of, read_start
from shiva.training.state import checkpoints, load_state, locked
from shiva.training.trainer import MOST_SKIPPED, Trainer
from training_rank import train_noting
from training_tiny import make_folder, tiny_recipe

from method_table import METHODS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("training"))
    (made / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(made)))
    return made


def trainer_of(folder: Path, output: Path, **changes: Any) -> Trainer:
    trainer = Trainer(recipe_from(tiny_recipe(folder, **changes)), output)
    trainer.prepare()
    return trainer


def run_steps(trainer: Trainer, count: int) -> list[dict[str, float]]:
    """Steps without files."""
    numbers = []
    stages, micro = trainer.recipe.stages, trainer.micro_batches
    for loaded in load_ahead(trainer.prepared.feed, trainer.step, trainer.step + count, micro, range(micro)):
        now = moment(stages, trainer.step)
        assert now is not None
        if now.step == 0:
            trainer.enter(now)
        numbers.append(trainer.train_step(now, loaded))
        trainer.step += 1
    return numbers


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every tensor that could change."""
    method = {f"method.{n}": p for n, p in trainer.method.named_parameters()}
    base = {f"base.{n.replace('.base_layer', '')}": p for n, p in trainer.session.transformer.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in {**method, **base}.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Groups of the tensors that moved."""

    def group(name: str) -> str:
        if ".shiva." in name:
            return "adapter"
        return {"method.routers": "router", "method.policy": "policy"}.get(".".join(name.split(".")[:2]), "base")

    return {group(name) for name in before if not torch.equal(before[name], after[name])}


def test_each_stage_changes_its_groups_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path)
    start = weights(trainer)
    run_steps(trainer, 3)
    warm = weights(trainer)
    assert changed(start, warm) == {"router"}
    run_steps(trainer, 3)
    learned = weights(trainer)
    assert changed(warm, learned) == {"policy"}
    run_steps(trainer, 1)
    first = weights(trainer)
    run_steps(trainer, 1)
    assert changed(first, weights(trainer)) == {"router", "policy", "adapter"}


def test_gradients_reach_routers_through_the_teachers_updates(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path)
    run_steps(trainer, 1)
    tensors = trainer.optimizer.state_dict()["state"].values()
    moved = [float(entry["exp_avg_sq"].sum()) > 0 for entry in tensors]
    assert trainer.method.needs_updates
    assert sum(moved) > len(moved) // 2


def test_the_teacher_is_the_same_weights_with_nothing_attached(folder: Path, tmp_path: Path) -> None:
    """Also in joint tuning, when an adapter has moved; and there is no second copy."""
    trainer = trainer_of(folder, tmp_path, stages={"warmup": {"steps": 0}, "policy": {"steps": 0}})
    batch = trainer.validator.batches()[0]
    dense = trainer.objectives.teach(batch)
    count = sum(p.numel() for p in trainer.session.transformer.parameters())
    run_steps(trainer, 2)
    trained = [p.requires_grad for p in trainer.session.transformer.parameters()]
    again = trainer.objectives.teach(batch)
    assert [p.requires_grad for p in trainer.session.transformer.parameters()] == trained
    assert torch.equal(again.prediction, dense.prediction)
    assert sorted(again.recording.updates) == [1, 2, 3]
    assert sorted(again.recording.outputs) == [3]
    adapter = sum(p.numel() for p in trainer.groups["adapter"])
    assert sum(p.numel() for p in trainer.session.transformer.parameters()) == count + adapter


def test_validation_does_not_depend_on_what_the_pipeline_drew(folder: Path, tmp_path: Path) -> None:
    """A learned schedule is fitted to a sampler's timesteps; those of a picture drawn before must not be it."""
    trainer = trainer_of(folder, tmp_path)
    policy: Any = trainer.method.policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    first = trainer.validator.measure()
    assert "samples" in trainer.validator.pictures()
    scheduler = trainer.family.pipe.scheduler
    assert len(scheduler.timesteps) == 2
    assert trainer.validator.measure() == first
    scheduler.set_timesteps(7)
    assert trainer.validator.measure() == first
    assert trainer.family.pipe.scheduler is scheduler
    assert len(scheduler.timesteps) == 7


def test_the_papers_estimator_records_no_updates(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, method={"preset": "paper"})
    assert not trainer.objectives.teach(trainer.validator.batches()[0]).recording.updates


def test_gradient_checkpointing_and_the_complete_loss(folder: Path, tmp_path: Path) -> None:
    """Recomputing blocks changes no gradient; the complete model's loss is computed inside its own context."""
    results = []
    for checkpointing in (False, True):
        changes = {"compute": {"gradient_checkpointing": checkpointing}, "weights": {"complete": 0.5}}
        stages = {"warmup": {"steps": 0}, "policy": {"steps": 0}}
        trainer = trainer_of(folder, tmp_path / str(checkpointing), stages=stages, **changes)
        results.append((run_steps(trainer, 2), weights(trainer)))
    (plain, end), (recomputed, end_recomputed) = results
    assert plain[1]["complete"] > 0
    assert plain[1]["loss"] == pytest.approx(recomputed[1]["loss"], rel=1e-5)
    for name, tensor in end.items():
        torch.testing.assert_close(end_recomputed[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_the_complete_loss_is_told_where_no_adapter_trains(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, weights={"complete": 0.5})
    assert run_steps(trainer, 1)[0]["complete"] > 0


@pytest.mark.parametrize("where", ["adapter", "dense"])
def test_a_loss_that_is_not_finite_names_step_layer_and_checkpoint(folder: Path, tmp_path: Path, where: str) -> None:
    trainer = trainer_of(folder, tmp_path, stages={"warmup": {"steps": 0}, "policy": {"steps": 0}})
    run_steps(trainer, 2)
    trainer.newest = tmp_path / "states" / "step-00000002"
    linear: Any = trainer.session.transformer.transformer_blocks[2].ff.net[2]
    broken = linear.lora_B["shiva"].weight if where == "adapter" else linear.base_layer.weight
    with torch.no_grad():
        broken.fill_(float("nan"))
    before = weights(trainer)
    also = " already in the dense model" if where == "dense" else ""
    with pytest.raises(NonFiniteError, match=rf"step 2: the output of block 2 is not finite{also}; .*step-00000002"):
        run_steps(trainer, 1)
    after = weights(trainer)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def test_an_unknown_group_or_weight_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'router'"):
        trainer_of(folder, tmp_path, stages={"warmup": {"trains": ["ruter"]}})
    with pytest.raises(ValueError, match=r"optimizer.rates has no option 'ruter'; did you mean 'router'"):
        trainer_of(folder, tmp_path, optimizer={"rates": {"ruter": 1e-3}})
    with pytest.raises(ValueError, match="did you mean 'budget'"):
        trainer_of(folder, tmp_path, weights={"budgt": 2.0})


def test_losses_that_nothing_trained_enters_are_named(folder: Path, tmp_path: Path) -> None:
    """Of a router warm-up at drawn ratios there is no budget to pay."""
    weights = {"diffusion": 0.0, "distill": 0.0, "output": 0.0}
    trainer = trainer_of(folder, tmp_path, weights=weights)
    with pytest.raises(ValueError, match="none of a weight above 0 depends on what is trained; raise"):
        run_steps(trainer, 1)


class Scaler:
    """As of fp16, whose state is all that counts."""

    def __init__(self) -> None:
        self.state: dict[str, float] = {"scale": 8.0}

    def state_dict(self) -> dict[str, float]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.state = dict(state)


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path)
    run_steps(trainer, 1)
    trainer.accelerator.scaler = Scaler()
    now, (weight, *_) = moment(trainer.recipe.stages, 1), trainer.parameters()
    assert now is not None

    def update(value: float) -> None:
        weight.grad = torch.full_like(weight, value)
        with torch.no_grad():
            kept = weight.clone()
            trainer.update(now)
            weight.copy_(kept)

    for value in (torch.nan, 1.0, *[torch.nan] * MOST_SKIPPED):
        update(value)
    with pytest.raises(NonFiniteError, match="step 1: the gradient of router is not finite"):
        update(torch.nan)


def test_the_scale_of_fp16_is_taken_up_at_the_end_of_a_stage_too(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path)
    run_steps(trainer, 3)
    trainer.accelerator.scaler = Scaler()
    trainer.accelerator.scaler.state = {"scale": 2.0}
    now = moment(trainer.recipe.stages, 2)
    assert now is not None
    assert now.last
    trainer.save(now)
    trainer.accelerator.scaler = Scaler()
    (saved,) = checkpoints(tmp_path / "states")
    trainer.restore(saved, load_state(saved))
    assert trainer.accelerator.scaler.state == {"scale": 2.0}


def test_every_rank_knows_the_newest_state(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path)
    trainer.main, trainer.step = False, 2
    now = moment(trainer.recipe.stages, 1)
    assert now is not None
    trainer.save(now)
    assert trainer.newest == tmp_path / "states" / "step-00000002"


TRAINED = {type(row.on).__name__: row.on for row in METHODS.values() if row.differentiable}


@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_method_uses_this_loop(name: str, folder: Path, tmp_path: Path) -> None:
    """Its groups and the adapter move, the base does not; its checkpoint attaches."""
    config: Any = TRAINED[name]
    groups = list(config.build(BackboneSpec("SD3Transformer2DModel", 4, 32, 32, 20, 4)).groups())
    recipe = tiny_recipe(folder)
    recipe["method"] = {"name": name, **dataclasses.asdict(config)}
    recipe["stages"] = [{"name": "all", "steps": 2, "trains": [*groups, "adapter"], "warmup": 0}]
    trainer = Trainer(recipe_from(recipe), tmp_path)
    trainer.prepare()
    start = weights(trainer)
    numbers = run_steps(trainer, 2)
    assert all(torch.tensor(list(step.values())).isfinite().all() for step in numbers)
    moved = {n for n, tensor in weights(trainer).items() if n not in start or not torch.equal(start[n], tensor)}
    assert any(n.startswith("method.") for n in moved)
    assert not any(n.startswith("base.") and ".shiva." not in n for n in moved)
    assert "mse/schedule" in trainer.validator.measure()
    trainer.export()
    trainer.session.detach()
    with shiva.attach(trainer.family.pipe, trainer.final) as session:
        assert type(session.method.config).__name__ == name


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["Shiva", "DyDiT", "SparseDiT"])
def test_a_method_trains_the_same_over_sharded_weights(name: str, folder: Path, tmp_path: Path, group: None) -> None:
    """Teacher, prices (DyDiT), keys (SparseDiT) and recomputed blocks find the weights whole while they run."""
    config: Any = TRAINED[name]
    groups = list(config.build(BackboneSpec("SD3Transformer2DModel", 4, 32, 32, 20, 4)).groups())
    recipe = tiny_recipe(folder, compute={"gradient_checkpointing": True}, validation={"images": 0})
    recipe["method"] = {"name": name, **dataclasses.asdict(config)}
    recipe["stages"] = [{"name": "all", "steps": 2, "trains": [*groups, "adapter"], "warmup": 0}]
    ended = []
    for sharding in (None, Sharding(1, torch.device("cpu"), reshard_after_forward=True)):
        trainer = Trainer(recipe_from(recipe), tmp_path)
        trainer.sharding = sharding
        trainer.prepare()
        numbers = run_steps(trainer, 2)
        ended.append((numbers[-1], trainer.validator.measure(), trainer.adapter.weights()))
    (alone, measured, weights), (sharded, measured_too, weights_too) = ended
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert measured_too == pytest.approx(measured, rel=1e-4)
    for key, tensor in weights.items():
        torch.testing.assert_close(weights_too[key], tensor, rtol=1e-3, atol=1e-5, msg=key)


RUN = {"density": "run", "steps": 2}
SHARDINGS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"FSDP_VERSION": "1"}, {}, "FSDP 1; set fsdp_version: 2"),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, {}, "fsdp_offload_params=true is not supported"),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "compute.gradient_checkpointing=true"),
    ({}, {"data": {"kind": "prompts"}}, "data.kind=prompts .* set data.kind=latents"),
    ({}, {"sampling": {**RUN, "rollout": 0.5}}, "sampling.rollout=0.5 runs .* set it to 0"),
]


@pytest.mark.parametrize(("environment", "changes", "message"), SHARDINGS)
def test_what_fsdp_cannot_do_here_is_refused_by_name(
    environment: dict[str, str], changes: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **environment}.items():
        monkeypatch.setenv(key, value)
    recipe = recipe_from(tiny_recipe(folder, **changes))
    with pytest.raises(ValueError, match=message):
        sharding_of(SimpleNamespace(num_processes=2), recipe)
    assert sharding_of(SimpleNamespace(num_processes=1), recipe) is None


def test_tokens_that_cannot_be_compared_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """SparseDiT holds fewer inside, where a distilled block may lie."""
    recipe = tiny_recipe(folder, distill={"every": 1})
    recipe["method"] = {"name": "SparseDiT", **dataclasses.asdict(TRAINED["SparseDiT"])}  # type: ignore[call-overload]
    recipe["stages"] = [{"name": "all", "steps": 1, "trains": ["adapter"]}]
    trainer = Trainer(recipe_from(recipe), tmp_path)
    trainer.prepare()
    with pytest.raises(ValueError, match="distill.every=1 compares the tokens after block 0, of which SparseDiT"):
        run_steps(trainer, 1)


def test_micro_batches_that_roll_out_and_others_have_the_same_losses(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, sampling={**RUN, "rollout": 0.5})
    assert all({"diffusion", "output"} <= numbers.keys() for numbers in run_steps(trainer, 3))


# -- whole runs --------------------------------------------------------------------------------------


def command(folder: Path, output: Path, *extra: str) -> forked.Process:
    return forked.Process("train", folder / "recipe.yaml", "--output", output, *extra)


def wait_for_step(process: forked.Process, output: Path, step: int) -> None:
    """Until the run has logged so many steps."""
    deadline = time.monotonic() + 200
    path = output / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.wait().stderr}")


def final_weights(output: Path) -> dict[str, Tensor]:
    adapter = load_file(output / "checkpoint" / "adapter" / "adapter_model.safetensors")
    return {**load_file(output / "checkpoint" / "shiva.safetensors"), **adapter}


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """An uninterrupted run of the command."""
    done = command(folder, folder / "whole").wait()
    assert done.returncode == 0, done.stderr
    return folder / "whole"


@pytest.mark.slow
def test_the_command_makes_a_checkpoint_that_attaches_and_generates(folder: Path, finished: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    metrics = json.loads((finished / "metrics.json").read_text())
    assert [m["step"] for m in metrics["metrics"]] == list(range(1, 10))
    assert {"mse/keep_0.5", "cosine/schedule"} <= metrics["validation"][-1].keys()
    assert metrics["schedule"]["budget"] == 0.5
    assert len(list((finished / "pictures").glob("*.png"))) == 6
    assert list((finished / "tensorboard").rglob("events*"))
    assert len(checkpoints(finished / "states")) == 2
    pipe = StableDiffusion3Pipeline.from_pretrained(folder / "pipeline", text_encoder_3=None, tokenizer_3=None)
    with shiva.attach(pipe, finished / "checkpoint") as session:
        image = pipe("a cat", height=32, width=32, num_inference_steps=2, max_sequence_length=0).images[0]
        assert session.summary().keep == pytest.approx(0.5, abs=0.02)
    assert image.size == (32, 32)


@pytest.mark.slow
def test_a_finished_run_without_its_states_is_not_trained_again(
    folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished / "checkpoint", tmp_path / "checkpoint")
    assert Trainer(recipe_from(tiny_recipe(folder)), tmp_path).run() == tmp_path / "checkpoint"
    assert "is finished; pass --fresh" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_killed_before_its_last_validation_makes_up_for_it(folder: Path, finished: Path, tmp_path: Path) -> None:
    output = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(output / "checkpoint")
    lines = (output / "validation.jsonl").read_text().splitlines()
    (output / "validation.jsonl").write_text("".join(f"{line}\n" for line in lines[:-1]))
    Trainer(recipe_from(tiny_recipe(folder)), output).run()
    again = [json.loads(line) for line in (output / "validation.jsonl").read_text().splitlines()]
    assert again[-1] == pytest.approx(json.loads(lines[-1]))
    assert len(again) == len(lines)


def test_a_run_killed_after_a_validation_has_the_states_of_one_that_was_not(folder: Path, tmp_path: Path) -> None:
    """Also right after it, when the newest state is from before it."""
    often = {"checkpoints": {"every": 1, "keep": 9}, "validation": {"every": 2, "images": 0}}
    steps = {"stages": {"warmup": {"steps": 1}, "policy": {"steps": 3}, "joint": {"steps": 0}}}
    recipe = recipe_from(tiny_recipe(folder, **often, **steps))
    Trainer(recipe, tmp_path / "whole").run()
    killed = shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(killed / "checkpoint")
    for state in checkpoints(killed / "states")[2:]:
        shutil.rmtree(state)
    Trainer(recipe, killed).run()
    assert differences(killed, contents(tmp_path / "whole")) == []


@pytest.mark.slow
def test_killed_at_any_moment_and_inside_writes_it_ends_as_if_it_had_not_been() -> None:
    """Weights, records, validation, pictures, states: the same files with the same bytes; more with `--kills 50`."""
    done = forked.run("--kills", "6", file=HERE / "kills.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kills over" in done.stdout


@pytest.mark.slow
def test_sigterm_saves_and_says_how_to_continue(folder: Path, tmp_path: Path) -> None:
    process = command(folder, tmp_path, "--set", "stages.joint.steps=500", "--set", "checkpoints.every=1000")
    wait_for_step(process, tmp_path, 8)
    process.terminate()
    done = process.wait(timeout=120)
    assert done.returncode == 143
    assert "stopped by SIGTERM after step" in done.stderr
    assert "the same command continues it" in done.stderr
    state = load_state(checkpoints(tmp_path / "states")[-1])
    assert state.step >= 8
    with pytest.raises(ValueError, match=r"stages.joint.steps=500, the recipe now has 3.*--fresh"):
        Trainer(recipe_from(tiny_recipe(folder)), tmp_path).run()


def test_a_second_run_in_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ValueError, match="is in use by a run of process"):
        Trainer(recipe_from(tiny_recipe(folder)), tmp_path).run()


@pytest.mark.slow
def test_a_run_whose_newest_state_is_cut_ends_with_the_same_weights(
    folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(output / "checkpoint")
    newest = checkpoints(output / "states")[-1] / "optimizer.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    Trainer(recipe_from(tiny_recipe(folder)), output).run()
    assert "continuing from the older" in capsys.readouterr().err
    expected, ended = final_weights(finished), final_weights(output)
    assert all(torch.equal(ended[name], tensor) for name, tensor in expected.items())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))


TWENTY = {"stages": {"warmup": {"steps": 7}, "policy": {"steps": 6}, "joint": {"steps": 7}}}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # accelerate's default, which would leave text encoders empty
}


def start_ranks(recipe: Path, output: Path, environment: dict[str, str], *extra: str) -> list[forked.Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **environment}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start = partial(forked.Process, recipe, output, *extra, file=HERE / "training_rank.py", **common)
    return [start(RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """Twenty steps in one process."""
    recipe = folder / "twenty.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(folder, **TWENTY)))
    train_noting(recipe, folder / "alone")
    return folder / "alone"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_two_ranks_agree_with_one_process(kind: str, folder: Path, alone: Path, tmp_path: Path) -> None:
    """The same global batch: equal timesteps and budget, losses and weights equal up to float error.

    With FSDP 2 also after a stop in the middle, each rank with half of the base.
    """
    sharded = kind == "fsdp"
    for pause in (["11"], []) if sharded else ([],):
        for rank in start_ranks(folder / "twenty.yaml", tmp_path, FSDP if sharded else {}, *pause):
            done = rank.wait(timeout=140)
            assert done.returncode == 0, done.stderr
    one, *two = (
        json.loads((run / f"seen-{rank}.json").read_text()) for run, rank in ((alone, 0), (tmp_path, 0), (tmp_path, 1))
    )
    assert all(len(rank["micro_batches"]) == len(one["micro_batches"]) // 2 for rank in two)
    assert sorted(two[0]["micro_batches"] + two[1]["micro_batches"]) == sorted(one["micro_batches"])
    for rank in two:
        assert rank["weights"] < 0.7 * one["weights"] if sharded else rank["weights"] == one["weights"]
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (alone, tmp_path)]
    for a, b in zip(*([json.loads(line) for line in run] for run in lines), strict=True):
        assert b["budget_ema"] == pytest.approx(a["budget_ema"], rel=1e-6)
        for name in ("loss", "diffusion", "distill", "keep", "gradient"):
            assert b[name] == pytest.approx(a[name], rel=1e-4), (a["step"], name)
    assert len(lines[0]) == 20
    expected, ended = final_weights(alone), final_weights(tmp_path)
    for name, tensor in expected.items():
        torch.testing.assert_close(ended[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    told = [json.loads((run / "validation.jsonl").read_text().splitlines()[-1]) for run in (alone, tmp_path)]
    assert told[1] == pytest.approx(told[0], rel=1e-3)
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {p.name for p in (alone / "pictures").iterdir()}


def test_a_run_starts_with_what_another_learned(folder: Path, tmp_path: Path) -> None:
    whole = trainer_of(folder, tmp_path / "first")
    whole.run()
    state = load_state(checkpoints(tmp_path / "first" / "states")[-1])
    second = trainer_of(folder, tmp_path / "second", start=str(tmp_path / "first"), method={"budget": 0.8})
    fresh_average = {name: value.clone() for name, value in second.method.named_buffers()}
    first = read_start(str(tmp_path / "first"), print)
    second.start_from(first)
    routers = dict(second.method.routers.named_parameters(prefix="routers"))
    assert routers
    for name, value in routers.items():
        torch.testing.assert_close(value.detach(), state.method[name], rtol=0, atol=0)
    assert torch.sigmoid(second.method.policy.anchor).item() == pytest.approx(0.8), "a policy for another budget"
    for name, value in second.method.named_buffers():
        torch.testing.assert_close(value, fresh_average[name], rtol=0, atol=0)
    assert second.adapter.on
    with pytest.raises(FileNotFoundError, match="states/step"):
        Trainer(recipe_from(tiny_recipe(folder, start=str(tmp_path / "nothing"))), tmp_path / "third").run()
    assert not (tmp_path / "third" / "latents").exists(), "refused before the data is encoded"
    narrow = trainer_of(folder, tmp_path / "fourth", method={"bottleneck": 4}, adapter={"rank": 4})
    with pytest.raises(ValueError, match="make them the same"):
        narrow.start_from(first)
    with pytest.raises(ValueError, match=r"an adapter of rank=2, and adapter.rank is 4; make it the same"):
        first.adapter_for(narrow.recipe.adapter)


def test_a_run_goes_on_from_a_checkpoint_with_its_policy_and_adapter(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer_of(folder, tmp_path / "first")
    first.run()
    weights, adapter = first.method.state_dict(), first.adapter.weights()
    assert adapter
    again = trainer_of(folder, tmp_path / "again")
    again.start_from(read_start(str(first.final), print))
    assert all(torch.equal(again.method.state_dict()[n], weights[n]) for n, _ in first.method.named_parameters())
    assert all(torch.equal(value, adapter[name]) for name, value in again.adapter.weights().items())
    assert "its adapter was trained on" not in capsys.readouterr().err
    config = json.loads((first.final / "config.json").read_text())
    (first.final / "config.json").write_text(json.dumps({**config, "base_model": "somebody/another-model"}))
    trainer_of(folder, tmp_path / "elsewhere").start_from(read_start(str(first.final), print))
    assert "its adapter was trained on somebody/another-model, and this run is of" in capsys.readouterr().err
    dearer = shiva.Shiva(budget=0.8, bottleneck=8).build(first.session.spec)
    taken = read_start(str(first.final), print).weights_for(dearer)
    assert {part_of(name) for name in taken} == {"routers"}, "a policy for another budget starts anew"
