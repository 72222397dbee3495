"""Recipes: every value is a field, unknown ones are refused, and the preset `paper` is the paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from shiva.cli import app
from shiva.core.options import conform
from shiva.training.draws import moment
from shiva.training.recipe import Recipe, load_recipe, recipe_from
from shiva.training.sections import STAGES, Stage, Temperatures

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
        ({"stages": {}}, "stages={} changes no stage; leave it out"),
        ({"stages": []}, r"stages=\[\] trains nothing; leave stages out"),
        ({"stages": [{"name": "a", "steps": 1, "trains": ["adapter"]}] * 2}, "two have one name; name each its own"),
        ({"stages": ["warmup"]}, r"stages\[0\] is 'warmup'; give a mapping"),
        ({"stages": {"warmup": 100}}, r"stages.warmup is 100; give a mapping of options, such as {steps: 100}"),
        ({"stages": [{"name": "all"}]}, r"stages\[0\] has no 'steps'"),
        ({"stages": {"joint": {"steps": -3}}}, r"stages\[2\].steps=-3 is not at least 0"),
        ({"stages": {"joint": {"steps": 2.5}}}, r"stages\[2\].steps=2.5 is not a whole number"),
        ({"validation": {"samples": -1}}, "validation.samples=-1 is not at least 1; pass a number of at least 1"),
        (
            {"validation": {"keeps": [0.5, 1.5]}},
            r"validation.keeps\[1\]=1.5 is above 1; pass .* at most 1",
        ),
        ({"validation": {"keeps": 0.5}}, r"validation.keeps=0.5 is not a list; write \[0.5\]"),
        ({"optimizer": {"clip": -1}}, "optimizer.clip=-1.0 is not at least 0"),
        ({"optimizer": {"clip": ".nan"}}, "optimizer.clip='.nan' is not a number"),
        ({"optimizer": {"rates": {"router": float("inf")}}}, "optimizer.rates.router=inf is not finite"),
        ({"optimizer": {"betas": [0.9]}}, "has 1 values; give 2"),
        ({"optimizer": None}, "optimizer is None; give a mapping"),
        ({"weights": {"bugdet": 3}}, "weights.bugdet=3: weights has no option 'bugdet'; did you mean 'budget'"),
        ({"weights": {"budget": float("nan")}}, "weights.budget=nan is not finite"),
        ({"weights": 3}, "weights=3 is not a mapping"),
        (
            {"weights": {"diffusion": 0, "distill": 0, "output": 0, "budget": 0}},
            "weights are all 0, so nothing is learned; set one above 0",
        ),
        ({"temperatures": {"rank_end": 0}}, "temperatures.rank_end=0.0 is not above 0"),
        ({"sampling": {"caption_dropout": float("nan")}}, "sampling.caption_dropout=nan is not finite"),
        ({"sampling": {"batch": True}}, "sampling.batch=True is not a whole number"),
        ({"data": {"path": "x", "streaming": 1}}, "data.streaming=1 is not true or false"),
        ({"data": {"path": 7}}, "data.path=7 is not text"),
        ({"data": {"path": "x", "where": {"score": float("inf")}}}, "data.where.score=inf is not finite"),
        ({"data": {"path": "x", "streaming": True, "cache": "y"}}, "data.cache='y' is not filled from a stream"),
        ({"data": {"path": "x", "kind": "mjhq", "where": {"a": 1}}}, "kind='mjhq' has no columns that data.where"),
        ({"data": {"path": "x", "kind": "prompts", "where": {"a": 1}}}, "no columns that data.where"),
        ({"data": {"path": "x", "kind": "latents", "where": {"a": 1}}}, "no columns that data.where"),
        ({"data": {"path": "x", "kind": "latents", "limit": 3}}, "data.limit=3, and data.kind='latents' reads them"),
        ({"method": "Shiva"}, "method='Shiva' is not a mapping"),
        ({"method": {"dual": float("nan")}}, "method.dual=nan is not finite"),
        ({"method": {"budget": "much"}}, "method.budget='much' is not a number"),
        ({"seed": "one"}, "seed='one' is not a whole number"),
    ],
)
def test_mistakes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from({**LEAST, **changes})


def test_what_the_command_line_refuses_it_refuses_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: a}\ndata: {path: b}\n")
    arguments = ["train", str(path), "--check", "--set"]
    assert CliRunner().invoke(app, [*arguments, "validation.samples=4"]).exit_code == 0
    for change in ("validation.samples=-1", "optimizer.clip=-1", "weights.bugdet=3", "seed=.inf", "stages={}"):
        refused = CliRunner().invoke(app, [*arguments, change])
        assert isinstance(refused.exception, ValueError)
        assert change.partition("=")[0] in str(refused.exception)


@dataclass
class Inner:
    share: float = 0.5


@dataclass
class Everything:
    whole: int = 1
    number: float = 1
    flag: bool = True
    text: str = ""
    mode: Literal["a", "b"] = "a"
    maybe: float | None = None
    either: int | str = 1
    pair: tuple[int, str] = (1, "x")
    many: tuple[float, ...] = (0.5, 1)
    rows: list[int] = field(default_factory=lambda: [1])
    table: dict[str, float] = field(default_factory=lambda: {"a": 1})
    inner: Inner = field(default_factory=Inner)
    anything: Any = None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("whole", 1.0, "whole=1.0 is not a whole number"),
        ("whole", True, "whole=True is not a whole number"),
        ("number", "1", "number='1' is not a number"),
        ("number", float("nan"), "number=nan is not finite"),
        ("number", False, "number=False is not a number"),
        ("flag", 1, "flag=1 is not true or false"),
        ("text", None, "text=None is not text"),
        ("mode", "c", "mode='c' is unknown; pass one of 'a', 'b'"),
        ("maybe", "x", "maybe='x' is not a number"),
        ("either", 1.5, "either=1.5 is not text"),
        ("pair", (1,), "pair=\\(1,\\) has 1 values; give 2"),
        ("pair", (1, 2), r"pair\[1\]=2 is not text"),
        ("many", (1, float("inf")), r"many\[1\]=inf is not finite"),
        ("many", "ab", "many='ab' is not a list"),
        ("rows", [1, "2"], r"rows\[1\]='2' is not a whole number"),
        ("table", {"a": None}, "table.a=None is not a number"),
        ("inner", {"shar": 1}, "inner has no option 'shar'; did you mean 'share'"),
        ("inner", 3, "inner is 3; give a mapping of options"),
        ("inner", Inner(share="x"), "inner.share='x' is not a number"),
        ("anything", {"a": [1, float("nan")]}, r"anything.a\[1\]=nan is not finite"),
    ],
)
def test_types_are_checked_from_annotations(option: str, value: Any, message: str) -> None:
    conform(Everything(maybe=1))
    with pytest.raises(ValueError, match=message):
        conform(Everything(**{option: value}))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_valid(path: Path) -> None:
    assert isinstance(load_recipe(path), Recipe)


def test_a_budget_that_the_method_weighs_is_not_weighed_twice() -> None:
    for name, given, expected in (("LapSum", {}, 1), ("Shiva", {}, 50), ("DiffCR", {"budget": 3}, 3)):
        recipe = recipe_from({**LEAST, "method": {"name": name}, "weights": given})
        assert recipe.weights["budget"] == expected, name


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
