"""The ablations' harness on a tiny pipeline: what is shared changes no result, and what is kept is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experiments import ON_THE_MODEL, budget_on_model, ratio_policy, router_context, router_sharing, selection
from experiments.embedded import KEEP, KEEPS, Ablation, Bench, Variant
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
    passes = len(bench.taught)
    ours = weights(bench.checkpoint(Variant(), 0))
    assert len(bench.taught) == passes > 0
    theirs = weights(Trainer(bench.recipe(Variant(), 0), tmp_path).run())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_seed_is_not_measured_against_the_dense_passes_of_another(bench: Bench, folder: Path, tmp_path: Path) -> None:
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
        with selection.contender(task.pipe, checkpoint, rejected, ranking) as session:
            found[ranking] = task.measure(session, dense)
    assert all(row["one step"] > 0 and row["run"] > 0 for row in found.values())
    assert all(row["keep"] == pytest.approx(KEEP, abs=0.02) for row in found.values())
    assert found["router"] != found["random"]
