"""Protocols, each one function: who takes part, which images it needs, which tables it fills.

These are for any model; a checkout has those of the paper's tables too (`reproduce/protocols.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from shiva.bench.table import Table
from shiva.checkpoint import ShivaCheckpoint
from shiva.core.method import MethodConfig
from shiva.core.options import REFUSALS
from shiva.evaluate import tables
from shiva.evaluate.candidates import DENSE, Candidate, slug
from shiva.evaluate.checkout import reproduce
from shiva.evaluate.costs import Prices, cached
from shiva.evaluate.evaluation import Comparison, Evaluation
from shiva.evaluate.images import Run
from shiva.evaluate.rivals import CacheName

TOLERANCE = 0.02
"""Share of dense FLOPs by which a method may miss the target: token counts are whole numbers, and some are rounded."""
ROUNDS = 7


def matched(prices: Prices, name: str, target: float) -> Candidate:
    """The candidate with its knob turned to a share of dense FLOPs; an error says why it cannot be."""
    candidate = prices.run.candidates[name]
    source = candidate.source()
    config = source.method_config if isinstance(source, ShivaCheckpoint) else source
    if config is None or candidate.is_rival:
        raise ValueError("only a method on dense's own steps can be turned; --protocol main and floor have whole runs")
    method = type(config).__name__
    path = prices.run.folder / "scores" / slug(name) / f"matched-{round(1000 * target)}.json"
    key = f"{prices.run.key(name)} {target}"
    found = cached(path, key, lambda: nearest_options(config, candidate, prices, target))
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


class Found(NamedTuple):
    """What a protocol found out."""

    tables: list[Table]
    """For people."""
    figures: dict[str, Any]
    """The same, for programs."""
    detail: str = ""
    """What its file's name has after the protocol's, where one protocol fills several."""


Protocol = Callable[[Evaluation], Found | None]


def compared(evaluation: Evaluation, protocol: str, run: Run, seeds: tuple[int, ...], least: int = 1) -> Comparison:
    """The protocol's candidates with all their images; an error if too few of them can run."""
    wanted = evaluation.candidates.of(protocol)
    names = evaluation.complete(run, wanted, seeds)
    absent = {name: run.skipped[name] for name in wanted if name not in names}
    if len(names) < least:
        reasons = "; ".join(f"{name}: {why}" for name, why in absent.items())
        raise ValueError(f"--protocol {protocol} needs {least} candidates, {len(names)} can run here ({reasons})")
    return Comparison(run, names, seeds, absent)


def main(evaluation: Evaluation) -> Found | None:
    """All methods: quality, FLOPs, latency, speed-up."""
    return overview(evaluation, "main", "Quality of every method", evaluation.rivals)


def overview(evaluation: Evaluation, protocol: str, title: str, rivals: bool = False) -> Found | None:
    """Quality and cost of a protocol's candidates, perhaps beside what every user has for nothing."""
    shown = compared(evaluation, protocol, evaluation.run(), evaluation.seeds)
    if rivals:
        shown = beside_rivals(evaluation, shown)
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, shown, title)
    costs, prices = tables.costs(evaluation, shown)
    return Found([quality, costs], {"quality": figures, "cost": prices})


def beside_rivals(evaluation: Evaluation, shown: Comparison) -> Comparison:
    """With what every user has for nothing: fewer steps of the dense model, at each method's FLOPs, and caches.

    The user's own candidate of such a name takes its place.
    """
    run, whole = shown.run, evaluation.settings.steps

    def counts() -> list[int]:
        own = [name for name in shown.names if not run.candidates[name].is_rival]
        nearest = {round(evaluation.cost(run, name).share * whole) for name in own}
        return sorted((count for count in nearest if 0 < count < whole), reverse=True)

    steps = {f"{count} steps": Candidate(steps=count) for count in evaluation.workers.found_by_main(counts)}
    ways = {**steps, **{cache: Candidate(cache=cache) for cache in get_args(CacheName)}}
    named = {slug(name): name for name in run.candidates}
    rivals = {named.get(slug(name), name): way for name, way in ways.items()}
    run.candidates = {**rivals, **run.candidates}
    names = evaluation.complete(run, list(rivals), shown.seeds)
    absent = {name: run.skipped[name] for name in rivals if name not in names}
    every = list(dict.fromkeys([*shown.names, *names]))
    return dataclasses.replace(shown, names=every, absent={**shown.absent, **absent})


def floor(evaluation: Evaluation) -> Found | None:
    """Where no step can be spared: every method beside dense runs of fewer steps, and how far above their line."""
    shown = compared(evaluation, "floor", evaluation.run(), evaluation.seeds, least=2)
    if not evaluation.workers.main:
        return None
    steps = evaluation.settings.steps
    quality, figures = tables.quality(evaluation, shown, f"Every method at {steps} steps")
    above, distances = tables.above_the_line(evaluation, shown)
    costs, prices = tables.costs(evaluation, shown)
    return Found([above, quality, costs], {"above": distances, "quality": figures, "cost": prices})


def match(evaluation: Evaluation) -> Found | None:
    """Every method at the same true FLOPs: quality, cost, and where the first candidate stands."""
    run, names = evaluation.run(), [name for name in evaluation.candidates.of("matched") if name != DENSE]
    if not names:
        raise ValueError(f"--protocol matched needs a candidate beside {DENSE}; name some in --methods")
    able = run.claim(names)
    target, turned, refused = evaluation.workers.found_by_main(lambda: search(evaluation, run, names[0], able))
    run.candidates |= dict(turned.values())
    wanted = {named: name for name, (named, _) in turned.items()}
    whole = evaluation.complete(run, list(wanted), evaluation.seeds)
    failed = {name: run.skipped[named] for named, name in wanted.items() if named not in whole}
    absent = {name: why for name in names if (why := {**run.skipped, **refused, **failed}.get(name))}
    reduced = Comparison(run, whole, evaluation.seeds, absent)
    shown = dataclasses.replace(reduced, names=[*([DENSE] if DENSE in run.candidates else []), *whole])
    if not shown.names:
        reasons = "; ".join(f"{name}: {why}" for name, why in absent.items())
        raise ValueError(f"--protocol matched brings nobody to {target:.1%} of dense FLOPs ({reasons}); name others")
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, shown, f"Every method at {target:.1%} of dense FLOPs")
    costs, prices = tables.costs(evaluation, shown)
    filled, found = [quality, costs], {"target": target, "quality": figures, "cost": prices}
    if whole and wanted[whole[0]] == names[0]:
        verdict, found["verdict"] = tables.verdict(evaluation, reduced)
        filled.insert(0, verdict)
    return Found(filled, found, f"{100 * target:.1f}".removesuffix(".0"))


def search(
    evaluation: Evaluation, run: Run, aim: str, names: list[str]
) -> tuple[float, dict[str, tuple[str, Candidate]], dict[str, str]]:
    """The share of dense FLOPs to match, who was turned to it under which name, and why others could not be."""
    target = evaluation.target
    if target is None:
        if aim not in names:
            raise ValueError(f"{aim} gives the FLOPs to match, but {run.skipped[aim]}; or pass --flops SHARE")
        target = evaluation.prices(run).of(aim).share
    turned: dict[str, tuple[str, Candidate]] = {}
    refused: dict[str, str] = {}
    for name in names:
        evaluation.progress(f"{name}: finding {target:.1%} of dense FLOPs")
        asis, stays = run.candidates[name], name == aim and evaluation.target is None
        try:
            found = asis if stays else matched(evaluation.prices(run, 1), name, target)
        except REFUSALS as error:
            refused[name] = str(error)
            continue
        turned[name] = (name if found == asis else f"{name} at {target:.1%}"), found
    return target, turned, refused


def protocols() -> dict[str, Protocol]:
    """By name: the paper's in a checkout, with ours among them; else ours."""
    papers = reproduce("protocols")
    return {"main": main, "matched": match, "floor": floor} if papers is None else papers.PROTOCOLS
