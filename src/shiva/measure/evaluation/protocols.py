"""The paper's protocols, each one function: who takes part, which images it needs, which tables it fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shiva.measure.evaluation import paper, tables
from shiva.measure.evaluation.evaluation import Evaluation
from shiva.measure.evaluation.lineup import DENSE
from shiva.measure.evaluation.match import matched
from shiva.measure.evaluation.run import SKIPPABLE, Run
from shiva.measure.sheet import Sheet

Found = tuple[list[Sheet], dict[str, Any]]
"""Tables for people, and the same figures for programs."""
FIVE = (0, 1, 2, 3, 4)


def standing(evaluation: Evaluation, protocol: str, run: Run, seeds: tuple[int, ...], least: int = 1) -> list[str]:
    """The protocol's cast with all its images; an error if too few of it can run."""
    names = evaluation.generate(run, evaluation.lineup.cast(protocol), seeds)
    if len(names) < least:
        reasons = "; ".join(f"{name}: {why}" for name, why in run.skipped.items())
        raise ValueError(f"--protocol {protocol} needs {least} contenders, {len(names)} can run here ({reasons})")
    return names


def main(evaluation: Evaluation) -> Found | None:
    """All methods: quality, FLOPs, speed-up."""
    return overview(evaluation, "main", "Quality of every method")


def points(evaluation: Evaluation) -> Found | None:
    """Operating points of a few checkpoints, most of them by shifting a table to another budget."""
    return overview(evaluation, "points", "Operating points")


def overview(evaluation: Evaluation, protocol: str, title: str) -> Found | None:
    run, seeds = evaluation.run(), evaluation.seeds
    names = standing(evaluation, protocol, run, seeds)
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, run, names, seeds, title)
    costs, prices = tables.costs(evaluation, run, names)
    theirs = paper.main_sheet([run.contenders[name].paper for name in names])
    return [quality, costs, *([theirs] if theirs.rows else [])], {"quality": figures, "cost": prices}


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
    run, seeds = evaluation.run(), evaluation.seeds
    names = standing(evaluation, protocol, run, seeds, least=2)
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, run, names, seeds, title)
    pairs, differences = tables.paired(evaluation, run, names, seeds, f"{title}, paired")
    return [quality, pairs, theirs], {"quality": figures, "paired": differences}


def seeds(evaluation: Evaluation) -> Found | None:
    """Five matched seeds: differences seed by seed."""
    run = evaluation.run()
    chosen = evaluation.seeds if len(evaluation.seeds) > 1 else FIVE
    names = standing(evaluation, "seeds", run, chosen, least=2)
    if not evaluation.workers.main:
        return None
    sheets, figures = tables.by_seed(evaluation, run, names, chosen)
    return [*sheets, paper.seeds_sheet()], {"reference": names[0], "seeds": list(chosen), "paired": figures}


def categories(evaluation: Evaluation) -> Found | None:
    """Paired differences in each category; our `symbols` are the paper's `logo`."""
    run, chosen = evaluation.run(), evaluation.seeds
    names = standing(evaluation, "categories", run, chosen, least=2)
    if not evaluation.workers.main:
        return None
    found = {name: tables.by_category(evaluation, run, name, names[0], chosen) for name in names[1:]}
    sheets = [sheet for sheet, _ in found.values()]
    figures = {name: figures for name, (_, figures) in found.items()}
    return [*sheets, paper.categories_sheet()], {"reference": names[0], "paired": figures}


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
        names = standing(evaluation, "heldout", run, evaluation.seeds)
        if evaluation.workers.main:
            sheet, figures[title] = tables.quality(evaluation, run, names, evaluation.seeds, title)
            sheets.append(sheet)
    return ([*sheets, paper.generalization_sheet()], figures) if evaluation.workers.main else None


def match(evaluation: Evaluation) -> Found | None:
    """Every method at the same true FLOPs: quality and speed."""
    run, chosen = evaluation.run(), evaluation.seeds
    cast = evaluation.lineup.cast("matched")
    target, aim = evaluation.target, cast[0]
    prices = evaluation.prices(run, 1)
    run.claim(cast, chosen, evaluation.workers.main)
    if target is None:
        if aim in run.skipped:
            raise ValueError(f"{aim} gives the FLOPs to match, but {run.skipped[aim]}; or pass --flops SHARE")
        target = evaluation.prices(run).of(aim).share
    names = []
    for name in cast:
        if name in run.skipped or name == DENSE:
            continue
        try:
            evaluation.progress(f"{name}: finding {target:.1%} of dense FLOPs")
            found = (
                run.contenders[name] if name == aim and evaluation.target is None else matched(prices, name, target)
            )
        except SKIPPABLE as error:
            run.skipped[name] = str(error)
            continue
        named = name if found is run.contenders[name] else f"{name} at {target:.1%}"
        run.contenders[named] = found
        names.append(named)
    names = evaluation.generate(run, names, chosen)
    if not evaluation.workers.main:
        return None
    shown = tables.with_dense(run, names)
    quality, figures = tables.quality(evaluation, run, shown, chosen, f"Every method at {target:.1%} of dense FLOPs")
    costs, costed = tables.costs(evaluation, run, shown)
    return [quality, costs], {"target": target, "quality": figures, "cost": costed}


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
