"""Whole runs of every kind of pipeline, as `shiva generate` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shiva
from pipelines import PIPELINES, dit
from shiva.cli import app
from shiva.measure.generate import Contender, generate


def test_a_class_is_drawn_by_number_or_name_and_progress_is_told() -> None:
    pipe: Any = dit()
    pipe.labels = {"tench": 2}
    pipe.set_progress_bar_config(disable=True)
    told: list[int] = []
    how: dict[str, Any] = {"steps": 3, "guidance": 2.0, "seed": 0, "progress": lambda name, step: told.append(step)}
    entrants = {"ToMeSD": Contender(shiva.ToMeSD())}
    by_number = generate(pipe, ["2"], entrants, **how)["ToMeSD"]
    by_name = generate(pipe, ["tench"], entrants, **how)["ToMeSD"]
    assert by_number.images[0].tobytes() == by_name.images[0].tobytes()
    assert told == [0, 1, 2] * 2
    assert "step" not in vars(pipe.scheduler)
    for wrong, message in (("999999", "pass a number from 0 to"), ("trench", "did you mean 'tench'")):
        with pytest.raises(ValueError, match=message):
            generate(pipe, [wrong], entrants, **how)


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
    assert len(generate(Embedded(), ["a fox"], {"dense": Contender(None)}, **how)["dense"].images) == 1
    assert told == [0, 1, 2]


def test_generate_says_which_options_a_method_runs_with(tmp_path: Path) -> None:
    dit().save_pretrained(tmp_path / "dit")
    call = ["generate", str(tmp_path / "dit"), "1", "--method", "ToMeSD", "--steps", "2", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, call, catch_exceptions=False)
    assert "ToMeSD(ratio=0.5" in result.output
    assert (tmp_path / "000-1.png").is_file()
    assert '"ratio": 0.5' in (tmp_path / "run.json").read_text()
