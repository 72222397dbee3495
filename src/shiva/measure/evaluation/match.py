"""Bringing every method to the same true FLOPs, each by its own knob."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from shiva.core.method import MethodConfig
from shiva.measure.evaluation.cost import Prices, read_cache, write_cache
from shiva.measure.evaluation.lineup import Contender, slug

TOLERANCE = 0.02
"""Share of dense FLOPs by which a method may miss the target: token counts are whole numbers, and some are rounded."""
ROUNDS = 7

Knob = Callable[[Any, float], dict[str, Any]]
"""From a method's config and a position (0 as gentle as can be, 1 as strong) to the options that put it there."""


def keep(config: Any, at: float) -> dict[str, Any]:
    return {"keep": 1.0 - 0.95 * at}


def merged(most: float) -> Knob:
    return lambda config, at: {"ratio": most * at}


def sdtm(config: Any, at: float) -> dict[str, Any]:
    """Its range narrows with its middle, as in its presets, so that it stays between 0 and what a window can lose."""
    spread = config.deviation / config.ratio if config.ratio else 0.0
    ratio = 0.74 * at / (1 + spread)
    return {"ratio": ratio, "deviation": spread * ratio}


def sparsedit(config: Any, at: float) -> dict[str, Any]:
    scale = 0.97 * at / max(config.rates)
    return {"rates": [rate * scale for rate in config.rates]}


KNOBS: dict[str, Knob] = {
    "ToMeSD": merged(0.75),
    "ToFu": merged(0.75),
    "IBTM": merged(0.75),
    "ToMA": merged(0.93),
    "SDTM": sdtm,
    "NeuralSort": keep,
    "SoftTopK": keep,
    "LapSum": keep,
    "DyDiT": lambda config, at: {"threshold": min(max(at, 1e-4), 1 - 1e-4)},
    "SparseDiT": sparsedit,
}
"""What can be turned at inference. DiffCR's ratios are learned, and bins: another share means another training."""


def matched(prices: Prices, name: str, target: float) -> Contender:
    """The contender with its knob turned to a share of dense FLOPs; an error says why it cannot be."""
    contender = prices.run.contenders[name]
    source = contender.source()
    config = source if isinstance(source, MethodConfig) else source.method_config
    method = type(config).__name__
    path = prices.run.folder / "scores" / slug(name) / f"matched-{round(1000 * target)}.json"
    key = f"{prices.run.key(name)} {target}"
    found = read_cache(path, key)
    if found is None:
        found = brought(config, contender, prices, target)
        write_cache(path, key, found)
    if abs(found["share"] - target) <= TOLERANCE:
        return with_options(contender, found["options"])
    if method == "Shiva" or method in KNOBS:
        raise ValueError(f"{method} comes no nearer to {target:.1%} of dense FLOPs than {found['share']:.1%}")
    raise ValueError(
        f"{method} has no knob at inference and takes {found['share']:.1%} of dense FLOPs, not {target:.1%}; "
        "train it to that share"
    )


def brought(config: MethodConfig, contender: Contender, prices: Prices, target: float) -> dict[str, Any]:
    """The options that bring a contender nearest to a share of dense FLOPs, and the share they take it to."""
    method = type(config).__name__
    if method in KNOBS:
        return turn(lambda at: KNOBS[method](config, at), contender, prices, target)
    options = {"budget": None, "flops": target} if method == "Shiva" else {}
    return {"options": options, "share": prices.share(with_options(contender, options))}


def turn(
    knob: Callable[[float], dict[str, Any]], contender: Contender, prices: Prices, target: float
) -> dict[str, Any]:
    """Bisection on priced FLOPs: the nearest of all positions tried."""
    tried: list[tuple[float, float]] = []

    def share(at: float) -> float:
        value = prices.share(with_options(contender, knob(at)))
        tried.append((abs(value - target), at))
        return value

    low, high = 0.0, 1.0
    if share(high) < target:
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) > target else (low, middle)
    _, best = min(tried)
    options = json.loads(json.dumps(knob(best)))
    return {"options": options, "share": prices.share(with_options(contender, options))}


def with_options(contender: Contender, found: dict[str, Any]) -> Contender:
    return dataclasses.replace(contender, options={**contender.options, **found})
