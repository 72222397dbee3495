"""What stops a run says how to go on; what a kill leaves is whole, absent, or refused by name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import shiva
from shiva.checkpoint import write_atomically
from shiva.cli.terminal import explain
from shiva.core.method import BackboneSpec
from shiva.files import read_json, to_json
from shiva.training.cache import LatentCache
from shiva.training.log import Log
from shiva.training.objectives import not_finite_of
from shiva.training.process import make_accelerator, sum_gradients
from shiva.training.start import Start
from shiva.training.state import (
    State,
    check_recipe,
    checkpoints,
    clean,
    load_state,
    locked,
    newest_state,
    save_state,
)
from shiva.training.validation import grid_of

SOURCE = Path(shiva.__file__).parent.parent


def save_steps(run: Path, *steps: int, keep: int = 9) -> None:
    """States of a run whose only stage trains an adapter."""
    recipe = {"stages": [{"name": "all", "steps": 9, "trains": ["router", "adapter"]}]}
    weights = {"weight": torch.zeros(3)}
    for step in steps:
        state = State(step, recipe, weights, {"state": {}, "step": step}, adapter=weights)
        save_state(run / "states", state, keep)


def names(run: Path) -> list[str]:
    return [folder.name for folder in checkpoints(run / "states")]


def test_a_state_without_its_adapter_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    folder = checkpoints(tmp_path / "states")[-1]
    assert load_state(folder).adapter
    (folder / "adapter.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"step-00000004/adapter.safetensors is missing.*put it back"):
        newest_state(tmp_path, print)


def test_another_recipe_is_refused_by_the_names_of_its_stages(tmp_path: Path) -> None:
    stages = [{"name": "warmup", "steps": 2}, {"name": "joint", "steps": 4}]
    for other, named in (
        ([stages[0], {"name": "joint", "steps": 5}], "stages.joint.steps=4, the recipe now has 5"),
        (stages[::-1], r"stages=\['warmup', 'joint'\], the recipe now has \['joint', 'warmup'\]"),
    ):
        with pytest.raises(ValueError, match=f"was trained with {named}; restore it"):
            check_recipe(tmp_path, {"stages": stages}, {"stages": other})


@pytest.mark.parametrize("name", ["optimizer.pt", "method.safetensors", "adapter.safetensors", "state.json"])
@pytest.mark.parametrize("size", [0, 40])
def test_of_a_damaged_state_the_older_one_is_used_and_said(tmp_path: Path, name: str, size: int) -> None:
    save_steps(tmp_path, 2, 4)
    path = tmp_path / "states" / "step-00000004" / name
    path.write_bytes(path.read_bytes()[:size])
    said: list[str] = []
    found = newest_state(tmp_path, said.append)
    assert found is not None
    assert (found[0].name, found[1].step) == ("step-00000002", 2)
    assert len(said) == 1
    assert "step-00000004 cannot be read" in said[0]
    assert "continuing from the older" in said[0]
    save_steps(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003"], "the damaged one is not kept in place of a whole one"
    path = tmp_path / "states" / "step-00000003" / name
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-00000003 cannot be read.*no older state: pass --fresh"):
        newest_state(tmp_path, said.append)


def test_the_newest_states_stay(tmp_path: Path) -> None:
    assert newest_state(tmp_path, print) is None
    save_steps(tmp_path, 2, 4, 6, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


def test_what_else_lies_among_the_states_is_neither_read_nor_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    states = tmp_path / "states"
    (states / "step-00000009").write_text("a file")
    for name in ("step-00000008-mine", "step-x", "notes"):
        (states / name).mkdir()
    found = newest_state(tmp_path, print)
    assert found is not None
    assert found[0].name == "step-00000004"
    save_steps(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-00000006"]
    assert len(list(states.iterdir())) == 5


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*step-00000002/\w+\.safetensors'") as caught:
        save_steps(tmp_path, 2)
    assert explain(caught.value) == 2
    assert newest_state(tmp_path, print) is None
    clean(tmp_path)
    assert list((tmp_path / "states").iterdir()) == []


def test_a_folder_is_one_runs_at_a_time_and_free_after_a_kill(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from shiva.training.state import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(200)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"is in use by a run of process {other.pid}; .* another --output"):
            locked(tmp_path).__enter__()
    finally:
        other.kill()
        other.wait()
    with locked(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()}"):
        locked(tmp_path).__enter__()
    with locked(tmp_path):
        pass


def test_what_a_killed_run_was_writing_goes_and_all_else_stays(tmp_path: Path) -> None:
    stay = [
        "metrics.json",
        "metrics.jsonl",
        ".gitignore",
        ".lock",
        "states/step-00000002/state.json",
        "latents/shard-00000.safetensors",
    ]
    go = [".metrics.json.abcd1234", ".writing-checkpoint/config.json", "states/.writing-00000004/state.json"]
    go += ["latents/.shard-00001.safetensors.x_y12345", "pictures/.samples-00000004.png.abcd1234"]
    for name in stay + go:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    clean(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(stay)
    clean(tmp_path, fresh=True)
    assert not (tmp_path / "states").exists()
    assert not list(tmp_path.glob("metrics.json*"))
    assert (tmp_path / "latents").is_dir()


def log_of(output: Path) -> Log:
    accelerator = SimpleNamespace(is_main_process=True, init_trackers=lambda project: None)
    recipe: Any = SimpleNamespace(steps=9, logging=SimpleNamespace(wandb=None))
    return Log(output, accelerator, recipe)


def test_records_survive_a_kill_while_a_run_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"step": step, "loss": 0.1}) for step in (1, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines, '{"step": 4, "lo']))

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            log_of(tmp_path).begin(2)
    assert path.read_text().splitlines()[:3] == lines
    log = log_of(tmp_path)
    log.begin(2)
    assert path.read_text().splitlines() == lines[:2]
    assert log.progress is not None
    log.progress.stop()


class Together:
    """An accelerator of one rank beside others, whose messages are known."""

    def __init__(self, *others: Tensor):
        self.others = others
        self.sent: list[Tensor] = []

    def reduce(self, message: Tensor, how: str) -> Tensor:
        self.sent.append(message.clone())
        return torch.stack([message, *self.others]).sum(0)


def test_a_weight_without_gradient_on_any_rank_rests_and_ranks_agree() -> None:
    """As in one process: weight decay and momentum must not move it; one rank's gradient reaches all."""

    def weights(*gradients: float | None) -> list[nn.Parameter]:
        made = [nn.Parameter(torch.ones(2)) for _ in gradients]
        for parameter, gradient in zip(made, gradients, strict=True):
            parameter.grad = None if gradient is None else torch.full((2,), gradient)
        return made

    ranks: list[tuple[float | None, ...]] = [(1.0, None, None), (2.0, 3.0, None)]
    messages = []
    for gradients in ranks:
        alone = Together()
        sum_gradients(weights(*gradients), alone)
        messages += alone.sent
    ended = []
    for rank, gradients in enumerate(ranks):
        own = weights(*gradients)
        sum_gradients(own, Together(messages[1 - rank]))
        assert own[2].grad is None
        assert [p.grad.tolist() for p in own[:2] if p.grad is not None] == [[3.0, 3.0], [3.0, 3.0]]
        torch.optim.AdamW(own, lr=0.1, weight_decay=0.5).step()
        assert own[2].tolist() == [1.0, 1.0]
        ended.append(torch.stack(list(own)))
    assert torch.equal(*ended)


def test_a_state_of_another_format_says_how_to_go_on(tmp_path: Path) -> None:
    write_atomically(tmp_path / "state.json", to_json({"format": 9}))
    with pytest.raises(ValueError, match="has format 9, this version reads 1; continue with.*--fresh"):
        load_state(tmp_path)
    write_atomically(tmp_path / "state.json", to_json({"format": 1, "step": 2, "recipe": {}}))
    with pytest.raises(ValueError, match=r"state\.json: About has no 'files'; give it one; pass --fresh"):
        load_state(tmp_path)


def test_latents_of_another_format_are_refused(tmp_path: Path) -> None:
    LatentCache.open(tmp_path, {}, 3)
    assert len(LatentCache.open(tmp_path, {}, 3)) == 3
    manifest = read_json(tmp_path / "manifest.json")
    write_atomically(tmp_path / "manifest.json", to_json({**manifest, "format": 9}))
    with pytest.raises(ValueError, match="have format 9, this version reads 1; delete the folder"):
        LatentCache.open(tmp_path, {}, 3)


@pytest.mark.parametrize(("value", "named"), [(torch.inf, "router"), (torch.nan, "router"), (1.0, "all weights")])
def test_gradients_that_are_not_finite_are_named(value: float, named: str) -> None:
    router, policy = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    router.grad, policy.grad = torch.tensor([value, 0.0]), torch.zeros(2)
    assert not_finite_of({"router": [router], "policy": [policy]}).startswith(named)


@pytest.mark.parametrize("mps", [True, False])
def test_a_mac_trains_on_its_cpu(mps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would take mps by itself, which has no float64."""
    asked: dict[str, Any] = {}

    def accelerator(**options: Any) -> Any:
        asked.update(options)
        return SimpleNamespace(distributed_type=SimpleNamespace(value="NO"))

    monkeypatch.setattr("accelerate.Accelerator", accelerator)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    make_accelerator("no", tmp_path, None)
    assert asked["cpu"] == mps


@pytest.mark.parametrize(("keep", "left"), [(0.6, False), (0.8, True)])
def test_a_policy_for_another_share_stays_behind_whatever_its_option_is_called(keep: float, left: bool) -> None:
    method: Any = shiva.LapSum(keep=keep).build(BackboneSpec("SD3Transformer2DModel", 4, 32, 32, 20, 4))
    found = Start("a run", shiva.LapSum(keep=0.6), dict(method.state_dict())).weights_for(method)
    assert ("ratio_logits" not in found) == left
    assert any(name.startswith("routers") for name in found)


def test_a_start_that_gives_nothing_is_refused() -> None:
    spec = BackboneSpec("SD3Transformer2DModel", 4, 32, 32, 20, 4)
    method: Any = shiva.LapSum(keep=0.6).build(spec)
    dense: Any = shiva.Dense().build(spec)
    with pytest.raises(ValueError, match="start: a run has no weight for Dense"):
        Start("a run", shiva.LapSum(keep=0.6), dict(method.state_dict())).weights_for(dense)


def test_pictures_of_several_sizes_have_room_beside_each_other() -> None:
    small, large = Image.new("RGB", (2, 3), "red"), Image.new("RGB", (4, 2), "blue")
    sheet = grid_of([[small, large]])
    assert sheet.size == (8, 3)
    assert sheet.getpixel((7, 1)) == (0, 0, 255)
