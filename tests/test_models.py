"""What is supported, as the command, the page and an example from outside tell it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import diffusers
import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

import releases
import shiva
from compatibility import TABLES, written
from shiva.backbones.base import _REGISTRY, REFUSED
from shiva.backbones.known import SINCE, absent, known
from shiva.cli import app

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "compatibility.md"
OLDEST = releases.allowed()[0]
EXAMPLE = REPOSITORY / "examples" / "architecture_from_outside.py"


def test_every_known_class_is_one_of_diffusers() -> None:
    assert len(known()) >= 25
    assert not {entry.name for entry in known()} & REFUSED.keys()
    installed = Version(diffusers.__version__)
    for name in [*REFUSED, *(entry.name for entry in known())]:
        assert hasattr(diffusers, name) == (installed >= Version(SINCE.get(name, OLDEST))), name


def test_the_command_names_the_release_that_a_class_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(absent(entry.name) for entry in known() if hasattr(diffusers, entry.name))
    monkeypatch.setattr(diffusers, "__version__", "0.40.0")
    monkeypatch.setattr("shiva.backbones.known.dir", lambda module: ["SD3Transformer2DModel"], raising=False)
    result = CliRunner().invoke(app, ["models"], env={"COLUMNS": "200"})
    assert "needs diffusers 0.41; 0.40.0 is installed" in result.stdout


def test_the_command_lists_classes_and_reasons() -> None:
    result = CliRunner().invoke(app, ["models"], terminal_width=200)
    assert result.exit_code == 0
    assert "WanTransformer3DModel" in result.stdout.replace("\n", "")
    assert "is refused" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_current(table: str) -> None:
    """Write it anew with: python tests/compatibility.py --write."""
    assert written(PAGE.read_text(), [table]) == PAGE.read_text()


def test_every_release_that_is_allowed_was_tried_and_none_failed() -> None:
    place = releases.PLACE.search(PAGE.read_text())
    assert place is not None
    rows = re.findall(r"^\| (0\.\d+)\.\d+ \| \S+ \| (\d+) \| (\d+) \|", place[0], re.MULTILINE)
    assert [release for release, _, _ in rows] == releases.allowed()
    assert all(int(passed) > 100 and failed == "0" for _, passed, failed in rows)


def test_a_row_is_read_from_what_pytest_prints() -> None:
    skips = "SKIPPED [3] tests/tiny_images.py:23: diffusers 0.40.0 has no Krea2Transformer2DModel\n"
    row = releases.read(("0.40.0", "5.0.0"), skips + "1 failed, 20 passed, 3 skipped, 1 error in 61.02s (0:01:01)\n")
    assert (row.passed, row.failed, row.missing) == (20, 2, ("Krea2Transformer2DModel",))
    assert releases.read(("0.40.0", "5.0.0"), "ERROR: no such file").passed == 0
    assert "| 0.40.0 | 5.0.0 | 20 | 2 | `Krea2Transformer2DModel` |" in releases.table([row])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    stranger = type(name, (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match="cannot be reduced"):
        shiva.attach(stranger, shiva.ToMeSD())


def test_a_class_from_outside_is_an_entry_of_under_twenty_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = EXAMPLE.read_text()
    entry = re.search(r"^COGVIEW3 = .*?^\)$", source, re.DOTALL | re.MULTILINE)
    assert entry is not None
    assert len(entry[0].splitlines()) < 20
    monkeypatch.setattr("shiva.backbones.base._REGISTRY", dict(_REGISTRY))
    spec = importlib.util.spec_from_file_location("architecture_from_outside", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main()
    assert "whole run" in capsys.readouterr().out
    model = example.tiny()
    sizes = {name: torch.zeros(1, 2) for name in ("original_size", "target_size", "crop_coords")}
    call = {
        "hidden_states": torch.randn(1, 4, 14, 18),
        "encoder_hidden_states": torch.randn(1, 5, 8),
        "timestep": torch.tensor([500.0]),
        **sizes,
    }
    with torch.no_grad():
        dense = model(**call)[0]
        with shiva.attach(model, shiva.Shiva(budget=1.0)):
            assert torch.equal(model(**call)[0], dense)
