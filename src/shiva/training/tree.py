"""Nested mappings to nested dataclasses, with types checked and unknown keys refused by name."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from shiva.core.options import unknown_key

T = TypeVar("T")


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `changes` laid over it; mappings are merged, all else is replaced."""
    result = {key: merge(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def build_tree(cls: type[T], values: Any, path: str) -> T:
    """An instance of a dataclass whose fields may be dataclasses; `path` is where errors say it is."""
    owner = path or "the recipe"
    if not isinstance(values, Mapping):
        raise TypeError(f"{owner} is {values!r}; give a mapping of options")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(unknown_key(str(key), known, owner))
    return cls(**{key: convert(hints[key], value, f"{path}.{key}".lstrip(".")) for key, value in values.items()})


def convert(hint: Any, value: Any, path: str) -> Any:
    """A value as the type its field asks for; YAML reads 3e-4 as text, and lists for tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build_tree(hint, value, path)  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return convert(next(a for a in arguments if a is not type(None)), value, path)
    if origin is tuple:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise TypeError(f"{path}={value!r} is not a list; write [{value}]")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise TypeError(f"{path} has {len(value)} values; it takes {len(kinds)}")
        return tuple(convert(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{path}={value!r} is not a mapping")
        return {str(k): convert(arguments[1], v, f"{path}.{k}") for k, v in value.items()}
    if hint is Any:
        return value
    return scalar(hint, value, path)


def scalar(hint: type, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif hint is int and isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value):
        return int(value)
    elif (hint is bool and isinstance(value, bool)) or (hint is str and isinstance(value, str)):
        return value
    names = {float: "number", int: "whole number", bool: "true or false", str: "text"}
    raise TypeError(f"{path}={value!r} is not a {names.get(hint, hint.__name__)}")
