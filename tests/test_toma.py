"""ToMA holds what its paper, or its release, says of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shiva
from baseline_tools import SPEC, medium, output, sampled, tera
from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.methods import toma
from shiva.ops import merging

from tiny import BACKBONES, call_flux, call_sd3, make_flux, make_sd3, noise

grids = st.tuples(st.integers(2, 9), st.integers(2, 9))


@given(tokens=st.integers(2, 8), seed=st.integers(0, 999), data=st.data())
@settings(max_examples=40, deadline=None)
def test_greedy_facility_location_is_near_the_best_choice(tokens: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, tokens))
    x = merging.unit(noise(1, tokens, 5, seed=seed).abs())
    similarity = x @ x.mT
    chosen = toma.facility_location(similarity, count)[0]
    assert len(set(chosen.tolist())) == count

    def covered(choice: Any) -> float:
        return float(similarity[0, list(choice)].max(dim=0).values.sum())

    best = max(covered(choice) for choice in itertools.combinations(range(tokens), count))
    assert covered(chosen.tolist()) >= (1 - 1 / math.e) * best
    assert toma.facility_location(similarity, 1)[0, 0] == similarity[0].sum(dim=-1).argmax()


def tiles_of(x: Tensor, grid: tuple[int, int], count: int, scale: float) -> tuple[toma.Tiling, Tensor, Tensor]:
    tiles = toma.tiling(Layout(*grid), 4)
    tokens = tiles.fold(merging.unit(x))
    chosen = toma.facility_location(tokens @ tokens.mT, count)
    return tiles, chosen, toma.assign(tokens, chosen, scale)


@given(grid=st.sampled_from([(8, 8), (6, 10), (7, 9)]), scale=st.sampled_from([1.0, 10.0, 1000.0]))
@settings(deadline=None)
def test_assignments_are_weighted_means_so_a_constant_survives(grid: tuple[int, int], scale: float) -> None:
    tiles, _, assignment = tiles_of(noise(2, math.prod(grid), 16), grid, 6, scale)
    torch.testing.assert_close(assignment.sum(dim=2), torch.ones(2, assignment.shape[1], tiles.size))
    constant = torch.full((2, math.prod(grid), 3), 2.5)
    back = toma.unmerge(toma.merge(constant, assignment, tiles), assignment, tiles)
    torch.testing.assert_close(back, constant)


def test_toma_keeping_all_distinct_tokens_is_the_identity() -> None:
    x = noise(2, 64, 16)
    tiles, _, assignment = tiles_of(x, (8, 8), 16, 1e6)
    torch.testing.assert_close(toma.unmerge(toma.merge(x, assignment, tiles), assignment, tiles), x)


@given(grid=grids, side=st.integers(1, 6))
def test_tiles_fold_and_unfold(grid: tuple[int, int], side: int) -> None:
    x, tiles = noise(1, math.prod(grid), 2), toma.tiling(Layout(*grid), side)
    assert torch.equal(tiles.unfold(tiles.fold(x)), x)
    assert tiles.down * tiles.across * tiles.size == math.prod(grid)


def test_toma_shares_destinations_over_the_batch_and_leaves_weights_to_each_sample() -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    chosen = {}
    for source in ("first", "cond", "mean"):
        with shiva.attach(model, shiva.ToMA(skip=1, select_from=source), cfg="batched") as session:
            output(model, call)
            assert session.ctx is not None
            key = ("transformer_blocks", 0)
            chosen[source] = session.ctx.run.destinations.tensors[key]
            weights = session.ctx.run.assignments.tensors[key]
            assert chosen[source].shape == (1, 4, 8)
            assert weights.shape == (2, 4, 8, 16)
            assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(chosen["first"], chosen["cond"])


def test_toma_merges_and_refreshes_at_its_steps() -> None:
    model = make_sd3()
    session, timesteps = sampled(model, shiva.ToMA(skip=1, every=2, select_every=4, assign_every=2), 9)
    made, kept = [], []
    with session:
        for timestep in timesteps[:8]:
            output(model, call_sd3(2, 8, 8, timestep))
            assert session.ctx is not None
            run = session.ctx.run
            made.append(tuple(c.made_at["transformer_blocks", 0] for c in (run.destinations, run.assignments)))
            kept.append(session.stats[-1].kept["transformer_blocks.1.attn"])
    assert kept == [32, 64] * 4
    assert made == [(0, 0), (0, 0), (0, 2), (0, 2), (4, 4), (4, 4), (4, 6), (4, 6)]


def test_toma_takes_the_conditional_half_where_the_pipeline_puts_it() -> None:
    """SD3 puts it second, DiT first."""
    for backbone, half in (("sd3", 1), ("dit", 0)):
        tiny = BACKBONES[backbone]
        model, call, chosen = tiny.make(), tiny.call(2, 8, 8), {}
        for source, batch in {"cond": call, "first": flipped(call, half)}.items():
            with shiva.attach(model, shiva.ToMA(skip=1, select_from=source), cfg="batched") as session:
                output(model, batch)
                assert session.ctx is not None
                chosen[source] = session.ctx.run.destinations.tensors["transformer_blocks", 0]
        assert torch.equal(chosen["cond"], chosen["first"])


def flipped(call: dict[str, Any], first: int) -> dict[str, Any]:
    """A batch of two whose sample `first` comes first."""
    order = [first, 1 - first]
    return {name: value[order] if isinstance(value, Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize(("grid", "height", "width"), [((61, 64), 1, 4), ((53, 64), 1, 4), ((49, 64), 7, 4)])
def test_toma_finds_tiles_on_awkward_grids(grid: tuple[int, int], height: int, width: int) -> None:
    method = shiva.ToMA().build(SPEC)
    ctx = StepContext(Layout(*grid), timestep=900.0, run=method.new_run(), now=method.new_step())
    method.begin_step(ctx)
    assert ctx.now.merges
    assert toma.tiling(Layout(*grid), 4)[1::2] == (height, width)


def test_toma_refuses_a_grid_that_no_tile_fits() -> None:
    method = shiva.ToMA().build(SPEC)
    with pytest.raises(ValueError, match=r"tile=4 cuts a 53x53 grid into tiles of 1x1.*pass a larger tile"):
        method.begin_step(StepContext(Layout(53, 53), timestep=900.0, run=method.new_run(), now=method.new_step()))


def test_toma_on_flux_merges_attention_in_double_and_whole_single_blocks() -> None:
    model = make_flux()
    with shiva.attach(model, shiva.ToMA(skip=1)) as session:
        output(model, call_flux(2, 8, 8))
        reduced = {name for name, kept in session.stats[-1].kept.items() if kept == 32}
    assert reduced == {"transformer_blocks.1.attn", "single_transformer_blocks.1"}


def test_a_merged_block_keeps_the_untouched_residual() -> None:
    """With every gate shut the block adds nothing, so merging it must change nothing."""
    model, call = make_sd3(), call_sd3(2, 8, 8)
    for block in model.transformer_blocks:
        for norm in (block.norm1, block.norm1_context):
            nn.init.zeros_(norm.linear.weight)
            nn.init.zeros_(norm.linear.bias)
    dense = output(model, call)
    with shiva.attach(model, shiva.ToMA(skip=0, site="block")):
        torch.testing.assert_close(output(model, call), dense)


@pytest.mark.slow
def test_paper_flops_of_toma_with_its_merge_products(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, counted = medium().records(shiva.ToMA.preset("paper"), (0,), monkeypatch)
    assert tera(counted[0]) == pytest.approx(8.22, abs=0.03)
    assert tera(summary.flops) == pytest.approx(8.20, abs=0.01)
