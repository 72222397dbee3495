"""A session beside what else people put on a transformer, in either order, or refused with the order that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn

import shiva
from neighbours import NEIGHBOURS, TINY
from pipelines import PIPELINES
from shiva.cost import Summary

from tiny import BACKBONES, make_flux, make_sd3, noise

OFF, ON = shiva.Shiva(budget=1.0), shiva.Shiva(budget=0.5)
PAIRS = [(row, name) for row, found in NEIGHBOURS.items() if found.put is not None for name in found.classes]


@torch.no_grad()
def output(model: Any, name: str, timestep: float = 500.0) -> Tensor:
    result = model(**TINY[name].call(1, 4, 6, timestep=timestep))[0]
    return torch.stack(result) if isinstance(result, list) else result


def alone(model: Any, name: str) -> Tensor:
    """The output of a call that is a run of its own, to those who keep something from step to step."""
    if not hasattr(model, "cache_context"):
        return output(model, name)
    model._reset_stateful_cache()
    with model.cache_context("cond"):
        return output(model, name)


@pytest.fixture(autouse=True)
def kernels_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_attention_backend` chooses for all models that come after, too."""
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)


@pytest.mark.parametrize("row", [name for name, found in NEIGHBOURS.items() if found.test])
def test_what_is_tested_elsewhere_is(row: str) -> None:
    NEIGHBOURS[row].check_test()


@pytest.mark.parametrize(("row", "name"), PAIRS)
def test_put_on_before_attach(row: str, name: str) -> None:
    neighbour, model = NEIGHBOURS[row], TINY[name].make()
    assert neighbour.put is not None
    neighbour.put(model)
    expected = alone(model, name)
    if neighbour.before is not None:
        with pytest.raises(ValueError, match="attach first, then enable"):
            shiva.attach(model, ON)
        return
    with shiva.attach(model, OFF):
        assert torch.equal(alone(model, name), expected)
    with shiva.attach(model, ON) as session:
        assert_reduced(alone(model, name), expected, session.summary())
    assert torch.equal(alone(model, name), expected), "detached"


@pytest.mark.parametrize(("row", "name"), PAIRS)
def test_put_on_after_attach(row: str, name: str) -> None:
    neighbour, there, model = NEIGHBOURS[row], TINY[name].make(), TINY[name].make()
    assert neighbour.put is not None
    neighbour.put(there)
    expected = alone(there, name)
    with shiva.attach(model, OFF):
        neighbour.put(model)
        assert torch.equal(alone(model, name), expected)
    assert torch.equal(alone(model, name), expected), "it outlives the session"
    other = TINY[name].make()
    with shiva.attach(other, ON) as session:
        neighbour.put(other)
        assert_reduced(alone(other, name), expected, session.summary())


def assert_reduced(found: Tensor, dense: Tensor, summary: Summary) -> None:
    assert found.isfinite().all()
    assert not torch.equal(found, dense)
    assert 0.3 < summary.flops_share < 0.99


# -- projections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd3", "pixart", "flux", "wan"])
def test_projections_fused_after_attach_are_refused_where_keys_of_all_tokens_are_kept(name: str) -> None:
    model: Any = TINY[name].make()
    dense = output(model, name)
    with shiva.attach(model, shiva.Sweep(budget=0.5)):
        output(model, name, 900.0)
        model.fuse_qkv_projections()
        with pytest.raises(ValueError, match="fused after attach.*unfuse_qkv_projections"):
            output(model, name, 950.0)
        model.unfuse_qkv_projections()
        output(model, name, 950.0)
    torch.testing.assert_close(output(model, name), dense)


@pytest.mark.parametrize("config", [ON, shiva.Sweep(budget=0.5)], ids=["shiva", "sweep"])
def test_a_lora_is_fused_unfused_and_swapped_under_the_session(config: Any, tmp_path: Path) -> None:
    """As pipelines do: what changes weights in place needs no other session."""
    model: Any = make_flux()
    targets = ["to_q", "to_k", "to_v"]

    def save(seed: int) -> Path:
        other: Any = make_flux()
        torch.manual_seed(seed)
        other.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets))
        other.save_lora_adapter(tmp_path / str(seed))
        return tmp_path / str(seed)

    first, second = save(1), save(2)

    def drawn() -> Tensor:
        return [output(model, "flux", timestep) for timestep in (900.0, 600.0, 300.0)][-1]

    def load(folder: Path, **how: Any) -> None:
        model.load_lora_adapter(folder, prefix=None, adapter_name="one", use_safetensors=True, **how)

    load(first)
    with shiva.attach(model, config, **({"guidance": "shared"} if config is ON else {})) as session:
        one = drawn()
        model.fuse_lora()
        torch.testing.assert_close(drawn(), one, rtol=1e-3, atol=1e-4)
        model.unfuse_lora()
        torch.testing.assert_close(drawn(), one, rtol=1e-3, atol=1e-4)
        load(second, hotswap=True)
        two = drawn()
        assert (two - one).abs().max() > 1e-3
        assert session.summary().flops_share < 1
        model.disable_lora()
        assert (drawn() - two).abs().max() > 1e-3
        model.enable_lora()
        torch.testing.assert_close(drawn(), two)


# -- image prompts and control ---------------------------------------------------------------------------


def image_prompt_weights(blocks: int, width: int, text: int) -> dict[str, Any]:
    def weights(seed: int, *shape: int) -> Tensor:
        return 0.3 * noise(*shape, seed=seed)

    adapter = {}
    for block in range(blocks):
        for seed, name in enumerate(("to_k_ip", "to_v_ip")):
            adapter[f"{block}.{name}.weight"] = weights(seed + block, width, text)
            adapter[f"{block}.{name}.bias"] = weights(seed + block, width)
    projection = {"proj.weight": weights(7, 4 * text, 16), "proj.bias": weights(8, 4 * text)}
    projection |= {"norm.weight": weights(9, text), "norm.bias": weights(10, text)}
    return {"ip_adapter": adapter, "image_proj": projection}


@torch.no_grad()
def prompted(model: Any, timestep: float = 500.0) -> Tensor:
    image = {"ip_adapter_image_embeds": [noise(1, 1, 16, seed=9)]}
    return model(**BACKBONES["flux"].call(1, 4, 6, timestep=timestep), joint_attention_kwargs=image)[0]


def load_image_prompts(model: Any) -> None:
    model._load_ip_adapter_weights([image_prompt_weights(2, 32, 24)], low_cpu_mem_usage=False)


@pytest.mark.parametrize("config", [ON, shiva.Sweep(budget=0.5)], ids=["shiva", "sweep"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_image_prompt_adapter_of_flux(config: Any, before: bool) -> None:
    plain: Any = make_flux()
    load_image_prompts(plain)
    dense = prompted(plain)
    for method in (OFF, config):
        model: Any = make_flux()
        if before:
            load_image_prompts(model)
        with shiva.attach(model, method) as session:
            if not before:
                load_image_prompts(model)
            found = [prompted(model, timestep) for timestep in (900.0, 500.0)][-1]
            assert torch.equal(found, dense) == (method is OFF)
            assert (session.summary().flops_share < 1) == (method is not OFF)
        assert torch.equal(prompted(model), dense), "the adapter outlives the session"
        assert [type(attn.processor) for attn in attentions(model)] == [type(a.processor) for a in attentions(plain)]


def attentions(model: Any) -> list[Any]:
    return [block.attn for block in (*model.transformer_blocks, *model.single_transformer_blocks)]


def test_an_attention_that_returns_a_third_stream_is_refused_by_name() -> None:
    model: Any = make_flux()
    load_image_prompts(model)
    with shiva.attach(model, shiva.ToMeSD()), pytest.raises(ValueError, match="3 streams.*image prompt adapters"):
        prompted(model)


CONTROL = {
    "sd3": {"block_controlnet_hidden_states": lambda: [noise(1, 24, 32, seed=8)]},
    "flux": {"controlnet_block_samples": lambda: [noise(1, 24, 32, seed=8)]},
    "qwen": {"controlnet_block_samples": lambda: [noise(1, 36, 32, seed=8)]},
}


@pytest.mark.parametrize("name", CONTROL)
def test_a_controlnet_adds_to_all_tokens_between_blocks(name: str) -> None:
    model, call = TINY[name].make(), TINY[name].call(1, 4, 6)
    without = output(model, name)
    call |= {argument: make() for argument, make in CONTROL[name].items()}
    with torch.no_grad():
        dense = model(**call)[0]
        assert not torch.equal(dense, without)
        with shiva.attach(model, OFF):
            assert torch.equal(model(**call)[0], dense)
        with shiva.attach(model, shiva.Shiva(budget=0.5, span=2)) as session:
            assert_reduced(model(**call)[0], dense, session.summary())


# -- pipelines from a picture ----------------------------------------------------------------------------

FROM_PICTURE = {
    "img2img": ("sd3", "StableDiffusion3Img2ImgPipeline"),
    "flux img2img": ("flux", "FluxImg2ImgPipeline"),
    "flux inpaint": ("flux", "FluxInpaintPipeline"),
}


@pytest.mark.parametrize("name", FROM_PICTURE)
def test_a_run_from_a_picture(name: str, tmp_path: Path) -> None:
    family, cls = FROM_PICTURE[name]
    tiny = PIPELINES[family]
    loaded: Any = tiny.load(tmp_path)
    pipe = getattr(diffusers, cls)(**loaded.components)
    pipe.set_progress_bar_config(disable=True)
    start = {"image": torch.rand(1, 3, 32, 32), "strength": 0.7, "height": 32, "width": 32}
    if "inpaint" in name:
        start["mask_image"] = torch.ones(1, 1, 32, 32)
        start["mask_image"][..., :16] = 0
    dense = tiny.image(pipe, steps=4, **start)
    with shiva.attach(pipe, OFF):
        assert torch.equal(tiny.image(pipe, steps=4, **start), dense)
    for config in (ON, shiva.Sweep(budget=0.7)):
        with shiva.attach(pipe, config) as session:
            assert not torch.equal(tiny.image(pipe, steps=4, **start), dense)
            assert session.summary().keep == pytest.approx(config.budget, abs=0.03)
    assert torch.equal(tiny.image(pipe, steps=4, **start), dense)


# -- device maps -----------------------------------------------------------------------------------------


def test_weights_that_device_map_leaves_on_disk_come_after_the_session(tmp_path: Path) -> None:
    model: Any = make_flux()
    model.save_pretrained(tmp_path)
    dense = output(model, "flux")
    devices = {name: "cpu" for name, _ in model.named_children()} | {"single_transformer_blocks": "disk"}
    folder = str(tmp_path / "offloaded")
    loaded = type(model).from_pretrained(tmp_path, device_map=devices, offload_folder=folder)
    assert torch.equal(output(loaded, "flux"), dense)
    with pytest.raises(ValueError, match="left weights of this transformer on disk.*attach first, then enable"):
        shiva.attach(loaded, ON)
    with shiva.attach(model, ON) as session:
        accelerate.dispatch_model(model, devices, offload_dir=folder)
        assert_reduced(output(model, "flux"), dense, session.summary())
    assert torch.equal(output(model, "flux"), dense)


# -- compiling -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "qwen", "wan"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_blocks_compiled_one_by_one_share_two_graphs(name: str, before: bool, graphs: Any) -> None:
    """The hooks stay outside, so that no graph depends on the layer: one for all tokens, one for fewer."""
    model: Any = TINY[name].make()

    rows = torch.tensor([[-1.0, 0.0, 0.5, 1.0], [1.0, 0.0, 0.0, -1.0]], dtype=torch.float64)
    schedule = shiva.RatioSchedule((1000.0, 0.0), rows, dense=frozenset({0}))

    def three_steps(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        with shiva.attach(model, shiva.Shiva()) as session:
            if compiles:
                model.compile_repeated_blocks(fullgraph=True, backend=graphs)
            session.method.set_schedule(schedule)
            return [output(model, name, timestep) for timestep in (900.0, 600.0, 300.0)]

    eager = three_steps(False)
    if before:
        model.compile_repeated_blocks(fullgraph=True, backend=graphs)
    for found, expected in zip(three_steps(not before), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    kinds = {type(module) for module in model.modules() if module._compiled_call_impl is not None}
    assert kinds, "the blocks are as they were compiled, once the session is gone"
    assert len(kinds) <= len(graphs.seen) <= 2 * len(kinds)


def test_blocks_compiled_one_by_one_run_as_they_are_where_a_method_acts_inside_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = make_flux()
    model.compile_repeated_blocks(fullgraph=True, backend=lambda graph, inputs: pytest.fail("compiled"))
    with shiva.attach(model, shiva.Sweep(budget=0.5, dense=())), caplog.at_level("WARNING", "shiva"):
        output(model, "flux")
        assert "session.compile()" in caplog.text
        caplog.clear()
        output(model, "flux", 950.0)
        assert not caplog.text, "told once"
    assert model.transformer_blocks[0]._compiled_call_impl is not None


# -- weights in other forms, and many devices --------------------------------------------------------------


class Packed(nn.Linear):
    """A quantised layer as libraries make them: whole numbers, and a forward that no meta tensor passes."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features)
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_meta
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def test_quantised_layers_are_priced_as_what_they_stand_for() -> None:
    shares = []
    for packs in (False, True):
        model = make_sd3()
        for parent in [module for name, module in model.named_modules() if packs and "blocks." in name]:
            for name, linear in parent.named_children():
                if type(linear) is nn.Linear:
                    parent._modules[name] = Packed(linear)
        with shiva.attach(model, shiva.Sweep(budget=0.6)) as session:
            output(model, "sd3", 900.0)
            output(model, "sd3", 600.0)
            shares.append(session.summary().flops_share)
        assert output(model, "sd3").isfinite().all()
    assert shares[0] == pytest.approx(shares[1])


@pytest.mark.parametrize("name", ["flux", "qwen", "wan"])
def test_context_parallelism_is_refused_by_name(name: str) -> None:
    """By the hooks that diffusers puts on; its `enable_parallelism` itself wants an accelerator."""
    model: Any = TINY[name].make()
    config = ContextParallelConfig(ulysses_degree=2)
    plan = {module: how for module, how in model._cp_plan.items() if module}  # the root's would ask for processes
    with shiva.attach(model, ON):
        apply_context_parallel(model, config, plan)
        with pytest.raises(ValueError, match="context parallelism splits the tokens over processes"):
            output(model, name)
    with pytest.raises(ValueError, match="context parallelism splits the tokens over processes"):
        shiva.attach(model, ON)
    remove_context_parallel(model, plan)
    with shiva.attach(model, ON):
        assert output(model, name).isfinite().all()
