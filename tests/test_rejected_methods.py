"""Rejected tokens at inference in the methods that have a router of their own, and the choice by run length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shiva
from pipelines import PIPELINES
from shiva.methods.fills import CACHED_FROM

from tiny import call_sd3, make_sd3

N = 16


def random_logits(x: Tensor, site: Any, ctx: Any) -> Tensor:
    return torch.randn(x.shape[:2], generator=torch.Generator().manual_seed(10 * ctx.step + site.layer))


def two_steps(config: Any, part: str) -> tuple[list[Tensor], list[Tensor], list[int], Any]:
    """Inputs and outputs (B, N, D) of a module of block 2 at two steps, the tokens it ran on, and the module."""
    model = make_sd3()
    inputs, outputs, kept = [], [], []
    with shiva.attach(model, config) as session:
        if isinstance(config, shiva.DiffCR):
            session.method.rho.data.fill_(0.5)
        else:
            session.method.logits = random_logits
        block: Any = model.transformer_blocks[2]
        module = block.ff if part == "ff" else block

        def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            inputs.append(args[0] if part == "ff" else kwargs["hidden_states"])
            outputs.append(output if part == "ff" else output[1])

        handle = module.register_forward_hook(note, with_kwargs=True)
        with torch.no_grad():
            for timestep in (700.0, 500.0):
                model(**call_sd3(2, 4, 4, timestep=timestep))
                kept.append(session.stats[-1].kept["transformer_blocks.2" + (".ff" if part == "ff" else "")])
        handle.remove()
        with session.disabled(), torch.no_grad():
            computed = module(inputs[1]) if part == "ff" else None
    return inputs, outputs, kept, computed


@pytest.mark.parametrize("union", [False, True])
def test_dydit_reuses_each_tokens_last_ffn_update(union: bool) -> None:
    config = shiva.DyDiT(fill="cached", bias=0.0, union=union)
    _, (first, second), kept, computed = two_steps(config, "ff")
    assert kept[0] == N, "the first step fills the cache"
    assert 0 < kept[1] < N
    reused = (second == first).all(dim=-1)
    assert N - round(float(reused.sum()) / 2) == kept[1]
    torch.testing.assert_close(second[~reused], computed[~reused], rtol=1e-4, atol=1e-5)


def test_dydit_gives_a_near_tokens_update_of_the_same_sample() -> None:
    inputs, (_, second), kept, computed = two_steps(shiva.DyDiT(fill="near", bias=0.0), "ff")
    assert 0 < kept[1] < N
    own = torch.isclose(second, computed, rtol=1e-4, atol=1e-5).all(dim=-1)
    for b in range(2):
        for i in (~own[b]).nonzero().flatten().tolist():
            chosen = own[b].nonzero().flatten().tolist()
            nearest = max(chosen, key=lambda j: float(torch.cosine_similarity(inputs[1][b, i], inputs[1][b, j], 0)))
            torch.testing.assert_close(second[b, i], second[b, nearest])


@pytest.mark.parametrize("rejected", ["cached", "near", "identity"])
def test_diffcr_gives_rejected_tokens_what_it_is_told(rejected: str) -> None:
    inputs, outputs, kept, _ = two_steps(shiva.DiffCR(fill=rejected, dense=(0,)), "block")
    assert kept == ([N, N // 2] if rejected == "cached" else [N // 2] * 2)
    first, second = (out - x for x, out in zip(inputs, outputs, strict=True))
    if rejected == "cached":
        reused = torch.isclose(second, first, rtol=1e-3, atol=1e-5).all(dim=-1)
        assert (reused.sum(dim=-1) == N // 2).all()
    still = (second == 0).all(dim=-1).sum(dim=-1)
    assert (still == (N // 2 if rejected == "identity" else 0)).all()


def test_auto_caches_from_so_many_steps_on(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Ranked(budget=0.6, fill="auto", score="random")) as session:
        for steps, rejected in ((CACHED_FROM - 1, "near"), (CACHED_FROM, "cached")):
            image = tiny.image(pipe, steps=steps)
            assert (session.summary().cached_bytes > 0) == (rejected == "cached")
            with pytest.MonkeyPatch.context() as patch:
                named = shiva.Ranked(budget=0.6, fill=rejected, score="random").build(session.spec)
                patch.setattr(session, "method", named)
                assert torch.equal(tiny.image(pipe, steps=steps), image)


def test_a_whole_step_cache_around_a_session_is_priced_and_leaves_nothing_behind(tmp_path: Path) -> None:
    from reproduce.claims.mag_cache import MagCached
    from shiva.evaluate.rivals import magnitude_ratios

    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with magnitude_ratios(pipe.transformer) as ratios:
        dense = tiny.image(pipe, steps=6)
    assert len(ratios) == 6
    assert ratios[0] == 1.0
    for source in (shiva.Shiva(budget=1.0), shiva.Ranked(budget=0.6, score="random", fill="cached")):
        with MagCached(source, magnitudes=tuple(ratios), setting=10.0).attached(pipe) as session:
            tiny.image(pipe, steps=6)
            skipped = [not step.kept for step in session.stats]
            share = session.summary().flops_share
        assert sum(skipped) >= 3, "retention and three skips a time"
        assert share < 0.6
        assert torch.equal(tiny.image(pipe, steps=6), dense)


@pytest.mark.parametrize(
    "config",
    [
        shiva.Shiva(budget=0.5, fill="cached", signals=("time", "prompt", "layer", "age"), age=0.5),
        shiva.Sweep(budget=0.5),
    ],
    ids=["updates and age", "keys and values"],
)
def test_a_step_with_a_cache_has_no_open_shape(config: shiva.Shiva) -> None:
    """A whole step is traced, cache and ages included, and every shape in it is a number."""
    model = make_sd3()
    with shiva.attach(model, config) as session, torch.no_grad():
        model(**call_sd3(2, 4, 4, timestep=700.0))
        call = call_sd3(2, 4, 4, timestep=500.0)
        program = session.program(**call)
        assert program.ctx.counts[1] == N // 2
        exported = torch.export.export(program, (), kwargs={**call, "return_dict": False})
    values = [node.meta.get("val") for node in exported.graph.nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    assert len(tensors) > 50
    assert all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


CARRYING = {
    "cached updates": shiva.Shiva(budget=0.5, fill="cached", age=0.5),
    "sweep": shiva.Sweep(budget=0.5),
    "SDTM": shiva.SDTM(protect_every=2),
    "DyDiT": shiva.DyDiT(fill="cached", bias=0.0),
    "DiffCR": shiva.DiffCR(fill="cached", initial=0.5),
}


@pytest.mark.parametrize("config", CARRYING.values(), ids=CARRYING)
def test_what_a_run_carries_holds_no_graph_of_its_steps(config: Any) -> None:
    model = make_sd3()
    with shiva.attach(model, config) as session:
        for timestep in (900.0, 700.0, 500.0):
            call = call_sd3(2, 4, 4, timestep=timestep)
            call["hidden_states"].requires_grad_()
            model(**call)[0].sum().backward()
            assert call["hidden_states"].grad.abs().sum() > 0
            assert session.ctx is not None
            held = [value for part in vars(session.ctx.run).values() if part for value in part.values()]
            tensors = [value for value in held if isinstance(value, Tensor)]
            assert tensors
            assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.6])
def test_a_sweep_is_one_moving_band_that_leaves_no_token_waiting(keep: float, tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Sweep(budget=keep)) as session, session.trace() as trace:
        tiny.image(pipe, steps=13)
    bands: dict[int, set[int]] = {}
    for (step, layer), positions in trace.positions.items():
        band = set(positions[0].tolist())
        assert bands.setdefault(step, band) == band, f"layer {layer} sees the same tokens as the others"
    tokens = session.stats[0].tokens
    for step, band in bands.items():
        begins = [token for token in band if (token - 1) % tokens not in band]
        assert len(begins) == 1, f"step {step} runs on one band"
    for first in range(1, 13 - round(3 / keep)):
        seen = set().union(*(bands[step] for step in range(first, first + round(3 / keep))))
        assert seen == set(range(tokens))
