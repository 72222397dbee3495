"""The paper's protocols, each one function: who takes part, which images it needs, which tables it fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from shiva.core.options import REFUSALS
from shiva.measure.evaluation import comparisons, paper, tables
from shiva.measure.evaluation.evaluation import Cast, Evaluation
from shiva.measure.evaluation.lineup import DENSE, Contender
from shiva.measure.evaluation.match import matched
from shiva.measure.evaluation.run import Run
from shiva.measure.sheet import Sheet

FIVE = (0, 1, 2, 3, 4)


class Found(NamedTuple):
    """What a protocol found out."""

    sheets: list[Sheet]
    """For people."""
    figures: dict[str, Any]
    """The same, for programs."""
    detail: str = ""
    """What its file's name has after the protocol's, where one protocol fills several."""


def standing(evaluation: Evaluation, protocol: str, run: Run, seeds: tuple[int, ...], least: int = 1) -> Cast:
    """The protocol's cast with all its images; an error if too few of it can run."""
    wanted = evaluation.lineup.cast(protocol)
    names = evaluation.generate(run, wanted, seeds)
    absent = {name: run.skipped[name] for name in wanted if name not in names}
    if len(names) < least:
        reasons = "; ".join(f"{name}: {why}" for name, why in absent.items())
        raise ValueError(f"--protocol {protocol} needs {least} contenders, {len(names)} can run here ({reasons})")
    return Cast(run, names, seeds, absent)


def main(evaluation: Evaluation) -> Found | None:
    """All methods: quality, FLOPs, latency, speed-up."""
    return overview(evaluation, "main", "Quality of every method")


def points(evaluation: Evaluation) -> Found | None:
    """Operating points of a few checkpoints, most of them by shifting a table to another budget."""
    return overview(evaluation, "points", "Operating points")


def overview(evaluation: Evaluation, protocol: str, title: str) -> Found | None:
    cast = standing(evaluation, protocol, evaluation.run(), evaluation.seeds)
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, cast, title)
    costs, prices = tables.costs(evaluation, cast)
    theirs = paper.main_sheet([cast.run.contenders[name].paper for name in cast.names])
    return Found([quality, costs, *([theirs] if theirs.rows else [])], {"quality": figures, "cost": prices})


def transfer(evaluation: Evaluation) -> Found | None:
    """A table shifted to another budget against a checkpoint trained for it, paired."""
    return compare(evaluation, "transfer", "Transfer against direct training", paper.transfer_sheet())


def ratio(evaluation: Evaluation) -> Found | None:
    """One ratio everywhere against the learned table, at the same mean keep."""
    return compare(evaluation, "ratio", "Fixed against adaptive ratio", paper.ratio_sheet())


def int8(evaluation: Evaluation) -> Found | None:
    """INT8 feed-forward layers in some blocks."""
    return compare(evaluation, "int8", "INT8 by its scope", paper.int8_sheet())


def compare(evaluation: Evaluation, protocol: str, title: str, theirs: Sheet) -> Found | None:
    cast = standing(evaluation, protocol, evaluation.run(), evaluation.seeds, least=2)
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, cast, title)
    pairs, differences = comparisons.paired(evaluation, cast, f"{title}, paired")
    return Found([quality, pairs, theirs], {"quality": figures, "paired": differences})


def seeds(evaluation: Evaluation) -> Found | None:
    """Five matched seeds: differences seed by seed."""
    chosen = evaluation.seeds if len(evaluation.seeds) > 1 else FIVE
    cast = standing(evaluation, "seeds", evaluation.run(), chosen, least=2)
    if not evaluation.workers.main:
        return None
    sheets, figures = comparisons.by_seed(evaluation, cast)
    told = {"reference": cast.names[0], "seeds": list(chosen), "paired": figures}
    return Found([*sheets, paper.seeds_sheet()], told)


def categories(evaluation: Evaluation) -> Found | None:
    """Paired differences in each category; our symbols are the paper's logo."""
    cast = standing(evaluation, "categories", evaluation.run(), evaluation.seeds, least=2)
    if not evaluation.workers.main:
        return None
    found = {name: comparisons.by_category(evaluation, cast, name) for name in cast.names[1:]}
    sheets = [sheet for sheet, _ in found.values()]
    figures = {name: figures for name, (_, figures) in found.items()}
    return Found([*sheets, paper.categories_sheet()], {"reference": cast.names[0], "paired": figures})


def heldout(evaluation: Evaluation) -> Found | None:
    """Prompts that were not trained on, and other resolutions, without training again."""
    variants: dict[str, Run] = {}
    if evaluation.held_out is not None:
        variants["held-out prompts"] = evaluation.run("held-out", evaluation.held_out)
    for height, width in evaluation.lineup.sizes:
        variants[f"{height} x {width}"] = evaluation.run(f"{height}x{width}", height=height, width=width)
    if not variants:
        raise ValueError("--protocol heldout needs --held-out FILE, or `sizes` in the file of contenders")
    sheets: list[Sheet] = []
    figures: dict[str, Any] = {}
    for title, run in variants.items():
        cast = standing(evaluation, "heldout", run, evaluation.seeds)
        if evaluation.workers.main:
            sheet, figures[title] = tables.quality(evaluation, cast, title)
            sheets.append(sheet)
    return Found([*sheets, paper.generalization_sheet()], figures) if evaluation.workers.main else None


def match(evaluation: Evaluation) -> Found | None:
    """Every method at the same true FLOPs: quality, cost, and where the first contender stands."""
    run, cast = evaluation.run(), [name for name in evaluation.lineup.cast("matched") if name != DENSE]
    if not cast:
        raise ValueError(f"--protocol matched needs a contender beside {DENSE}; name some in --methods")
    able = run.claim(cast)
    target, brought, refused = evaluation.workers.found_by_main(lambda: search(evaluation, run, cast[0], able))
    run.contenders |= dict(brought.values())
    wanted = {named: name for name, (named, _) in brought.items()}
    whole = evaluation.generate(run, list(wanted), evaluation.seeds)
    if not evaluation.workers.main:
        return None
    failed = {name: run.skipped[named] for named, name in wanted.items() if named not in whole}
    absent = {name: why for name in cast if (why := {**run.skipped, **refused, **failed}.get(name))}
    matched_cast = Cast(run, whole, evaluation.seeds, absent)
    shown = dataclasses.replace(matched_cast, names=[*([DENSE] if DENSE in run.contenders else []), *whole])
    quality, figures = tables.quality(evaluation, shown, f"Every method at {target:.1%} of dense FLOPs")
    costs, costed = tables.costs(evaluation, shown)
    sheets = [quality, costs]
    told = {"target": target, "quality": figures, "cost": costed}
    if whole and wanted[whole[0]] == cast[0]:
        standings, told["verdict"] = comparisons.verdict(evaluation, matched_cast)
        sheets.insert(0, standings)
    return Found(sheets, told, f"{100 * target:.1f}".removesuffix(".0"))


def search(
    evaluation: Evaluation, run: Run, aim: str, names: list[str]
) -> tuple[float, dict[str, tuple[str, Contender]], dict[str, str]]:
    """The share of dense FLOPs to match, who was brought there under which name, and why others could not be."""
    target = evaluation.target
    if target is None:
        if aim not in names:
            raise ValueError(f"{aim} gives the FLOPs to match, but {run.skipped[aim]}; or pass --flops SHARE")
        target = evaluation.prices(run).of(aim).share
    brought: dict[str, tuple[str, Contender]] = {}
    refused: dict[str, str] = {}
    for name in names:
        evaluation.progress(f"{name}: finding {target:.1%} of dense FLOPs")
        asis, stays = run.contenders[name], name == aim and evaluation.target is None
        try:
            found = asis if stays else matched(evaluation.prices(run, 1), name, target)
        except REFUSALS as error:
            refused[name] = str(error)
            continue
        brought[name] = (name if found == asis else f"{name} at {target:.1%}"), found
    return target, brought, refused


PROTOCOLS: dict[str, Callable[[Evaluation], Found | None]] = {
    "main": main,
    "points": points,
    "transfer": transfer,
    "seeds": seeds,
    "categories": categories,
    "heldout": heldout,
    "ratio": ratio,
    "int8": int8,
    "matched": match,
}
