"""ToMeSD holds what its release says of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shiva
from baseline_tools import medium, output, pair, tera
from shiva.core.context import StepContext
from shiva.core.method import MethodConfig
from shiva.ops import merging
from shiva.ops.merging import Matching, unmerge
from shiva.session import Session

from tiny import call_flux, call_sd3, make_flux, make_sd3, noise


def positions_of(session: Session, layer: int) -> Tensor:
    assert session.ctx is not None
    return session.ctx.now.matchings[layer, 0].positions


def test_tomesd_matches_the_block_input_once_for_all_sublayers() -> None:
    model, call, made = make_sd3(dual=(0, 1, 2)), call_sd3(2, 8, 8), []
    inputs = {}
    for layer, block in enumerate(model.transformer_blocks):
        block.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: inputs.update({layer: kwargs["hidden_states"]}), with_kwargs=True
        )
    with shiva.attach(model, shiva.ToMeSD(sites=("attention", "ffn"), random=False)) as session:
        original = session.method.matching

        def noted(metric: Tensor, layer: int, ctx: StepContext) -> Matching:
            made.append((layer, torch.equal(metric, inputs[layer])))
            return original(metric, layer, ctx)

        session.method.matching = noted
        output(model, call)
    assert made == [(layer, True) for layer in range(4)]


def test_random_destinations_follow_seed_step_and_layer_alone() -> None:
    model, call = make_sd3(), pair(call_sd3(2, 8, 8))
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(results))
        with shiva.attach(model, shiva.ToMeSD(seed=seed)) as session:
            results.append(output(model, call))
            destinations = positions_of(session, 1)[:, -16:]
            assert torch.equal(destinations[0], destinations[1])
            assert not torch.equal(destinations, positions_of(session, 2)[:, -16:])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("config", [shiva.ToMeSD, shiva.ToFu])
def test_shared_guidance_merges_the_same_tokens_in_both_halves(config: type[shiva.ToMeSD]) -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    for policy, same in (("shared", True), ("per-sample", False)):
        with shiva.attach(model, config(guidance=policy), cfg="batched") as session:
            output(model, call)
            first, second = positions_of(session, 3)
            assert torch.equal(first, second) == same


def test_shared_guidance_holds_across_sequential_branches() -> None:
    model, calls = make_flux(), [call_flux(1, 8, 8), call_flux(1, 8, 8)]
    calls[1]["hidden_states"] = calls[0]["hidden_states"]
    calls[1]["encoder_hidden_states"] = noise(1, 5, 24, seed=9)
    with shiva.attach(model, shiva.ToMeSD(guidance="shared")) as session:
        output(model, calls[0])
        first = positions_of(session, 2)
        output(model, calls[1])
        assert session.ctx is not None
        assert session.ctx.branch == 1
        assert torch.equal(positions_of(session, 2), first)


def test_text_does_not_see_how_results_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call, texts = make_sd3(), call_sd3(2, 8, 8), []
    model.transformer_blocks[0].register_forward_hook(lambda m, a, result: texts.append(result[0]))
    with shiva.attach(model, shiva.ToMeSD()):
        output(model, call)
        monkeypatch.setattr(merging, "unmerge", lambda values, m: torch.zeros_like(unmerge(values, m)))
        output(model, call)
    assert torch.equal(*texts)


def test_round_to_makes_round_counts() -> None:
    assert shiva.ToMeSD(ratio=0.3, round_to=16).removed(4096) == 1216
    assert shiva.ToMeSD(ratio=0.3).removed(4096) == 1228


@pytest.mark.slow
@pytest.mark.parametrize(("config", "target"), [(shiva.ToMeSD, 8.97), (shiva.ToFu, 8.97)])
def test_paper_flops_of_merging_in_every_attention(
    config: type[MethodConfig], target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, counted = medium().records(config.preset("paper"), (0,), monkeypatch)
    assert tera(summary.dense) == pytest.approx(11.80, abs=0.005)
    assert tera(summary.flops) == pytest.approx(target, abs=0.02)
    assert tera(counted[0]) > tera(summary.flops), "the paper's column leaves the matching itself out"
