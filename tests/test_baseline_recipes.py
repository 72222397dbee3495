"""The recipes of the baselines: as many images as Shiva sees, the same adapter; each trains and attaches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from recipes.emoji import checkpoints
from shiva.checkpoint import ShivaCheckpoint
from shiva.core.method import Trainable
from shiva.training.recipe import load_recipe, recipe_from
from shiva.training.start import read_start
from shiva.training.trainer import Trainer
from training_tiny import make_folder, tiny_recipe

from tiny import call_sd3

RECIPES = Path(__file__).parent.parent / "recipes"
BASELINES = sorted((RECIPES / "baselines").glob("*.yaml"))
FITTED: dict[str, dict[str, Any]] = {
    "dydit": {"flops": 0.9},
    "sparsedit": {"split": [1, 0, 1, 0]},
}
"""What does not fit four layers of a tiny model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("baselines"))


def test_there_is_one_for_each_trained_baseline() -> None:
    trained = {"Dense", "DiffCR", "DyDiT", "LapSum", "NeuralSort", "SoftTopK", "SparseDiT"}
    assert {type(load_recipe(path).method_config()).__name__ for path in BASELINES} == trained


@pytest.mark.parametrize("name", checkpoints.RUNS)
def test_each_is_trained_on_1024_tokens_with_as_many_images_from_a_router_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(RECIPES.parent)
    words = checkpoints.command(name, tmp_path)
    changes = [value for flag, value in pairwise(words) if flag == "--set"]
    recipe = load_recipe(RECIPES.parent / words[words.index("train") + 1], changes)
    assert recipe.model.path == "models/emoji-128"
    assert recipe.steps * recipe.sampling.batch == 4800
    if recipe.start is not None:
        assert not Path(recipe.start).exists(), "a command that is only shown writes nothing"
        checkpoints.write_start(name, recipe.start)
        start, spec = read_start(recipe.start, print), ShivaCheckpoint.from_pretrained(recipe.start).origin.backbone
        method = recipe.method_config().build(spec)
        assert isinstance(method, Trainable)
        policy = {id(weight) for weight in method.groups().get("policy", [])}
        ratios = {key for key, weight in method.named_parameters() if id(weight) in policy}
        assert start.weights_for(method).keys() == dict(method.named_parameters()).keys() - ratios
        assert not start.adapter


def test_every_baseline_and_shiva_are_trained_there() -> None:
    shiva_itself = {"shiva-60", "shiva-80", "shiva-60-fixed"}
    assert {path.stem for path in BASELINES} | shiva_itself == set(checkpoints.RUNS)


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_a_baseline_differs_from_shivas_recipe_in_method_and_objective_alone(path: Path) -> None:
    ours, theirs = load_recipe(RECIPES / "emoji.yaml"), load_recipe(path)
    assert theirs.steps * theirs.sampling.batch == ours.steps * ours.sampling.batch
    for section in ("model", "data", "sampling", "adapter", "temperatures", "seed"):
        assert getattr(theirs, section) == getattr(ours, section)
    assert theirs.optimizer.rate("adapter") == ours.optimizer.rate("adapter")


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_a_baseline_trains_and_its_checkpoint_attaches(path: Path, folder: Path, tmp_path: Path) -> None:
    recipe, tiny = load_recipe(path).to_dict(), tiny_recipe(folder)
    recipe |= {name: tiny[name] for name in ("model", "data", "sampling", "adapter", "checkpoints", "logging")}
    recipe |= {
        "validation": {**tiny["validation"], "images": 0},
        "method": recipe["method"] | FITTED.get(path.stem, {}),
    }
    recipe["stages"] = [{**stage, "steps": 1, "warmup": 0} for stage in recipe["stages"]]
    trainer = Trainer(recipe_from(recipe), tmp_path)
    final = trainer.run()
    transformer: Any = trainer.session.transformer
    moved = [p for n, p in transformer.named_parameters() if "lora_B" in n and bool(p.any())]
    assert moved, "the adapter did not train"
    trainer.session.detach()
    call = call_sd3(2, 8, 8)
    with torch.no_grad(), shiva.attach(transformer, final) as session:
        assert session.transformer(**call)[0].isfinite().all()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


BASE = "model: {path: a}\ndata: {path: b}\nmethod: {name: Shiva, budget: 0.6}\nsampling: {batch: 8, micro_batch: 2}\n"


def test_an_extended_recipe_is_changed_where_the_file_says_so(tmp_path: Path) -> None:
    write(tmp_path, base=BASE, same="extends: base.yaml\nmethod: {budget: 0.8}\nsampling: {batch: 16}\n")
    same = load_recipe(tmp_path / "same.yaml")
    assert same.method == {"name": "Shiva", "budget": 0.8}
    assert (same.sampling.batch, same.sampling.micro_batch) == (16, 2)


def test_a_named_method_and_a_list_of_stages_replace(tmp_path: Path) -> None:
    text = "extends: base.yaml\nmethod: {name: NeuralSort}\nstages: [{name: all, steps: 9, trains: [router]}]\n"
    write(tmp_path, base=BASE + "stages: {warmup: {steps: 5}}\n", other=text)
    other = load_recipe(tmp_path / "other.yaml", ["stages.all.steps=3"])
    assert other.method == {"name": "NeuralSort"}
    assert [(stage.name, stage.steps) for stage in other.stages] == [("all", 3)]
    with pytest.raises(ValueError, match="stages has no option 'al'; did you mean 'all'"):
        load_recipe(tmp_path / "other.yaml", ["stages.al.steps=3"])


def test_mistakes_in_extending_are_named(tmp_path: Path) -> None:
    write(tmp_path, base=BASE, a="extends: base.yaml\n", b="extends: a.yaml\n", c="extends: nowhere.yaml\n")
    write(tmp_path, typo="extends: base.yaml\nsamplng: {}\n")
    with pytest.raises(ValueError, match="extend a recipe that is whole in itself"):
        load_recipe(tmp_path / "b.yaml")
    with pytest.raises(FileNotFoundError, match=r"no recipe at .*nowhere\.yaml"):
        load_recipe(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match="did you mean 'sampling'"):
        load_recipe(tmp_path / "typo.yaml")
