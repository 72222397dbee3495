"""A recipe file as nested mappings; it may extend another, so that runs to compare differ only where they say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shiva.core.options import unknown_key
from shiva.training.needs import need
from shiva.training.tree import merge

EXTENDS = "extends"


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe file, laid over those of the file that `extends` names, relative to its own folder.

    Mappings are merged and all else is replaced; a `method` with a name replaces the other's with all its options. One
    level only: what is extended is whole in itself.
    """
    values = read_mapping(path)
    if EXTENDS not in values:
        return values
    base_path = path.parent / str(values.pop(EXTENDS))
    base = read_mapping(base_path)
    if EXTENDS in base:
        raise ValueError(
            f"{path} extends {base_path}, which extends {base[EXTENDS]!r}; extend a recipe that is whole in itself"
        )
    if "name" in (values.get("method") or {}):
        base.pop("method", None)
    return lay_over(base, values)


def read_mapping(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no recipe at {path}; see the recipes/ folder for examples")
    values = need("yaml").safe_load(path.read_text()) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; a recipe is a mapping")
    return values


def lay_over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes merged in; a mapping of stages changes those of a list by their names."""
    stages, given = values.get("stages"), changes.get("stages")
    if isinstance(stages, list) and isinstance(given, Mapping):
        changes = {**changes, "stages": change_stages(stages, given)}
    return merge(values, changes)


def change_stages(stages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A list of stages with fields changed by the stage's name."""
    names = [stage.get("name", "") for stage in stages]
    for name in given:
        if name not in names:
            raise ValueError(unknown_key(name, names, "stages"))
    return [{**stage, **given.get(stage.get("name", ""), {})} for stage in stages]
