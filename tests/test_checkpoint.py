"""Checkpoints: what is saved is what runs, in another process too, and nothing wrong is loaded."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shiva
from pipelines import PIPELINES
from shiva.adapter import ADAPTER_NAME, remove_adapter
from shiva.checkpoint import CONFIG_FILE, WEIGHTS_FILE, may_be_hub_id, write_atomically
from shiva.compiled import GraphRunner

from tiny import BACKBONES, make_flux, make_sd3, randomized

IN_ANOTHER_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[4])
torch.set_num_threads(1)
import shiva
from pipelines import PIPELINES
tiny = PIPELINES["sd3"]
pipe = tiny.load_from(sys.argv[1])
with shiva.attach(pipe, sys.argv[2], budget=0.5):
    torch.save(tiny.image(pipe), sys.argv[3])
"""


def varied_method(model: nn.Module, **options: Any) -> Any:
    """A method with weights and a table that are not the initial ones."""
    session = shiva.attach(model, shiva.Shiva(**options))
    session.detach()
    method = session.method
    randomized(method.policy, seed=5)
    method.eval()
    method.set_schedule(shiva.RatioSchedule.compile(method.policy, [1000.0, 500.0, 0.0]))
    return method


def adapter(model: nn.Module) -> dict[str, Any]:
    """A DoRA adapter as training leaves it, taken out of a throw-away copy of the model."""
    config = peft.LoraConfig(r=4, use_dora=True, target_modules=["to_q", "ff.net.2"])
    wrapped = peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    weights = peft.get_peft_model_state_dict(wrapped, adapter_name=ADAPTER_NAME)
    weights = {name: torch.randn_like(t) * 0.3 + t for name, t in weights.items()}
    plain = {"r": 4, "use_dora": True, "target_modules": ["to_q", "ff.net.2"]}
    return {"adapter_config": plain, "adapter_weights": weights}


def test_a_saved_checkpoint_gives_the_same_image_in_a_new_process(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path / "pipe")
    method = varied_method(pipe.transformer, budget=0.7)
    parts = adapter(tiny.make().transformer)
    checkpoint = shiva.ShivaCheckpoint.of(method, base_model="tiny", budget=0.7, **parts)
    checkpoint.save_pretrained(tmp_path / "checkpoint")
    dense = tiny.image(pipe)
    with shiva.attach(pipe, checkpoint, budget=0.5):
        expected = tiny.image(pipe)
    assert torch.equal(tiny.image(pipe), dense), "detaching takes the adapter out too"
    out = tmp_path / "image.pt"
    here = str(Path(__file__).parent)
    arguments = [str(tmp_path / "pipe"), str(tmp_path / "checkpoint"), str(out), here]
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, *arguments], check=True, timeout=240)
    assert torch.equal(torch.load(out, weights_only=True), expected)
    assert not torch.equal(expected, dense)


def test_a_checkpoint_that_is_passed_on_tells_no_path_of_the_machine_it_was_made_on(tmp_path: Path) -> None:
    method = varied_method(make_sd3())
    shiva.ShivaCheckpoint.of(method, base_model=str(tmp_path / "my-model")).save_pretrained(tmp_path / "made")
    written = [path.read_text() for path in (tmp_path / "made").iterdir() if path.suffix in (".json", ".md")]
    assert any("my-model" in text for text in written)
    assert not any(str(tmp_path) in text for text in written)


def test_everything_survives_the_files(tmp_path: Path) -> None:
    method = varied_method(make_sd3(), sharing="groups-3", signals=("time",), bottleneck=16)
    shiva.ShivaCheckpoint.of(method, base_model="some/model", budget=0.6).save_pretrained(tmp_path)
    again = shiva.ShivaCheckpoint.from_pretrained(str(tmp_path))
    assert again.method_config == method.config
    assert again.origin.base_model == "some/model"
    assert again.origin.budget == 0.6
    loaded = again.method()
    assert loaded.schedule.counts(64) == method.schedule.counts(64)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), method.parameters(), strict=True))
    assert {p.suffix for p in tmp_path.iterdir()} <= {".json", ".safetensors", ".md"}, "no pickles"
    card = (tmp_path / "README.md").read_text()
    assert "# Shiva for" in card
    assert "shiva.attach(pipe" in card
    assert "a ratio table" in card


def test_a_checkpoint_saved_over_another_is_the_later_one(tmp_path: Path) -> None:
    method = varied_method(make_sd3())
    shiva.ShivaCheckpoint.of(method, **adapter(make_sd3())).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "an adapter" in card
    assert '`pip install -e ".[adapter]"`' in card
    shiva.ShivaCheckpoint.of(method).save_pretrained(tmp_path)
    assert shiva.ShivaCheckpoint.from_pretrained(tmp_path).adapter_weights is None
    assert "an adapter" not in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("somebody's own")
    shiva.ShivaCheckpoint.of(method).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "somebody's own"


@pytest.mark.parametrize("backbone", BACKBONES)
def test_an_adapter_goes_in_and_out_of_every_backbone(backbone: str) -> None:
    """Also of those without diffusers' own adapter support; a user's own adapter stays."""
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(1, 6, 6)
    names = {name: type(m) for name, m in model.named_modules()}
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(model), **adapter(tiny.make()))
    with torch.no_grad():
        dense = model(**call)[0]
        session = shiva.attach(model, checkpoint, budget=1.0)
        assert not torch.equal(model(**call)[0], dense)
        session.detach()
        assert torch.equal(model(**call)[0], dense)
        assert {name: type(m) for name, m in model.named_modules()} == names
        assert all(p.requires_grad for p in model.parameters())

        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["to_k"]), model, adapter_name="users")
        with shiva.attach(model, checkpoint, budget=0.5):
            pass
        left = {n for n, m in model.named_modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)}
        assert left
        assert all(n.endswith("to_k") for n in left)
        remove_adapter(model, "users")
        assert torch.equal(model(**call)[0], dense)


class Foreign(nn.Linear):
    """Stands for a layer whose weights are not plain numbers in reach."""


def test_an_adapter_is_folded_into_the_weights_and_means_the_same() -> None:
    """Live and folded agree, a user's own adapter still acts, and nothing of PEFT is left to run."""
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(model), **adapter(make_sd3()))
    tuned = peft.tuners.tuners_utils.BaseTunerLayer
    with torch.no_grad():
        with shiva.attach(model, checkpoint, budget=0.5):
            assert not any(isinstance(m, tuned) for m in model.modules())
            folded = model(**call)[0]
        originals = {name: m.__class__ for name, m in model.named_modules() if type(m) is nn.Linear}
        for name in originals:
            model.get_submodule(name).__class__ = Foreign
        with shiva.attach(model, checkpoint, budget=0.5):
            assert any(isinstance(m, tuned) for m in model.modules())
            torch.testing.assert_close(model(**call)[0], folded, rtol=1e-4, atol=1e-4)
        for name in originals:
            model.get_submodule(name).__class__ = nn.Linear

        config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model, adapter_name="users")
        with shiva.attach(model, checkpoint, budget=0.5):
            assert not torch.allclose(model(**call)[0], folded, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("live", [False, True], ids=["folded", "live"])
@pytest.mark.parametrize("active", [["a", "b"], ["b"], []], ids=str)
def test_the_users_own_adapters_stay_as_active_as_they_were(active: list[str], live: bool) -> None:
    model, call, checkpoint = adapted_sd3()
    if live:
        model.transformer_blocks[0].attn.to_q.__class__ = Foreign
    with shiva.attach(model, checkpoint, budget=1.0):
        alone = model(**call)[0]
    for name in ("a", "b"):
        config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
        model.add_adapter(config, adapter_name=name)
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]
    for layer in layers:
        layer.set_adapter(active)
    before, trained = model(**call)[0], [p.requires_grad for p in model.parameters()]
    with shiva.attach(model, checkpoint, budget=1.0):
        assert torch.equal(model(**call)[0], alone) == (not active)
        assert [[n for n in layer.active_adapters if n != ADAPTER_NAME] for layer in layers] == [active] * len(layers)
    assert [layer.active_adapters for layer in layers] == [active] * len(layers)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert torch.equal(model(**call)[0], before)


@torch.no_grad()
def test_a_fused_lora_is_not_undone_by_an_adapter() -> None:
    model, call, checkpoint = adapted_sd3()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), adapter_name="users")
    model.fuse_lora()
    fused = model(**call)[0]
    with pytest.raises(ValueError, match="a LoRA is fused into the weights.*pipe.unfuse_lora"):
        shiva.attach(model, checkpoint, budget=0.5)
    assert torch.equal(model(**call)[0], fused)


def adapted_sd3() -> tuple[nn.Module, dict[str, Any], shiva.ShivaCheckpoint]:
    model = make_sd3()
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(model), **adapter(make_sd3()))
    return model, BACKBONES["sd3"].call(1, 6, 6), checkpoint


def offload_to_disk(model: Any, folder: Path) -> None:
    cpu = torch.device("cpu")
    model.enable_group_offload(cpu, cpu, offload_type="leaf_level", offload_to_disk_path=str(folder))


@torch.no_grad()
def test_group_offload_to_disk_is_refused_before_an_adapter_and_keeps_it_afterwards(tmp_path: Path) -> None:
    """diffusers loads every weight from the file it wrote, whatever has become of the weight since."""
    model, call, checkpoint = adapted_sd3()
    session = shiva.attach(model, checkpoint, budget=1.0)
    adapted = model(**call)[0]
    offload_to_disk(model, tmp_path / "after")
    with pytest.raises(ValueError, match="would bring them back; load the pipeline again"):
        session.detach()
    assert session.attached
    torch.testing.assert_close(model(**call)[0], adapted)

    model, call, checkpoint = adapted_sd3()
    dense = model(**call)[0]
    offload_to_disk(model, tmp_path / "before")
    with pytest.raises(ValueError, match="attach first, then enable group offload"):
        shiva.attach(model, checkpoint, budget=1.0)
    torch.testing.assert_close(model(**call)[0], dense)


@torch.no_grad()
@pytest.mark.parametrize("offload_first", [True, False])
def test_an_adapter_lives_with_group_offload_in_memory(offload_first: bool) -> None:
    model, call, checkpoint = adapted_sd3()
    dense = model(**call)[0]
    with shiva.attach(model, checkpoint, budget=0.5):
        adapted = model(**call)[0]

    def offload() -> None:
        model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")

    if offload_first:
        offload()
    session = shiva.attach(model, checkpoint, budget=0.5)
    if not offload_first:
        offload()
    assert torch.equal(model(**call)[0], adapted)
    hooks = [m._diffusers_hook.get_hook("group_offloading") for m in model.modules() if hasattr(m, "_diffusers_hook")]
    group: Any = next(hook.group for hook in hooks if hook is not None)
    group.stream = object()  # a stream needs CUDA; its groups hold their own copies
    with pytest.raises(ValueError, match="group offload with streams"):
        session.detach()
    group.stream = None
    session.detach()
    assert torch.equal(model(**call)[0], dense)


@torch.no_grad()
def test_an_adapter_under_sequential_offload_leaves_after_it() -> None:
    model, call, checkpoint = adapted_sd3()
    dense = model(**call)[0]
    session = shiva.attach(model, checkpoint, budget=0.5)
    accelerate.cpu_offload(model, execution_device="cpu")
    model(**call)
    with pytest.raises(ValueError, match="remove_all_hooks"):
        session.detach()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    session.detach()
    assert torch.equal(model(**call)[0], dense)


@torch.no_grad()
def test_weights_are_cast_to_eight_bits_after_an_adapter_not_before() -> None:
    model, call, checkpoint = adapted_sd3()
    with shiva.attach(model, checkpoint, budget=1.0):
        adapted = model(**call)[0]
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        cast = model(**call)[0]
    assert (cast - adapted).norm() < (cast - model(**call)[0]).norm()
    with pytest.raises(ValueError, match="attach first, then call enable_layerwise_casting"):
        shiva.attach(model, checkpoint, budget=1.0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_fused_after_attach_is_not_undone(dtype: torch.dtype) -> None:
    model, call, checkpoint = adapted_sd3()
    model.to(dtype)
    call = {name: t.to(dtype) if torch.is_floating_point(t) else t for name, t in call.items()}
    dense = model(**call)[0]
    session = shiva.attach(model, checkpoint, budget=0.5)
    users = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    model.add_adapter(users, adapter_name="users")
    model.fuse_lora()
    fused = model(**call)[0]
    with pytest.raises(ValueError, match="pipe.unfuse_lora"):
        session.detach()
    assert torch.equal(model(**call)[0], fused)
    model.unfuse_lora()
    model.delete_adapters("users")
    session.detach()
    assert torch.equal(model(**call)[0], dense)


FOREIGN_ADAPTERS = {
    "another way of making weights": (lambda a: a["adapter_config"].update(init_lora_weights="pissa"), "init_lora"),
    "another size": (lambda a: a["adapter_config"].update(r=7), "config has r=7, but .* is of rank 4"),
}


@pytest.mark.parametrize("fault", FOREIGN_ADAPTERS)
def test_an_adapter_that_does_not_fit_leaves_the_model_alone(fault: str) -> None:
    spoil, message = FOREIGN_ADAPTERS[fault]
    model, broken = make_sd3(), adapter(make_sd3())
    spoil(broken)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises((ValueError, RuntimeError), match=message):
        shiva.attach(model, shiva.ShivaCheckpoint.of(varied_method(model), **broken), budget=0.5)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_checkpoint_of_sd3_is_refused_by_sd35_of_the_same_sizes() -> None:
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(make_sd3()))
    with pytest.raises(ValueError, match=r"0 dual attentions.*the pipeline's has 2 dual attentions"):
        shiva.attach(make_sd3(dual=(0, 1)), checkpoint)


def test_an_adapter_that_breaks_while_it_is_folded_leaves_the_model_alone() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    broken = adapter(make_sd3())
    last = sorted(name for name in broken["adapter_weights"] if "lora_B" in name)[-1]
    broken["adapter_weights"][last] = torch.full_like(broken["adapter_weights"][last], torch.nan)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        dense = model(**call)[0]
        with pytest.raises(ValueError, match="NaNs"):
            shiva.attach(model, shiva.ShivaCheckpoint.of(varied_method(model), **broken), budget=0.5)
        assert [name for name, _ in model.named_parameters()] == names
        assert torch.equal(model(**call)[0], dense)


@pytest.mark.parametrize("fault", ["adapter", "cfg"])
def test_a_refused_checkpoint_leaves_the_session_before_it_at_work(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    sound, broken = (shiva.ShivaCheckpoint.of(varied_method(model), **adapter(make_sd3())) for _ in range(2))
    if fault == "adapter":
        assert broken.adapter_config is not None
        broken.adapter_config["target_modules"] = ["attn.to_q"]
    with torch.no_grad():
        dense = model(**call)[0]
        session = shiva.attach(model, sound, budget=0.5)
        reduced = model(**call)[0]
        with pytest.raises(ValueError, match="no place" if fault == "adapter" else "cfg='twice'"):
            shiva.attach(model, broken, budget=0.5, cfg="auto" if fault == "adapter" else "twice")
        assert session.attached
        assert "is replaced by" not in caplog.text
        assert torch.equal(model(**call)[0], reduced)
        assert session.summary().keep < 1
        session.detach()
        assert torch.equal(model(**call)[0], dense)


@pytest.mark.parametrize(
    "put",
    [
        lambda model: model.enable_cache(diffusers.MagCacheConfig(num_inference_steps=9, mag_ratios=[1.0] * 9)),
        lambda model: accelerate.cpu_offload_with_hook(model, execution_device="cpu"),
    ],
    ids=["MagCache", "offload"],
)
def test_a_refused_attach_leaves_what_was_put_on_after_the_session_where_it_is(put: Any) -> None:
    model = make_flux()
    session = shiva.attach(model, shiva.Shiva(budget=0.5))
    put(model)
    hooked = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    before = {name: list(module._diffusers_hook.hooks) for name, module in hooked_by_diffusers(model)}
    with pytest.raises((ValueError, RuntimeError), match="attach first"):
        shiva.attach(model, shiva.Sweep(budget=0.5))
    assert session.attached
    assert {name: list(module._diffusers_hook.hooks) for name, module in hooked_by_diffusers(model)} == before
    assert {n: module._hf_hook for n, module in model.named_modules() if hasattr(module, "_hf_hook")} == hooked


def hooked_by_diffusers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "_diffusers_hook")]


def test_a_refused_checkpoint_leaves_chance_as_it_is_and_drops_recorded_graphs() -> None:
    model = make_sd3()
    sound = shiva.ShivaCheckpoint.of(varied_method(model), **adapter(make_sd3()))
    with shiva.attach(model, sound, budget=0.5) as session:
        runner: Any = GraphRunner(session, recorder=None)  # type: ignore[arg-type]
        session.runner, runner.recordings = runner, {"a row": "a graph that reads the folded weights"}
        state = torch.random.get_rng_state()
        with pytest.raises(ValueError, match="cfg='twice'"):
            shiva.attach(model, sound, budget=0.5, cfg="twice")
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not runner.recordings


def saved(tmp_path: Path) -> Path:
    shiva.ShivaCheckpoint.of(varied_method(make_sd3())).save_pretrained(tmp_path)
    return tmp_path


def edited(tmp_path: Path, **changes: Any) -> Path:
    path = saved(tmp_path) / CONFIG_FILE
    description = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del description[key]
        elif isinstance(value, dict):
            description[key].update(value)
        else:
            description[key] = value
    path.write_text(json.dumps(description))
    return tmp_path


def truncated(tmp_path: Path) -> Path:
    path = saved(tmp_path) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])
    return tmp_path


def without_weights(tmp_path: Path) -> Path:
    (saved(tmp_path) / WEIGHTS_FILE).unlink()
    return tmp_path


def with_nan(tmp_path: Path) -> Path:
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(make_sd3()))
    checkpoint.weights["policy.anchor"].fill_(float("nan"))
    checkpoint.save_pretrained(tmp_path)
    return tmp_path


def rewritten(tmp_path: Path, **changes: Any) -> Path:
    """A checkpoint with some tensors of its weights file put in, or left out."""
    path = saved(tmp_path) / WEIGHTS_FILE
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return tmp_path


def adapted(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint with an adapter, its parts changed."""
    made = adapter(make_sd3())
    change(made)
    shiva.ShivaCheckpoint.of(varied_method(make_sd3()), **made).save_pretrained(tmp_path)
    return tmp_path


def without(part: str) -> Callable[[dict[str, Any]], None]:
    def drop(made: dict[str, Any]) -> None:
        made["adapter_weights"] = {n: t for n, t in made["adapter_weights"].items() if part not in n}

    return drop


def with_a_link(tmp_path: Path) -> Path:
    path = adapted(tmp_path / "checkpoint", lambda made: None) / "adapter" / "adapter_model.safetensors"
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    return tmp_path / "checkpoint"


def as_json(tmp_path: Path, text: str) -> Path:
    (saved(tmp_path) / CONFIG_FILE).write_text(text)
    return tmp_path


SCORE = "routers.routers.0.score.weight"
BROKEN = {
    "a list": (lambda p: as_json(p, "[1]"), "config.json holds a list, not a mapping"),
    "deep nesting": (lambda p: as_json(p, "[" * 100_000), "is not valid JSON"),
    "not text": (lambda p: as_json(p, "\0"), "is not valid JSON"),
    "options as a list": (lambda p: edited(p, options=[1]), "options=[1] is not a mapping"),
    "a text for a number": (lambda p: edited(p, options={"budget": "0.5"}), "budget='0.5' is not a number"),
    "a share for a layer": (lambda p: edited(p, options={"dense": [0.5]}), "dense[0]=0.5 is not a whole number"),
    "infinity": (lambda p: edited(p, options={"age": float("inf")}), "age=inf is not finite"),
    "a wide router": (lambda p: edited(p, options={"bottleneck": 60_000}), "its options say (2, 60000)"),
    "a router of a billion": (lambda p: edited(p, options={"bottleneck": 10**9}), "bottleneck=1000000000 is above"),
    "other sharing": (lambda p: edited(p, options={"sharing": "independent"}), "has no routers.routers.2"),
    "layers without end": (lambda p: edited(p, backbone={"layers": 10**12}), "backbone.layers=1000000000000 is above"),
    "a width of text": (lambda p: edited(p, backbone={"width": "32"}), "backbone.width='32' is not a whole number"),
    "no layers": (lambda p: edited(p, backbone={"layers": 0}), "backbone.layers=0 is not at least 1"),
    "eight bits": (lambda p: rewritten(p, **{SCORE: torch.ones(1, 64, dtype=torch.int8)}), "in torch.int8"),
    "another shape": (
        lambda p: rewritten(p, **{SCORE: torch.ones(1, 63)}),
        "(1, 63), its options say (1, 64)",
    ),
    "a weight too few": (lambda p: rewritten(p, **{SCORE: None}), f"has no {SCORE}"),
    "a weight too many": (lambda p: rewritten(p, extra=torch.ones(1)), "has a extra, which has no place"),
    "no table": (lambda p: rewritten(p, **{"table.logits": None}), "the table in shiva.safetensors has no logits"),
    "NaN times": (
        lambda p: rewritten(p, **{"table.timesteps": torch.tensor([1e3, torch.nan, 0.0], dtype=torch.float64)}),
        "a timestep that is not finite",
    ),
    "NaN logits": (
        lambda p: rewritten(p, **{"table.logits": torch.full((3, 4), torch.nan)}),
        "the table holds NaN",
    ),
    "an adapter without weights": (lambda p: adapted(p, without("")), "the adapter's file holds no lora_A"),
    "an adapter without lora_A": (lambda p: adapted(p, without("lora_A")), "the adapter's file holds no lora_A"),
    "an adapter without one of them": (lambda p: adapted(p, without("blocks.1.attn.to_q.lora_A")), "lora_A"),
    "an adapter without magnitudes": (lambda p: adapted(p, without("magnitude")), "the adapter has no"),
    "an adapter of another rank": (
        lambda p: adapted(p, lambda made: made["adapter_config"].update(r=60_000)),
        "config has r=60000, but",
    ),
    "an adapter by a pattern": (
        lambda p: adapted(p, lambda made: made["adapter_config"].update(target_modules=".*")),
        "target_modules='.*' is not a list",
    ),
    "a link that leaves the folder": (with_a_link, "is a link that leaves"),
    "not a safetensors file": (truncated, "not a whole safetensors file"),
    "no weights": (without_weights, "is missing; save the checkpoint again"),
    "NaN weights": (with_nan, "policy.anchor"),
    "a later format": (lambda p: edited(p, format=9), "has format 9, this version reads 1"),
    "an unknown option": (lambda p: edited(p, options={"bugdet": 1}), "did you mean 'budget'"),
    "an unknown method": (lambda p: edited(p, method="Shivaa"), "did you mean 'Shiva'"),
    "no backbone": (lambda p: edited(p, backbone=None), "has no 'backbone'"),
    "another architecture": (lambda p: edited(p, backbone={"name": "FluxTransformer2DModel"}), "is for Flux"),
    "another size": (
        lambda p: edited(p, backbone={"layers": 24, "width": 1536}),
        "this checkpoint is for 24 layers of width 1536; the pipeline has 4 of 32",
    ),
    "an empty folder": (lambda p: p, "config.json is missing"),
    "no folder": (lambda p: p / "nowhere", "no checkpoint folder at"),
}


def test_a_missing_folder_beside_others_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert may_be_hub_id("runs/sd3")
    Path("runs").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint folder at runs/sd3"):
        shiva.attach(make_sd3(), "runs/sd3")


@pytest.mark.parametrize("error", [OSError("401 Client Error"), ValueError("not a repo id")])
def test_a_checkpoint_that_the_hub_does_not_give_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("shiva.checkpoint.snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=f"somebody/something is no folder here, .*{error}"):
        shiva.ShivaCheckpoint.from_pretrained("somebody/something")


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line_and_the_model_is_left_alone(fault: str, tmp_path: Path) -> None:
    make, message = BROKEN[fault]
    model = make_sd3()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        shiva.attach(model, make(tmp_path))
    assert message in str(error.value)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_a_checkpoint_of_another_model_and_a_trained_shape_cannot_be_overridden(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="for SD3Transformer2DModel; the pipeline has a FluxTransformer2DModel"):
        shiva.attach(make_flux(), path)
    with pytest.raises(ValueError, match="bottleneck is fixed by training"):
        shiva.attach(make_sd3(), path, bottleneck=32)
    with pytest.raises(ValueError, match="budget=7 is above 1"):
        shiva.attach(make_sd3(), path, budget=7)


def test_a_share_of_flops_takes_the_place_of_the_trained_budget_and_the_other_way() -> None:
    model = make_sd3()
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(model, budget=0.7))
    checkpoint.method_config = shiva.Shiva(budget=0.7)
    by_flops = checkpoint.method(flops=0.5).config
    assert (by_flops.budget, by_flops.flops) == (None, 0.5)
    assert shiva.Shiva(flops=0.5).changed({"budget": 0.6}) == shiva.Shiva(budget=0.6)
    assert shiva.Shiva(budget=0.6).changed({"bucket": 64}).budget == 0.6
    with pytest.raises(ValueError, match="exclude each other"):
        checkpoint.method(budget=0.6, flops=0.5)


def test_atomic_writes_leave_the_old_file_when_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, b"old")

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_dense_layers_of_a_trained_table_can_be_changed() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(model, budget=0.5))
    for options, dense in (({}, {0}), ({"dense": (1, 2)}, {1, 2})):
        with shiva.attach(model, checkpoint, **options) as session, torch.no_grad():
            model(**call)
            kept = list(session.stats[-1].kept.values())
            assert {layer for layer in range(4) if kept[layer] == 36} == dense
            assert session.summary().keep == pytest.approx(0.5, abs=0.03)


def test_a_table_with_dense_layers_of_its_own_keeps_them() -> None:
    model = make_sd3()
    method = varied_method(model)
    method.set_schedule(shiva.RatioSchedule.flat(0.5, 4, dense=(3,)))
    assert shiva.ShivaCheckpoint.of(method).method().dense_layers() == {3}


def test_a_file_in_the_hubs_cache_is_a_link_to_its_store(tmp_path: Path) -> None:
    snapshot = saved(tmp_path / "models--a--b" / "snapshots" / "1")
    store = tmp_path / "models--a--b" / "blobs"
    store.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (snapshot / name).rename(store / name)
        (snapshot / name).symlink_to(store / name)
    shiva.attach(make_sd3(), snapshot).detach()


def test_sizes_in_json_are_compared_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device a router of 65,536 takes no memory, and it is not the file's."""
    path, built, build = edited(tmp_path, options={"bottleneck": 65_536}), [], shiva.Shiva.build
    monkeypatch.setattr(shiva.Shiva, "build", lambda self, spec: built.append(build(self, spec)) or built[-1])
    with pytest.raises(ValueError, match=r"its options say \(2, 65536\)"):
        shiva.attach(make_sd3(), path)
    assert [{p.device.type for p in method.parameters()} for method in built] == [{"meta"}]


def test_attach_of_a_checkpoint_leaves_the_random_generator_where_it_was(tmp_path: Path) -> None:
    path = adapted(tmp_path, lambda made: None)
    model = make_sd3()
    before = torch.random.get_rng_state()
    shiva.attach(model, path).detach()
    assert torch.equal(torch.random.get_rng_state(), before)


@torch.no_grad()
def test_saving_under_an_adapter_writes_the_original_weights(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path / "pipe")
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(pipe.transformer), **adapter(tiny.load(tmp_path).transformer))
    originals = {name: p.clone() for name, p in pipe.transformer.named_parameters()}
    signature, own = inspect.signature(pipe.transformer.save_pretrained), set(vars(pipe.transformer))
    session = shiva.attach(pipe, checkpoint)
    folded = {name: p.clone() for name, p in pipe.transformer.named_parameters()}
    assert any(not torch.equal(folded[name], originals[name]) for name in originals)
    assert inspect.signature(pipe.transformer.save_pretrained) == signature
    pipe.transformer.save_pretrained(tmp_path / "alone")
    pipe.save_pretrained(tmp_path / "whole")
    assert all(torch.equal(p, folded[name]) for name, p in pipe.transformer.named_parameters())
    for folder in (tmp_path / "alone", tmp_path / "whole" / "transformer"):
        written = type(pipe.transformer).from_pretrained(folder)
        assert all(torch.equal(p, originals[name]) for name, p in written.named_parameters())
    session.detach()
    assert set(vars(pipe.transformer)) == own
    assert all(torch.equal(p, originals[name]) for name, p in pipe.transformer.named_parameters())


def test_saving_is_refused_where_the_original_weights_are_not_in_reach(tmp_path: Path) -> None:
    model, _, checkpoint = adapted_sd3()
    model.transformer_blocks[0].attn.to_q.__class__ = Foreign
    session = shiva.attach(model, checkpoint)
    with pytest.raises(ValueError, match=r"detach\(\) first"):
        model.save_pretrained(tmp_path)
    session.detach()
    assert "save_pretrained" not in vars(model)


def test_a_checkpoint_that_keeps_everything_says_that_its_adapter_stays(caplog: pytest.LogCaptureFixture) -> None:
    model, _, checkpoint = adapted_sd3()
    with caplog.at_level(logging.WARNING, "shiva"), shiva.attach(model, checkpoint, budget=0.5) as session:
        assert "its adapter in the weights" in repr(session)
        assert not caplog.records
        session.set_budget(1.0)
        assert "adapter stays in the weights" in caplog.text
        assert "detach() for the pipeline as it was" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shiva"), shiva.attach(model, checkpoint, budget=1.0):
        assert len(caplog.records) == 1
