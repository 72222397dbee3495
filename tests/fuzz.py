"""Seeded mutations of valid inputs: of nested values (what YAML and JSON say) and of a file's bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 10**6, 2**40, 10**30, -(2**63), 0.0, 0.5, 1.0, 1.5, -0.5, 1e-300, 1e300,
    float("nan"), float("inf"), -float("inf"), "", "x", "0.5", "3e-4", "\0", "../..", "²", "groups-0", "groups-²",
    [], [0], [0.5], [-1], [None], [[0]], {}, {"x": 1}, [10**30], "a" * 200,
)  # fmt: skip
"""What nobody meant: wrong types, ends of ranges, numbers that are none, names that mean something elsewhere."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a nested value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [p for key, part in inside for p in ((*path, key), *places(part, (*path, key)))]


def mutated(rng: random.Random, value: Any, touched: list[str]) -> Any:
    """A copy with one to three places replaced, removed, misspelt or added; `touched` gets the names on their way."""
    value = copy.deepcopy(json.loads(json.dumps(value)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = places(value)
        if not known:
            value = rng.choice(HOSTILE)
            touched += value if isinstance(value, dict) else ()
            return value
        *path, last = rng.choice(known)
        touched += [key for key in (*path, last) if isinstance(key, str)]
        holder = value
        for key in path:
            holder = holder[key]
        change = rng.randrange(8)
        if change == 0:
            del holder[last]
        elif change == 1 and isinstance(holder, dict):
            holder[f"{last}{rng.choice('sx_')}"] = holder.pop(last)
        elif change == 2 and isinstance(holder[last], (int, float)) and not isinstance(holder[last], bool):
            holder[last] = holder[last] * rng.choice((-1, 2, 10, 1000, 0.5))
        else:
            holder[last] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """A copy cut short, with bytes changed, added or repeated."""
    change, at = rng.randrange(5), rng.randrange(max(1, len(data)))
    if change == 0:
        return data[:at]
    if change == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + data[at:]
    if change == 2:
        return data + data[at : at + 64]
    some = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 64))):
        near = rng.randrange(min(len(some), 600)) if change == 3 else rng.randrange(len(some))
        some[near] = rng.randrange(256)
    return bytes(some)
