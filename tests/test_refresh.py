"""Methods that run the same tokens through all blocks and hold a result of the others; lifting and rebuilding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shiva
from baseline_tools import SPEC
from pipelines import PIPELINES, dit
from shiva.cli import app
from shiva.core.context import StepContext
from shiva.core.layout import Layout, to_prediction, to_tokens, token_mask
from shiva.core.method import Place
from shiva.evaluate.drawing import draw, load_with_arguments
from shiva.fitting import fit_probe
from shiva.fitting.table import fit_table
from shiva.methods.coredit import coherence, covering
from shiva.methods.jit import lifted
from shiva.ops.probe import FEATURES, Moves, Probe, look, regress
from shiva.ops.schedule import Cell, allocate

from tiny import BACKBONES


@pytest.mark.parametrize("name", ["sd3", "flux", "pixart"])
def test_one_sum_of_updates_does_what_one_update_a_layer_does(name: str, tmp_path: Path) -> None:
    """With the same tokens in all layers; a third of what Sweep keeps, less one tensor, is saved."""
    tiny = PIPELINES[name]
    pipe = tiny.load(tmp_path)
    guidance = 1.0 if name == "flux" else 3.0
    with shiva.attach(pipe, shiva.Sweep(budget=0.5)) as session:
        by_layer, before = tiny.image(pipe, guidance=guidance, steps=6), session.summary()
    with shiva.attach(pipe, shiva.Refresh(budget=0.5, score="band")) as session:
        summed, after = tiny.image(pipe, guidance=guidance, steps=6), session.summary()
    torch.testing.assert_close(summed, by_layer, rtol=1e-4, atol=1e-4)
    assert [step.kept for step in after.steps] == [step.kept for step in before.steps]
    assert after.flops.true == before.flops.true
    layers = sum(1 for _, kind, _ in before.places if kind == "block") - 1
    held = (2 * layers + 1) / (3 * layers)
    ages = 4 * after.steps[0].tokens * session._batch
    assert after.cached_bytes <= held * before.cached_bytes + ages


def test_half_precision_holds_half_of_it_and_hardly_changes_the_image(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    sizes, images = [], []
    for config in (shiva.Sweep(budget=0.5), shiva.Refresh(budget=0.5, score="band", cache_dtype="bfloat16")):
        with shiva.attach(pipe, config) as session:
            images.append(tiny.image(pipe, steps=6))
            sizes.append(session.summary().cached_bytes)
    assert sizes[1] <= 0.67 * sizes[0]
    assert (images[1] - images[0]).abs().max() < 0.02 * images[0].abs().max()


def test_fresh_keys_of_what_tokens_are_believed_to_be_need_a_third_of_the_memory(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    dense, sizes, errors = tiny.image(pipe, steps=6), [], []
    for attends in ("all", "fresh"):
        with shiva.attach(pipe, shiva.Sweep(budget=0.5, attends=attends)) as session:
            errors.append((tiny.image(pipe, steps=6) - dense).square().mean())
            sizes.append(session.summary().cached_bytes)
    assert 3 * sizes[1] == sizes[0]
    assert errors[1] < errors[0]


def test_resets_and_waiting_leave_no_token_behind() -> None:
    tiny = BACKBONES["sd3"]
    model = tiny.make()
    with shiva.attach(model, shiva.Refresh(budget=0.3, reset=4, age=100.0)) as session, torch.no_grad():
        kept = []
        for step in range(6):
            model(**tiny.call(2, 8, 8, timestep=900.0 - 100 * step))
            kept.append(session.stats[-1].kept["transformer_blocks.2"])
            if step < 4:
                assert session.ctx is not None
                assert session.ctx.run.ages.max() <= 3, "with so heavy a bonus the oldest run first"
    assert kept == [64, 19, 19, 19, 64, 19]


def test_what_moved_runs_and_what_stood_still_holds() -> None:
    tiny = BACKBONES["sd3"]
    model, call = tiny.make(), tiny.call(1, 8, 8, timestep=900.0)
    moved = {**call, "timestep": call["timestep"] - 1, "hidden_states": call["hidden_states"].clone()}
    moved["hidden_states"][..., :8, :] += 3.0  # the upper half
    config = shiva.Refresh(budget=0.5, first=1)
    with shiva.attach(model, config) as session, session.trace() as trace, torch.no_grad():
        model(**call)
        model(**moved)
    assert trace.mask(1, 2)[:4].float().mean() > 0.8


def test_ras_keeps_the_last_prediction_of_what_does_not_run() -> None:
    tiny = BACKBONES["sd3"]
    model = tiny.make()
    with shiva.attach(model, shiva.RAS(budget=0.25, first=1)) as session, torch.no_grad():
        first = model(**tiny.call(2, 6, 6, timestep=900.0))[0]
        second = model(**tiny.call(2, 6, 6, timestep=800.0))[0]
        held = (to_tokens(second, session.ctx.layout) == to_tokens(first, session.ctx.layout)).all(dim=-1)
    assert held.sum(dim=1).tolist() == [27, 27]


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 3, 8, 12), Layout(4, 6)), ((2, 3, 2, 8, 12), Layout(4, 6, frames=2)), ((2, 30, 5), Layout(4, 6, after=6))],
)
def test_a_prediction_by_tokens_and_back(shape: tuple[int, ...], layout: Layout) -> None:
    prediction = torch.randn(shape)
    tokens = to_tokens(prediction, layout)
    assert tokens.shape[:2] == (2, layout.tokens)
    assert torch.equal(to_prediction(tokens, prediction, layout), prediction)
    mask = torch.rand(2, layout.tokens) > 0.5
    zeroed = torch.where(token_mask(mask, prediction, layout), prediction, 0)
    assert torch.equal(to_tokens(zeroed, layout), tokens * mask[..., None])


def test_jit_lifts_the_clean_picture_and_each_token_keeps_its_noise() -> None:
    tiny = BACKBONES["sd3"]
    model, call = tiny.make(), tiny.call(2, 8, 8, timestep=900.0)
    with shiva.attach(model, shiva.JiT(stages=((1.0, 0.25),))) as session, torch.no_grad():
        velocity = model(**call)[0]
        assert session.ctx is not None
        layout, anchors = session.ctx.layout, session.ctx.now.anchors
    clean = to_tokens(call["hidden_states"] - 0.9 * velocity, layout)
    expected = lifted(clean, anchors, layout.shape, 0.8)
    others = torch.ones(2, 64, dtype=torch.bool).scatter(1, anchors, False)
    torch.testing.assert_close(clean[others], expected[others], rtol=1e-4, atol=1e-5)
    assert anchors.shape == (2, 16)
    assert {(int(i) // 8 % 2, int(i) % 2) for i in anchors[0]} == {
        (int(anchors[0, 0]) // 8 % 2, int(anchors[0, 0]) % 2)
    }
    flat = torch.ones(1, 64, 3)
    torch.testing.assert_close(lifted(flat, anchors[:1], (1, 8, 8), 0.8), flat)


def test_jit_sees_more_tokens_stage_by_stage(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.JiT(stages=((0.5, 0.25), (0.25, 0.5)))) as session:
        tiny.image(pipe, steps=8)
        kept = [step.kept["transformer_blocks.1"] for step in session.stats]
    assert kept == [12] * 4 + [24] * 2 + [48] * 2
    with pytest.raises(ValueError, match=r"stages take 1\.2 of a run"):
        shiva.JiT(stages=((0.6, 0.25), (0.6, 0.5)))


def test_coherent_tokens_skip_attention_and_none_is_far_from_one_that_runs() -> None:
    x = torch.randn(1, 64, 16)
    x.view(1, 8, 8, 16)[:, :4] = torch.randn(16)  # the upper half is all alike
    found = coherence(x, Layout(8, 8))
    assert torch.allclose(found[:, :24], torch.ones(1, 24), atol=1e-5)
    chosen = covering(-found, Layout(8, 8)).topk(32).indices[0]
    cells = {(int(i) // 16, int(i) % 8 // 2) for i in chosen}
    assert len(cells) == 16, "one of each cell"
    assert sum(int(i) >= 32 for i in chosen) > 20, "the others where neighbours differ"


def test_coredit_rebuilds_an_update_from_near_and_alike_tokens() -> None:
    x, updates = torch.randn(1, 9, 6), torch.randn(1, 8, 3)
    around = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]])
    method: Any = shiva.CoReDiT(spread=0.7).build(SPEC)
    rebuilt = method.rebuilt(updates, around, x, StepContext(Layout(3, 3), 500.0))
    away = torch.tensor([2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 2.0])  # squared distances to the middle
    alike = torch.cosine_similarity(x[0, around[0]], x[0, 4][None]).clamp(min=1e-3)
    weights = torch.exp(-away / (2 * 0.7**2)) * alike
    torch.testing.assert_close(rebuilt[0, 4], (weights[:, None] * updates[0]).sum(0) / weights.sum())


@pytest.mark.parametrize(("growth", "shares"), [(0.0, [0.5, 0.5, 0.5]), (0.5, [0.25, 0.5, 0.75])])
def test_coredit_skips_more_as_a_run_goes_on(growth: float, shares: list[float]) -> None:
    config = shiva.CoReDiT(ratio=0.5, growth=growth)
    assert [config.share(step, 5) for step in (0, 2, 4)] == pytest.approx(shares)


def test_ras_runs_what_is_busy_and_what_waits() -> None:
    method: Any = shiva.RAS(starvation=0.5).build(SPEC)
    ctx = StepContext(Layout(2, 2), 500.0, run=method.new_run(), now=method.new_step())
    prediction, ages = torch.randn(1, 3, 4, 4), torch.tensor([0.0, 1.0, 2.0, 0.0])
    method.end_step(prediction, ctx)
    ctx.run.ages = ages[None]
    busy = torch.stack(
        [prediction[..., row : row + 2, column : column + 2].std() for row in (0, 2) for column in (0, 2)]
    )
    torch.testing.assert_close(method.scores(torch.zeros(1, 4, 16), ctx)[0], busy * torch.exp(0.5 * ages))


def test_toca_runs_what_says_much_waited_and_leads_its_cell() -> None:
    config = shiva.ToCa(fresh=0.3, slope=0.5, attention=0.1, waiting=0.5, even=0.6, interval=4)
    assert [config.share("ffn", layer, 3) for layer in range(3)] == pytest.approx([0.45, 0.3, 0.15])
    assert [config.share("attention", layer, 3) for layer in range(3)] == pytest.approx([0.15, 0.1, 0.05])
    method: Any = config.build(SPEC)
    ctx = StepContext(Layout(4, 4), 500.0, run=method.new_run(), now=method.new_step())
    site, ages, updates = (
        Place("ff", "ffn", 1, nn.Identity()),
        torch.randint(0, 4, (1, 16)).float(),
        torch.randn(1, 16, 5),
    )
    ctx.run.ages["ff", 0] = ages
    expected = updates.norm(dim=-1) / updates.norm(dim=-1).max() + 0.5 * ages / 4
    for cell in Layout(4, 4).windows()[0]:
        expected[0, cell[expected[0, cell].argmax()]] += 0.6
    chosen = method.choose(updates, 7, site, ctx)
    assert torch.equal(chosen, expected.topk(7).indices.sort().values)
    assert torch.equal(ctx.run.ages["ff", 0], (ages + 1).scatter(1, chosen, 0.0))


def test_toca_runs_all_tokens_once_an_interval_and_some_between(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.ToCa(interval=3, fresh=0.5, slope=0.0)) as session:
        tiny.image(pipe, steps=6)
        ffn, attention = ([step.kept[f"transformer_blocks.1.{n}"] for step in session.stats] for n in ("ff", "attn"))
        share = session.summary().flops_share
    assert ffn == [48, 24, 24] * 2
    assert attention == [48, 0, 0] * 2
    assert 0.3 < share < 0.9


def test_a_look_keeps_distances_up_to_a_factor() -> None:
    x, y = torch.randn(2, 500, 256).unbind(0)
    seen = (look(x[None]) - look(y[None])).norm(dim=-1)[0]
    true = (x - y).norm(dim=-1)
    assert (seen / true).std() / (seen / true).mean() < 0.2


def test_the_probe_is_fitted_on_dense_runs_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    arguments = ["fit", tmp_path / "dit", "--probe", "--prompts", 4, "--steps", 5, "--guidance", 1]
    found = CliRunner().invoke(app, [str(part) for part in (*arguments, "--output", tmp_path / "probed")])
    assert found.exit_code == 0, found.output
    assert "of log distances on held-out prompts" in found.output
    pipe, _ = load_with_arguments(tmp_path / "dit")
    with shiva.attach(pipe, tmp_path / "probed", budget=0.5) as session:
        assert isinstance(session.method.config, shiva.Refresh)
        assert session.method.config.score == "probe"
        draw(pipe, ["1"], 0, [0], 4, 1.0, output_type="latent")
        assert session.summary().flops_share < 0.9
    with pytest.raises(ValueError, match="tell too little"):
        fit_probe(pipe, ["1", "2"], steps=(2,))


def test_a_probe_learns_what_the_look_tells() -> None:
    generator = torch.Generator().manual_seed(0)
    looks = [torch.randn(2, 64, FEATURES, generator=generator).cumsum(0) for _ in range(5)]
    totals = [2 * seen * (1 + seen[..., :1].abs()) for seen in looks]
    waits = Moves.of(looks, totals, [0.9, 0.7, 0.5, 0.3, 0.1], generator)
    assert waits.age.unique().tolist() == [0, 1, 2, 3]
    fitted, alone = regress(Probe(), waits, waits, 300, generator)
    assert fitted > alone
    assert fitted > 0.7


def test_a_budget_goes_where_it_is_worth_most() -> None:
    steep, gentle = ((0.25, 9.0), (0.5, 4.0), (1.0, 0.0)), ((0.25, 4.1), (0.5, 4.0), (1.0, 3.9))
    cells = [Cell(0.25, steep), Cell(0.25, gentle), Cell(0.25, gentle), Cell(0.25, steep)]
    found = allocate(cells, 0.5, (0.1, 0.25, 0.5, 0.8, 1.0))
    assert min(found[0], found[3]) > 0.5 > max(found[1], found[2])
    assert sum(found) / 4 <= 0.5
    with pytest.raises(ValueError, match="below the smallest ratio"):
        allocate(cells, 0.05, (0.1, 1.0))


def test_a_table_is_learned_on_whole_runs_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    arguments = ["fit", tmp_path / "dit", "--table", "DiffSparse", "--prompts", 2, "--steps", 4, "--guidance", 1]
    arguments += ["--cells", "3,2", "--budget", 0.6, "--output", tmp_path / "table"]
    found = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert found.exit_code == 0
    assert "squared error of final latents" in found.output
    pipe, _ = load_with_arguments(tmp_path / "dit")
    with shiva.attach(pipe, tmp_path / "table") as session:
        assert isinstance(session.method.config, shiva.DiffSparse)
        draw(pipe, ["1"], 0, [0], 4, 1.0, output_type="latent")
        kept = [[step.kept[f"transformer_blocks.{layer}"] for layer in range(4)] for step in session.stats]
        assert kept[0] == [64] * 4, "the first step is dense"
        assert sum(map(sum, (row[1:] for row in kept))) / (64 * 12) <= 0.62
    for other in (shiva.ToMeSD(), shiva.Lattice()):
        with pytest.raises(ValueError, match=f"{type(other).__name__} has no table to learn; pass Refresh"):
            fit_table(pipe, other, ["1", "2"], budget=0.5, steps=3)
    with pytest.raises(ValueError, match="each of the 2 steps of this run sees all tokens; pass more --steps"):
        fit_table(pipe, shiva.Refresh(first=4), ["1", "2"], budget=0.5, steps=2)


def test_a_table_is_run_as_it_was_learned_in_calls_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option's tilt or FLOPs would move what the table says."""
    calls = []

    def draw_noting(pipe: Any, prompts: Any, *arguments: Any, **how: Any) -> Any:
        calls.append(len(prompts))
        return draw(pipe, prompts, *arguments, **how)

    monkeypatch.setattr("shiva.fitting.table.draw", draw_noting)
    pipe: Any = dit()
    pipe.set_progress_bar_config(disable=True)
    config = shiva.Refresh(score="band", flops=0.5)
    tabled = fit_table(pipe, config, ["1", "2", "3", "4"], budget=0.6, steps=4, guidance=1.0, step_cells=1, batch=1)
    assert set(calls) == {1}
    assert (config.tilt, tabled.method.config.tilt, tabled.method.config.flops) == (2.0, 0.0, None)
    with shiva.attach(pipe, tabled.method) as session:
        draw(pipe, ["1"], 0, [0], 4, 1.0, output_type="latent")
        kept = [min(step.kept.values()) for step in session.stats]
    assert kept[0] == 64
    assert len(set(kept[1:])) == 1, "one cell of steps has one ratio"
