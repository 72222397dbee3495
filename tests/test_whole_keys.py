"""attends="all": selected tokens see the keys and values that the others last had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor

import shiva
from shiva.core.cost import count
from tiny_images import IMAGES
from tiny_videos import VIDEOS

from tiny import BACKBONES, Tiny, call_sd3, make_sd3

PATTERNS = {**IMAGES, **VIDEOS}
TABLE = {
    **BACKBONES,
    "sd3 with dual attention": Tiny(lambda: make_sd3(dual=(0, 1, 2)), call_sd3),
    **{name: tiny for name, tiny in PATTERNS.items() if tiny.keys},
}
SWEEP = shiva.Sweep(budget=0.5)
CONFIGS: dict[str, Any] = {
    "sweep": SWEEP,
    "NeuralSort": shiva.NeuralSort(keep=0.5, fill="cached", attends="all"),
}


@torch.no_grad()
def two_steps(model: Any, tiny: Tiny) -> Tensor:
    """The output of a step that differs from the one before it by next to nothing."""
    call = tiny.call(2, 4, 6)
    time = call[tiny.time].float()
    model(**{**call, tiny.time: time * (1 - 2e-6 if tiny.rises else 1 + 2e-6)})
    latents = {"hidden_states": call["hidden_states"].clone()} if "hidden_states" in call else {}
    output = model(**{**call, **latents, tiny.time: time})[0]
    return torch.stack(output) if isinstance(output, list) else output


@pytest.mark.parametrize("backbone", [name for name, tiny in PATTERNS.items() if not tiny.keys])
def test_a_class_whose_keys_cannot_be_whole_says_so(backbone: str) -> None:
    model = PATTERNS[backbone].make()
    with pytest.raises(ValueError, match="attends='selected'"):
        shiva.attach(model, replace(SWEEP, attends="all"))
    with shiva.attach(model, SWEEP) as session:
        assert session.method.config.attends == "selected"


@pytest.mark.parametrize("backbone", TABLE)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_where_nothing_changes_a_reduced_step_is_the_dense_one(backbone: str, config: Any) -> None:
    tiny = TABLE[backbone]
    model = tiny.make()
    dense = two_steps(model, tiny)
    errors = {}
    for attends in ("selected", "all"):
        with shiva.attach(model, config, attends=attends) as session:
            errors[attends] = float((two_steps(model, tiny) - dense).abs().max())
            assert session.stats[1].kept[session.hooks.blocks[1]] == 12 * tiny.frames, (
                "the second step runs on half of the tokens"
            )
    assert errors["all"] < 0.01 * errors["selected"]
    assert torch.equal(two_steps(model, tiny), dense), "detached"


@pytest.mark.parametrize("backbone", TABLE)
def test_its_attention_is_priced_as_it_runs(backbone: str) -> None:
    tiny = TABLE[backbone]
    model = tiny.make()
    with shiva.attach(model, SWEEP) as session, torch.no_grad():
        model(**tiny.call(2, 4, 6, timestep=900.0))
        ran = count(lambda: model(**tiny.call(2, 4, 6, timestep=600.0)))
        dense, reduced = session.summary().step_flops()
        assert reduced.attention == pytest.approx(ran.attention)
        assert reduced.attention < dense.attention
        assert reduced.linear == pytest.approx(ran.linear, rel=0.05), "signals of a router are not the model's"
        inside = session.cost_model()
        assert inside.step(session.ctx.counts).true == pytest.approx(reduced.true)  # type: ignore[union-attr]


def test_keys_are_counted_as_memory_and_may_be_smaller() -> None:
    model, sizes = make_sd3(), []
    for options in ({}, {"attends": "selected"}, {"cache_dtype": "bfloat16"}, {"cache_layers": (1,)}):
        with shiva.attach(model, SWEEP, **options) as session, torch.no_grad():
            model(**call_sd3(2, 4, 4, timestep=900.0))
            model(**call_sd3(2, 4, 4, timestep=600.0))
            sizes.append(session.summary().cached_bytes)
    whole, updates, half, one = sizes
    assert updates * 3 == whole == half * 2 == one * 3, "an update, a key and a value for each of three layers"


def test_attention_keeps_its_processors_and_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    model: Any = BACKBONES["flux"].make()
    before = [block.attn.processor for block in model.transformer_blocks]
    with shiva.attach(model, SWEEP):
        assert [block.attn.processor for block in model.transformer_blocks] == before
        model.set_attention_backend("_native_math")
    assert model.single_transformer_blocks[0].attn.processor._attention_backend is not None


def test_a_lora_that_comes_after_the_session_is_told_where_it_belongs() -> None:
    model, lora = make_sd3(), peft.LoraConfig(r=2, target_modules=["to_k", "to_v"])
    with shiva.attach(model, SWEEP), torch.no_grad():
        model(**call_sd3(1, 4, 4, timestep=900.0))
        peft.inject_adapter_in_model(lora, model)
        with pytest.raises(ValueError, match="to_k was replaced after attach.*load or unload it, then attach"):
            model(**call_sd3(1, 4, 4, timestep=950.0))
    with shiva.attach(model, SWEEP) as session, torch.no_grad():
        for timestep in (900.0, 600.0):
            model(**call_sd3(1, 4, 4, timestep=timestep))
        assert session.stats[-1].kept["transformer_blocks.2"] == 8


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"attends='some'.*selected"):
        shiva.Shiva(attends="some")
    fused: Any = BACKBONES["flux"].make()
    fused.fuse_qkv_projections()
    with pytest.raises(ValueError, match="unfuse_qkv_projections"):
        shiva.attach(fused, replace(SWEEP, attends="all"))
    with shiva.attach(fused, SWEEP) as session:
        assert session.method.config.attends == "selected"
    model = make_sd3()
    with shiva.attach(model, CONFIGS["NeuralSort"]) as session:
        session.method.train()
        with pytest.raises(ValueError, match="attends='all' is for inference"):
            model(**call_sd3(1, 4, 4))
