"""The walks of docs/architecture.md name functions that exist, and the house keeps its own rules."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import shiva
import shiva.methods
from shiva.core.method import Method, MethodConfig

from tiny import make_sd3

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "shiva").rglob("*.py"))
NAMED = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / "docs" / "architecture.md").read_text())


def defined(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_the_walks_are_there() -> None:
    assert len(NAMED) >= 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_function_exists(file: str, name: str) -> None:
    assert name in defined(ROOT / "src" / "shiva" / file)


def test_no_state_is_kept_under_a_string() -> None:
    keyed = re.compile(r"ctx\.(run|now)(\.\w+\()?[\[(][\"']")
    assert not [path for path in SOURCES if keyed.search(path.read_text())]


def test_a_method_has_at_most_eight_things_to_override() -> None:
    ours = {name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert len(ours) <= 8
    assert "Start with `reduction`" in (Method.__doc__ or "")


def test_bases_of_configs_are_not_methods() -> None:
    assert "Shiva" in MethodConfig.known
    assert not [name for name in MethodConfig.known if name.endswith("Options")]
    with pytest.raises(ValueError, match="no method 'PrunerOptions'"):
        shiva.attach(make_sd3(), "PrunerOptions")


def test_the_public_names_are_documented() -> None:
    undocumented = [name for name in shiva.__all__ if name != "__version__" and not getattr(shiva, name).__doc__]
    assert not undocumented
