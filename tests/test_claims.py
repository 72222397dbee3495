"""What the experiments may claim, with fixed seeds and small sizes; and the command that runs them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

import forked
import shiva
from reproduce.claims import (
    FROM_TABLES,
    ON_THE_MODEL,
    SYNTHETIC,
    accumulation,
    budget_control,
    checking,
    claims_page,
    estimators,
    film,
    jacobian,
    joint_learning,
    relaxation,
    single_path,
    stratified,
    trained_block,
)
from reproduce.claims.common import KEPT, VERDICTS, Claim, Result, cosine, spread
from reproduce.claims.directions import coordinate_marginals, estimate, fixed_budget_marginals, flips, losses, two_path
from reproduce.claims.residual_task import ResidualTask, normal_scores, residual_task
from shiva.backbones.base import backbone_of
from shiva.evaluate.checkout import reproduce
from shiva.ops.topk import hard_topk

from tiny import call_sd3, make_sd3

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def small() -> tuple[ResidualTask, Tensor, int]:
    return residual_task(0, tokens=8), normal_scores(0, 8), 3


def loss_of(task: ResidualTask, mask: Tensor) -> float:
    return float(losses(task, mask.nonzero().flatten()[None]))


# -- directions: each against its definition, token by token --------------------------------------------


def test_coordinate_marginals_flip_one_token(small: tuple[ResidualTask, Tensor, int]) -> None:
    task, scores, k = small
    mask = torch.zeros(8, dtype=torch.bool).scatter(0, hard_topk(scores[None], k)[0], True)
    found = coordinate_marginals(task, scores, k)
    for i in range(8):
        inside, outside = mask.clone(), mask.clone()
        inside[i], outside[i] = True, False
        assert float(found[i]) == pytest.approx(loss_of(task, inside) - loss_of(task, outside), abs=1e-9)


def test_fixed_budget_marginals_run_k_tokens_in_both(small: tuple[ResidualTask, Tensor, int]) -> None:
    task, scores, k = small
    found = fixed_budget_marginals(task, scores, k)
    for i in range(8):
        first, last = scores.clone(), scores.clone()
        first[i], last[i] = 99.0, -99.0
        pair = losses(task, hard_topk(torch.stack([first, last]), k))
        assert float(found[i]) == pytest.approx(float(pair[0] - pair[1]), abs=1e-9)


def test_two_paths_are_the_executed_half_and_the_flipped_half(small: tuple[ResidualTask, Tensor, int]) -> None:
    task, scores, k = small
    found = two_path(task, scores, k, chunk=2)
    now = estimate(task, hard_topk(scores[None], k), "input")[0]
    without, joined, chosen, others = flips(scores, k)
    for selections, tokens in ((without, chosen), (joined, others)):
        for selection, token in zip(selections, tokens.tolist(), strict=True):
            other = estimate(task, selection[None], "input")[0]
            assert float(found[token]) == pytest.approx(float(now[token] + other[token]), abs=1e-9)


@pytest.mark.parametrize("direction", [two_path, coordinate_marginals, fixed_budget_marginals])
def test_some_tokens_have_the_direction_that_all_give_them(direction: Any, small: tuple[Any, Tensor, int]) -> None:
    task, scores, k = small
    some = torch.tensor([6, 0, 3])
    torch.testing.assert_close(direction(task, scores, k, only=some)[some], direction(task, scores, k)[some])


def test_input_estimate_is_the_papers_equation(small: tuple[ResidualTask, Tensor, int]) -> None:
    task, scores, k = small
    chosen = hard_topk(scores[None], k)[0]
    x = task.x.clone().requires_grad_()
    y = x.clone()
    y[:, chosen] = task.block(x[:, chosen])
    (gradient,) = torch.autograd.grad((y - task.target).square().sum(), x)
    sign = torch.full((8,), -1.0, dtype=x.dtype).scatter(0, chosen, 1.0)
    expected = sign * (gradient * x.detach()).sum(-1)[0]
    torch.testing.assert_close(estimate(task, chosen[None], "input")[0], expected)


# -- the claims -------------------------------------------------------------------------------------------


def test_scores_and_budget_are_learned_together() -> None:
    course = joint_learning.learn(seed=0)
    assert 17.5 <= joint_learning.final_mean(course["k"]) <= 20
    assert joint_learning.final_mean(course["recall"]) >= 0.88


def test_single_path_agrees_with_two_paths_at_every_budget() -> None:
    tasks = [(residual_task(seed), normal_scores(seed)) for seed in range(5)]
    by_ratio = {ratio: [single_path.agreement(*task, ratio) for task in tasks] for ratio in (0.1, 0.5, 0.9)}
    assert min(min(values) for values in by_ratio.values()) > 0
    assert 0.6 < spread(by_ratio[0.5])["mean"] < 0.8


def test_draws_accumulate() -> None:
    courses = [accumulation.accumulated(seed, pre_norm=False) for seed in range(4)]
    first, last = (spread([course[at] for course in courses])["mean"] for at in (0, -1))
    assert last > first + 0.1


def test_soft_rank_carries_the_linear_contrast() -> None:
    found = spread(relaxation.linear_task(0, 300, 100, tau_rank=0.2, tau_sel=0.1))
    assert found["mean"] == pytest.approx(0.73, abs=0.03)
    assert found["positive"] == 1


def test_soft_rank_carries_the_residual_estimate_but_not_the_contrast() -> None:
    rows = [relaxation.residual(seed) for seed in range(10)]
    exact, itself = (spread([row[f"input, {what}"] for row in rows])["mean"] for what in ("exact contrast", "itself"))
    assert abs(exact) < 0.1
    assert 0.6 < itself < 0.85


def test_jacobian_signs_and_balance() -> None:
    assert {claim.verdict for claim in jacobian.run(seeds=range(2)).claims} == {"reproduced"}


def test_stratified_variance_is_the_theorys() -> None:
    details = stratified.run(quick=True).details
    for row in details["schedules"].values():
        assert row["ratio"]["mean"] == pytest.approx(row["theory"], rel=0.03)
    assert details["schedules"]["linear ramp"]["theory"] == pytest.approx(256, rel=1e-3)


def test_film_is_flat_along_its_symmetry() -> None:
    policy = film.make("film", seed=0)
    assert isinstance(policy, film.FiLMPolicy)
    with torch.no_grad():
        assert film.symmetry_error(policy, 4.0) < 1e-6
        moved = film.logits_with(policy, {**dict(policy.named_parameters()), "anchor": policy.anchor + 1})
        assert float((moved - policy.logits(film.TIMES)).mean()) == pytest.approx(1, abs=1e-5)
    assert film.flatness(policy) < 1e-6


def offset(steps: int = 400, **case: float | bool) -> float:
    course = budget_control.control(budget_control.Case(steps=steps, **case), seed=0)  # type: ignore[arg-type]
    return budget_control.final_mean(course) - budget_control.TARGET


def test_budget_is_met_without_task_and_noise() -> None:
    assert abs(offset()) < 0.005


@pytest.mark.slow
def test_proportional_control_settles_beside_the_target_and_the_dual_term_does_not() -> None:
    assert offset(pull=0.2, weight=3) == pytest.approx(0.2 / 6, abs=0.005)
    assert abs(offset(700, pull=0.2, dual=0.02)) < 0.01


@pytest.mark.slow
def test_noise_moves_the_ratios_that_inference_uses_unless_they_are_what_is_tracked() -> None:
    assert 0.01 < offset(noise=1.0) < 0.03
    noisy, free = (offset(700, pull=0.2, dual=0.02, noise=1.0, noise_free=free) for free in (False, True))
    assert noisy > 0.01 > abs(free)


@pytest.mark.slow
def test_output_estimator_finds_the_marginal_and_the_papers_does_not() -> None:
    tasks = [residual_task(seed) for seed in range(5)]
    trials = [estimators.compare(t, normal_scores(s), 50, t.x[0], s) for s, t in enumerate(tasks)]
    rows = {
        name: {ref: stats["mean"] for ref, stats in row.items()} for name, row in estimators.pooled(trials).items()
    }
    assert abs(rows["input (paper)"]["raw"]) < 0.2
    assert rows["output, teacher"]["raw"] > rows["output, mean"]["raw"] > 0.3
    assert rows["output, teacher"]["centred"] > 0.15 > abs(rows["random direction"]["centred"])
    assert rows["input (paper)"]["two-path"] > 0.6


def test_radial_updates_turn_the_papers_estimator_around() -> None:
    rows = estimators.radial_effect(range(3))
    assert rows["-0.6"]["marginal"] > 0.4 > -0.4 > rows["+0.6"]["marginal"]
    assert min(row["two-path"] for row in rows.values()) > 0.5


def test_trained_block_protocol_on_a_tiny_transformer() -> None:
    transformer = make_sd3().requires_grad_(False)
    method = trained_block.OneLayer(backbone_of(transformer).spec(transformer), layer=1)
    with shiva.attach(transformer, method, cfg="none") as session:
        task = trained_block.TrainedBlock(session, call_sd3(1, 4, 4), layer=1)
        assert float(losses(task, torch.arange(16)[None])) < 1e-10
        rows = trained_block.one_draw(task, seed=0)
        scores = normal_scores(0, 16).float()
        drawn = estimate(task, hard_topk(scores[None], 8), "teacher")[0]
        assert float(cosine(drawn, coordinate_marginals(task, scores, 8))) > 0
    assert rows["input (paper)"].keys() - {"two-path"} == rows["feature norm"].keys()
    assert rows["output, teacher"]["fixed budget, raw"] != rows["random direction"]["fixed budget, raw"]


def cosines(mean: float, std: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "std": std, "positive": float(mean > 0), "count": 50}


@pytest.mark.parametrize(
    ("agreement", "paths", "verdicts"),
    [
        (0.15, 0.53, ["reproduced", "reproduced"]),
        (0.6, 0.6, ["reproduced in direction", "reproduced in direction"]),
        (0.01, -0.1, ["not reproduced", "not reproduced"]),
    ],
)
def test_trained_block_is_judged_by_mean_and_error(agreement: float, paths: float, verdicts: list[str]) -> None:
    references = ("raw", "centred", "fixed budget, raw", "fixed budget, centred", "two-path")
    names = ("input (paper)", "output, teacher", *trained_block.PAPER)
    rows = {name: {reference: cosines(agreement) for reference in references} for name in names}
    rows["input (paper)"]["two-path"] = cosines(paths)
    assert [claim.verdict for claim in trained_block.claims(rows)[:2]] == verdicts[::-1]


# -- the command and the page -------------------------------------------------------------------------------


def test_command_prints_verdicts_and_writes_json(tmp_path: Path) -> None:
    done = forked.run("validate", "--only", "jacobian", "--output", tmp_path, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "2 reproduced" in done.stdout
    record = json.loads((tmp_path / "jacobian.json").read_text())
    assert record["quick"] is True
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert {claim["verdict"] for claim in record["claims"]} <= set(VERDICTS)


def test_command_refuses_an_unknown_experiment() -> None:
    with pytest.raises(ValueError, match="there is no experiment 'jacobi'; pass one of joint_learning"):
        checking.chosen(False, ["jacobi"])
    assert checking.chosen(False, None) == [*SYNTHETIC, *FROM_TABLES]
    assert checking.chosen(True, None) == [*SYNTHETIC, *ON_THE_MODEL, *FROM_TABLES]


def test_what_says_nothing_of_a_model_is_not_kept_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = REPOSITORY / "models" / "emoji-128"
    checking.check(True, [*FROM_TABLES, "jacobian"], large, tmp_path, record=False)
    assert [path.name for path in tmp_path.iterdir()] == ["quality_tables.json"]
    kept = json.loads((KEPT / "emoji-128" / "quality_tables.json").read_text())
    assert json.loads((tmp_path / "quality_tables.json").read_text())["claims"] == kept["claims"]
    assert "jacobian is left out" in capsys.readouterr().out
    assert not checking.left_out("jacobian", Path("models/emoji"))
    assert "says nothing of models/mine" in checking.left_out("quality_tables", Path("models/mine"))


def test_outside_a_checkout_the_error_says_where_to_run(tmp_path: Path) -> None:
    assert reproduce("claims.common", tmp_path) is None


@pytest.mark.parametrize(("name", "file"), [("floor", "emoji-64"), ("rollout_adapter", "rollout-adapter-64")])
def test_only_what_is_recorded_goes_to_results(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = importlib.import_module(f"reproduce.claims.{name}")
    if name == "floor":
        monkeypatch.setattr(module, "load_with_arguments", lambda model: (None, {}))
        monkeypatch.setattr(module.Stage, "fitted", lambda *given: SimpleNamespace(layers=[], seconds=1.0, tokens=1))
        monkeypatch.setattr(module, "points", lambda *given: [module.Point("Sweep", 4, 0.6, 0.6, [20.0])])
    else:
        point = module.Point("Sweep", 16, 0.6, [20.0], [21.0], 1, 1.0)
        monkeypatch.setattr(module, "measured", lambda *given: point)
    monkeypatch.chdir(tmp_path)
    for more, folder in (([], "outputs"), (["--record"], "results")):
        monkeypatch.setattr("sys.argv", [name, *more])
        assert not (tmp_path / folder).exists()
        module.main()
        settings = json.loads((tmp_path / folder / "floor" / f"{file}.json").read_text())["settings"]
        assert not {"output", "record", "labels"} & settings.keys()


@pytest.mark.skipif(not KEPT.exists(), reason="no results are committed")
def test_the_page_of_claims_is_the_committed_results() -> None:
    records, large = claims_page.load(), claims_page.load_large()
    assert claims_page.page(records, large) == claims_page.PAGE.read_text()
    assert not any(record["quick"] for record in (*records, *large))


def test_the_page_says_where_1024_tokens_change_a_verdict() -> None:
    def record(*verdicts: str) -> dict[str, Any]:
        claims = [{"claim": f"claim {i}", "ours": f"{v} so", "verdict": v} for i, v in enumerate(verdicts)]
        return {"name": "selection", "command": "python", "claims": claims, "details": {}}

    small, large = record("reproduced", "not reproduced"), record("reproduced", "reproduced")
    lines = claims_page.on_1024_tokens([small], [large])
    assert "1 of 2 verdicts are others" in lines[2]
    assert "`router_maps`" in lines[2]
    assert "`selection`" not in lines[2]
    assert lines[-2].endswith("| still reproduced |")
    assert lines[-1].endswith("| not reproduced so | reproduced so | **reproduced**, on 256 tokens not reproduced |")

    single = {**record("reproduced in direction", "not reproduced"), "details": {"seeds": [0]}}
    lines = claims_page.on_1024_tokens([record("reproduced", "reproduced")], [single])
    assert "1 of 2 verdicts are others" in lines[2]
    assert lines[-2].endswith("| reproduced in direction, one seed |")
    assert lines[-1].endswith("| **not reproduced**, on 256 tokens reproduced |")


@pytest.mark.parametrize("name", [*SYNTHETIC, *ON_THE_MODEL])
def test_every_committed_result_can_be_drawn(name: str) -> None:
    record = json.loads((KEPT / f"{name}.json").read_text())
    claims = tuple(Claim(**claim) for claim in record["claims"])
    axes = Figure().add_subplot()
    importlib.import_module(f"reproduce.claims.{name}").draw(
        Result(name, record["title"], claims, record["details"]), axes
    )
    assert axes.get_xlabel() or axes.get_ylabel()
