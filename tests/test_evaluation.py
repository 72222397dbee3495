"""`shiva eval`: resumable, the same over processes, paired to the bit, and honest about what it could not do."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from typer.testing import CliRunner

import forked
import shiva
from pipelines import call_sd3, dit, sd3
from reproduce.protocols import PROTOCOLS, leading_first
from shiva.api import resolve
from shiva.cli import app
from shiva.cli.eval import select
from shiva.cli.generate import choose, generate
from shiva.cli.terminal import numbers
from shiva.evaluate.candidates import Candidate, Candidates, fingerprint, read_candidates
from shiva.evaluate.costs import Prices, record, replay
from shiva.evaluate.drawing import Workers, noise_seed
from shiva.evaluate.evaluation import Comparison, Evaluation
from shiva.evaluate.images import OtherImages, Settings
from shiva.evaluate.metrics import METRICS, Score, Tools, chosen
from shiva.evaluate.prompts import Prompt, PromptSet
from shiva.evaluate.protocols import TOLERANCE, Found, matched
from shiva.evaluate.tables import Paired, above_the_line, rank_word
from shiva.show.style import draw_floor

REPOSITORY = Path(__file__).parents[1]
PROMPTS = PromptSet("three", tuple(Prompt(text, group) for text, group in (("a", "x"), ("b", "x"), ("c", "y"))))
CANDIDATES = {
    "dense": Candidate(),
    "dense again": Candidate(),
    "ToMeSD": Candidate(method="ToMeSD", preset="paper"),
    "random": Candidate(method="Ranked", options={"budget": 0.5, "score": "random"}, preset="official"),
}


class Prompted:
    """A tiny SD3 pipeline without text encoders that takes prompts: each text has embeddings of its own."""

    def __init__(self) -> None:
        self.real: Any = sd3()
        self.real.set_progress_bar_config(disable=True)
        self.noise: list[int] = []
        """The seed of each image asked for."""

    @property
    def transformer(self) -> Any:
        return self.real.transformer

    @transformer.setter
    def transformer(self, module: Any) -> None:
        self.real.transformer = module

    @property
    def scheduler(self) -> Any:
        return self.real.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.real.scheduler = scheduler

    def __call__(
        self, prompt: list[str], guidance_scale: float, height: Any = None, width: Any = None, **arguments: Any
    ) -> Any:
        arguments |= {} if height is None else {"height": height, "width": width}
        self.noise += [generator.initial_seed() for generator in arguments["generator"]]
        given = call_sd3(1, guidance_scale)
        shift = [torch.tensor(float(ord(text[0]) % 7)) / 7 for text in prompt]
        for name, value in list(given.items()):
            if isinstance(value, torch.Tensor):
                given[name] = torch.cat([value + by for by in shift])
        return self.real(**{**given, **arguments})


@pytest.fixture(scope="module")
def pipe() -> Prompted:
    return Prompted()


@pytest.fixture
def evaluation(tmp_path: Path, pipe: Prompted) -> Evaluation:
    return make(tmp_path, pipe)


def make(folder: Path, pipe: Prompted, **changes: Any) -> Evaluation:
    given: dict[str, Any] = {
        "candidates": Candidates(CANDIDATES, {"seeds": ["dense", "dense again", "random"]}),
        "settings": Settings("tiny", None, steps=2, guidance=3.0),
        "metrics": chosen(["psnr", "mse"], Tools()),
        "prompts": PROMPTS,
        "rounds": 0,
        "probes": 1,
    }
    return Evaluation(
        folder=folder,
        held_out=None,
        tools=Tools(),
        workers=Workers(),
        pipe=lambda: pipe,
        **{**given, **changes},
    )


def images(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("images/*/*/*.png"))}


# -- generating --------------------------------------------------------------------------------------


def test_images_are_made_once_and_the_rest_on_the_next_run(evaluation: Evaluation, pipe: Prompted) -> None:
    run = evaluation.run()
    assert evaluation.complete(run, ["dense", "ToMeSD"], [0]) == ["dense", "ToMeSD"]
    first, stamps = images(run.folder), {p: p.stat().st_mtime_ns for p in run.folder.glob("images/*/*/*.png")}
    assert len(first) == 6
    gone = run.path("ToMeSD", 0, 1)
    gone.unlink()
    made = len(pipe.noise)
    evaluation.complete(run, ["dense", "ToMeSD"], [0])
    assert len(pipe.noise) == made + 1
    assert images(run.folder) == first
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items() if path != gone)
    manifest = json.loads((run.folder / "run.json").read_text())
    assert manifest["candidates"]["ToMeSD"]["config"]["options"]["ratio"] == 0.25
    assert [prompt["text"] for prompt in manifest["prompts"]] == ["a", "b", "c"]
    assert manifest["seeds"] == [0]


def test_every_candidate_gets_the_same_noise_and_every_image_another(evaluation: Evaluation, pipe: Prompted) -> None:
    made = len(pipe.noise)
    evaluation.complete(evaluation.run(), ["dense", "random"], [0, 1])
    dense, random = pipe.noise[made : made + 6], pipe.noise[made + 6 :]
    assert dense == random
    assert len(set(dense)) == 6


def test_noise_of_many_seeds_and_prompts_never_repeats() -> None:
    drawn = {
        torch.randn(4, generator=torch.Generator().manual_seed(noise_seed(seed, index))).numpy().tobytes()
        for seed in range(5)
        for index in range(200)
    }
    assert len(drawn) == 1000


def test_a_changed_config_under_the_same_name_is_an_error(evaluation: Evaluation, pipe: Prompted) -> None:
    evaluation.complete(evaluation.run(), ["ToMeSD"], [0])
    half = Candidate(method="ToMeSD", preset="paper", options={"ratio": 0.5})
    changed = make(evaluation.folder, pipe, candidates=Candidates({**CANDIDATES, "ToMeSD": half, "dense": half}))
    with pytest.raises(ValueError, match=r"options.ratio is 0.5, was 0.25; pass another --output, or") as refused:
        changed.complete(changed.run(), ["ToMeSD"], [0])
    assert "images of 'dense' made otherwise: method is ToMeSD" in str(refused.value), "all that changed at once"
    renamed = make(
        evaluation.folder,
        pipe,
        candidates=Candidates({"tomesd": Candidate(method="ToMeSD", preset="paper", options={"ratio": 0.5})}),
    )
    with pytest.raises(ValueError, match=r"images of 'tomesd' made otherwise: options.ratio is 0.5, was 0.25"):
        renamed.complete(renamed.run(), ["tomesd"], [0])
    slower = make(evaluation.folder, pipe, settings=Settings("tiny", None, steps=3, guidance=3.0))
    with pytest.raises(ValueError, match="steps is 3, was 2; pass another --output"):
        slower.complete(slower.run(), ["ToMeSD"], [0])
    fewer = make(evaluation.folder, pipe, prompts=PROMPTS.limited(2))
    with pytest.raises(ValueError, match="2 prompts, not the same as the 3 there"):
        fewer.complete(fewer.run(), ["ToMeSD"], [0])


def test_the_weights_of_a_linked_component_are_part_of_a_models_fingerprint(tmp_path: Path) -> None:
    vae = tmp_path / "small" / "vae" / "model.safetensors"
    vae.parent.mkdir(parents=True)
    vae.write_bytes(b"one")
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "vae").symlink_to("../small/vae")
    before = fingerprint(tmp_path / "large")
    assert before == fingerprint(tmp_path / "small")
    vae.write_bytes(b"two")
    assert fingerprint(tmp_path / "large") != before


def test_a_missing_checkpoint_is_left_out_with_the_way_to_train_it(tmp_path: Path, pipe: Prompted) -> None:
    absent = Candidate(checkpoint=str(tmp_path / "none"), train="shiva train x.yaml")
    evaluation = make(tmp_path / "out", pipe, candidates=Candidates({**CANDIDATES, "trained": absent}))
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    assert "trained" not in found.figures["quality"]
    assert "trained left out" in found.tables[0].caption
    assert "train it: shiva train x.yaml" in found.tables[0].caption
    evaluation.candidates.tables["points"] = ["dense", "ToMeSD"]
    points = PROTOCOLS["points"](evaluation)
    assert points is not None
    assert "left out" not in points.tables[0].caption


def test_a_run_that_never_drew_does_not_bind_the_folder_to_its_settings(tmp_path: Path, pipe: Prompted) -> None:
    def nowhere() -> Any:
        raise ValueError("no such model")

    evaluation = make(tmp_path, pipe, settings=Settings("mistyped", None, steps=2, guidance=3.0))
    evaluation.pipe = nowhere
    run = evaluation.run()
    with pytest.raises(ValueError, match="no such model"):
        evaluation.complete(run, ["dense"], [0])
    evaluation = make(tmp_path, pipe)
    assert evaluation.complete(evaluation.run(), ["dense"], [0]) == ["dense"]


def test_what_is_damaged_in_the_folder_is_measured_again_or_named(evaluation: Evaluation) -> None:
    run = evaluation.run()
    evaluation.complete(run, ["dense", "ToMeSD"], [0])
    before = evaluation.scores(run, "ToMeSD", 0)
    for damaged in ("{", "{}", "[]"):
        (run.folder / "scores" / "tomesd" / "0.json").write_text(damaged)
        assert evaluation.scores(run, "ToMeSD", 0) == before
    for damaged in ("{", "[]", '{"settings": {}}', '{"settings": {}, "candidates": {}, "prompts": ["a"]}'):
        (run.folder / "run.json").write_text(damaged)
        with pytest.raises(OtherImages, match=r"run.json is damaged .*; delete .*, or pass another --output"):
            run.claim(["dense"])


def test_a_folder_without_images_and_tables_is_free_for_other_settings(evaluation: Evaluation) -> None:
    run = evaluation.run()
    evaluation.complete(run, ["dense"], [0])
    other = copy.copy(run)
    other.settings = dataclasses.replace(run.settings, steps=3)
    with pytest.raises(OtherImages, match="steps"):
        other.claim(["dense"])
    shutil.rmtree(run.folder / "images")
    assert other.claim(["dense"]) == ["dense"]
    (run.folder / "tables").mkdir()
    (run.folder / "tables" / "main.json").write_text("{}")
    with pytest.raises(OtherImages, match="steps"):
        other.claim(["dense"])
    shutil.rmtree(run.folder / "tables")
    (run.folder / "frontier.json").write_text("{}")
    with pytest.raises(OtherImages, match="steps"):
        other.claim(["dense"])


def test_the_folder_knows_who_failed_while_running(evaluation: Evaluation) -> None:
    run = evaluation.run()
    run.candidates["deep"] = Candidate(int8=99)
    assert evaluation.complete(run, ["dense", "deep"], [0]) == ["dense"]
    assert list(run.manifest["skipped"]) == ["deep"]
    run.candidates["deep"] = Candidate()
    assert evaluation.complete(run, ["deep"], [0]) == ["deep"]
    assert run.manifest["skipped"] == {}


def test_a_candidate_that_refuses_the_run_is_left_out_and_the_others_go_on(tmp_path: Path, pipe: Prompted) -> None:
    """IBTM compares two predictions; without guidance there is one, which shows only while it runs."""
    chosen_ones = Candidates({"dense": Candidate(), "IBTM": Candidate(method="IBTM", options={"layers": [0, 1]})})
    unguided = make(tmp_path, pipe, candidates=chosen_ones, settings=Settings("tiny", None, steps=3, guidance=1.0))
    run = unguided.run()
    assert unguided.complete(run, ["IBTM", "dense"], [0]) == ["dense"]
    assert "raise guidance_scale above 1" in run.skipped["IBTM"]


def test_the_folder_keeps_every_environment_that_made_images(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluation.run()
    for cpu, names in (("one", ["dense"]), ("two", ["dense"]), ("three", ["dense", "ToMeSD"])):
        monkeypatch.setattr("shiva.evaluate.images.environment", lambda cpu=cpu: {"cpu": cpu, "load": len(cpu)})
        evaluation.complete(run, names, [0])
    assert run.manifest["environment"]["cpu"] == "three"
    assert [earlier["cpu"] for earlier in run.manifest["earlier_environments"]] == ["one"]
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    assert "several environments" in found.tables[0].caption


# -- measuring ---------------------------------------------------------------------------------------


def test_a_method_against_itself_differs_by_exactly_nothing(tmp_path: Path, pipe: Prompted) -> None:
    from shiva.evaluate.metrics import metric

    @metric("brightness", "brightness", needs="images", higher=True)
    def brightness(subject: Any, tools: Tools) -> torch.Tensor:
        return torch.cat([batch.mean((1, 2, 3)) for batch in subject.images.batches()])

    try:
        evaluation = make(tmp_path, pipe, metrics=chosen(["brightness"], Tools()), seeds=(0, 1))
        for protocol in ("seeds", "categories", "transfer", "ratio", "int8"):
            evaluation.candidates.tables[protocol] = ["dense", "dense again", "random"]
            found = PROTOCOLS[protocol](evaluation)
            assert found is not None
            same, other = found.figures["paired"]["dense again"], found.figures["paired"]["random"]
            if protocol == "categories":
                assert set(same) == {"x", "y", "all categories"}
                same, other = same["all categories"], other["all categories"]
            assert same["brightness"]["mean"] == same["brightness"]["deviation"] == 0
            assert same["brightness"]["wins"] == 0.5
            assert same["brightness"]["count"] == (2 if protocol == "seeds" else 3)
            assert other["brightness"]["mean"] != 0
    finally:
        del METRICS["brightness"]


def test_scores_are_kept_and_measured_again_only_if_need_be(evaluation: Evaluation, pipe: Prompted) -> None:
    run = evaluation.run()
    evaluation.complete(run, ["random"], [0])
    score = evaluation.scores(run, "random", 0)["psnr"]
    assert score.each is not None
    assert len(score.each) == 3
    cache = run.folder / "scores" / "random" / "0.json"
    stamp = cache.stat().st_mtime_ns
    again = make(evaluation.folder, pipe)
    assert again.scores(again.run(), "random", 0)["psnr"] == score
    assert cache.stat().st_mtime_ns == stamp


def test_a_metric_without_weights_is_named_and_the_others_run(tmp_path: Path, pipe: Prompted) -> None:
    metrics = chosen(["psnr", "text_image", "frechet"], Tools())
    evaluation = make(tmp_path, pipe, metrics=metrics)
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    assert found.tables[0].columns == ("method", "PSNR to dense, dB ↑")
    assert "text-image score left out: the text-image score needs" in found.tables[0].caption
    assert set(found.figures["quality"]["ToMeSD"]) == {"psnr"}


def test_paired_statistics() -> None:
    pair = Paired.of([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], higher=True)
    assert (pair.mean, pair.wins) == (pytest.approx(4 / 3), pytest.approx(2.5 / 3))
    assert pair.error == pytest.approx(1.5275 / 3**0.5, rel=1e-3)
    single = Paired.of([1.0], [2.0], higher=False)
    assert single.wins == 1
    assert single.to_dict()["error"] is None
    assert str(single) == "-1"


def test_a_verdict_needs_two_standard_errors() -> None:
    psnr, frechet = METRICS["psnr"], METRICS["frechet"]
    assert rank_word(Paired(4, 1.1, 1.0, 1.0), psnr) == "ahead"
    assert rank_word(Paired(4, -1.1, 1.0, 0.0), psnr) == "behind"
    assert rank_word(Paired(4, -0.9, 1.0, 0.0), psnr) == "level"
    assert rank_word(Paired.of([1.0], [0.0], higher=True), psnr) == "level"
    assert rank_word(Paired.of([1.0], [2.0], higher=False), frechet) == "ahead"


def test_categories_are_ordered_by_the_text() -> None:
    metrics = [METRICS[name] for name in ("lpips_real", "text_image", "top1", "clip")]
    assert [metric.name for metric in leading_first(metrics)] == ["clip", "lpips_real", "text_image", "top1"]
    assert leading_first(metrics[:3])[0].name == "text_image"


# -- cost --------------------------------------------------------------------------------------------


def test_cost_is_measured_on_the_dense_path(evaluation: Evaluation) -> None:
    run = evaluation.run()
    recording = record(run, [0, 1], 0)
    assert len(recording.calls) == 4
    dense = replay(run, Candidate(), recording)
    assert (dense.share, dense.one_step_mse) == (1.0, 0.0)
    half, most = (
        replay(run, Candidate("Ranked", "official", options={"budget": budget, "score": "norm"}), recording)
        for budget in (0.5, 0.9)
    )
    assert half.share < most.share < 1
    assert half.one_step_mse > most.one_step_mse > 0
    assert half.share != half.share_paper


def test_a_cost_is_of_denses_own_steps_whatever_ran_in_between(evaluation: Evaluation, pipe: Prompted) -> None:
    """A band's first step is dense: its share depends on how many steps the scheduler has."""
    run, prices = evaluation.run(), evaluation.prices(evaluation.run())
    sweep = Candidate(method="Ranked", options={"budget": 0.7, "fill": "cached"})
    before = prices.share(sweep)
    run.draw(pipe, 0, [0], 5)
    assert prices.share(sweep) == before


def test_methods_are_brought_to_the_same_flops(evaluation: Evaluation) -> None:
    run = evaluation.run()
    run.candidates["NeuralSort"] = Candidate("NeuralSort")
    prices = Prices(run, 1)
    target = prices.of("random").share
    for name in ("NeuralSort", "random"):
        assert prices.share(matched(prices, name, target)) == pytest.approx(target, abs=TOLERANCE)
    with pytest.raises(ValueError, match="ToMeSD comes no nearer to"):
        matched(prices, "ToMeSD", 0.2)
    run.candidates["DiffCR"] = Candidate("DiffCR")
    with pytest.raises(ValueError, match="DiffCR has no knob at inference"):
        matched(prices, "DiffCR", target)
    run.candidates |= {"1 step": Candidate(steps=1), "even": Candidate("NeuralSort", solver="even")}
    for rival in ("1 step", "even"):
        with pytest.raises(ValueError, match="only a method on dense's own steps can be turned"):
            matched(prices, rival, target)


def test_matched_protocol_brings_everyone_to_one_share_and_says_where_the_first_stands(
    tmp_path: Path, pipe: Prompted
) -> None:
    candidates = {**CANDIDATES, "NeuralSort": Candidate("NeuralSort"), "DiffCR": Candidate("DiffCR")}
    candidates["1 step"] = Candidate(steps=1)
    tables = {"matched": ["random", "NeuralSort", "DiffCR", "1 step"], "main": ["dense", "DiffCR"]}
    evaluation = make(tmp_path, pipe, candidates=Candidates(candidates, tables))
    found = PROTOCOLS["matched"](evaluation)
    assert found is not None
    target = found.figures["target"]
    other = f"NeuralSort at {target:.1%}"
    assert list(found.figures["quality"]) == ["dense", "random", other]
    assert all(found.figures["cost"][n]["share"] == pytest.approx(target, abs=TOLERANCE) for n in ("random", other))
    assert found.detail == f"{100 * target:.1f}"
    verdict, quality, _ = found.tables
    assert verdict.columns == ("random against", "PSNR to dense, dB ↑", "MSE to dense ↓", "not ahead on")
    assert [row[0] for row in verdict.rows] == [other]
    against = found.figures["verdict"][other]
    own, theirs = (evaluation.scores(evaluation.run(), n, 0)["psnr"].value for n in ("random", other))
    assert against["metrics"]["psnr"]["mean"] == pytest.approx(own - theirs)
    words = {name: entry["stands"] for name, entry in against["metrics"].items()}
    assert against["not_ahead_on"] == [name for name, word in words.items() if word != "ahead"]
    assert "DiffCR left out: DiffCR has no knob" in quality.caption
    assert "1 step left out: only a method on dense's own steps" in quality.caption
    main = PROTOCOLS["main"](evaluation)
    assert main is not None
    assert "left out" not in main.tables[0].caption


def test_the_floor_holds_each_method_against_fewer_steps_at_its_own_flops(tmp_path: Path, pipe: Prompted) -> None:
    fewer = {f"{n} steps": Candidate(steps=n) for n in (3, 2)}
    random = {f"random {k:g}": Candidate(method="Ranked", options={"flops": k}) for k in (0.9, 0.6, 0.45)}
    candidates = Candidates({"dense": Candidate(), **fewer, **random})
    evaluation = make(tmp_path, pipe, candidates=candidates, settings=Settings("tiny", None, steps=4, guidance=3.0))
    found = PROTOCOLS["floor"](evaluation)
    assert found is not None
    above, run = found.figures["above"], evaluation.run()
    assert set(above) == {"random 0.6", "random 0.45"}, "at 90 % the line ends"
    shares = {name: evaluation.cost(run, name).share for name in run.candidates}
    assert (shares["3 steps"], shares["2 steps"]) == (0.75, 0.5)
    psnr = {name: evaluation.scores(run, name, 0)["psnr"].value for name in run.candidates if name != "dense"}
    way = (shares["random 0.6"] - 0.5) / 0.25
    line = psnr["2 steps"] + way * (psnr["3 steps"] - psnr["2 steps"])
    assert above["random 0.6"]["psnr"]["mean"] == pytest.approx(psnr["random 0.6"] - line, abs=1e-6)
    below = psnr["random 0.45"] - psnr["2 steps"]
    assert above["random 0.45"]["psnr"]["mean"] == pytest.approx(below, abs=1e-6), "below the cheapest it stays"
    document = {"results": found.figures, "settings": {"steps": 4}, "tables": [{"title": found.tables[0].title}]}
    draw_floor(document, tmp_path / "psnr.png")
    for quality in document["results"]["quality"].values():
        quality["ssim"] = 0.5
    draw_floor(document, tmp_path / "floor.png")
    assert Image.open(tmp_path / "floor.png").size[0] > 1000
    assert Image.open(tmp_path / "psnr.png").size[0] > 1000, "what was not measured has no panel"


def test_a_candidate_on_the_line_of_fewer_steps_is_level_with_it() -> None:
    psnr, scores = METRICS["psnr"], [0.1 * n for n in range(1, 30)]
    shares = {"3 steps": 0.75, "random": 0.6, "2 steps": 0.5}
    candidates = {name: Candidate(steps=int(name[0]) if "step" in name else None) for name in shares}
    run: Any = SimpleNamespace(candidates=candidates, prompts=scores)
    evaluation: Any = SimpleNamespace(
        metrics=[psnr],
        missing=lambda run: {},
        cost=lambda run, name: SimpleNamespace(share=shares[name]),
        scores=lambda run, name, seed: {"psnr": Score(0.0, scores)},
    )
    _, found = above_the_line(evaluation, Comparison(run, list(shares), (0,), {}))
    assert found["random"]["psnr"]["wins"] == 0.5


def test_where_nobody_can_be_matched_that_is_said(tmp_path: Path, pipe: Prompted) -> None:
    evaluation = make(tmp_path, pipe, candidates=Candidates({"1 step": Candidate(steps=1)}), target=0.5)
    with pytest.raises(ValueError, match=r"nobody to 50\.0% of dense FLOPs \(1 step: only a method on dense's own"):
        PROTOCOLS["matched"](evaluation)


def test_all_protocols_are_those_of_any_name_beside_them() -> None:
    known: dict[str, Any] = dict.fromkeys(("main", "floor", "matched"))
    assert select(known, ["all", "main"]) == ["main", "floor", "matched"]
    assert select(known, ["floor", "all"]) == ["floor", "main", "matched"]
    assert select(known, None) == ["main"]
    with pytest.raises(ValueError, match="--protocol has no option 'floors'; did you mean 'floor'"):
        select(known, ["all", "floors"])


def test_without_a_dense_candidate_distances_to_it_are_left_out(tmp_path: Path, pipe: Prompted) -> None:
    random = {f"random {k:g}": Candidate(method="Ranked", options={"flops": k}) for k in (0.6, 0.5)}
    evaluation = make(tmp_path, pipe, candidates=Candidates({"1 step": Candidate(steps=1), **random}))
    floor = PROTOCOLS["floor"](evaluation)
    assert floor is not None
    assert "PSNR to dense left out: no candidate called dense" in floor.tables[0].caption
    draw_floor({"results": floor.figures, "settings": {"steps": 2}}, tmp_path / "floor.png")
    evaluation.candidates.tables["matched"] = list(random)
    found = PROTOCOLS["matched"](evaluation)
    assert found is not None
    assert found.tables[0].columns == ("random 0.6 against", "not ahead on")


def test_shiva_is_refused_too_where_it_misses_the_target(evaluation: Evaluation) -> None:
    prices = SimpleNamespace(run=evaluation.run(), share=lambda candidate: 0.5)
    assert matched(cast("Prices", prices), "random", 0.51).options["flops"] == 0.51
    with pytest.raises(ValueError, match=r"Ranked comes no nearer to 40.0% of dense FLOPs than 50.0%"):
        matched(cast("Prices", prices), "random", 0.4)


def test_latency_is_told_in_seconds_and_read_the_next_time(evaluation: Evaluation, pipe: Prompted) -> None:
    evaluation.rounds = 1
    evaluation.candidates.tables["main"] = ["dense", "random"]
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    costs = found.tables[1]
    for row, name in zip(costs.rows, ("dense", "random"), strict=True):
        cells, cost = dict(zip(costs.columns, row, strict=True)), found.figures["cost"][name]
        assert float(cells["latency, s"]) == pytest.approx(cost["latency"]["median"], rel=0.01)
        dense = found.figures["cost"]["dense"]["latency"]["median"]
        assert cost["speedup"] == pytest.approx(dense / cost["latency"]["median"])
    assert dict(zip(costs.columns, costs.rows[0], strict=True))["speed-up"] == "1.00x"
    made = len(pipe.noise)
    seconds, _ = make(evaluation.folder, pipe, rounds=1).latencies(evaluation.run(), ["dense", "random"])
    assert seconds["random"].median == found.figures["cost"]["random"]["latency"]["median"]
    assert len(pipe.noise) == made


def test_a_failed_timing_is_an_empty_column_with_its_reason(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("shiva.evaluate.costs.interleave", fail)
    evaluation.rounds = 1
    evaluation.candidates.tables["main"] = ["dense", "random"]
    found = PROTOCOLS["main"](evaluation)
    assert found is not None
    assert "not timed: RuntimeError: out of memory" in found.tables[1].caption
    assert found.figures["cost"]["random"]["speedup"] is None


def test_held_out_prompts_and_other_sizes_are_runs_of_their_own(tmp_path: Path, pipe: Prompted) -> None:
    evaluation = make(tmp_path, pipe, candidates=Candidates(CANDIDATES, {"heldout": ["random"]}))
    with pytest.raises(ValueError, match="needs --held-out FILE"):
        PROTOCOLS["heldout"](evaluation)
    sized = Candidates(CANDIDATES, {"heldout": ["random"]}, sizes=[[24, 32]])
    evaluation = make(tmp_path, pipe, candidates=sized)
    evaluation.held_out = PromptSet("other", (Prompt("d"),))
    found = PROTOCOLS["heldout"](evaluation)
    assert found is not None
    assert list(found.figures) == ["held-out prompts", "24 x 32"]
    held_out, other = (tmp_path / "runs" / run / "images" / "random" / "0" for run in ("held-out", "24x32"))
    assert [path.name for path in held_out.iterdir()] == ["00000.png"]
    assert Image.open(other / "00002.png").size == (32, 24)
    assert json.loads((tmp_path / "runs" / "24x32" / "run.json").read_text())["settings"]["height"] == 24


def test_int8_is_there_for_as_long_as_the_candidate_runs(
    evaluation: Evaluation, pipe: Prompted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for torchao that rounds weights: which layers it gets, and that nothing of it stays."""
    touched: list[torch.nn.Module] = []

    def quantize(module: torch.nn.Module, config: object) -> None:
        touched.append(module)
        for parameter in module.parameters():
            parameter.data = parameter.data.mul(8).round().div(8)

    fake = SimpleNamespace(Int8DynamicActivationInt8WeightConfig=lambda: None, quantize_=quantize)
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    run = evaluation.run()
    recording = record(run, [0], 0)
    one, two = (replay(run, Candidate(int8=blocks), recording).one_step_mse for blocks in (1, 2))
    assert len(touched) == 2 * (1 + 2)
    assert 0 < one < two
    assert replay(run, Candidate(), recording).one_step_mse == 0
    with pytest.raises(ValueError, match="int8: 99 is more than the"):
        replay(run, Candidate(int8=99), recording)


# -- candidates --------------------------------------------------------------------------------------


def test_the_embedded_file_of_candidates_is_whole() -> None:
    found = read_candidates(str(REPOSITORY / "recipes" / "eval" / "emoji.yaml"))
    assert set(found.tables) == set(PROTOCOLS)
    for name in ("ToMeSD", "ToFu", "SDTM", "ToMA", "IBTM"):
        assert found.candidates[name].config()["method"] == name
    assert found.candidates["Shiva 90"].checkpoint == "models/shiva/80"
    assert all(entry.train for entry in found.candidates.values() if entry.checkpoint)
    turbo = read_candidates(str(REPOSITORY / "recipes" / "eval" / "emoji-128-turbo.yaml"))
    assert {name for name, entry in turbo.candidates.items() if entry.only_steps} == {"3 steps", "2 steps"}
    many = read_candidates(str(REPOSITORY / "recipes" / "eval" / "emoji-128.yaml"))
    assert set(many.tables) == set(PROTOCOLS) - {"matched"}
    for entry in (*turbo.candidates.values(), *many.candidates.values()):
        assert entry.train or not entry.checkpoint
        if entry.method:
            assert entry.config()["method"] == entry.method


def test_candidates_are_checked_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(read_candidates("ToMeSD,ToMA:official").candidates) == ["dense", "ToMeSD", "ToMA:official"]
    folder = REPOSITORY / "models" / "shiva" / "60"
    assert read_candidates(str(folder)).candidates[str(folder)] == Candidate(checkpoint=str(folder))
    monkeypatch.chdir(tmp_path)
    for name in ("tomesd", "dense"):
        (tmp_path / name).mkdir()  # such as a clone of its repository
    assert read_candidates("tomesd,dense").candidates["tomesd"].config() == Candidate("ToMeSD").config()
    assert read_candidates("tomesd,dense").candidates["dense"] == Candidate()
    assert isinstance(resolve("tomesd"), shiva.ToMeSD)
    with pytest.raises(ValueError, match="has no method 'ToMeS'; did you mean 'ToMeSD'"):
        read_candidates("ToMeS")
    with pytest.raises(
        ValueError, match="no method 'Configs'; methods are .*Dense, DiffCR, DiffSparse, DyDiT, "
    ) as refused:
        read_candidates("Configs")
    assert "SelectConfig" not in str(refused.value), "bases that methods share are no methods"
    with pytest.raises(ValueError, match="would share the folder shiva-80"):
        Candidates({"Shiva 80": Candidate(), "shiva-80": Candidate()})
    with pytest.raises(ValueError, match="tables.main has no option 'ToMa'"):
        Candidates({"ToMA": Candidate(method="ToMA")}, {"main": ["ToMa"]})
    ignored: dict[str, dict[str, Any]] = {"options budget": {"options": {"budget": 0.5}}, "flat": {"flat": True}}
    ignored |= {"setting 0.1": {"setting": 0.1}, "preset paper": {"preset": "paper", "checkpoint": str(folder)}}
    for what, given in ignored.items():
        with pytest.raises(ValueError, match=f"{what}.* would change nothing; give a"):
            Candidate(**given)
    assert Candidate(steps=3, paper="3 steps").only_steps
    path = tmp_path / "candidates.yaml"
    path.write_text("candidates: {x: {method: ToMA, ratio: 1}}")
    with pytest.raises(ValueError, match="candidates.x has no option 'ratio'"):
        read_candidates(str(path))
    path.write_text("candidates: {x: {method: ToMeSD, options: {sites: [attent]}}}")
    with pytest.raises(ValueError, match=r"candidates.yaml: candidates.x: sites\[0\]='attent' is unknown"):
        read_candidates(str(path))


# -- the command ---------------------------------------------------------------------------------------


def test_numbers_that_mean_nothing_are_refused_at_the_door(tmp_path: Path) -> None:
    for option, value in (("--probes", "0"), ("--batch", "0"), ("--limit", "0"), ("--flops", "1.5")):
        found = CliRunner().invoke(app, ["eval", "tiny", "--methods", "ToMeSD", option, value])
        assert found.exit_code == 2
        assert f"Invalid value for '{option}'" in found.output
    assert numbers("--seeds", "3,0,3", int) == (3, 0)
    with pytest.raises(ValueError, match="--seeds a,1 holds what is no whole number; pass such as"):
        numbers("--seeds", "a,1", int)


def test_a_protocol_that_failed_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox")
    monkeypatch.setitem(PROTOCOLS, "main", lambda evaluation: Found([], {}))
    monkeypatch.setitem(PROTOCOLS, "matched", lambda evaluation: Found([], {}, "62.5"))
    arguments = ["eval", "tiny", "--methods", "ToMeSD", "--prompts", str(prompts), "--output", str(tmp_path)]
    arguments += ["--protocol", "main", "--protocol", "matched"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {"main.json", "matched-62.5.json"}
    failed = CliRunner().invoke(app, [*arguments, "--protocol", "heldout"])
    assert failed.exit_code == 1
    assert "not done: heldout" in failed.output


def test_a_model_says_itself_how_many_text_tokens_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By methods' names alone, without a file that says it."""
    lengths: set[int] = set()
    forward = SD3Transformer2DModel.forward

    @functools.wraps(forward)
    def noted(self: Any, *args: Any, **call: Any) -> Any:
        lengths.add(call["encoder_hidden_states"].shape[1])
        return forward(self, *args, **call)

    monkeypatch.setattr(SD3Transformer2DModel, "forward", noted)
    run = quick(tmp_path, REPOSITORY / "models" / "emoji", "pizza")
    assert lengths == {16}
    assert run["settings"]["without"] == ["text_encoder_3", "tokenizer_3"]
    assert run["settings"]["arguments"] == {"max_sequence_length": 0}


def test_a_pipeline_of_classes_is_evaluated(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    run = quick(tmp_path, tmp_path / "dit", "1\n2")
    assert run["skipped"] == {}
    assert len(images(tmp_path / "out")) == 4
    table = json.loads((tmp_path / "out" / "tables" / "main.json").read_text())["results"]
    assert table["cost"]["ToMeSD"]["share"] < 1


def test_what_a_pipeline_does_not_take_is_refused_before_drawing(tmp_path: Path, pipe: Prompted) -> None:
    class Video(Prompted):
        def __call__(self, prompt: list[str], num_frames: int = 8, **arguments: Any) -> Any:
            raise AssertionError("drawn")

    wrong = make(tmp_path, pipe, settings=Settings("tiny", None, 2, 3.0, arguments={"max_length": 9}))
    with pytest.raises(ValueError, match="Prompted takes no max_length=9; leave it out"):
        wrong.complete(wrong.run(), ["dense"], [0])
    video = make(tmp_path / "video", Video())
    with pytest.raises(ValueError, match="Video draws videos, this command images; call shiva.attach"):
        video.complete(video.run(), ["dense"], [0])


def quick(folder: Path, model: Path, prompts: str) -> dict[str, Any]:
    """`shiva eval --methods ToMeSD` in two steps; its manifest."""
    (folder / "prompts.txt").write_text(prompts)
    arguments = ["eval", model, "--methods", "ToMeSD", "--prompts", folder / "prompts.txt", "--output", folder / "out"]
    arguments += ["--steps", 2, "--rounds", 0, "--probes", 1, "--metrics", "psnr", "--no-rivals"]
    CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    return json.loads((folder / "out" / "run.json").read_text())


def test_a_bare_name_means_the_same_everywhere() -> None:
    for candidate in (Candidate("ToMeSD"), read_candidates("ToMeSD").candidates["ToMeSD"]):
        assert candidate.source() == shiva.ToMeSD() == shiva.ToMeSD.preset("official")
    assert choose(None, "ToMeSD", generate_default("preset"), None, {}).source() == shiva.ToMeSD()


def generate_default(name: str) -> Any:
    return inspect.signature(generate).parameters[name].default


# -- killed, and in several processes -------------------------------------------------------


def arguments_of(output: Path, prompts: Path) -> list[str]:
    made = f"--methods {prompts.with_suffix('.yaml')} --prompts {prompts} --output {output} --rounds 0 --probes 1"
    return f"eval {REPOSITORY / 'models' / 'emoji'} {made} --metrics psnr,mse --no-rivals".split()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("pizza\na fox\nrocket\ncastle\n")
    prompts.with_suffix(".yaml").write_text(
        "{steps: 2, guidance: 3.0, without: [text_encoder_3, tokenizer_3], arguments: {max_sequence_length: 0}, "
        "candidates: {dense: {}, ToMeSD: {method: ToMeSD}}}"
    )
    return prompts


def wait_for(condition: Callable[[], bool], process: forked.Process) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (REPOSITORY / "models" / "emoji" / "model_index.json").is_file(), reason="no embedded model")
def test_killed_and_resumed_gives_the_images_of_two_processes_in_one_go(tmp_path: Path, small: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    two = arguments_of(tmp_path / "two", small)
    ranks = [forked.Process(*two, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(2)]
    first, second = (rank.wait(timeout=800) for rank in ranks)
    assert first.returncode == second.returncode == 0, (first, second)
    whole = images(tmp_path / "two")
    assert len(whole) == 8
    assert "MSE to dense" in first.stdout
    assert "MSE to dense" not in second.stdout

    killed = tmp_path / "killed"
    process = forked.Process(*arguments_of(killed, small))
    wait_for(lambda: len(images(killed)) >= 2, process)
    process.kill()
    before = {path: path.stat().st_mtime_ns for path in killed.glob("images/*/*/*.png")}
    assert 2 <= len(before) < len(whole)
    anew = [sys.executable, "-m", "shiva", *arguments_of(killed, small)]  # with its own hashes, and chance of numpy's
    resumed = subprocess.run(anew, capture_output=True, text=True, timeout=800)
    assert resumed.returncode == 0, resumed
    assert images(killed) == whole
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert (killed / "tables" / "main.json").is_file()
