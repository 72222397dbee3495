"""Whole runs of every kind of pipeline, as `shiva generate` makes them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import shiva
from pipelines import PIPELINES, dit
from shiva.cli import app
from shiva.evaluate import drawing
from shiva.evaluate.candidates import Candidate
from shiva.evaluate.drawing import generate, load_with_arguments

EMOJI = Path(__file__).parents[1] / "models" / "emoji"


def test_a_class_is_drawn_by_number_or_name_and_progress_is_told() -> None:
    pipe: Any = dit()
    pipe.labels = {"tench": 2}
    pipe.set_progress_bar_config(disable=True)
    told: list[int] = []
    how: dict[str, Any] = {"steps": 3, "guidance": 2.0, "seed": 0, "progress": lambda name, step: told.append(step)}
    candidates = {"ToMeSD": Candidate(shiva.ToMeSD())}
    by_number = generate(pipe, ["2"], candidates, **how)["ToMeSD"]
    by_name = generate(pipe, ["tench"], candidates, **how)["ToMeSD"]
    assert by_number.images[0].tobytes() == by_name.images[0].tobytes()
    assert told == [0, 1, 2] * 2
    assert "step" not in vars(pipe.scheduler)
    for wrong, message in (("999999", "pass a number from 0 to"), ("trench", "did you mean 'tench'")):
        with pytest.raises(ValueError, match=message):
            generate(pipe, [wrong], candidates, **how)


@pytest.mark.parametrize("family", ["pixart", "flux"])
def test_progress_is_told_of_pipelines_with_a_callback_and_without(family: str) -> None:
    tiny = PIPELINES[family]
    pipe: Any = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    given = {key: value for key, value in tiny.call(1, 1.0).items() if key not in ("prompt", "guidance_scale")}
    told: list[int] = []

    class Embedded:
        """The pipeline with embeddings in the prompt's place."""

        scheduler = pipe.scheduler

        def __call__(self, prompt: list[str], **arguments: Any) -> Any:
            return pipe(**given, **arguments)

    how: dict[str, Any] = {"steps": 3, "guidance": 1.0, "seed": 0, "progress": lambda name, step: told.append(step)}
    assert len(generate(Embedded(), ["a fox"], {"dense": Candidate()}, **how)["dense"].images) == 1
    assert told == [0, 1, 2]


def test_generate_says_which_options_a_method_runs_with(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    call = ["generate", str(tmp_path / "dit"), "1", "--method", "ToMeSD", "--steps", "2", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, call, catch_exceptions=False)
    assert "ToMeSD(ratio=0.5" in result.output
    assert (tmp_path / "000-1.png").is_file()
    assert '"ratio": 0.5' in (tmp_path / "run.json").read_text()


def sd3_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[dict[str, Any]]]:
    """A stand-in for the embedded model that notes what it is called with."""
    calls: list[dict[str, Any]] = []
    pipe, arguments = load_with_arguments(EMOJI)

    class Noting:
        transformer, scheduler = pipe.transformer, pipe.scheduler

        def __call__(
            self, prompt: Any, negative_prompt: Any = None, height: Any = None, width: Any = None, **more: Any
        ) -> Any:
            calls.append({"negative_prompt": negative_prompt, "height": height, "width": width})
            return pipe(prompt=prompt, negative_prompt=negative_prompt, height=height, width=width, **more)

    monkeypatch.setattr(drawing, "load_with_arguments", lambda *given: (Noting(), arguments))
    return pipe, calls


def test_size_negative_prompt_and_any_option_of_a_method_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calls = sd3_folder(tmp_path, monkeypatch)
    call = ["generate", "emoji", "a fox", "pizza", "--steps", "2", "--output", str(tmp_path), "--method", "tomesd"]
    call += ["--height", "48", "--width", "64", "--negative", "red", "--set", "ratio=0.25", "--set", "sites=[ffn]"]
    result = CliRunner().invoke(app, call, catch_exceptions=False)
    assert "ToMeSD(ratio=0.25" in result.output
    assert "sites=('ffn',)" in result.output
    assert calls == [{"negative_prompt": ["red", "red"], "height": 48, "width": 64}]
    assert Image.open(tmp_path / "000-a-fox.png").size == (64, 48)
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert (settings["height"], settings["width"], settings["negative_prompt"]) == (48, 64, "red")
    assert settings["options"]["ratio"] == 0.25


def test_what_a_pipeline_does_not_take_is_refused(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    call = ["generate", str(tmp_path / "dit"), "1", "--negative", "red", "--output", str(tmp_path)]
    with pytest.raises(ValueError, match="DiTPipeline takes no negative_prompt='red'; leave it out"):
        CliRunner().invoke(app, call, catch_exceptions=False)


def test_guidance_is_passed_as_a_pipeline_takes_it_and_a_negative_prompt_wins() -> None:
    class Qwen:
        def __call__(
            self, prompt: Any, true_cfg_scale: float, negative_prompt: Any, guidance_scale: Any = None, **more: Any
        ) -> Any:
            return SimpleNamespace(images=[(true_cfg_scale, negative_prompt, guidance_scale)])

    class OnlyTrue:
        def __call__(self, prompt: Any, true_cfg_scale: float, negative_prompt: Any, **more: Any) -> Any:
            return SimpleNamespace(images=[(true_cfg_scale, negative_prompt)])

    class Distilled:
        def __call__(self, prompt: Any, num_inference_steps: int, generator: Any) -> Any:
            return SimpleNamespace(images=prompt)

    how: dict[str, Any] = {"seed": 0, "places": [0], "steps": 2, "guidance": 3.0}
    assert drawing.draw(Qwen(), ["fox"], **how) == [(3.0, [" "], None)]
    assert drawing.draw(Qwen(), ["fox"], negative_prompt=["red"], **how) == [(3.0, ["red"], None)]
    assert drawing.draw(OnlyTrue(), ["fox"], **how) == [(3.0, [" "])]
    assert drawing.draw(Distilled(), ["fox"], **how) == ["fox"]
