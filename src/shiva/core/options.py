"""Configs are plain dataclasses; an unknown key is refused with the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

REFUSALS = (ValueError, FileNotFoundError, ImportError)
"""What is raised where a setting, a file or a package is at fault, with the fix in the message; all else is a bug."""


def unknown_key(key: str, known: Iterable[str], owner: str) -> str:
    """The error text for a key that `owner` does not have."""
    known = sorted(known)
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"
    return f"{owner} has no option {key!r}; {hint}"


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass from a mapping, refusing unknown keys by name."""
    known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(unknown_key(key, known, cls.__name__))
    return cls(**values)


def replace(config: T, changes: Mapping[str, Any]) -> T:
    """A copy of the dataclass with some fields changed, refusing unknown keys by name."""
    current = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return build(type(config), {**current, **changes}) if changes else config


def share(name: str, value: float, *, zero: bool = False) -> float:
    """Check a share of tokens: above 0 (or from 0, with `zero`) and at most 1."""
    low_ok = value >= 0 if zero else value > 0
    if not low_ok or not value <= 1:
        limit = "at least 0" if zero else "above 0"
        side = "above 1" if value > 1 else ("not a number" if value != value else f"not {limit}")
        raise ValueError(f"{name}={value} is {side}; pass a share {limit} and at most 1")
    return float(value)


def choice(name: str, value: str, allowed: Iterable[str]) -> str:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; pass one of {', '.join(map(repr, allowed))}")
    return value
