"""IBTM holds what its paper, or its release, says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shiva
from baseline_tools import medium, output, pair, sampled, tera
from pipelines import PIPELINES
from shiva.core.layout import Layout
from shiva.methods.ibtm import guidance_difference
from shiva.ops import merging

from tiny import call_flux, call_pixart, call_sd3, make_flux, make_pixart, make_sd3, noise


def ibtm(**changes: Any) -> shiva.IBTM:
    return shiva.IBTM(**{"layers": (1, 2), **changes})


def two_steps(
    config: shiva.IBTM, make: Callable[[], nn.Module], call: Callable[..., dict[str, Any]]
) -> tuple[Any, Tensor]:
    """The session after two guided steps, and the first step's output."""
    model = make()
    session, timesteps = sampled(model, config, 6)
    first = output(model, pair(call(2, 8, 8, timesteps[0])))
    output(model, pair(call(2, 8, 8, timesteps[1])))
    return session, first


@pytest.mark.parametrize("similarity", ["position", "feature"])
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_ibtm_keeps_exactly_the_most_important_tokens_of_the_step_before(similarity: str, ratio: float) -> None:
    session, first = two_steps(ibtm(ratio=ratio, similarity=similarity), make_sd3, call_sd3)
    importance = guidance_difference(*first.chunk(2), Layout(8, 8), 4)
    pooled = (first[0] - first[1]).abs().mean(dim=0).view(8, 2, 8, 2).mean(dim=(1, 3)).flatten()
    torch.testing.assert_close(importance[0], pooled)
    important = set(importance[0].topk(64 - int(ratio * 64)).indices.tolist())
    for layer in (1, 2):
        matching = session.ctx.now.matchings[layer, 0]
        for half in range(2):
            assert set(matching.positions[half].tolist()) == important
    assert not torch.equal(*(session.ctx.now.matchings[layer, 0].destinations for layer in (1, 2)))


@given(pool=st.floats(0.3, 2.0), ratio=st.floats(0.05, 0.75))
@settings(max_examples=15, deadline=None)
def test_ibtm_destinations_lie_in_the_pool_and_counts_are_static(pool: float, ratio: float) -> None:
    session, _ = two_steps(ibtm(ratio=ratio, pool=pool, similarity="feature"), make_sd3, call_sd3)
    matching, members = session.ctx.now.matchings[1, 0], session.ctx.now.pool[0]
    assert set(matching.destinations.flatten().tolist()) <= set(members.tolist())
    assert torch.equal(matching.destinations[0], matching.destinations[1])
    assert session.stats[-1].kept["transformer_blocks.1.attn"] == 64 - int(ratio * 64)


def test_ibtm_merges_into_the_nearest_destination() -> None:
    session, _ = two_steps(ibtm(), make_sd3, call_sd3)
    matching = session.ctx.now.matchings[1, 0]
    place = torch.stack([torch.arange(64) // 8, torch.arange(64) % 8], dim=1).float()
    distances = torch.cdist(place[matching.sources[0]], place[matching.destinations[0]])
    taken = distances.gather(1, matching.target[0][:, None])[:, 0]
    torch.testing.assert_close(taken, distances.min(dim=1).values)


def test_ibtm_leaves_the_predicted_variance_out() -> None:
    session, first = two_steps(ibtm(), make_pixart, call_pixart)
    assert first.shape[1] == 8
    means = guidance_difference(*first[:, :4].chunk(2), Layout(8, 8), 4)
    assert torch.equal(session.ctx.now.pool[0].sort().values, means[0].topk(32).indices.sort().values)


def test_ibtm_without_a_guidance_pair_says_why() -> None:
    model = make_sd3()
    session, timesteps = sampled(model, ibtm(), 6)
    with session:
        output(model, call_sd3(1, 8, 8, timesteps[0]))
        with pytest.raises(ValueError, match="raise guidance_scale above 1"):
            output(model, call_sd3(1, 8, 8, timesteps[1]))


def test_ibtm_uses_no_map_twice_when_guidance_ends_within_a_run() -> None:
    model = make_sd3()
    session, timesteps = sampled(model, ibtm(), 6)
    with session:
        for timestep in timesteps[:2]:
            output(model, pair(call_sd3(2, 8, 8, timestep)))
        output(model, call_sd3(1, 8, 8, timesteps[2]))  # the step before it still had both predictions
        with pytest.raises(ValueError, match="keep it there to the last step"):
            output(model, call_sd3(1, 8, 8, timesteps[3]))


def test_ibtm_on_flux_needs_the_two_calls_of_true_guidance() -> None:
    model = make_flux()
    session, timesteps = sampled(model, ibtm(), 6)
    with session:
        for timestep in timesteps[:3]:
            call = call_flux(1, 8, 8, timestep)
            outputs = [output(model, call), output(model, {**call, "encoder_hidden_states": noise(1, 5, 24, seed=9)})]
            assert session.ctx is not None
            assert session.ctx.branch == 1
            expected = (outputs[0] - outputs[1]).abs().mean(dim=-1)
            torch.testing.assert_close(session.ctx.run.importance, expected)
        call = call_flux(1, 8, 8, timesteps[0])
        output(model, call)
        with pytest.raises(ValueError, match="true_cfg_scale"):
            output(model, call_flux(1, 8, 8, timesteps[1]))


def test_ibtm_drops_before_it_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, model = [], make_sd3()
    session, timesteps = sampled(model, ibtm(merge_from=0.5, first_step="dense"), 4)
    original = merging.merge
    monkeypatch.setattr(merging, "merge", lambda x, m, rule="mean": rules.append(rule) or original(x, m, rule))
    with session:
        for timestep in timesteps:
            output(model, pair(call_sd3(2, 8, 8, timestep)))
        assert [record.kept["transformer_blocks.1.attn"] for record in session.stats] == [64, 32, 32, 32]
    assert rules == ["prune"] * 2 + ["mean"] * 4


@pytest.mark.parametrize(("steps", "dropping"), [(20, 4), (10, 2)])
def test_ibtm_drops_for_a_fifth_of_a_run_of_any_length(steps: int, dropping: int) -> None:
    model, combined = make_sd3(), []
    session, timesteps = sampled(model, ibtm(), steps)
    with session:
        for timestep in timesteps[: dropping + 1]:
            output(model, pair(call_sd3(2, 8, 8, timestep)))
            assert session.ctx is not None
            combined.append(session.ctx.now.combine)
    assert combined == ["prune"] * dropping + ["mean"]


@pytest.mark.parametrize("backbone", ["sd3", "flux", "pixart"])
def test_ibtm_in_an_unguided_pipeline_says_why(backbone: str) -> None:
    tiny = PIPELINES[backbone]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    with shiva.attach(pipe, ibtm()), pytest.raises(ValueError, match="difference of the two guidance predictions"):
        tiny.image(pipe, guidance=1.0)


@pytest.mark.slow
def test_paper_flops_of_ibtm_with_its_first_step_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, _ = medium().records(shiva.IBTM.preset("paper"), (0, 1), monkeypatch)
    first, other = map(tera, summary.step_flops())
    assert first == pytest.approx(11.80, abs=0.005)
    assert (first + 49 * other) / 50 == pytest.approx(10.18, abs=0.02)
