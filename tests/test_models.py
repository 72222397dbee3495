"""What is supported, as the command, the page and an example from outside tell it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import diffusers
import pytest
import torch
from typer.testing import CliRunner

import shiva
from compatibility import TABLES, written
from shiva.backbones.base import _REGISTRY, REFUSED
from shiva.backbones.patterns import known
from shiva.cli import app

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "compatibility.md"
EXAMPLE = REPOSITORY / "examples" / "architecture_from_outside.py"


def test_every_known_class_is_one_of_diffusers() -> None:
    assert len(known()) >= 25
    assert not {entry.name for entry in known()} & REFUSED.keys()
    for name in [*REFUSED, *(entry.name for entry in known())]:
        assert hasattr(diffusers, name), name


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
