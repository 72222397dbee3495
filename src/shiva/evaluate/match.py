"""Bringing every method to the same true FLOPs, each by its own knob."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from shiva.checkpoint import ShivaCheckpoint
from shiva.core.method import MethodConfig
from shiva.evaluate.candidates import Candidate, slug
from shiva.evaluate.costs import Prices, read_cache, write_cache

TOLERANCE = 0.02
"""Share of dense FLOPs by which a method may miss the target: token counts are whole numbers, and some are rounded."""
ROUNDS = 7


def matched(prices: Prices, name: str, target: float) -> Candidate:
    """The candidate with its knob turned to a share of dense FLOPs; an error says why it cannot be."""
    candidate = prices.run.candidates[name]
    source = candidate.source()
    config = source.method_config if isinstance(source, ShivaCheckpoint) else source
    assert config is not None, "dense has nothing to turn"
    method = type(config).__name__
    path = prices.run.folder / "scores" / slug(name) / f"matched-{round(1000 * target)}.json"
    key = f"{prices.run.key(name)} {target}"
    found = read_cache(path, key)
    if found is None:
        found = nearest_options(config, candidate, prices, target)
        write_cache(path, key, found)
    if abs(found["share"] - target) <= TOLERANCE:
        return with_options(candidate, found["options"])
    if "flops" in config.either or config.turned(0.5) is not None:
        raise ValueError(f"{method} comes no nearer to {target:.1%} of dense FLOPs than {found['share']:.1%}")
    raise ValueError(
        f"{method} has no knob at inference and takes {found['share']:.1%} of dense FLOPs, not {target:.1%}; "
        "train it to that share"
    )


def nearest_options(config: MethodConfig, candidate: Candidate, prices: Prices, target: float) -> dict[str, Any]:
    """The options that bring a candidate nearest to a share of dense FLOPs, and the share they take it to."""
    if config.turned(0.5) is not None:
        return bisected(lambda at: config.turned(at) or {}, candidate, prices, target)
    options = {"budget": None, "flops": target} if "flops" in config.either else {}
    return {"options": options, "share": prices.share(with_options(candidate, options))}


def bisected(
    knob: Callable[[float], dict[str, Any]], candidate: Candidate, prices: Prices, target: float
) -> dict[str, Any]:
    """Bisection on priced FLOPs: the nearest of all positions tried."""
    tried: list[tuple[float, float]] = []

    def share(at: float) -> float:
        value = prices.share(with_options(candidate, knob(at)))
        tried.append((abs(value - target), at))
        return value

    low, high = 0.0, 1.0
    if share(high) < target:
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) > target else (low, middle)
    _, best = min(tried)
    options = json.loads(json.dumps(knob(best)))
    return {"options": options, "share": prices.share(with_options(candidate, options))}


def with_options(candidate: Candidate, found: dict[str, Any]) -> Candidate:
    return dataclasses.replace(candidate, options={**candidate.options, **found})
