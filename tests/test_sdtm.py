"""SDTM holds what its paper, or its release, says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shiva
from baseline_tools import matched, medium, output, sampled, tera
from shiva.core.layout import Layout
from shiva.core.method import MethodConfig
from shiva.cost import StepRecord
from shiva.methods.sdtm import SDTMRun, blended, detail_matching, structure_matching
from shiva.ops import seeded
from shiva.ops.merging import draw, merge, unmerge

from tiny import BACKBONES, call_sd3, make_sd3, noise


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
    grid, cells = (7, 8), Layout(7, 8).windows()
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
    cells, priority = Layout(4, 4).windows(), torch.zeros(1, 16)
    priority[0, cells.members[2]] = 1.0
    matching = structure_matching(torch.ones(1, 16, 4), priority, cells, draw(cells, 1, None)[0], merged=1)
    assert matching.destinations[0].tolist() == [int(cells.members[2, 0])]


def test_detail_stage_merges_into_the_longest_merged_token() -> None:
    cells, counter = Layout(4, 4).windows(), torch.zeros(1, 16)
    counter[0, cells.members[:, 3]] = 2.0
    matching = detail_matching(noise(1, 16, 8), counter, cells, merged=6)
    assert matching.destinations[0].tolist() == cells.members[:, 3].tolist()
    assert matching.positions.shape == (1, 10)


def test_a_constant_image_is_restored_exactly() -> None:
    x, cells = torch.full((1, 63, 4), 0.1), Layout(7, 9).windows()
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


def run_steps(config: MethodConfig, steps: int = 6, spoil: Callable[[SDTMRun], None] | None = None) -> list[Tensor]:
    """Outputs of successive steps of one run on the tiny SD3; spoil may tamper with the run's memory."""
    model, results = make_sd3(), []
    session, timesteps = sampled(model, config, steps)
    with session:
        for timestep in timesteps:
            results.append(output(model, call_sd3(2, 8, 8, timestep)))
            if spoil is not None and session.ctx is not None:
                spoil(session.ctx.run)
    return results


def spoil_cache(run: SDTMRun) -> None:
    run.results = {key: torch.full_like(result, 100.0) for key, result in run.results.items()}


def test_the_cache_matters_exactly_when_it_has_weight() -> None:
    def outputs(weight: float, spoil: Callable[[SDTMRun], None] | None) -> list[Tensor]:
        return run_steps(shiva.SDTM(round_to=1, switch=0.5, cache_weight=weight), spoil=spoil)

    assert all(map(torch.equal, outputs(1.0, None), outputs(1.0, spoil_cache)))
    assert not all(map(torch.equal, outputs(0.1, None), outputs(0.1, spoil_cache)))


def test_protecting_every_step_is_dense() -> None:
    model, timesteps = make_sd3(), torch.linspace(1000, 1000 / 6, 6).tolist()
    dense = [output(model, call_sd3(2, 8, 8, timestep)) for timestep in timesteps]
    assert all(map(torch.equal, run_steps(shiva.SDTM(round_to=1, protect_every=1)), dense))


def test_tokens_left_alone_lose_their_priority() -> None:
    model = make_sd3()
    session, timesteps = sampled(model, shiva.SDTM.preset("paper", round_to=1), 4)
    with session:
        output(model, call_sd3(2, 8, 8, timesteps[0]))
        assert session.ctx is not None
        counter = session.ctx.run.merged[0]
        last = session.ctx.now.matchings[3, 0]
        assert (counter.gather(1, last.kept) == 0).all()
        assert (counter.gather(1, last.sources) >= 1).all()
        assert counter.max() <= 4
        output(model, call_sd3(2, 8, 8, timesteps[0]))
        assert session.ctx.run.merged[0].max() <= 4, "a new image starts anew"


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


@pytest.mark.slow
def test_paper_flops_of_sdtm_over_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shiva.SDTM.preset("paper")
    assert isinstance(config, shiva.SDTM)
    summary, _ = medium().records(config, (0, 30), monkeypatch)

    def declared(step: int) -> dict[str, int]:
        return {name: sdtm_kept(config, step, 50, kind, 4096) for name, kind, _ in summary.places}

    for step, record in zip((0, 30), summary.steps, strict=True):
        assert {name: record.kept[name] for name in declared(step)} == declared(step)
    schedule = replace(summary, steps=[StepRecord(0.0, 4096, declared(step)) for step in range(50)])
    assert tera(schedule.flops) / 50 == pytest.approx(8.84, abs=0.03)
