"""What must hold for every method on every backbone it is defined on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiva
from shiva.backbones.base import backbone_of
from shiva.session import Session
from tiny_images import IMAGES
from tiny_videos import VIDEOS

from method_table import METHODS, Row
from tiny import BACKBONES, Tiny, sample

PATTERNS = {**IMAGES, **VIDEOS}
TABLE = {**BACKBONES, **PATTERNS}
PAIRS = [(m, b) for m, row in METHODS.items() for b in row.backbones]
ON_PATTERNS = [
    (m, b)
    for m, row in METHODS.items()
    for b, tiny in PATTERNS.items()
    if row.everywhere and (tiny.attention or not row.needs_attention) and b not in row.not_on
]
SQUARE_ONLY = {"dit"}  # DiTTransformer2DModel itself only unpatchifies squares
IN_FOURS_ONLY = {"qwen21"}  # its slots stand for four tokens
ON_GRIDS = [(m, b, g) for m, b in PAIRS for g in [(8, 8), (6, 10), (7, 9)] if g[0] == g[1] or b not in SQUARE_ONLY]
ON_GRIDS += [(m, b, (6, 10) if b in IN_FOURS_ONLY else (7, 9)) for m, b in ON_PATTERNS]
PER_SAMPLE = [(m, b) for m, b in PAIRS + ON_PATTERNS if getattr(METHODS[m].on, "guidance", "per-sample") != "shared"]
TRAINED = [(m, b) for m, b in PAIRS if METHODS[m].differentiable]
IN_HALF = [(m, b) for m, b in PAIRS if b in ("sd3", "flux")]


def output(model: nn.Module, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result = model(**call)[0]
        return torch.stack(result) if isinstance(result, list) else result


def begin(model: nn.Module, tiny: Tiny, row: Row, *shape: int, change: Any = lambda call: call) -> None:
    """The calls of a run, at noisier timesteps, after which the method reduces."""
    noisier = 100.0 if backbone_of(model).rises else 900.0
    for step in range(row.dense_calls):
        output(model, change(tiny.call(*shape, timestep=noisier - step)))


def block_outputs(model: Any, call: dict[str, Any]) -> list[Tensor]:
    """What every block returns, of image, text and references, in order."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, result: Any) -> None:
        streams = result if isinstance(result, tuple) else (result,)
        seen.extend(stream for stream in streams if stream is not None)

    blocks = [site.module for site in backbone_of(model).sites(model) if site.kind == "block"]
    handles = [block.register_forward_hook(note) for block in blocks]
    output(model, call)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_makes_on_the_host_is_there_whatever_torchs_default_device(method: str) -> None:
    tiny, row = BACKBONES["sd3"], METHODS[method]
    model, cfg = tiny.make(), "batched" if method == "ibtm" else "auto"
    calls = [tiny.call(2, 9, 7, timestep=900.0 - step) for step in range(2)]
    with shiva.attach(model, row.on, cfg=cfg) as session:
        with torch.device("meta"):
            found = [output(model, call) for call in calls]
        session.begin_run()
        expected = [output(model, call) for call in calls]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("method", "backbone"), PAIRS + ON_PATTERNS)
def test_switched_off_is_bit_identical_and_detach_leaves_no_trace(method: str, backbone: str) -> None:
    tiny, row = TABLE[backbone], METHODS[method]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    dense, dense_streams = output(model, call), block_outputs(model, call)

    session = shiva.attach(model, row.off)
    assert torch.equal(output(model, call), dense)
    assert all(torch.equal(a, b) for a, b in zip(block_outputs(model, call), dense_streams, strict=True))
    session.detach()

    with shiva.attach(model, row.on):
        begin(model, tiny, row, 2, 8, 8)
        assert not torch.equal(output(model, call), dense)
    assert torch.equal(output(model, call), dense)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(("method", "backbone", "grid"), ON_GRIDS)
def test_realised_counts_are_the_declared_ones_on_any_grid(method: str, backbone: str, grid: tuple[int, int]) -> None:
    tiny, row = TABLE[backbone], METHODS[method]
    model, tokens = tiny.make(), tiny.frames * grid[0] * grid[1]
    with shiva.attach(model, row.on) as session:
        begin(model, tiny, row, 2, *grid)
        result = output(model, tiny.call(2, *grid))
        assert result.isfinite().all()
        assert_declared_counts(session, row, tokens)


def assert_declared_counts(session: Session, row: Row, tokens: int) -> None:
    record = session.stats[-1]
    assert record.tokens == tokens
    assert any(kept < tokens for kept in record.kept.values())
    if row.kept is not None:
        for site in session.backbone.sites(session.transformer):
            if site.name in record.kept:
                assert record.kept[site.name] == row.kept(site.kind, site.layer, tokens), site.name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("method", "backbone"), IN_HALF)
def test_half_precision_and_autocast_reduce_alike(method: str, backbone: str, autocast: bool) -> None:
    tiny, row = BACKBONES[backbone], METHODS[method]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    if not autocast:
        model, call = model.bfloat16(), halved(call)
    with shiva.attach(model, row.on) as session, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        begin(model, tiny, row, 2, 8, 8, change=(lambda call: call) if autocast else halved)
        result = output(model, call)
        assert result.dtype == torch.bfloat16
        assert result.isfinite().all()
        assert_declared_counts(session, row, 64)
        if row.differentiable:
            session.method.train()
            assert model(**call)[0].isfinite().all()


def halved(call: dict[str, Any]) -> dict[str, Any]:
    """The call in bfloat16; ids stay as they are."""
    return {
        key: value.bfloat16()
        if isinstance(value, Tensor) and value.is_floating_point() and not key.endswith("_ids")
        else value
        for key, value in call.items()
    }


@pytest.mark.parametrize(("method", "backbone"), PER_SAMPLE)
def test_a_batch_of_different_samples_equals_single_runs(method: str, backbone: str) -> None:
    """Holds where the guidance policy leaves samples alone: nothing may leak from one sample to another."""
    tiny, row = TABLE[backbone], METHODS[method]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    torch.manual_seed(0)
    with shiva.attach(model, row.on):
        begin(model, tiny, row, 2, 8, 8)
        together, singles = output(model, call), []
        for i in range(2):
            begin(model, tiny, row, 2, 8, 8, change=lambda call, i=i: sample(call, i))
            singles.append(output(model, sample(call, i)))
    torch.testing.assert_close(together, torch.cat(singles), rtol=1e-4, atol=1e-5)


def paired(call: dict[str, Any]) -> dict[str, Any]:
    """Two guidance halves over the same latents."""
    return {**call, "hidden_states": call["hidden_states"][:1].repeat(2, 1, 1, 1)}


def policies(name: str) -> list[str]:
    """The policies under which both guidance halves of a method must keep the same tokens."""
    kept = []
    for policy in ("shared", "max"):
        with contextlib.suppress(ValueError):  # not one of its own
            METHODS[name].on.changed({"guidance": policy})
            kept.append(policy)
    return kept


@pytest.mark.parametrize(("method", "policy"), [(name, policy) for name in METHODS for policy in policies(name)])
def test_guidance_halves_and_branches_keep_the_same_tokens_under_a_joint_policy(method: str, policy: str) -> None:
    row = METHODS[method]
    config = row.on.changed({"guidance": policy})
    model, call = BACKBONES["sd3"].make(), paired(BACKBONES["sd3"].call(2, 8, 8))
    with shiva.attach(model, config) as session, session.trace() as trace:
        begin(model, BACKBONES["sd3"], row, 2, 8, 8, change=paired)
        output(model, call)
    assert trace.positions
    assert torch.equal(trace.masks(row=0), trace.masks(row=1))
    if "flux" in row.backbones:
        model, call = BACKBONES["flux"].make(), BACKBONES["flux"].call(1, 8, 8)
        with shiva.attach(model, config) as session, session.trace() as trace:
            for step in range(row.dense_calls):
                earlier = BACKBONES["flux"].call(1, 8, 8, timestep=900.0 - step)
                for sign in (1, -1):
                    output(model, {**earlier, "encoder_hidden_states": sign * earlier["encoder_hidden_states"]})
            output(model, call)
            first = trace.masks()
            output(model, {**call, "encoder_hidden_states": -call["encoder_hidden_states"]})
            assert session.ctx is not None
            assert session.ctx.branch == 1
        assert torch.equal(trace.masks(), first)


@pytest.mark.parametrize(("method", "backbone"), TRAINED)
def test_gradient_checkpointing_gives_the_same_gradients(method: str, backbone: str) -> None:
    tiny, row = BACKBONES[backbone], METHODS[method]
    plain = gradients(tiny, row.on, checkpointing=False, training=True)
    checkpointed = gradients(tiny, row.on, checkpointing=True, training=True)
    assert plain.keys() == checkpointed.keys()
    assert any(gradient.abs().max() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_and_so_it_does_in_inference_whose_blocks_find_their_first_choice_again(method: str) -> None:
    config, tiny = METHODS[method].on, BACKBONES["sd3"]
    aged = {"fill": "cached", "age": 0.5, "attends": "selected", "span": 1}
    changed = config.changed({name: value for name, value in aged.items() if hasattr(config, name)})
    for on in dict.fromkeys((config, changed)):  # once, where it has none of these options
        plain, checkpointed = (gradients(tiny, on, checkpointing) for checkpointing in (False, True))
        torch.testing.assert_close(checkpointed["latents"], plain["latents"], rtol=1e-4, atol=1e-6)


def gradients(tiny: Tiny, config: Any, checkpointing: bool, training: bool = False) -> dict[str, Tensor]:
    """Of the method's weights in training; otherwise of the latents, after two steps of a run."""
    model = tiny.make().requires_grad_(False)
    if checkpointing:
        model.enable_gradient_checkpointing()
    torch.manual_seed(0)
    with shiva.attach(model, config, cfg="none" if training else "batched") as session:
        session.method.train(training)
        for timestep in (500.0,) if training else (900.0, 600.0):
            call = tiny.call(2, 8, 8, timestep=timestep)
            latents = call["hidden_states"].requires_grad_(True)
            model(**call)[0].square().mean().backward()
        assert latents.grad is not None
        found = {n: p.grad for n, p in session.method.named_parameters() if p.grad is not None}
        return found if training else {"latents": latents.grad}
