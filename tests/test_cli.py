"""The command line, as a person meets it: real subprocesses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from shiva.cli import main

REPOSITORY = Path(__file__).parent.parent
EMOJI = REPOSITORY / "models" / "emoji"


def shiva(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shiva", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=REPOSITORY)


def test_help_names_every_command() -> None:
    result = shiva("--help")
    assert result.returncode == 0
    for command in ("demo", "generate", "train", "bench", "report", "serve"):
        assert command in result.stdout


def test_a_mistake_is_one_line_with_the_fix() -> None:
    result = shiva("bench", "step", "--model", "sd4")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "sd3-medium" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    result = shiva("generate", tmp_path / "nowhere", "a fox", "--output", tmp_path)
    assert result.returncode == 2
    assert "does not load as a diffusers pipeline" in result.stderr


WRONG_CALLS = [
    (("--budget", "0.5"), "--budget 0.5 needs something to keep it"),
    (("--method", "ToMeSD", "--budget", "0.5"), "ToMeSD has no option 'budget'"),
    (("--dtype", "float8"), "dtype='float8' is unknown"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_CALLS, ids=[message for _, message in WRONG_CALLS])
def test_generate_refuses_what_does_not_fit(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = shiva("generate", EMOJI, "a fox", *options, "--output", tmp_path)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


class UNetPipeline:
    def to(self, device: str) -> None:
        pass


def test_a_method_that_a_pipeline_cannot_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shiva.report.command.load_with_arguments", lambda *given: (UNetPipeline(), {}))
    call = ("generate", "a U-Net", "a fox", "--method", "ToMeSD", "--output", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["shiva", *call])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "error: UNetPipeline has no transformer; pass a DiT pipeline" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_writes_images_and_what_was_spared(tmp_path: Path) -> None:
    method = ("--method", "Shiva", "--preset", "sweep", "--budget", "0.4", "--dtype", "bfloat16")
    result = shiva("generate", EMOJI, "red apple", "a fox", *method, "--steps", "3", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert Image.open(tmp_path / "000-red-apple.png").size == (64, 64)
    assert Image.open(tmp_path / "001-a-fox.png").size == (64, 64)
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["summary"]["flops_share"] < 0.6
    assert report["settings"]["dtype"] == "bfloat16"
    assert report["settings"]["prompts"] == ["red apple", "a fox"]


@pytest.mark.slow
def test_demo_writes_a_page_that_needs_no_network(tmp_path: Path) -> None:
    lineup = tmp_path / "methods.yaml"
    lineup.write_text(
        "contenders:\n"
        "  ToMeSD: {method: ToMeSD}\n"
        "  LapSum: {checkpoint: models/nowhere, train: shiva train mine.yaml}\n"
        "  Shiva 60: {checkpoint: models/shiva/60}\n"
    )
    result = shiva("demo", "--methods", lineup, "--steps", "3", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "index.html").as_uri() in result.stdout
    assert "left out: LapSum: models/nowhere is not here; train it: shiva train mine.yaml" in result.stdout
    page = (tmp_path / "index.html").read_text()
    assert "octopus" in page
    assert "How Shiva 60 scored the tokens" in page
    assert page.count("data:image/png;base64") >= 24
    assert "http" not in page
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
