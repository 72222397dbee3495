"""Configs are plain dataclasses whose annotations say what each option may be; here they are held to them.

    budget: Ratio | None = None          # Annotated[float, Range(0, 1, above=True)]
    rule: Literal["mlerp", "mean"] = "mlerp"

A wrong type, a number out of range or not finite, an unknown name or key is refused, with the value and the fix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")

REFUSALS = (ValueError, FileNotFoundError, ImportError)
"""What is raised where a setting, a file or a package is at fault, with the fix in the message; all else is a bug."""
KINDS: dict[Any, tuple[Any, str]] = {
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "a whole number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
    Any: (object, "anything"),
}
LARGEST = 2**63 - 1
"""Of whole numbers: what a tensor, a seed or a file can hold."""


# -- what an option may be ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number may be, in an annotation: `Annotated[int, Range(1)]`."""

    low: float
    high: float = math.inf
    above: bool = False
    """The lower end itself is left out."""

    def check(self, name: str, value: float) -> float:
        low_ok = value > self.low if self.above else value >= self.low
        if not low_ok or value > self.high:
            at_least = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
            at_most = "" if self.high == math.inf else f" and at most {self.high:g}"
            side = f"above {self.high:g}" if low_ok else f"not {at_least.removeprefix('of ')}"
            kind = "share" if (self.low, self.high) == (0, 1) else "number"
            raise ValueError(f"{name}={value!r} is {side}; pass a {kind} {at_least}{at_most}")
        return value


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Size = Annotated[int, Range(1, 1 << 16)]
"""A side of a weight, or a number of them: more than any model has is a mistake, or takes all memory."""
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Ratio = Annotated[float, Range(0, 1, above=True)]


def unknown_key(key: str, known: Iterable[str], owner: str) -> str:
    """The error text for a key that `owner` does not have."""
    known = sorted(known)
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known) or 'none, leave it out'}"
    return f"{owner} has no option {key!r}; {hint}"


def choice(name: str, value: str, allowed: Iterable[str]) -> str:
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; pass one of {', '.join(map(repr, allowed))}")
    return value


def share(name: str, value: float) -> float:
    """Check a share of tokens: above 0 and at most 1."""
    return float(fitted(Ratio, value, name))


# -- dataclasses -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def hints_of(cls: Any) -> dict[str, Any]:
    """Annotations of a dataclass by field; those of a class inside a function, which has no names to look up, allow
    anything."""
    names = [field.name for field in dataclasses.fields(cls)]
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:
        return dict.fromkeys(names, Any)
    return {name: hints[name] for name in names}


def build(cls: type[T], values: Any, path: str = "", *, text: bool = False, others: bool = False) -> T:
    """An instance of a dataclass, whose fields may be dataclasses, from a mapping; `path` is where errors say it is.

    With `text`, as of YAML, some values are meant otherwise: a number written 3e-4, a whole one written 2.0. With
    `others`, keys that it does not know are left alone.
    """
    owner = path or cls.__name__
    if not isinstance(values, Mapping):
        raise ValueError(f"{owner} is {values!r}; give a mapping of options")
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    if others:
        values = {key: value for key, value in values.items() if key in known}
    for key in values:
        if key not in known:
            raise ValueError(unknown_key(str(key), known, owner))
    for name, f in known.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{owner} has no {name!r}; give it one")
    hints = hints_of(cls)  # type: ignore[arg-type]
    return cls(**{key: fitted(hints[key], value, joined(path, key), text) for key, value in values.items()})


def replace(config: T, changes: Mapping[str, Any]) -> T:
    """A copy of the dataclass with some fields changed, refusing unknown keys by name."""
    current = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    for key in changes:
        if key not in current:
            raise ValueError(unknown_key(str(key), current, type(config).__name__))
    return type(config)(**{**current, **changes}) if changes else config


def conform(instance: Any, path: str = "") -> None:
    """Hold a dataclass to its annotations: lists become the tuples they stand for, what does not fit is refused."""
    for name, hint in hints_of(type(instance)).items():  # type: ignore[arg-type]
        object.__setattr__(instance, name, fitted(hint, getattr(instance, name), joined(path, name)))


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `changes` laid over it; mappings are merged, all else is replaced."""
    result = {key: merge(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


# -- values ------------------------------------------------------------------------------------------


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def fitted(hint: Any, value: Any, path: str, text: bool = False) -> Any:
    """The value as its annotation has it, refused where it does not allow it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = fitted(arguments[0], value, path, text)
        for limit in (part for part in arguments[1:] if isinstance(part, Range)):
            limit.check(path, value)
        return value
    if origin in (types.UnionType, typing.Union):
        return fitted_union(arguments, value, path, text)
    if origin is Literal:
        return choice(path, value, arguments)
    if dataclasses.is_dataclass(hint):
        return fitted_dataclass(hint, value, path, text)
    if origin in (tuple, list) or (hint is Any and isinstance(value, (tuple, list))):
        return fitted_list(origin or type(value), arguments, value, path, text)
    if origin is dict or (hint is Any and isinstance(value, Mapping)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}={value!r} is not a mapping; write {{name: value}}")
        kind = arguments[1] if arguments else Any
        return {str(key): fitted(kind, part, f"{path}.{key}", text) for key, part in value.items()}
    return fitted_scalar(hint, value, path, text)


def fitted_union(kinds: tuple[Any, ...], value: Any, path: str, text: bool) -> Any:
    if value is None and type(None) in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not type(None))
    for kind in others:
        with contextlib.suppress(ValueError):
            return fitted(kind, value, path, text)
    return fitted(last, value, path, text)


def fitted_dataclass(hint: Any, value: Any, path: str, text: bool) -> Any:
    if isinstance(value, Mapping):
        return build(hint, value, path, text=text)
    if not isinstance(value, hint):
        raise ValueError(f"{path} is {value!r}; give a mapping of options")
    conform(value, path)
    return value


def fitted_list(origin: Any, arguments: tuple[Any, ...], value: Any, path: str, text: bool) -> Any:
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{path}={value!r} is not a list; write [{value}]")
    fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis
    if fixed and len(value) != len(arguments):
        raise ValueError(f"{path}={value!r} has {len(value)} values; give {len(arguments)}")
    kinds = arguments if fixed else [arguments[0] if arguments else Any] * len(value)
    parts = [fitted(kind, part, f"{path}[{i}]", text) for i, (kind, part) in enumerate(zip(kinds, value, strict=True))]
    return tuple(parts) if origin is tuple else parts


def fitted_scalar(hint: Any, value: Any, path: str, text: bool) -> Any:
    if text and hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    elif text and hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and not isinstance(value, numbers.Integral) and not math.isfinite(value):
        raise ValueError(f"{path}={value!r} is not finite; pass a number that is")
    if is_number and isinstance(value, numbers.Integral) and abs(int(value)) > LARGEST:
        raise ValueError(f"{path} is a whole number of {len(str(value))} digits; pass a smaller one")
    allowed, name = KINDS.get(hint, (hint, f"a {getattr(hint, '__name__', hint)}"))
    if isinstance(allowed, type) and (
        not isinstance(value, allowed) or (isinstance(value, bool) and hint in (int, float))
    ):
        raise ValueError(f"{path}={value!r} is not {name}; pass {'one' if name.startswith('a ') else name}")
    return hint(value) if is_number and not isinstance(value, (int, float)) else value  # numpy's numbers are ours now
