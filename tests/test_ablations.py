"""The ablations' harness on a tiny pipeline: what is shared changes no result, and what is kept is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from reproduce.claims import (
    ON_THE_MODEL,
    budget_on_model,
    guidance_halves,
    learned_schedule,
    ratio_policy,
    router_context,
    router_maps,
    router_sharing,
    selection,
    temperatures,
    training_strategy,
)
from reproduce.claims.common import ordered
from reproduce.claims.embedded import KEEP, KEEPS, Ablation, Bench, Stats, Variant, over_seeds
from shiva.ops.schedule import RatioSchedule
from shiva.training.trainer import Trainer
from training_tiny import make_folder, tiny_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("ablations"))


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    return bench_in(folder, folder / "state")


def bench_in(folder: Path, state: Path, **changes: Any) -> Bench:
    base = tiny_recipe(folder, validation={"image_steps": 2, "image_guidance": 3.0})
    options = {"steps": 2, "seeds": [0], "samples": 2, "images": 1, **changes}
    return Bench(folder / "pipeline", state, base=base, **options)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "shiva.safetensors")


def test_a_remembered_teacher_changes_nothing(bench: Bench, folder: Path, tmp_path: Path) -> None:
    """Bit for bit the weights that the library's own trainer ends at, though another variant ran the dense passes."""
    bench.outcome(Variant({"sharing": "global"}), 0)
    passes = len(bench.dense.passes)
    ours = weights(bench.checkpoint(Variant(), 0))
    assert len(bench.dense.passes) == passes > 0
    theirs = weights(Trainer(bench.recipe(Variant(), 0), tmp_path).run())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_seed_is_not_measured_against_the_dense_passes_of_another(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    after_another = bench_in(folder, tmp_path / "both")
    after_another.outcome(Variant(), 0)
    assert after_another.outcome(Variant(), 1) == bench_in(folder, tmp_path / "alone").outcome(Variant(), 1)


def test_a_policy_is_learned_over_the_router_of_its_own_variant(bench: Bench) -> None:
    variant = Variant({"sharing": "global", "policy": "film"}, policy=True)
    learned, own, plain = (weights(bench.checkpoint(v, 0)) for v in (variant, variant.router, Variant()))
    routers = {name for name in learned if name.startswith("routers.")}
    assert all(torch.equal(learned[name], own[name]) for name in routers)
    assert routers < {name for name in plain if name.startswith("routers.")}, (
        "pairs have more routers than one for all"
    )
    assert 0.3 < bench.outcome(variant, 0)["mean keep"] < 0.9


def test_outcomes_are_found_again_and_named_by_what_shapes_them(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bench.compare({"plain": Variant()})["plain"]
    assert {f"{what}/keep_{k:g}" for what in ("mse", "cosine") for k in KEEPS} < rows.keys()
    assert rows["score deviation"]["mean"] > 0
    assert rows["psnr"]["mean"] > 0

    def train(self: Ablation) -> Path:
        raise AssertionError("trained again")

    monkeypatch.setattr(Ablation, "run", train)
    assert bench.compare({"plain": Variant()})["plain"] == rows
    spelled = Variant({"sharing": "pairwise", "bottleneck": 64, "estimator": "output", "guess": "teacher"})
    assert bench.folder(spelled, 0) == bench.folder(Variant(), 0)
    with pytest.raises(AssertionError, match="trained again"):
        bench_in(folder, folder / "state", steps=3).outcome(Variant(), 0)


def test_tables_share_their_common_variants() -> None:
    assert ratio_policy.VARIANTS["additive"] == budget_on_model.VARIANTS["dual, noise-free, λ_b = 10"]
    assert len(router_sharing.VARIANTS) == 10
    assert len(router_context.VARIANTS) == 7
    assert {"router_sharing", "router_context", "ratio_policy", "selection"} < set(ON_THE_MODEL)


def test_selection_measures_one_step_and_whole_runs(bench: Bench) -> None:
    checkpoint = bench.checkpoint(Variant(policy=True), 0)
    task = selection.Task(selection.load(bench.model), ["a red ball", "one cat"], steps=3, guidance=3.0)
    dense = task.dense()
    assert len(dense.calls) == len(dense.predictions) == 3
    found = {}
    for rejected, ranking in (("identity", "router"), ("identity", "random"), ("cached", "update")):
        with selection.ranked(task.pipe, checkpoint, rejected, ranking) as session:
            found[ranking] = task.measure(session, dense)
    assert all(row["one step"] > 0 and row["run"] > 0 for row in found.values())
    assert all(row["keep"] == pytest.approx(KEEP, abs=0.02) for row in found.values())
    assert found["router"] != found["random"]


def test_scores_are_read_along_a_dense_run(bench: Bench) -> None:
    task = selection.Task(selection.load(bench.model), ["a red ball", "one cat"], steps=3, guidance=3.0)
    dense = task.dense()
    checkpoint = bench.checkpoint(Variant(), 0)
    scores = router_maps.scores_along(task.pipe, dense, checkpoint)
    schedule = learned_schedule.schedule_of(checkpoint)
    steps, layers, images, _ = scores.shape
    assert (steps, layers, images) == (3, len(schedule.reduced), 2)
    assert not torch.equal(scores[0], scores[-1])


def test_halves_of_guidance_can_choose_apart(bench: Bench) -> None:
    task = selection.Task(selection.load(bench.model), ["a red ball", "one cat"], steps=3, guidance=3.0)
    dense, checkpoint = [task.images()], bench.checkpoint(Variant(), 0)
    together, apart = (
        guidance_halves.distances([task], dense, checkpoint, policy) for policy in ("max", "per-sample")
    )
    assert together != apart


def test_foreground_is_the_chance_of_being_scored_above_the_background() -> None:
    mask = torch.tensor([True, True, False, False, False])
    assert router_maps.above(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), mask) == 1
    assert router_maps.above(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), mask) == 0
    assert router_maps.above(torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0]]), mask) == pytest.approx(4 / 6)
    assert router_maps.above(torch.ones(5), mask) == 0.5


def test_texture_is_a_rank_correlation() -> None:
    texture = torch.tensor([0.0, 1.0, 4.0, 9.0])
    assert router_maps.rank_correlation(texture.exp(), texture) == pytest.approx(1)
    assert router_maps.rank_correlation(-texture, texture) == pytest.approx(-1)


def test_a_table_is_described_by_its_parts() -> None:
    logits = torch.linspace(-1, 1, 10, dtype=torch.float64)[:, None] - torch.arange(5, dtype=torch.float64)
    shape = learned_schedule.shape_of(RatioSchedule(tuple(range(900, -1, -100)), logits))
    assert shape["late"] > shape["early"]
    assert shape["shallow"] > shape["deep"]
    assert shape["deviation"] > learned_schedule.shape_of(RatioSchedule.flat(KEEP, 5).resample([1.0] * 5))["deviation"]


# -- verdicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        ([1.0, 1.1, 1.2], [0.9, 1.0, 1.1], "reproduced"),
        ([1.0, 1.1], [0.9, 1.0], "reproduced in direction"),
        ([1.0], [0.9], "reproduced in direction"),
        ([1.0, 1.3, 0.95], [0.9, 1.0, 1.0], "reproduced in direction"),
        ([1.0, 1.0, 1.0], [0.5, 1.4, 1.0], "not reproduced"),
        ([0.9, 0.9, 0.9], [1.0, 1.0, 1.1], "not reproduced"),
    ],
)
def test_an_order_is_judged_seed_by_seed(better: list[float], worse: list[float], verdict: str) -> None:
    assert ordered(better, worse) == verdict


def rows_at(names: Any, measure: str, values: dict[str, float], spread: float = 0.0) -> dict[str, dict[str, Stats]]:
    """Rows of three seeds in which `measure` is as given, or 1, and the seeds of the given lie apart."""
    keys = {"psnr", "score deviation", "mean keep", "mse/schedule", "cosine/keep_0.6"}
    keys |= {f"mse/keep_{keep:g}" for keep in KEEPS}
    rows = {name: {key: over_seeds([1.0] * 3) for key in keys} for name in names}
    for name, value in values.items():
        rows[name][measure] = over_seeds([value - spread, value, value + spread])
    return rows


def test_sharing_is_judged_against_every_other() -> None:
    names = router_sharing.VARIANTS
    lower = rows_at(names, "mse/keep_0.6", {"pairwise, 64": 0.9})
    unsure = rows_at(names, "mse/keep_0.6", {"pairwise, 64": 0.9}, spread=0.15)
    beaten = [
        rows_at(names, "mse/keep_0.6", {"pairwise, 64": 0.9, other: 0.8}) for other in names if other[:4] != "pair"
    ]
    verdicts = [router_sharing.claim_of(rows, "3 seeds").verdict for rows in (lower, unsure, *beaten)]
    assert verdicts == ["reproduced", "reproduced in direction", *["not reproduced"] * len(beaten)]


def test_context_needs_all_three_first_and_none_last() -> None:
    def verdict(**values: float) -> str:
        named = {"time + prompt + layer": values.get("full", 1.0), "none": values.get("none", 1.0)}
        return router_context.claims_of(rows_at(router_context.VARIANTS, "cosine/keep_0.6", named), "")[0].verdict

    assert verdict(full=1.1, none=0.9) == "reproduced"
    assert verdict(full=1.0, none=0.9) == "reproduced in direction"
    assert verdict() == verdict(full=0.8, none=0.9) == "not reproduced"


def test_removing_a_signal_is_judged_by_the_error() -> None:
    def verdict(**values: float) -> str:
        named = {"time + layer": values.get("prompt", 1.0), "time + prompt": values.get("layer", 1.0)}
        return router_context.claims_of(rows_at(router_context.VARIANTS, "mse/keep_0.6", named), "")[1].verdict

    assert verdict(prompt=1.1, layer=1.1) == "reproduced"
    assert verdict(prompt=1.1) == verdict(layer=1.1) == "not reproduced"


def test_transfer_is_judged_at_every_ratio_but_that_of_training() -> None:
    names = training_strategy.VARIANTS
    everywhere = rows_at(names, "psnr", {})
    for keep in KEEPS:
        everywhere["fixed"][f"mse/keep_{keep:g}"] = over_seeds([1.2] * 3)
    above = rows_at(names, "mse/keep_0.9", {"fixed": 1.4})
    away = rows_at(names, "psnr", {})
    for keep in KEEPS:
        away["fixed"][f"mse/keep_{keep:g}"] = over_seeds([1.0 if keep == KEEP else 1.2] * 3)
    assert training_strategy.claims_of(everywhere, "")[1].verdict == "not reproduced"
    assert training_strategy.claims_of(above, "")[1].verdict == "not reproduced"
    assert training_strategy.claims_of(away, "")[1].verdict == "reproduced"


def test_an_adaptive_ratio_is_judged_by_the_validation_error() -> None:
    names = ratio_policy.VARIANTS
    one_step = rows_at(names, "mse/schedule", {"additive": 0.8})
    images = rows_at(names, "psnr", {"additive": 1.2})
    assert ratio_policy.claims_of(one_step, "")[0].verdict == "reproduced"
    assert ratio_policy.claims_of(images, "")[0].verdict == "not reproduced"
    assert ratio_policy.claims_of(rows_at(names, "psnr", {"film": 1.2}), "")[1].verdict == "reproduced in direction"


def test_a_budget_is_judged_by_its_offset() -> None:
    names = budget_on_model.VARIANTS
    met = rows_at(names, "mean keep", dict.fromkeys(names, KEEP + 0.005))
    assert budget_on_model.claims_of(met, "")[0].verdict == "reproduced"
    assert budget_on_model.claims_of(rows_at(names, "mean keep", {}), "")[0].verdict == "not reproduced"


def test_a_better_temperature_is_named() -> None:
    rows = rows_at(temperatures.VARIANTS, "mse/keep_0.6", {"ranks half as soft": 0.9})
    assert "two standard errors: ranks half as soft." in temperatures.claim_of(rows, "").sentence


def test_selection_is_judged_by_final_images() -> None:
    def verdict(run: float, step: float) -> str:
        names = [f"{r}: {k}" for r, known in selection.RANKINGS.items() for k in (selection.ADAPTIVE, *known)]
        rows = {name: {"run": over_seeds([1.0] * 3), "one step": over_seeds([1.0] * 3)} for name in names}
        rows["identity: router"] = {"run": over_seeds([run] * 3), "one step": over_seeds([step] * 3)}
        return selection.claim_of("output", rows, 3).verdict

    assert verdict(run=1.2, step=1.1) == "reproduced"
    assert verdict(run=0.8, step=0.9) == "not reproduced"


def test_a_learned_table_is_judged_by_its_parts() -> None:
    def verdicts(**parts: float) -> list[str]:
        usual = {"early": 0.6, "late": 0.6, "shallow": 0.6, "deep": 0.6, "deviation": 0.1}
        rows = {name: {p: over_seeds([v] * 3) for p, v in usual.items()} for name in learned_schedule.BUDGETS}
        rows |= {learned_schedule.PLAIN: {p: over_seeds([v] * 3) for p, v in usual.items()}}
        rows |= {learned_schedule.NOISY: {p: over_seeds([v] * 3) for p, v in (usual | parts).items()}}
        images = dict.fromkeys(learned_schedule.VARIANTS, over_seeds([20.0] * 3))
        return [claim.verdict for claim in learned_schedule.claims_of(rows, images, "")]

    assert verdicts(early=0.41, late=0.79, shallow=0.7, deviation=0.2) == ["reproduced"] * 3
    assert verdicts(late=0.7) == ["reproduced in direction", "not reproduced", "not reproduced"]
    assert verdicts(early=0.7, deep=0.7, deviation=0.05) == ["not reproduced"] * 3


def test_halves_are_judged_by_final_images() -> None:
    def verdict(together: float) -> str:
        rows = {
            name: {c: over_seeds([20.0] * 3) for c in guidance_halves.COLUMNS} for name in guidance_halves.POLICIES
        }
        rows["maximum (paper)"] = {column: over_seeds([together] * 3) for column in guidance_halves.COLUMNS}
        return guidance_halves.claim_of(rows, "").verdict

    assert (verdict(21.0), verdict(20.0)) == ("reproduced", "not reproduced")


def test_maps_are_judged_by_foreground_and_texture() -> None:
    def verdicts(foreground: float, texture: float) -> list[str]:
        row = {key: over_seeds([0.5] * 3) for key in router_maps.COLUMNS}
        row |= {"foreground": over_seeds([foreground] * 3), "texture": over_seeds([texture] * 3)}
        fixed = row | {"foreground": over_seeds([0.5] * 3), "texture": over_seeds([0.0] * 3)}
        return [claim.verdict for claim in router_maps.claims_of({"stratified": row, "fixed": fixed}, "")]

    assert verdicts(0.6, 0.1) == ["reproduced"] * 2
    assert verdicts(0.4, 0.1) == verdicts(0.6, -0.1) == ["not reproduced"] * 2


@pytest.mark.parametrize("side", [64, 128])
def test_pictures_of_any_size_are_cut_into_a_patch_a_token(side: int) -> None:
    image = Image.new("L", (side, side), 255)
    image.putpixel((5, 2), 0)
    patches = router_maps.patches(image)
    assert patches.shape == ((side // 4) ** 2, 16)
    assert patches.amin(1).argmin() == 1
