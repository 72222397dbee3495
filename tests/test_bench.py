"""The benchmarks' own code at tiny shapes: what they run, count and refuse. Times are never asserted."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import forked
import shiva
from pipelines import PIPELINES, dit
from reproduce.bench import figures
from reproduce.bench.anatomy import ModuleClock, anatomy_table, measure_anatomy
from reproduce.bench.compiling import compile_table, count_graphs, export_steps, measure_compile
from reproduce.bench.compose import (
    MIXES,
    add_cache,
    attention_cache_refusals,
    compose_table,
    measure_compose,
    mixes_without,
)
from reproduce.bench.pages import fill_tables
from reproduce.bench.presets import baseline_entries
from reproduce.bench.reach import REACH, measure_reach, reach_table
from reproduce.bench.roofline import DEVICES, Kernel, kernels_of, predict
from reproduce.bench.scale import growth_table, measure_growth, measure_path, path_table
from reproduce.bench.selector import OPERATORS, measure_selector, selector_table
from reproduce.bench.train_cost import measure_train, train_table, trained_methods
from shiva.api import attach
from shiva.bench import shapes
from shiva.bench.entries import (
    Attached,
    Entry,
    interleave,
    learned_shape,
    meta_step,
    official_presets,
    shiva_entry,
    timed,
    typical_row,
)
from shiva.bench.shapes import Shape, shape
from shiva.bench.step import flops_table, measure_flops, measure_step, step_table
from shiva.bench.table import Table, environment, publish
from shiva.cli import app
from shiva.compiled import GraphRunner, use_graphs
from shiva.core.cost import count
from shiva.show.figures import draw_step

from tiny import BACKBONES, make_flux, make_sd3

TINY_SD3 = {"sample_size": 16, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
TINY_SD3 |= {"pos_embed_max_size": 16}
TINY_FLUX = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shape]:
    """The benchmarks' shapes, with few channels and tokens behind the same names."""
    for name, tiny in (("sd3-medium", TINY_SD3), ("flux-dev", TINY_FLUX)):
        known = shapes.SHAPES[name]
        monkeypatch.setitem(shapes.SHAPES, name, replace(known, config={**known.config, **tiny}, text=8))
    return lambda name="sd3-medium", layers=4, **changes: shape(name, height=128, width=128, **changes).slice(layers)


# -- step ------------------------------------------------------------------------------------------------


def test_the_learned_tables_shape_is_structure_first_and_detail_later() -> None:
    table = learned_shape(24)
    ratios = table.ratios()
    assert (ratios[0, 1:] < ratios[1, 1:]).all(), "noise keeps fewer than the image"
    assert (ratios[:, 1:-1] > ratios[:, 2:]).all(), "shallow layers keep more"
    assert float(ratios[0, 1:].mean()) == pytest.approx(0.4, abs=0.02)
    assert float(ratios[1, 1:].mean()) == pytest.approx(0.8, abs=0.02)
    assert typical_row(table, 0.6).mean_keep == pytest.approx(0.6, abs=0.01)


@pytest.mark.slow
def test_a_step_holds_shiva_against_every_baseline(small: Any, tmp_path: Path) -> None:
    chosen = small(layers=12)
    entries = {"shiva 0.6": shiva_entry(0.6), "sweep 0.6": Entry(shiva.Sweep(budget=0.6)), **baseline_entries(12)}
    results, skipped = measure_step(chosen, entries, rounds=1, warmup=0)
    assert not skipped
    assert [row.name for row in results] == ["dense", *entries]
    assert min(results[1].limit, results[2].limit) > 1
    table = step_table(chosen, results, skipped, "adaptive")
    found = {"methods": [row.to_dict() for row in results]}
    document = publish("step", tmp_path, [table], found, {}, draw_step)
    assert json.loads(document.read_text())["environment"]["packages"]["torch"]
    assert (tmp_path / "step.png").stat().st_size > 0


def test_a_method_that_does_not_fit_the_shape_is_left_out_with_its_reason(small: Any) -> None:
    sparse = {"sparsedit": baseline_entries()["sparsedit"]}
    results, skipped = measure_step(small(layers=4), sparse, rounds=1, warmup=0)
    assert [row.name for row in results] == ["dense"]
    assert skipped[0].name == "sparsedit"
    assert "left out" in step_table(small(), results, skipped, "").caption


def test_a_method_without_a_whole_graph_is_left_out_of_a_compiled_step(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    dydit = {"dydit": baseline_entries()["dydit"]}
    results, skipped = measure_step(small(layers=4), dydit, rounds=1, warmup=0, compiled=True)
    assert [row.name for row in results] == ["dense"]
    assert "follow the data and break the graph" in skipped[0].reason


def test_turns_are_new_runs_that_choose_anew_and_twins_share_weights(small: Any) -> None:
    model, call = small().build(), small().call()
    attached = Attached(shiva_entry(0.5), model, call)
    assert attached.transformer.proj_out.weight is model.proj_out.weight
    for _ in range(2):
        attached.prepare()()
        assert attached.session.ctx is not None
        assert attached.session.ctx.branch == 0


@pytest.mark.parametrize(
    ("config", "step"),
    [
        (shiva.Sweep(budget=0.5), 2),
        (shiva.Refresh(budget=0.5), 2),
        (shiva.RAS(budget=0.5), 5),
        (shiva.ToCa(), 2),
        (shiva.Shiva(budget=0.5), None),
        (shiva.Dense(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_begins_with_all_tokens_is_timed_after_that(config: Any, step: int | None, small: Any) -> None:
    attached = Attached(Entry(config), small().build(), small().call())
    with torch.inference_mode():
        interleave({"it": attached.prepare}, rounds=2, warmup=0, whole=lambda name: attached.whole)
    assert attached.step == step
    assert attached.turns == (2 if step is None else step + 1), "no step is run that no turn asked for"
    assert step is None or attached.price(2).true < attached.session.summary().dense.true


def test_a_step_that_runs_all_tokens_is_timed_in_no_round(small: Any) -> None:
    limits = [
        [row.limit for row in measure_step(small(), {"toca": Entry(shiva.ToCa())}, rounds=rounds)[0]]
        for rounds in (1, 2, 4)
    ]
    assert limits[0][1] > 1.5
    assert limits[1:] == [pytest.approx(limits[0])] * 2


def test_a_method_whose_every_step_runs_all_tokens_is_priced_as_dense(small: Any) -> None:
    results, skipped = measure_step(small(), {"sweep 1": Entry(shiva.Sweep(budget=1.0))}, rounds=1, warmup=0)
    assert results[1].limit == pytest.approx(1)
    table = step_table(small(), results, skipped, "adaptive")
    assert all(float(row[table.columns.index("TFLOPs")]) > 0 for row in table.rows), "however small the shape is"


@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        ("sd3-medium", TINY_SD3),
        ("flux-dev", TINY_FLUX),
        ("z-image", {"dim": 128, "n_heads": 1, "n_kv_heads": 1}),
    ],
)
def test_reach_calls_a_transformer_whatever_its_arguments_are_named(name: str, narrow: dict[str, Any]) -> None:
    real = replace(REACH[name], config={**REACH[name].config, **narrow}, text=8)
    (row,) = measure_reach({name: real}, layers=2, tokens=64, rounds=1)
    assert (row.tokens, row.cut) == (64, True)
    assert row.limit > 1
    assert name in reach_table([row], 0.6, 2).markdown()


# -- anatomy, selector, scale, roofline ------------------------------------------------------------------


def test_anatomy_times_each_stage_and_counts_operators(small: Any, tmp_path: Path) -> None:
    chosen = small()
    results = measure_anatomy(chosen, {"shiva 0.6": shiva_entry(0.6)}, rounds=1, warmup=0)
    assert {"router", "sort", "gather", "scatter", "attention", "ffn"} <= results[1].stages.keys()
    assert results[0].path == 0
    assert results[1].operators > results[0].operators
    found = {"configurations": [vars(row) for row in results]}
    publish("anatomy", tmp_path, [anatomy_table(chosen, results)], found, {}, figures.draw_anatomy)


def test_no_module_is_timed_inside_another() -> None:
    """Keys and values are projected inside of attention: timed by themselves too, they would count twice."""
    model = make_sd3()
    before = {module: len(module._forward_hooks) for module in model.modules()}
    ModuleClock(model)
    timed = [module for module in model.modules() if len(module._forward_hooks) > before[module]]
    assert len(timed) == 2 * len(model.transformer_blocks)
    for module in timed:
        assert not [inner for inner in timed if inner is not module and inner in set(module.modules())]


def test_selectors_keep_linear_memory_but_for_neuralsort_and_what_is_too_large_is_left_out(tmp_path: Path) -> None:
    results = measure_selector((64, 128), width=8, rounds=1)
    kept = {(row.name, row.tokens): row.saved for row in results}
    assert {row.name for row in results} == set(OPERATORS)
    for name in OPERATORS:
        quadratic = name.startswith("NeuralSort")
        assert kept[name, 128] / kept[name, 64] == pytest.approx(4 if quadratic else 2, rel=0.1), name
    limited = measure_selector((64, 1024), width=8, rounds=1, names=("Shiva", "NeuralSort (STE)"), limit=4e6)
    assert [row.skipped[:5] for row in limited] == ["", "", "", "needs"]
    table = selector_table([*results, *limited], 8, 2)
    rows = {"operators": [vars(row) for row in results]}
    publish("selector", tmp_path, [table], rows, {}, figures.draw_selector)


def test_growth_and_the_roofline(small: Any, tmp_path: Path) -> None:
    path = measure_path(small(), (32, 64), rounds=1, warmup=0)
    assert path[1].bytes == 2 * path[0].bytes
    growth = measure_growth(small(), (1, 2), (2,), rounds=1)
    assert [(row.batch, row.layers) for row in growth] == [(1, 2), (2, 2)]
    predictions, _ = predict(small(), (0.6,))
    assert all(row.limit_ms <= row.expected_ms for row in predictions)
    tables = [path_table(small(), path), growth_table(small(), growth)]
    found = {"path": [vars(row) for row in path], "roofline": [vars(row) for row in predictions]}
    publish("scale", tmp_path, tables, found, {}, figures.draw_scale)


def test_traffic_is_what_an_operator_reads_and_writes() -> None:
    a, b = torch.empty(8, 16, device="meta"), torch.empty(16, 4, device="meta")
    assert kernels_of(lambda: a.t().t() @ b) == [Kernel("mm", 2 * 8 * 16 * 4, 4.0 * (8 * 16 + 16 * 4 + 8 * 4))]
    q = torch.empty(1, 2, 10, 4, device="meta")
    (attention,) = kernels_of(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert attention == Kernel("attention", 2 * 2 * 2 * 10 * 10 * 4, 4.0 * 4 * q.numel())
    slow = Kernel("add", 0.0, 1e9)
    assert slow.seconds(DEVICES[0]) == pytest.approx(1e9 / DEVICES[0].bandwidth)


# -- shapes ---------------------------------------------------------------------------------------------


def test_the_emoji_shape_is_the_embedded_models() -> None:
    built = shape("emoji").build("meta")
    config = json.loads(Path("models/emoji/transformer/config.json").read_text())
    same = {key: value for key, value in config.items() if not key.startswith("_")}
    assert {key: built.config[key] for key in same} == {**same, "dual_attention_layers": ()}
    assert shape("emoji").grid == (16, 16)
    assert built(**shape("emoji").call("meta"))[0].shape == (2, 12, 16, 16)


@pytest.mark.parametrize("family", ["sd3", "flux", "pixart", "dit"])
def test_a_pipelines_folder_is_a_shape(family: str, tmp_path: Path) -> None:
    pipe: Any = dit() if family == "dit" else PIPELINES[family].make()
    pipe.transformer.save_pretrained(tmp_path / "mine" / "transformer")
    chosen = replace(shape(str(tmp_path / "mine"), batch=2), height=64, width=64)
    assert chosen.build("meta").config.num_layers == pipe.transformer.config.num_layers
    assert count(meta_step(chosen, shiva_entry(0.5))).true < count(meta_step(chosen, None)).true


# -- train ----------------------------------------------------------------------------------------------


def test_an_optimizer_step_of_every_trained_method(small: Any) -> None:
    methods = trained_methods()
    methods["dydit"] = replace(methods["dydit"], config=shiva.DyDiT(bias=0.0, flops=0.99))
    results, skipped = measure_train(small(layers=3, batch=1), methods, rounds=1)
    assert list(skipped) == ["sparsedit"], "it needs more blocks"
    assert [row.name for row in results] == [
        "plain DoRA",
        "DoRA, one product",
        "shiva 0.6",
        "neuralsort",
        "dydit",
        "diffcr",
    ]
    assert "plain DoRA" in train_table(small(), results, skipped).markdown()


# -- flops -----------------------------------------------------------------------------------------------


def test_counted_flops_agree_with_the_price_of_the_tokens_and_meet_a_flops_budget() -> None:
    methods = {"dense": shiva.Dense(), "shiva": shiva.Shiva(flops=0.7), "tomesd": shiva.ToMeSD(ratio=0.25)}
    chosen = shape("emoji")
    dense, pruned, merged = measure_flops(chosen, methods, steps=3)
    assert dense.convention == pytest.approx(dense.with_own)
    assert dense.share == 1
    assert pruned.share == pytest.approx(0.72, abs=0.02), "the router's own products are on top"
    assert merged.share < 1
    assert all(row.with_own > row.convention for row in (pruned, merged))
    assert "tomesd" in flops_table(chosen, [dense, pruned, merged], 3).markdown()


# -- compile, export, graphs -----------------------------------------------------------------------------


def test_every_step_of_a_schedule_exports_and_dydit_does_not(small: Any) -> None:
    exported = export_steps(small(), shiva_entry(0.6), steps=2)
    assert [row.refused for row in exported] == ["", ""]
    assert exported[0].tokens < exported[1].tokens
    (refused,) = export_steps(small(), Entry(shiva.DyDiT(bias=0.0)), steps=1)
    assert "data-dependent" in refused.refused


@pytest.mark.parametrize("backbone", ["sd3", "flux"])
def test_an_exported_step_computes_what_the_session_does(backbone: str) -> None:
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 6, 6)
    with attach(model, shiva.Shiva(budget=0.5), cfg="none") as session, torch.no_grad():
        expected = model(**call, return_dict=False)[0]
        program = torch.export.export(session.program(**call), (), kwargs={**call, "return_dict": False})
        torch.testing.assert_close(program.module()(**call, return_dict=False)[0], expected, rtol=1e-4, atol=1e-5)
        other = {**call, "pooled_projections": call["pooled_projections"] + 1}
        expected = model(**other, return_dict=False)[0]
        torch.testing.assert_close(program.module()(**other, return_dict=False)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_step_is_one_graph(small: Any) -> None:
    torch._dynamo.reset()
    results = measure_compile(small(), {"shiva 0.6": shiva_entry(0.6)}, rounds=1, warmup=0, backend="eager")
    assert [row.graphs for row in results] == [1, 1]
    assert all(row.deviation < 1e-4 for row in results)
    compile_table(small(), results)
    torch._dynamo.reset()


def test_a_run_has_a_graph_for_each_distinct_row() -> None:
    exact, coarse = count_graphs(4, 256, 0.6, 20, (None, 128))
    assert exact.graphs == 20
    assert coarse.graphs < 20


class Repeat:
    """Stands in for a CUDA graph: replaying runs the call again and writes into the first output."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        output = run()

        def replay() -> None:
            for kept, new in zip(output, run(), strict=True):
                kept.copy_(new)

        return replay, output


def test_graphs_are_recorded_once_a_row_and_read_new_inputs() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    rows = torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None].expand(2, 4)
    calls = [{**tiny.call(2, 6, 6, timestep=t), "return_dict": False} for t in (900.0, 800.0, 200.0, 100.0)]
    for index, call in enumerate(calls):
        call["pooled_projections"] = call["pooled_projections"] + index
    recorder = Repeat()
    with attach(model, shiva.Shiva()) as session, torch.no_grad():
        session.method.set_schedule(shiva.RatioSchedule((1000.0, 0.0), rows))
        expected = [model(**call)[0] for call in calls]
        assert use_graphs(session, recorder)
        outputs = [model(**call)[0] for call in calls]
        assert recorder.recorded == 2
        assert session.stats[-1].kept["transformer_blocks.1"] > session.stats[0].kept["transformer_blocks.1"]
        session.runner = None
        assert torch.equal(model(**calls[0])[0], expected[0])
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)


def test_without_cuda_graphs_say_so_and_steps_run_as_before() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 6, 6)
    with attach(model, shiva.Shiva(budget=0.5)) as session, torch.no_grad():
        expected: Tensor = model(**call)[0]
        with pytest.warns(UserWarning, match="CUDA graphs need a CUDA device, but the transformer is on cpu"):
            assert not use_graphs(session)
        assert torch.equal(model(**call)[0], expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (shiva.DyDiT(bias=0.0), "does not settle its token counts"),
        (shiva.Shiva(budget=0.5, fill="cached"), "carries tensors from step to step"),
        (shiva.Ranked(budget=0.5, score="random"), "carries tensors from step to step"),
        (shiva.Shiva(budget=0.5, fill="shortcut", recall=0.5), "carries tensors from step to step"),
        (shiva.Shiva(budget=0.5, fill="shortcut", steady=0.5), "carries tensors from step to step"),
    ],
)
def test_what_cannot_be_recorded_is_refused(config: Any, message: str) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 6, 6)
    with attach(model, config) as session, torch.no_grad():
        session.runner = GraphRunner(session, Repeat())
        with pytest.raises(ValueError, match=message):
            model(**call)


# -- compose ---------------------------------------------------------------------------------------------


def test_cache_and_lora_compose_on_flux(small: Any, tmp_path: Path) -> None:
    results = measure_compose(small("flux-dev"), mixes_without(["int8", "cache-dit"]), steps=2, rounds=1)
    assert not [row.refused for row in results if row.refused]
    by_parts = {row.parts: row for row in results}
    assert by_parts[()].deviation == 0
    assert by_parts[("shiva",)].deviation > 0
    assert {row.parts: row.computed for row in results} == {
        row.parts: 1 if "cache" in row.parts else 2 for row in results
    }
    found = {"mixes": [{"name": row.name, **vars(row)} for row in results]}
    publish("compose", tmp_path, [compose_table(small(), results, [])], found, {}, figures.draw_compose)


def test_parts_are_left_out_by_name() -> None:
    assert mixes_without([""]) == MIXES
    assert not any("int8" in mix for mix in mixes_without(["int8"]))
    with pytest.raises(ValueError, match="--without has no option 'int4'"):
        mixes_without(["int4"])


@pytest.mark.parametrize("model", ["flux-dev", "sd3-medium"])
def test_cache_dit_composes_and_saves_the_blocks(model: str, small: Any) -> None:
    """The drifting latents of a short run are near enough for its cache to hit; the deviation shows that it did."""
    mixes = ((), ("shiva",), ("cache-dit",), ("cache-dit", "shiva"))
    results = {row.parts: row for row in measure_compose(small(model), mixes, steps=3, rounds=1, threshold=10.0)}
    assert not [row.refused for row in results.values() if row.refused]
    deviations = {results[parts].deviation for parts in mixes}
    assert len(deviations) == 4
    assert [results[parts].computed for parts in mixes] == [3, 3, 1, 1]


def test_int8_composes(small: Any) -> None:
    pytest.importorskip("torchao")
    dense, quantized, both = measure_compose(small("flux-dev"), ((), ("int8",), ("int8", "shiva")), steps=1, rounds=1)
    assert not quantized.refused
    assert not both.refused
    assert quantized.weights < dense.weights
    assert 0 < quantized.deviation < 0.2


def test_what_cannot_compose_is_refused_by_name(small: Any) -> None:
    refused = measure_compose(small(), ((), ("shiva", "cache")), steps=1, rounds=1)[1]
    assert "FirstBlockCache cannot run SD3" in refused.refused
    refusals = dict(attention_cache_refusals(small("flux-dev")))
    assert "caches attention outputs" in refusals["Pyramid Attention Broadcast"]
    model = make_flux()
    add_cache(model, 0.1)
    with pytest.raises(ValueError, match="FirstBlockCache.*attach first"):
        attach(model, shiva.Shiva(budget=0.5))


# -- the page and the command ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Shiva 66 in 3 steps", "outputs/train/emoji-cached/checkpoint-a"])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_narrow_terminal_cuts_no_figure(columns: int, name: str) -> None:
    headings = ("method", "GFLOPs, MACs counted once", "saved", "latency, s", "one-step cosine ↑", "not ahead on")
    rows = [(name, "1234.567", "51.4%", "0.147 ± 0.004", "0.98765", "Fréchet, " * 10)]
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    Table("Title", headings, rows, "caption").show(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert all(figure in shown for figure in rows[0][1:5])
    assert name[-8:] in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert shown.count("caption") == 1


def test_a_run_on_the_cpu_is_not_told_as_one_of_the_gpu_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("no kernel was launched"))
    assert environment()["gpu"] is None
    assert timed(lambda: None) >= 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert environment()["gpu"] == "a GPU"


def test_tables_are_written_into_their_places_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench:step -->\nold\n<!-- /bench -->\nb\n<!-- bench:train -->\nkeep\n<!-- /bench -->\n")
    table = Table("Title", ("method", "step"), [("dense", "1 s")], "caption")
    publish("step", tmp_path, [table], {}, {}, lambda document, path: None)
    assert fill_tables(page, tmp_path) == ["step"]
    text = page.read_text()
    assert "| dense | 1 s |" in text
    assert "old" not in text
    assert "keep" in text
    fill_tables(page, tmp_path)
    assert page.read_text() == text


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("bench", *arguments)


def test_the_command_writes_a_file_and_a_figure(tmp_path: Path) -> None:
    result = bench("selector", "--lengths", "64,128", "--width", "8", "--rounds", "1", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "NeuralSort" in result.stdout
    assert json.loads((tmp_path / "selector.json").read_text())["benchmark"] == "selector"
    assert (tmp_path / "selector.png").is_file()


def test_only_what_is_recorded_goes_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "selector", "--lengths", "16", "--width", "4", "--rounds", "1"]
    for more, folder in (([], "outputs"), (["--record"], "results")):
        assert not (tmp_path / folder).exists()
        CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False)
        assert (tmp_path / folder / "bench" / "selector.json").is_file()


def test_without_a_checkout_two_benchmarks_are_left_and_quote_nobody(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shiva.evaluate.checkout.MARK", Path("nowhere"))
    listed = CliRunner().invoke(app, ["bench", "--help"]).output
    assert "step" in listed
    assert "anatomy" not in listed
    arguments = ["--model", "emoji", "--layers", "2", "--rounds", "1", "--budgets", "0.6", "--sweeps", ""]
    arguments += ["--baselines", "--output", str(tmp_path)]
    CliRunner().invoke(app, ["bench", "step", *arguments], catch_exceptions=False)
    table = json.loads((tmp_path / "step.json").read_text())["tables"][0]
    assert {"dense", "shiva 0.6", "tomesd", "sdtm"} <= {row[0] for row in table["rows"]}
    assert "paper" not in table["columns"]
    few = {name: config for name, config in official_presets().items() if name in ("tomesd", "dydit")}
    monkeypatch.setattr("shiva.bench.entries.official_presets", lambda: few)
    CliRunner().invoke(
        app, ["bench", "flops", "--model", "emoji", "--steps", "2", "--output", str(tmp_path)], catch_exceptions=False
    )
    counted = json.loads((tmp_path / "flops.json").read_text())["tables"][0]
    assert "paper" not in counted["columns"]
    assert "tomesd" in {row[0] for row in counted["rows"]}
    assert "dydit" not in {row[0] for row in counted["rows"]}, "its counts are known only from data"


def test_every_benchmark_is_a_command() -> None:
    result = bench("--help")
    for name in ("step", "anatomy", "selector", "train", "compile", "compose", "scale", "reach", "flops", "tables"):
        assert name in result.stdout
