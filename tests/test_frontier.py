"""`shiva frontier`: what else makes a pipeline faster, held to the same images, FLOPs, memory and time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

import shiva
from baseline_tools import SPEC
from pipelines import PIPELINES, dit
from shiva.bench.entries import Timing
from shiva.checkpoint import ShivaCheckpoint
from shiva.cli import app
from shiva.evaluate import frontier
from shiva.evaluate.candidates import DENSE, Candidate, Candidates
from shiva.evaluate.costs import Weighed, latency, spend
from shiva.evaluate.drawing import Workers
from shiva.evaluate.evaluation import Evaluation
from shiva.evaluate.frontier import Point, advice, front, kind_of, make_grid
from shiva.evaluate.images import Run, Settings
from shiva.evaluate.prompts import Prompt, PromptSet
from shiva.evaluate.protocols import main
from shiva.evaluate.rivals import Solver, magnitude_ratios, multistep
from test_evaluation import CANDIDATES, Prompted, make

STEPS = 6


@pytest.fixture(scope="module")
def pipe() -> Prompted:
    return Prompted()


def run_of(folder: Path, pipe: Prompted, **candidates: Candidate) -> Run:
    prompts = PromptSet("two", (Prompt("a"), Prompt("b")))
    return Run(folder, Settings("tiny", None, STEPS, 3.0), prompts, {DENSE: Candidate(), **candidates}, lambda: pipe)


@pytest.mark.parametrize(
    "rival",
    [
        Candidate(solver="even"),
        Candidate(solver="multistep"),
        Candidate(cache="MagCache", setting=10.0),
        Candidate(cache="TaylorSeer", setting=3),
        Candidate(cache="DBCache", setting=10.0),
        Candidate(method="Sweep", options={"budget": 0.5}, cache="MagCache", setting=10.0),
        Candidate(method="Sweep", options={"budget": 0.5}, cache="DBCache", setting=10.0),
    ],
    ids=lambda rival: f"{rival.method or ''}{rival.cache or rival.solver}",
)
def test_a_rival_changes_the_images_and_leaves_the_pipeline_as_it_was(
    rival: Candidate, tmp_path: Path, pipe: Prompted
) -> None:
    if rival.cache == "DBCache":
        pytest.importorskip("cache_dit")
    run = run_of(tmp_path, pipe, rival=rival)
    # cache-dit wraps the pipeline itself, of which the tests' is only a shell
    target: Any = pipe.real if rival.cache == "DBCache" else pipe

    def image() -> torch.Tensor:
        return run.draw(pipe, 0, [0], output_type="latent")

    dense = image()
    with magnitude_ratios(pipe.transformer) as ratios:
        image()
    with rival.attached(target, lambda: ratios):
        first, again = image(), image()
    assert torch.equal(first, again), "a run does not begin with what the last one left"
    assert not torch.equal(first, dense)
    assert torch.equal(image(), dense)


def test_a_cache_that_does_not_fit_says_why(tmp_path: Path, pipe: Prompted) -> None:
    run = run_of(tmp_path, pipe, fbc=Candidate(cache="FirstBlockCache"))
    assert run.complete(["fbc"], [0], Workers()) == []
    assert "cannot run SD3" in run.skipped["fbc"]


def test_a_second_order_solver_is_nearer_to_the_converged_run() -> None:
    """On dx/dt = x, whose path bends: six steps of the flow scheduler, and six of its multistep sibling."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def ends(scheduler: Any, steps: int) -> torch.Tensor:
        scheduler.set_timesteps(steps)
        x = torch.ones(1, 4, dtype=torch.float64)
        for t in scheduler.timesteps:
            x = scheduler.step(x * t / 1000, t, x).prev_sample
        return x

    euler = FlowMatchEulerDiscreteScheduler(shift=1.5)
    exact = ends(FlowMatchEulerDiscreteScheduler(shift=1.5), 1000)
    assert (ends(multistep(euler), 6) - exact).abs().max() < 0.5 * (ends(euler, 6) - exact).abs().max()


def test_fewer_steps_cost_their_share_and_caches_what_they_compute(tmp_path: Path, pipe: Prompted) -> None:
    ways = {"half": Candidate(steps=3), "mag": Candidate(cache="MagCache", setting=10.0)}
    ways["sweep"] = Candidate(method="Sweep", options={"budget": 0.5})
    run = run_of(tmp_path, pipe, **ways)
    dense, half, mag, sweep = (spend(run, name) for name in (DENSE, *ways))
    assert half.flops.true == dense.flops.true / 2
    assert mag.flops.true < 0.9 * dense.flops.true
    with run.attached("sweep") as session:
        assert session is not None
        run.draw(pipe, 0, [0], output_type="latent")
        assert sweep.flops.true == pytest.approx(session.summary().flops.true, rel=1e-3)
    assert sweep.memory > dense.memory > 0


def test_memory_is_weighed_while_tensors_live() -> None:
    weight = torch.zeros(1000)
    with Weighed() as memory:
        one = weight.view(10, 100) + 1
        two = one * 2
        del one
        three = two[:5] + torch.zeros(5, 100)
        del two
    assert memory.peak == 4 * 2000
    assert memory.held == three.nbytes


def test_finished_rounds_of_timing_are_kept(tmp_path: Path, pipe: Prompted) -> None:
    run = run_of(tmp_path, pipe, half=Candidate(steps=3))
    latency(run, [DENSE, "half"], 1, "cpu")
    before = len(pipe.noise)
    found = latency(run, [DENSE, "half"], 2, "cpu")
    assert len(pipe.noise) == before + 4, "one round of two candidates, each with a rehearsal"
    assert found["half"].median > 0


def test_an_image_of_a_batch_is_timed_as_its_share_of_the_call(
    tmp_path: Path, pipe: Prompted, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, pipe)
    monkeypatch.setattr("shiva.evaluate.costs.interleave", lambda calls, **how: {DENSE: Timing([8.0])})
    assert latency(run, [DENSE], 1, "cpu")[DENSE].median == 8
    run.settings = replace(run.settings, batch=2)
    assert latency(run, [DENSE], 1, "cpu")[DENSE].median == 4
    monkeypatch.undo()
    before = len(pipe.noise)
    latency(run, [DENSE], 2, "cpu")
    assert len(pipe.noise) == before + 4, "a rehearsal and a turn of both prompts"


def test_the_main_table_has_fewer_steps_at_matched_flops_and_the_step_caches(tmp_path: Path, pipe: Prompted) -> None:
    evaluation = make(tmp_path, pipe, rivals=True, settings=Settings("tiny", None, steps=4, guidance=3.0))
    evaluation.candidates.tables["main"] = ["dense", "random"]
    found = main(evaluation)
    assert found is not None
    quality = found.tables[0]
    names = [row[0] for row in quality.rows]
    assert names[:2] == ["dense", "random"]
    share = found.figures["cost"]["random"]["share"]
    assert f"{round(4 * share)} steps" in names
    assert {"MagCache", "TaylorSeer"} <= set(names)
    assert found.figures["cost"]["3 steps"]["share"] == pytest.approx(0.75)
    assert found.figures["cost"]["3 steps"]["one_step_mse"] is None
    assert "FirstBlockCache cannot run SD3" in quality.caption


def test_a_rival_that_has_a_row_already_gets_no_second(tmp_path: Path, pipe: Prompted) -> None:
    evaluation = make(tmp_path, pipe, rivals=True, settings=Settings("tiny", None, steps=4, guidance=3.0))
    evaluation.candidates.candidates["3 steps"] = Candidate(steps=3)
    evaluation.candidates.tables["main"] = ["dense", "random", "3 steps"]
    found = main(evaluation)
    assert found is not None
    assert [row[0] for row in found.tables[0].rows].count("3 steps") == 1


def test_a_users_own_candidate_keeps_a_rivals_name(tmp_path: Path, pipe: Prompted) -> None:
    own = {"magcache": Candidate(cache="MagCache", setting=9.0)}
    own["TaylorSeer"] = Candidate(cache="TaylorSeer", setting=3)
    candidates = Candidates({**CANDIDATES, **own}, {"main": ["dense", "random", "TaylorSeer"]})
    settings = Settings("tiny", None, steps=4, guidance=3.0)
    evaluation = make(tmp_path, pipe, rivals=True, candidates=candidates, settings=settings)
    found = main(evaluation)
    assert found is not None
    names, run = [row[0] for row in found.tables[0].rows], evaluation.run()
    assert {name: run.candidates[name] for name in own} == own
    assert {"magcache", "TaylorSeer"} <= set(names)
    assert "MagCache" not in names


def test_a_metric_that_failed_for_one_seed_has_no_mean() -> None:
    one, two, three = (SimpleNamespace(value=value) for value in (1.0, 2.0, 3.0))
    scores = [{"psnr": one, "ssim": two}, {"psnr": three}]
    evaluation: Any = SimpleNamespace(scores=lambda run, name, seed: scores[seed])
    assert Evaluation.means(evaluation, None, "any", [0, 1]) == {"psnr": 2.0}  # type: ignore[arg-type]


def test_the_grid_says_what_each_way_is() -> None:
    pruned = frontier.pruning(["sweep"], (0.6, 0.4)) | frontier.pruning(["ToMeSD"], (0.6,))
    grid = make_grid(8, frontier.fewer(8), pruned, ["MagCache"])
    kinds = {name: kind_of(way, grid[DENSE]) for name, way in grid.items()}
    assert frontier.fewer(8) == (6, 4, 3, 2)
    assert frontier.fewer(4) == (3, 2)
    assert kinds["6 steps"] == "fewer steps"
    assert kinds["8 multistep"] == kinds["3 multistep"] == "multistep"
    combined = {"Sweep 0.4", "Sweep 0.4 in 6 steps", "Sweep 0.4, 4 even", "Sweep 0.4, 6 multistep"}
    assert {kinds[name] for name in (*combined, "Sweep 0.4 with MagCache", "ToMeSD")} == {"tokens"}
    assert grid["Sweep 0.4 with MagCache"].cache == "MagCache"
    assert kinds["MagCache, 6 even"] == "cache", "rivals go together too"
    assert grid["MagCache, 6 even"].steps == 6
    assert grid["converged"].steps == 100
    held = make_grid(8, (4,), pruned, [], solver="multistep")
    assert {name for name in held if "even" in name} == {"8 even", "4 even"}
    assert held["Sweep 0.6"].solver == held[DENSE].solver == "multistep"
    for solver in get_args(Solver):
        ways = list(make_grid(8, (4, 2), pruned, ["MagCache"], solver).values())
        assert all(ways.count(way) == 1 for way in ways), "nothing is drawn twice"


def test_checkpoints_keep_their_names_apart_and_turn_only_what_they_may(tmp_path: Path) -> None:
    for name, config in {"a": shiva.Shiva(), "b": shiva.Lattice(), "c": shiva.DiffCR(), "d": shiva.DyDiT()}.items():
        ShivaCheckpoint.of(config.build(SPEC)).save_pretrained(tmp_path / name / "checkpoint")
    folders = [str(tmp_path / name / "checkpoint") for name in "abcd"]
    found = frontier.pruning(folders, (0.6, 0.4))
    assert list(found) == ["a 0.6", "a 0.4", "b 0.6", "b 0.4", "c", "d"]
    assert list(frontier.pruning(folders[:1], (0.6,))) == ["checkpoint 0.6"]
    for repeated in (folders[:1] * 2, ["sweep", "Sweep"]):
        with pytest.raises(ValueError, match="twice; pass it once"):
            frontier.pruning(repeated, (0.6,))


def point(name: str, kind: Any, time: float, to_dense: float) -> Point:
    return Point(name, kind, 8, time, time, 1.0, to_dense, to_dense - 1)


def test_advice_names_the_nearest_that_is_fast_enough() -> None:
    points = [point("dense", "dense", 1.0, 100.0), point("4 steps", "fewer steps", 0.5, 30.0)]
    points += [point("2 steps", "fewer steps", 0.25, 20.0), point("Sweep 0.4", "tokens", 0.49, 33.0)]
    points += [point("worse", "tokens", 0.6, 29.0)]
    assert [p.name for p in front(points)] == ["2 steps", "Sweep 0.4", "dense"]
    half, third = advice(points)
    assert half.startswith("for 50% of the time use Sweep 0.4: 33.0 dB to dense")
    assert "4 steps, has 30.0" in half
    assert third.startswith("for 35% of the time use 2 steps")
    assert "nothing here is fast enough" in advice(points[:1])[0]


def test_the_command_ends_with_a_front_a_figure_and_a_sentence_and_goes_on_where_it_was(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    (tmp_path / "prompts.txt").write_text("1\n2")
    arguments = ["frontier", tmp_path / "dit", "--prompts", tmp_path / "prompts.txt", "--output", tmp_path / "out"]
    arguments += ["--steps", 2, "--guidance", 1, "--methods", "sweep,lattice", "--budgets", 0.5, "--fit", 2]
    arguments += ["--caches", "MagCache", "--rounds", 0, "--metrics", "mse"]
    found = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert found.exit_code == 0
    assert "of the FLOPs use" in found.output
    document = json.loads((tmp_path / "out" / "frontier.json").read_text())
    names = {entry["name"] for entry in document["results"]["points"]}
    assert {"dense", "1 step", "2 multistep", "Sweep 0.5", "Lattice 0.5", "Lattice all 0.5"} <= names
    assert "spacing of its own" in document["results"]["absent"]["1 even"]
    assert "MSE to dense" in document["tables"][0]["columns"], "a distance to dense that was asked for"
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 10_000
    images = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "images").rglob("*.png")}
    CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert {path: path.stat().st_mtime_ns for path in images} == images


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--fewer", "9", "not fewer than --steps 4"), ("--caches", "PAB", "--caches"), ("--solver", "heun", "--solver")],
)
def test_a_mistake_is_refused_before_any_work(option: str, value: str, message: str) -> None:
    found = CliRunner().invoke(app, ["frontier", "nowhere", "--steps", "4", option, value])
    assert isinstance(found.exception, ValueError)
    assert message in str(found.exception)


def test_a_candidate_file_may_name_steps_solver_and_cache(tmp_path: Path) -> None:
    from shiva.evaluate.candidates import read_candidates

    file = tmp_path / "candidates.yaml"
    file.write_text(
        "candidates: {dense: {}, half: {steps: 4, solver: multistep}, mag: {cache: MagCache, setting: 0.1}}"
    )
    found = read_candidates(str(file)).candidates
    assert found["half"] == Candidate(steps=4, solver="multistep")
    assert found["dense"].config() == {"method": None, "int8": 0}, "images made before these options keep their key"
    assert found["mag"].config()["cache"] == "MagCache"
    with pytest.raises(ValueError, match="MagCache needs its magnitudes"), found["mag"].attached(None):
        pass


def test_every_pipeline_of_flows_has_a_multistep_solver(tmp_path: Path) -> None:
    """Flux hands its scheduler noise levels and a shift of its own."""
    tiny = PIPELINES["flux"]
    flux = tiny.load(tmp_path)
    dense = tiny.image(flux, guidance=1.0, steps=3)
    with Candidate(solver="multistep").attached(flux):
        assert not torch.equal(tiny.image(flux, guidance=1.0, steps=3), dense)
    with pytest.raises(ValueError, match="says itself how its steps"), Candidate(solver="even").attached(flux):
        tiny.image(flux, guidance=1.0, steps=3)
    with shiva.attach(flux, shiva.Shiva(budget=1.0)):
        assert torch.equal(tiny.image(flux, guidance=1.0, steps=3), dense)
