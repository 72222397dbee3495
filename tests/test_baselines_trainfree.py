"""The training-free methods of the comparison: each holds what its paper, or its release, says of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tomesd
import torch
from diffusers import SD3Transformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import shiva
from pipelines import PIPELINES
from shiva.core.context import StepContext
from shiva.core.cost import Flops, count
from shiva.core.method import BackboneSpec, MethodConfig
from shiva.methods import toma
from shiva.methods.ibtm import guidance_difference
from shiva.methods.sdtm import blended, detail_matching, structure_matching
from shiva.modules import merging
from shiva.modules.merging import Matching, draw, match, merge, partition, seeded, unmerge, windows
from shiva.session import Session
from shiva.summary import StepRecord, Summary

from tiny import BACKBONES, call_flux, call_pixart, call_sd3, make_flux, make_pixart, make_sd3, noise

SPEC = BackboneSpec("toy", layers=4, width=16, time_width=8, prompt_width=8)
CONFIGS = (shiva.ToMeSD, shiva.ToFu, shiva.SDTM, shiva.ToMA, shiva.IBTM)

grids = st.tuples(st.integers(2, 9), st.integers(2, 9))


def cells_of(grid: tuple[int, int], generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    cells = windows(grid)
    destinations, sources = partition(cells, draw(cells, 1, generator), grid[0] * grid[1])
    return destinations[0], sources[0]


def matched(batch: int, grid: tuple[int, int], ratio: float, seed: int = 0) -> tuple[Tensor, Matching]:
    x = noise(batch, grid[0] * grid[1], 16, seed=seed)
    return x, match(x, *cells_of(grid, seeded(seed, 0)), int(ratio * x.shape[1]))


def output(model: nn.Module, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**call)[0]


def pair(call: dict[str, Any]) -> dict[str, Any]:
    """The same latents in both halves of the batch, under two prompts."""
    latents = call["hidden_states"][:1]
    return {**call, "hidden_states": torch.cat([latents, latents])}


def sampled(model: nn.Module, config: MethodConfig, steps: int, **options: Any) -> tuple[Session, list[float]]:
    """A session that knows how long its run is."""
    timesteps = torch.linspace(1000, 1000 / steps, steps)
    pipeline = SimpleNamespace(transformer=model, scheduler=SimpleNamespace(timesteps=timesteps))
    return shiva.attach(pipeline, config, **options), timesteps.tolist()


# -- matching, merging -------------------------------------------------------------------------------


@given(grid=grids, share=st.floats(0.05, 0.75), random=st.booleans(), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_matching_and_merging_are_bit_equal_to_the_tomesd_package(
    grid: tuple[int, int], share: float, random: bool, seed: int
) -> None:
    rows, columns = grid
    x, removed = noise(2, rows * columns, 16, seed=seed), max(1, int(share * rows * columns))
    theirs = torch.Generator().manual_seed(seed)
    peer_merge, peer_unmerge = tomesd.merge.bipartite_soft_matching_random2d(
        x, columns, rows, 2, 2, removed, no_rand=not random, generator=theirs
    )
    ours = torch.Generator().manual_seed(seed) if random else None
    matching = match(x, *cells_of(grid, ours), removed)

    order = same_tokens(matching, peer_unmerge)
    assert torch.equal(merge(x, matching), peer_merge(x).gather(1, order.expand(-1, -1, 16)))
    results = noise(2, matching.positions.shape[1], 5, seed=seed + 1)
    assert torch.equal(unmerge(results.gather(1, order.expand(-1, -1, 5)), matching), peer_unmerge(results))


def same_tokens(matching: Matching, peer_unmerge: Callable[[Tensor], Tensor]) -> Tensor:
    """The peer's place of each of our reduced tokens, (B, K, 1), having checked that they group alike.

    Only the destinations' order may differ: the peer leaves it to an unstable sort, ours is the grid's.
    """
    count = matching.positions.shape[1]
    theirs = peer_unmerge(torch.arange(count).view(1, -1, 1).expand(2, -1, 1))[..., 0]  # (B, N)
    order = theirs.gather(1, matching.positions)
    assert torch.equal(theirs, order.gather(1, merging.slots(matching))), "other tokens are merged"
    assert torch.equal(order.sort(dim=1).values, torch.arange(count).expand(2, -1))
    alone = matching.kept.shape[1]
    assert torch.equal(order[:, :alone], torch.arange(alone).expand(2, -1)), "unmerged sources are ordered otherwise"
    return order[..., None]


@given(grid=grids, share=st.floats(0, 0.75), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_groups_that_agree_survive_merging(grid: tuple[int, int], share: float, seed: int) -> None:
    _, matching = matched(2, grid, share, seed)
    everyone = torch.cat([matching.positions, matching.sources], dim=1).sort(dim=1).values
    assert torch.equal(everyone, torch.arange(grid[0] * grid[1]).expand(2, -1))
    agreed = unmerge(noise(2, matching.positions.shape[1], 7), matching)
    for rule in ("mean", "mlerp", "prune"):
        torch.testing.assert_close(unmerge(merge(agreed, matching, rule), matching), agreed)


def test_merging_computes_on_half_precision_and_keeps_it() -> None:
    x, matching = matched(2, (8, 8), 0.5)
    for rule in ("mean", "mlerp", "prune"):
        assert merge(x.bfloat16(), matching, rule).dtype == torch.bfloat16


def test_a_grid_without_a_whole_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="1x8 grid holds no whole 2x2 cell"):
        windows((1, 8))


# -- ToMeSD ------------------------------------------------------------------------------------------


def positions_of(session: Session, layer: int) -> Tensor:
    assert session.ctx is not None
    return session.ctx.memory["matching", layer, 0].positions


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


# -- ToFu --------------------------------------------------------------------------------------------


def test_mlerp_keeps_direction_of_the_mean_and_the_largest_norm() -> None:
    x, matching = matched(2, (8, 8), 0.6)
    alone = matching.kept.shape[1]
    means, fused = merge(x, matching)[:, alone:], merge(x, matching, "mlerp")[:, alone:]
    torch.testing.assert_close(cosine_similarity(means, fused, dim=-1), torch.ones(2, 16))
    for sample, slot in itertools.product(range(2), range(16)):
        others = matching.sources[sample][matching.target[sample] == slot]
        group = torch.cat([matching.destinations[sample, slot : slot + 1], others])
        largest = x[sample, group].norm(dim=-1).max()
        torch.testing.assert_close(fused[sample, slot].norm(), largest, rtol=1e-5, atol=0)
        if len(group) == 1:
            assert torch.equal(fused[sample, slot], x[sample, group[0]])


def test_pruning_leaves_destinations_as_they_are() -> None:
    x, matching = matched(2, (8, 8), 0.6)
    kept = x.gather(1, matching.positions[..., None].expand(-1, -1, 16))
    assert torch.equal(merge(x, matching, "prune"), kept)


def test_tofu_that_only_averages_is_tomesd() -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    results = []
    for config in (shiva.ToMeSD(), shiva.ToFu(switch=0.0, rule="mean"), shiva.ToFu()):
        with shiva.attach(model, config):
            results.append(output(model, call))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_tofu_switches_at_its_depth() -> None:
    assert [shiva.ToFu().build(SPEC).combine(layer) for layer in range(4)] == ["prune", "prune", "mlerp", "mlerp"]


# -- SDTM --------------------------------------------------------------------------------------------


@given(ratio=st.floats(0, 0.4), share=st.floats(0, 1), steps=st.integers(2, 100))
def test_sdtm_share_falls_from_ratio_plus_to_ratio_minus_deviation(ratio: float, share: float, steps: int) -> None:
    config = shiva.SDTM(ratio=ratio, deviation=min(ratio * share, 0.75 - ratio))
    shares = [config.share(step, steps) for step in range(steps)]
    assert shares[0] == pytest.approx(config.ratio + config.deviation)
    assert shares[-1] == pytest.approx(config.ratio - config.deviation)
    assert shares == sorted(shares, reverse=True)


def test_sdtm_counts_of_the_release() -> None:
    merged = shiva.SDTM().merged_windows(0.5, 4096)
    assert (merged, 4096 - 3 * merged) == (672, 2080)
    assert shiva.SDTM().merged_tokens(0.3, 4096) == 1216


def test_structure_stage_merges_the_most_uniform_windows_whole() -> None:
    grid, cells = (7, 8), windows((7, 8))
    x = noise(2, 56, 16)
    unit = x / x.norm(dim=-1, keepdim=True)
    likeness = torch.stack([(unit[:, m] @ unit[:, m].mT).mean(dim=(1, 2)) for m in cells.members], dim=1)
    matching = structure_matching(x, torch.zeros(2, 56), cells, draw(cells, 1, seeded(0, 0))[0], merged=5)
    for sample in range(2):
        best = cells.members[likeness[sample].topk(5).indices]
        merged = torch.cat([matching.destinations[sample], matching.sources[sample]])
        assert set(merged.tolist()) == set(best.flatten().tolist())
    assert matching.positions.shape == (2, math.prod(grid) - 15)
    reduced = merge(x, matching)
    window = next(m for m in cells.members if matching.destinations[0, 0] in m)
    torch.testing.assert_close(reduced[0, -5], x[0, window].mean(dim=0))


def test_priority_decides_between_equal_windows() -> None:
    cells, priority = windows((4, 4)), torch.zeros(1, 16)
    priority[0, cells.members[2]] = 1.0
    matching = structure_matching(torch.ones(1, 16, 4), priority, cells, draw(cells, 1, None)[0], merged=1)
    assert matching.destinations[0].tolist() == [int(cells.members[2, 0])]


def test_detail_stage_merges_into_the_longest_merged_token() -> None:
    cells, counter = windows((4, 4)), torch.zeros(1, 16)
    counter[0, cells.members[:, 3]] = 2.0
    matching = detail_matching(noise(1, 16, 8), counter, cells, merged=6)
    assert matching.destinations[0].tolist() == cells.members[:, 3].tolist()
    assert matching.positions.shape == (1, 10)


def test_a_constant_image_is_restored_exactly() -> None:
    x, cells = torch.full((1, 63, 4), 0.1), windows((7, 9))
    structure = structure_matching(x, torch.zeros(1, 63), cells, draw(cells, 1, seeded(0, 0))[0], merged=6)
    assert torch.equal(unmerge(merge(x, structure), structure), x)
    detail = detail_matching(x, torch.zeros(1, 63), cells, merged=20)
    torch.testing.assert_close(unmerge(merge(x, detail), detail), x, rtol=1e-6, atol=0)


def test_merged_tokens_blend_with_their_cache() -> None:
    _, matching = matched(1, (4, 4), 0.5)
    cached, values = noise(1, 16, 3, seed=3), noise(1, 8, 3, seed=4)
    plain, restored = unmerge(values, matching), blended(matching, cached, 0.1).restore(values, cached)
    alone = matching.kept[0]
    merged = torch.cat([matching.destinations, matching.sources], dim=1)[0]
    assert torch.equal(restored[0, alone], plain[0, alone])
    torch.testing.assert_close(restored[0, merged], 0.1 * plain[0, merged] + 0.9 * cached[0, merged])


def run_steps(
    config: MethodConfig, steps: int = 6, spoil: Callable[[dict[Any, Any]], None] | None = None
) -> list[Tensor]:
    """Outputs of successive steps of one run on the tiny SD3; spoil may tamper with the run's memory."""
    model, results = make_sd3(), []
    session, timesteps = sampled(model, config, steps)
    with session:
        for timestep in timesteps:
            results.append(output(model, call_sd3(2, 8, 8, timestep)))
            if spoil is not None and session.ctx is not None:
                spoil(session.ctx.run)
    return results


def spoil_cache(memory: dict[Any, Any]) -> None:
    for key in memory:
        if key[0] == "cache":
            memory[key] = torch.full_like(memory[key], 100.0)


def test_the_cache_matters_exactly_when_it_has_weight() -> None:
    def outputs(weight: float, spoil: Callable[[dict[Any, Any]], None] | None) -> list[Tensor]:
        return run_steps(shiva.SDTM(round_to=1, switch=0.5, cache_weight=weight), spoil=spoil)

    assert all(map(torch.equal, outputs(1.0, None), outputs(1.0, spoil_cache)))
    assert not all(map(torch.equal, outputs(0.1, None), outputs(0.1, spoil_cache)))


def test_protecting_every_step_is_dense() -> None:
    model, timesteps = make_sd3(), torch.linspace(1000, 1000 / 6, 6).tolist()
    dense = [output(model, call_sd3(2, 8, 8, timestep)) for timestep in timesteps]
    assert all(map(torch.equal, run_steps(shiva.SDTM(round_to=1, protect_every=1)), dense))


def test_tokens_left_alone_lose_their_priority() -> None:
    model = make_sd3()
    session, timesteps = sampled(model, shiva.SDTM.preset("merge_only", round_to=1), 4)
    with session:
        output(model, call_sd3(2, 8, 8, timesteps[0]))
        assert session.ctx is not None
        counter = session.ctx.run["counter", 0]
        last = session.ctx.memory["matching", 3, 0]
        assert (counter.gather(1, last.kept) == 0).all()
        assert (counter.gather(1, last.sources) >= 1).all()
        assert counter.max() <= 4
        output(model, call_sd3(2, 8, 8, timesteps[0]))
        assert session.ctx.run["counter", 0].max() <= 4, "a new image starts anew"


@pytest.mark.parametrize("backbone", BACKBONES)
def test_sdtm_realises_its_declared_counts_at_every_step(backbone: str) -> None:
    tiny, config = BACKBONES[backbone], shiva.SDTM(round_to=1, switch=3 / 8)
    model = tiny.make()
    session, timesteps = sampled(model, config, 8)
    with session:
        for step, timestep in enumerate(timesteps):
            output(model, tiny.call(2, 8, 8, timestep))
            for site in session.backbone.sites(model):
                if site.name in session.stats[-1].kept:
                    kept = session.stats[-1].kept[site.name]
                    assert kept == sdtm_kept(config, step, 8, site.kind, 64), (step, site.name)


@pytest.mark.parametrize(("steps", "structure"), [(50, 21), (16, 7), (5, 3), (1, 1)])
def test_sdtm_comes_to_its_detail_stage_in_a_run_of_any_length(steps: int, structure: int) -> None:
    """Steps 0 to 20 of the release's 50."""
    assert [shiva.SDTM().is_structure(step, steps) for step in range(steps)] == [
        step < structure for step in range(steps)
    ]


def sdtm_kept(config: shiva.SDTM, step: int, steps: int, kind: str, tokens: int) -> int:
    protected = config.protect_every is not None and step % config.protect_every == 0
    if protected or kind not in ("attention", "ffn"):
        return tokens
    share = config.share(step, steps)
    if config.is_structure(step, steps):
        return tokens - 3 * config.merged_windows(share, tokens)
    return tokens - config.merged_tokens(share, tokens) if kind == "ffn" else tokens


# -- ToMA --------------------------------------------------------------------------------------------


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
    tiles = toma.tiling(grid, 4)
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
    x, tiles = noise(1, math.prod(grid), 2), toma.tiling(grid, side)
    assert torch.equal(tiles.unfold(tiles.fold(x)), x)
    assert tiles.down * tiles.across * tiles.size == math.prod(grid)


def test_toma_shares_destinations_over_the_batch_and_leaves_weights_to_each_sample() -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    chosen = {}
    for source in ("first", "cond", "mean"):
        with shiva.attach(model, shiva.ToMA(skip=1, select_from=source), cfg="batched") as session:
            output(model, call)
            assert session.ctx is not None
            key = "transformer_blocks"
            chosen[source] = session.ctx.run["destinations", key, 0]
            weights = session.ctx.run["assignment", key, 0]
            assert chosen[source].shape == (1, 4, 8)
            assert weights.shape == (2, 4, 8, 16)
            assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(chosen["first"], chosen["cond"])


def test_toma_merges_and_refreshes_at_its_steps() -> None:
    model = make_sd3()
    session, timesteps = sampled(model, shiva.ToMA(skip=1, every=2, select_every=4, assign_every=2), 8)
    made, kept = [], []
    with session:
        for timestep in timesteps:
            output(model, call_sd3(2, 8, 8, timestep))
            assert session.ctx is not None
            steps = session.ctx.run["made"].at
            made.append(tuple(steps[kind, "transformer_blocks", 0] for kind in ("destinations", "assignment")))
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
                chosen[source] = session.ctx.run["destinations", "transformer_blocks", 0]
        assert torch.equal(chosen["cond"], chosen["first"])


def flipped(call: dict[str, Any], first: int) -> dict[str, Any]:
    """A batch of two whose sample `first` comes first."""
    order = [first, 1 - first]
    return {name: value[order] if isinstance(value, Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize(("grid", "height", "width"), [((61, 64), 1, 4), ((53, 64), 1, 4), ((49, 64), 7, 4)])
def test_toma_finds_tiles_on_awkward_grids(grid: tuple[int, int], height: int, width: int) -> None:
    method, ctx = shiva.ToMA().build(SPEC), StepContext(grid=grid, timestep=900.0)
    method.begin_step(ctx)
    assert ctx.memory["merges"]
    assert toma.tiling(grid, 4)[1::2] == (height, width)


def test_toma_refuses_a_grid_that_no_tile_fits() -> None:
    method = shiva.ToMA().build(SPEC)
    with pytest.raises(ValueError, match=r"tile=4 cuts a 53x53 grid into tiles of 1x1.*pass a larger tile"):
        method.begin_step(StepContext(grid=(53, 53), timestep=900.0))


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


# -- IBTM --------------------------------------------------------------------------------------------


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
    importance = guidance_difference(*first.chunk(2), (8, 8), 4)
    pooled = (first[0] - first[1]).abs().mean(dim=0).view(8, 2, 8, 2).mean(dim=(1, 3)).flatten()
    torch.testing.assert_close(importance[0], pooled)
    important = set(importance[0].topk(64 - int(ratio * 64)).indices.tolist())
    for layer in (1, 2):
        matching = session.ctx.memory["matching", layer, 0]
        for half in range(2):
            assert set(matching.positions[half].tolist()) == important
    assert not torch.equal(*(session.ctx.memory["matching", layer, 0].destinations for layer in (1, 2)))


@given(pool=st.floats(0.3, 2.0), ratio=st.floats(0.05, 0.75))
@settings(max_examples=15, deadline=None)
def test_ibtm_destinations_lie_in_the_pool_and_counts_are_static(pool: float, ratio: float) -> None:
    session, _ = two_steps(ibtm(ratio=ratio, pool=pool, similarity="feature"), make_sd3, call_sd3)
    matching, members = session.ctx.memory["matching", 1, 0], session.ctx.memory["pool"][0]
    assert set(matching.destinations.flatten().tolist()) <= set(members.tolist())
    assert torch.equal(matching.destinations[0], matching.destinations[1])
    assert session.stats[-1].kept["transformer_blocks.1.attn"] == 64 - int(ratio * 64)


def test_ibtm_merges_into_the_nearest_destination() -> None:
    session, _ = two_steps(ibtm(), make_sd3, call_sd3)
    matching = session.ctx.memory["matching", 1, 0]
    place = torch.stack([torch.arange(64) // 8, torch.arange(64) % 8], dim=1).float()
    distances = torch.cdist(place[matching.sources[0]], place[matching.destinations[0]])
    taken = distances.gather(1, matching.target[0][:, None])[:, 0]
    torch.testing.assert_close(taken, distances.min(dim=1).values)


def test_ibtm_leaves_the_predicted_variance_out() -> None:
    session, first = two_steps(ibtm(), make_pixart, call_pixart)
    assert first.shape[1] == 8
    means = guidance_difference(*first[:, :4].chunk(2), (8, 8), 4)
    assert torch.equal(session.ctx.memory["pool"][0].sort().values, means[0].topk(32).indices.sort().values)


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
            torch.testing.assert_close(session.ctx.run["importance"], expected)
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
            combined.append(session.ctx.memory["combine"])
    assert combined == ["prune"] * dropping + ["mean"]


# -- configs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shiva.ToMeSD(ratio=1.4), "ratio=1.4 is above 1"),
        (lambda: shiva.ToMeSD(ratio=0.8), "ratio=0.8 is above 0.75, all tokens but one of each 2x2 cell"),
        (lambda: shiva.ToMeSD(sites=("block",)), "sites='block' is unknown"),
        (lambda: shiva.ToMeSD(sites=()), "names no sub-layer"),
        (lambda: shiva.ToMeSD(sx=0), "sx=0 must be at least 1"),
        (lambda: shiva.ToMeSD(guidance="max"), "guidance='max' is unknown"),
        (lambda: shiva.ToFu(switch=2.0), "switch=2.0 is above 1"),
        (lambda: shiva.ToFu(rule="prune"), "rule='prune' is unknown"),
        (lambda: shiva.SDTM(switch=20), "switch=20 is above 1; pass a share"),
        (lambda: shiva.IBTM(merge_from=4), "merge_from=4 is above 1; pass a share"),
        (lambda: shiva.SDTM(deviation=0.4), "deviation=0.4 is above ratio=0.3"),
        (lambda: shiva.SDTM(ratio=0.7), "ratio \\+ deviation=0.[89].* is above 0.75"),
        (lambda: shiva.SDTM(protect_every=None), "pass protect_every, or cache_weight=1"),
        (lambda: shiva.SDTM(protect_every=0), "protect_every=0 must be at least 1"),
        (lambda: shiva.ToMA(scale=0.0), "scale=0.0 must be above 0"),
        (lambda: shiva.ToMA(site="ffn"), "site='ffn' is unknown"),
        (lambda: shiva.ToMA(skip=-1), "skip=-1 must be at least 0"),
        (lambda: shiva.IBTM(layers=(5, 2)), "pass \\(first, last\\)"),
        (lambda: shiva.IBTM(pool=0.0), "pool=0.0 must be above 0"),
        (lambda: shiva.attach(make_sd3(), shiva.IBTM()), "layers=\\(7, 20\\) ends behind the last of the 4 layers"),
        (lambda: shiva.attach(make_sd3(), ibtm(), cfg="none"), "compares the two predictions of guidance"),
        (lambda: shiva.attach(make_sd3(), shiva.ToMeSD(sites="cross_attention")), "widen its layers or sites"),
    ],
)
def test_a_bad_option_is_named_with_its_fix(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("config", CONFIGS)
def test_presets_build_for_a_backbone(config: type[MethodConfig]) -> None:
    spec = replace(SPEC, layers=24)
    for name in ("official", *config.presets):
        assert config.preset(name).build(spec).guidance in ("shared", "per-sample", "max")


# -- runs that change ------------------------------------------------------------------------------------

CHANGING: dict[str, MethodConfig] = {
    "sdtm": shiva.SDTM(round_to=1, switch=0.02, protect_every=5),
    "toma": shiva.ToMA(skip=1, every=1, select_every=3, assign_every=3),
    "toma-per-sample": shiva.ToMA(skip=1, every=1, select_every=3, assign_every=3, guidance="per-sample"),
}


@pytest.mark.parametrize("method", CHANGING)
def test_guidance_may_end_and_the_image_grow_within_falling_timesteps(method: str) -> None:
    model = make_sd3()
    with shiva.attach(model, CHANGING[method]) as session:
        output(model, pair(call_sd3(2, 8, 8, 900.0)))
        output(model, pair(call_sd3(2, 8, 8, 800.0)))
        output(model, call_sd3(1, 8, 8, 700.0))
        assert len(session.stats) == 3, "the same run, without its second half"
        grown = output(model, call_sd3(1, 8, 6, 600.0))
        assert len(session.stats) == 1, "another size is another run"
        session.begin_run()
        assert torch.equal(output(model, call_sd3(1, 8, 6, 600.0)), grown)


# -- pipelines ---------------------------------------------------------------------------------------

AT_WORK: dict[str, MethodConfig] = {
    "tomesd": shiva.ToMeSD(sites=("attention", "cross_attention", "ffn")),
    "tofu": shiva.ToFu(),
    "sdtm": shiva.SDTM(round_to=1, switch=0.25, protect_every=2),
    "toma": shiva.ToMA(skip=1, tile=3, select_every=2),
    "ibtm": shiva.IBTM(layers=(0, 3), merge_from=0.5),
}


@pytest.mark.parametrize("backbone", PIPELINES)
@pytest.mark.parametrize("method", AT_WORK)
def test_a_guided_pipeline_runs_and_runs_again_alike(method: str, backbone: str) -> None:
    tiny = PIPELINES[backbone]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    dense = tiny.image(pipe, steps=4)
    with shiva.attach(pipe, AT_WORK[method]):
        first, second = tiny.image(pipe, steps=4), tiny.image(pipe, steps=4)
    assert torch.equal(first, second), "a run must not remember the one before it"
    assert not torch.equal(first, dense)
    assert torch.equal(tiny.image(pipe, steps=4), dense)


COMPILED: dict[str, tuple[MethodConfig, int]] = {
    "tomesd": (AT_WORK["tomesd"], 1),
    "tofu": (AT_WORK["tofu"], 1),
    "sdtm": (shiva.SDTM.preset("merge_only", deviation=0.0, round_to=1), 2),  # its counter begins, and goes on
    "toma": (shiva.ToMA(skip=1, every=1, select_every=2), 2),  # destinations are made, or reused
    "ibtm": (shiva.IBTM(layers=(0, 1), merge_from=0.5, steps=4), 3),  # partition, prune, merge
    "neuralsort": (shiva.NeuralSort(keep=0.5), 1),
    "diffcr": (shiva.DiffCR(initial=0.5), 1),
    "sparsedit": (shiva.SparseDiT(rates=(0.5, 0.5), split=(1, 0, 1, 0), bottom=0, top=0), 1),
}
"""Methods, and how many graphs a run of theirs may need."""


@pytest.mark.slow
@pytest.mark.parametrize("method", COMPILED)
def test_a_run_compiles_to_one_graph_per_kind_of_step(method: str) -> None:
    torch._dynamo.reset()
    model, (config, expected) = make_sd3(layers=2), COMPILED[method]
    calls = [pair(call_sd3(2, 8, 8, timestep)) for timestep in (900.0, 800.0, 700.0, 600.0)]
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    with shiva.attach(model, config) as session:
        eager = [output(model, call) for call in calls]
        session.compile(backend=backend)
        compiled = [output(model, call) for call in calls]
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(graphs) == expected
    torch._dynamo.reset()


@pytest.mark.parametrize("backbone", ["sd3", "flux", "pixart"])
def test_ibtm_in_an_unguided_pipeline_says_why(backbone: str) -> None:
    tiny = PIPELINES[backbone]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    with shiva.attach(pipe, ibtm()), pytest.raises(ValueError, match="difference of the two guidance predictions"):
        tiny.image(pipe, guidance=1.0)


# -- FLOPs of the paper's table ----------------------------------------------------------------------


class Medium:
    """SD3-Medium at its real shape on the meta device: only shapes run."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self.model = SD3Transformer2DModel(
                sample_size=128,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=24,
                attention_head_dim=64,
                num_attention_heads=24,
                joint_attention_dim=4096,
                caption_projection_dim=1536,
                pooled_projection_dim=2048,
                pos_embed_max_size=192,
            )
            self.call = {
                "hidden_states": torch.empty(2, 16, 128, 128),
                "encoder_hidden_states": torch.empty(2, 333, 4096),
                "pooled_projections": torch.empty(2, 2048),
                "timestep": torch.empty(2),
            }

    def records(
        self, config: MethodConfig, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> tuple[Summary, list[Flops]]:
        """Run some steps of a 50-step run; also their FLOPs with all the method's own matrix products."""
        session, timesteps = sampled(self.model, config, 50, cfg="batched")
        counted = []
        with session:
            for step in steps:
                monkeypatch.setattr("shiva.session.read_timestep", lambda _, step=step: timesteps[step])
                counted.append(count(lambda: self.model(**self.call)))
            return session.summary(), counted


@pytest.fixture(scope="module")
def medium() -> Medium:
    return Medium()


def tera(flops: Flops) -> float:
    return flops.paper / 1e12


@pytest.mark.slow
@pytest.mark.parametrize(("config", "target"), [(shiva.ToMeSD, 8.97), (shiva.ToFu, 8.97)])
def test_paper_flops_of_merging_in_every_attention(
    config: type[MethodConfig], target: float, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, counted = medium.records(config.preset("paper"), (0,), monkeypatch)
    assert tera(summary.dense) == pytest.approx(11.80, abs=0.005)
    assert tera(summary.flops) == pytest.approx(target, abs=0.02)
    assert tera(counted[0]) > tera(summary.flops), "the paper's column leaves the matching itself out"


@pytest.mark.slow
def test_paper_flops_of_toma_with_its_merge_products(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, counted = medium.records(shiva.ToMA.preset("paper"), (0,), monkeypatch)
    assert tera(counted[0]) == pytest.approx(8.22, abs=0.03)
    assert tera(summary.flops) == pytest.approx(8.20, abs=0.01)


@pytest.mark.slow
def test_paper_flops_of_ibtm_with_its_first_step_dense(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, _ = medium.records(shiva.IBTM.preset("paper"), (0, 1), monkeypatch)
    first, other = map(tera, summary.step_flops())
    assert first == pytest.approx(11.80, abs=0.005)
    assert (first + 49 * other) / 50 == pytest.approx(10.18, abs=0.02)


@pytest.mark.slow
def test_paper_flops_of_sdtm_over_its_schedule(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shiva.SDTM.preset("merge_only")
    assert isinstance(config, shiva.SDTM)
    summary, _ = medium.records(config, (0, 30), monkeypatch)

    def declared(step: int) -> dict[str, int]:
        return {name: sdtm_kept(config, step, 50, kind, 4096) for name, kind, _ in summary.places}

    for step, record in zip((0, 30), summary.steps, strict=True):
        assert {name: record.kept[name] for name in declared(step)} == declared(step)
    schedule = replace(summary, steps=[StepRecord(0.0, 4096, declared(step)) for step in range(50)])
    assert tera(schedule.flops) / 50 == pytest.approx(8.84, abs=0.03)
