"""`shiva fit`: normal equations of a pipeline's own blocks, solved, judged on other prompts and attached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import forked
import shiva
from pipelines import dit
from shiva.cli import app
from shiva.cli.fit import cells_of
from shiva.evaluate.drawing import draw, load_with_arguments
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.fitting import Fitted, calls, everyday_prompts, fit

EMOJI = Path(__file__).parents[1] / "models" / "emoji"
NAMES = ["red apple", "fox", "snowman", "rocket", "pizza", "sunflower", "guitar", "penguin", "clock", "whale"]


@pytest.fixture(scope="module")
def emoji() -> tuple[Any, dict[str, Any]]:
    pipe, arguments = load_with_arguments(EMOJI)
    pipe.set_progress_bar_config(disable=True)
    return pipe, arguments


@pytest.fixture(scope="module")
def fitted(emoji: tuple[Any, dict[str, Any]]) -> Fitted:
    pipe, arguments = emoji
    return fit(pipe, NAMES, steps=(4,), guidance=3.0, arguments=arguments)


def test_most_of_an_update_is_linear_on_prompts_that_were_held_out(fitted: Fitted) -> None:
    assert fitted.tokens == 8 * 4 * 2 * 256, "prompts, steps, guidance halves, tokens"
    assert [row.layer for row in fitted.layers] == list(range(8))
    for row in fitted.layers:
        assert row.constant < row.low <= row.full + 0.02
        assert row.low > 0.5
    assert fitted.weak == []


def test_layers_may_be_fitted_in_groups(emoji: tuple[Any, dict[str, Any]]) -> None:
    pipe, arguments = emoji
    how: dict[str, Any] = {"steps": (1,), "guidance": 3.0, "rank": 4, "stride": 4, "arguments": arguments}
    told: list[str] = []
    whole, groups = fit(pipe, NAMES[:2], **how), fit(pipe, NAMES[:2], layers_at_once=5, progress=told.append, **how)
    for name, weights in whole.method.state_dict().items():
        assert torch.equal(groups.method.state_dict()[name], weights)
    assert told[0] == "layers 0 to 4 (group 1 of 2): call 1"
    assert shiva.api.session_of(pipe) is None


def test_it_is_worth_decibels_over_neighbours_alone_and_over_nothing(
    emoji: tuple[Any, dict[str, Any]], fitted: Fitted, tmp_path: Path
) -> None:
    pipe, arguments = emoji
    fitted.checkpoint("models/emoji").save_pretrained(tmp_path)
    prompts = ["cat face", "bicycle", "birthday cake"]

    def images() -> list[Any]:
        return draw(pipe, prompts, 0, range(3), 4, 3.0, **arguments)

    dense, psnr = images(), {}
    for parts in ("both", "neighbours", "identity"):
        with shiva.attach(pipe, tmp_path, budget=0.6, parts=parts):
            psnr[parts] = sum(map(image_psnr, images(), dense)) / 3
    assert psnr["both"] > psnr["neighbours"] + 0.2 > psnr["identity"] + 1.5


def test_prompts_and_how_they_are_called() -> None:
    assert len(set(everyday_prompts(48))) == 48
    with pytest.raises(ValueError, match="pass 2 to"):
        everyday_prompts(1)
    assert list(calls(6, (2, 4), 3)) == [
        ([0, 1, 2], False, 2),
        ([3, 5], False, 2),
        ([4], True, 2),
        ([0, 1, 2], False, 4),
        ([3, 5], False, 4),
        ([4], True, 4),
    ]
    assert list(calls(2, (1,), 4)) == [([0], False, 1), ([1], True, 1)]


def test_a_pipeline_of_classes_is_fitted_by_their_numbers() -> None:
    from shiva.cli.fit import texts_of

    pipe: Any = dit()
    pipe.set_progress_bar_config(disable=True)
    texts = texts_of(pipe, "4", 48)
    made = fit(pipe, texts, steps=(2,), guidance=2.0, rank=4)
    assert len(set(texts)) == 4
    assert all(parameter.isfinite().all() for parameter in made.method.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--table Refresh --steps 4,8", "--table Refresh is learned on runs of one length; pass --steps 4"),
        ("--table Refresh --probe", "--probe and --table Refresh exclude each other; pass one"),
        ("--budget 0.4", "--budget is of a table, and none is learned; pass --table Refresh, or leave it out"),
        ("--set score=band", "--set is of a table"),
        ("--cells 4,4", "--cells is of a table"),
        ("--table Refresh --cells 4,4,4", "--cells 4,4,4 is not one or two numbers of at least 1"),
        ("--table Refresh --cells 0", "--cells 0 is not one or two numbers of at least 1"),
    ],
)
def test_options_that_would_do_nothing_are_refused_before_the_model_is_loaded(
    options: str, message: str, tmp_path: Path
) -> None:
    found = CliRunner().invoke(app, ["fit", "nowhere", "--output", str(tmp_path), *options.split()])
    assert isinstance(found.exception, ValueError)
    assert message in str(found.exception)


def test_cells_may_be_equally_many() -> None:
    assert [cells_of(text) for text in ("4,4", "8,3", "5")] == [(4, 4), (8, 3), (5, 1)]


@pytest.mark.slow
def test_the_command_writes_what_generate_takes(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(NAMES[:5]))
    made, drawn = tmp_path / "made", tmp_path / "drawn"
    few = ["--steps", "2", "--guidance", "3"]
    told = shiva_command("fit", str(EMOJI), "--prompts", str(prompts), *few, "--output", str(made))
    assert "R² on held-out prompts" in told
    report = json.loads((made / "fit.json").read_text())
    assert len(report["r_squared"]) == 8
    assert report["settings"]["prompts"] == NAMES[:5]
    told = shiva_command(
        "generate", str(EMOJI), "fox", "--checkpoint", str(made), "--budget", "0.4", *few, "--output", str(drawn)
    )
    assert "Lattice on SD3Transformer2DModel" in told
    assert json.loads((drawn / "run.json").read_text())["summary"]["keep"] == pytest.approx(0.4, abs=0.01)


def shiva_command(*arguments: str) -> str:
    done = forked.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
