"""Recipes: every value is a field, unknown ones are refused, and the preset `paper` is the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiva.training.recipe import Recipe, load_recipe, recipe_from
from shiva.training.stages import STAGES, Stage, Temperatures, moment

RECIPES = Path(__file__).parent.parent / "recipes"
LEAST: dict[str, Any] = {"model": {"path": "somewhere"}, "data": {"path": "data"}}


def test_the_preset_paper_holds_the_papers_values() -> None:
    recipe = recipe_from({"preset": "paper", **LEAST})
    warmup, policy, joint = recipe.stages
    assert (warmup.trains, warmup.ratios, warmup.logit_noise) == (("router",), "stratified", 0)
    assert (policy.ratios, policy.logit_noise) == ("policy", 1.0)
    assert (joint.trains, joint.logit_noise) == (("router", "policy", "adapter"), 0)
    assert all(stage.warmup == 200 and stage.cooldown == 0 for stage in recipe.stages)
    method: Any = recipe.method_config()
    assert (method.estimator, method.beta, method.dual, method.noise_free) == ("input", 0.2, 0, False)
    assert method.dense == (0,)
    assert (recipe.sampling.batch, recipe.sampling.micro_batch, recipe.sampling.density) == (16, 1, "uniform")
    assert recipe.sampling.caption_dropout == 0.1
    assert (recipe.optimizer.rate("router"), recipe.optimizer.rate("policy")) == (3e-4, 1e-4)
    assert (recipe.adapter.rank, recipe.adapter.dora, recipe.distill.every) == (32, True, 4)
    assert recipe.temperatures.at(0) == (0.2, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samplng": {}}, "did you mean 'sampling'"),
        ({"sampling": {"bach": 4}}, "sampling has no option 'bach'; did you mean 'batch'"),
        ({"method": {"buget": 0.6}}, "did you mean 'budget'"),
        ({"method": {"name": "Shva"}}, "did you mean 'Shiva'"),
        ({"stages": {"warmpu": {}}}, "did you mean 'warmup'"),
        ({"stages": {"warmup": {"step": 3}}}, r"stages\[0\] has no option 'step'; did you mean 'steps'"),
        ({"sampling": {"batch": 5, "micro_batch": 2}}, "not a multiple"),
        ({"sampling": {"ratio_min": "low"}}, "sampling.ratio_min='low' is not a number"),
        ({"data": {"path": "x", "kind": "parket"}}, "data.kind='parket' is unknown"),
        ({"preset": "papr"}, "preset='papr' is unknown"),
        ({"stages": {"joint": {"trains": []}}}, "trains nothing"),
    ],
)
def test_mistakes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        recipe_from({**LEAST, **changes})


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_valid(path: Path) -> None:
    assert isinstance(load_recipe(path), Recipe)


def test_values_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: a}\ndata: {path: b}\noptimizer: {rates: {router: 1e-3}}\n")
    recipe = load_recipe(path, ["method.budget=0.8", "stages.joint.steps=7"])
    assert recipe.optimizer.rate("router") == 1e-3  # YAML itself reads 1e-3 as text
    assert recipe.optimizer.rate("policy") == 1e-4
    assert recipe.method["budget"] == 0.8
    assert recipe.stages[2].steps == 7


def test_stages_follow_each_other() -> None:
    stages = (Stage("a", 2, ("router",)), Stage("skipped", 0, ("router",)), Stage("b", 1, ("policy",)))
    seen = [moment(stages, step) for step in range(4)]
    assert [(m.stage.name, m.step) if m else None for m in seen] == [("a", 0), ("a", 1), ("b", 0), None]
    assert [stage.name for stage in STAGES] == ["warmup", "policy", "joint"]


def test_rates_rise_and_fall_and_temperatures_harden() -> None:
    stage = Stage("a", 100, ("router",), warmup=10, cooldown=0.2)
    factors = [stage.rate_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[79] == 1.0
    assert factors[99] == pytest.approx(0.05)
    temperatures = Temperatures(rank_start=0.2, rank_end=0.1)
    ranks = [temperatures.at(progress / 10)[0] for progress in range(11)]
    assert ranks == sorted(ranks, reverse=True)
    assert (ranks[0], ranks[-1]) == pytest.approx((0.2, 0.1))
