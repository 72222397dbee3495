"""For a share of the time, what to do to a model: steps x tokens x caches on one plane, and the front they draw."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from shiva.bench.table import Table
from shiva.checkpoint import ShivaCheckpoint
from shiva.evaluate.candidates import DENSE, Candidate, method_named
from shiva.evaluate.evaluation import Evaluation
from shiva.evaluate.metrics.pixels import IDENTICAL, paired, psnr
from shiva.evaluate.rivals import DEFAULTS, CacheName, Solver

T = TypeVar("T")
CONVERGED = "converged"
SHARES = (0.5, 0.35)
"""Of the dense run's time, that advice is given for."""
SLACK = 0.02
"""By which a share of the time may be missed, as times stray by as much; FLOPs do not."""
SETTINGS: dict[CacheName, tuple[float, ...]] = {
    "MagCache": (DEFAULTS["MagCache"], 0.3),
    "FirstBlockCache": (DEFAULTS["FirstBlockCache"], 0.15),
    "TaylorSeer": (2, 3),
    "DBCache": (0.2, 0.5),
}
"""Of each cache: near its default, and stronger."""
Kind = Literal["dense", "fewer steps", "even steps", "multistep", "cache", "tokens"]


# -- the grid --------------------------------------------------------------------------------------------


def fewer(steps: int) -> tuple[int, ...]:
    """Numbers of steps below a run's: three quarters, a half, three eighths and a quarter of them; of four steps and
    more, two at least, as some schedulers cannot place one alone."""
    counts, least = {round(share * steps) for share in (0.75, 0.5, 0.375, 0.25)}, 2 if steps > 3 else 1
    return tuple(sorted((count for count in counts if least <= count < steps), reverse=True))


def converged(steps: int) -> int:
    """Steps of a run that more of them would hardly change."""
    return max(100, 4 * steps)


def pruning(methods: Sequence[str], budgets: Sequence[float]) -> dict[str, Candidate]:
    """Methods and checkpoints' folders at several shares of the tokens; folders of one name go by their parents'."""
    folders = {method: Path(method).resolve() for method in methods if Path(method).is_dir()}
    names = [folders[m].name if m in folders else method_named(m).__name__ for m in methods]
    found: dict[str, Candidate] = {}
    for method, plain in zip(methods, names, strict=True):
        name = folders[method].parent.name if method in folders and names.count(plain) > 1 else plain
        made = budgeted(name, Candidate(checkpoint=method) if method in folders else Candidate(method=name), budgets)
        if found.keys() & made.keys():
            raise ValueError(f"--methods names {name} twice; pass it once, or rename the folder")
        found |= made
    return found


def budgeted(name: str, candidate: Candidate, budgets: Sequence[float]) -> dict[str, Candidate]:
    """A candidate at several shares of the tokens; as it is if it has no such knob, or was trained to one share."""
    source = candidate.source()
    trained = isinstance(source, ShivaCheckpoint)
    config = source.method_config if isinstance(source, ShivaCheckpoint) else source
    knob = None if config is None or (trained and config.knob in config.fixed) else config.knob
    if config is None or knob not in ("budget", "keep"):
        return {name: candidate}
    for at in budgets:
        config.changed({knob: at})  # 40 for .4 is refused here, not left out after an hour
    return {f"{name} {at:g}": dataclasses.replace(candidate, options={knob: at}) for at in budgets}


def make_grid(
    steps: int,
    fewer_steps: Sequence[int],
    pruned: Mapping[str, Candidate],
    caches: Sequence[CacheName],
    solver: Solver = "own",
) -> dict[str, Candidate]:
    """Steps x solvers, caches x settings, and what drops tokens; the last two alone and with fewer steps.

    `solver` is that of the dense run, and of all that does not say another.
    """
    found = {DENSE: Candidate(solver=solver), CONVERGED: Candidate(steps=converged(steps), solver=solver)}
    found |= {f"{n} step{'s' * (n > 1)}": Candidate(steps=n, solver=solver) for n in fewer_steps}
    others: list[Solver] = [other for other in get_args(Solver) if other not in ("own", solver)]
    found |= {f"{n} {other}": Candidate(steps=n, solver=other) for other in others for n in (steps, *fewer_steps)}
    found |= {f"{c} {at:g}": Candidate(cache=c, setting=at, solver=solver) for c in caches for at in SETTINGS[c]}
    found |= {name: dataclasses.replace(way, solver=solver) for name, way in pruned.items()}
    spaced: Solver = "even" if solver == "own" else solver
    for c, n in itertools.product(caches[:1], fewer_steps[:1]):
        found[f"{c}, {n} {spaced}"] = Candidate(cache=c, setting=SETTINGS[c][0], steps=n, solver=spaced)
    for name, way in pruned.items():
        for n in fewer_steps[:2]:
            found[f"{name} in {n} steps"] = dataclasses.replace(way, steps=n, solver=solver)
            if spaced != solver:
                found[f"{name}, {n} {spaced}"] = dataclasses.replace(way, steps=n, solver=spaced)
        for n in fewer_steps[:1] if solver != "multistep" else ():
            found[f"{name}, {n} multistep"] = dataclasses.replace(way, steps=n, solver="multistep")
        for c in caches[:1]:
            found[f"{name} with {c}"] = dataclasses.replace(way, cache=c, setting=SETTINGS[c][0], solver=solver)
    return found


def kind_of(candidate: Candidate, dense: Candidate) -> Kind:
    if candidate.method is not None or candidate.checkpoint is not None:
        return "tokens"
    if candidate.cache is not None:
        return "cache"
    if candidate.solver != dense.solver:
        return "multistep" if candidate.solver == "multistep" else "even steps"
    return "dense" if candidate.steps is None else "fewer steps"


# -- measuring -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One way to run a model, against the dense run of all steps."""

    name: str
    kind: Kind
    steps: int
    flops: float
    """True FLOPs of the transformer, a method's own included, as a share of dense."""
    time: float | None
    """Seconds of an image as a share of dense, medians of turns; None if it was not timed."""
    memory: float
    """Peak memory of a run beyond the weights, as a share of dense."""
    to_dense: float
    """PSNR in dB to the dense run of all steps."""
    to_converged: float
    """PSNR in dB to the converged run."""
    quality: dict[str, float] = field(default_factory=dict)
    """Other metrics, by name."""

    @property
    def cost(self) -> float:
        return self.flops if self.time is None else self.time


def measure(evaluation: Evaluation) -> tuple[list[Point], dict[str, str]]:
    """Every candidate that can run here, and why the others cannot. What was measured before is read, not made."""
    run, grid = evaluation.run(), evaluation.candidates.candidates
    names = evaluation.complete(run, list(grid), evaluation.seeds)
    absent = {name: run.skipped[name] for name in grid if name not in names}
    if DENSE not in names or CONVERGED not in names:
        raise ValueError(f"the dense pipeline does not run here: {absent.get(DENSE) or absent[CONVERGED]}")
    prices = evaluation.prices(run)
    points = []
    timed = [name for name in names if name != CONVERGED]
    for name in timed:
        evaluation.progress(f"{name}: FLOPs and memory")
        prices.spent(name)
    seconds, untimed = evaluation.latencies(run, timed)
    if untimed:
        absent["time"] = untimed
    dense = prices.spent(DENSE)
    for name in timed:
        spent, scores = prices.spent(name), evaluation.means(run, name, evaluation.seeds)
        points.append(
            Point(
                name,
                kind_of(grid[name], grid[DENSE]),
                run.steps(grid[name]),
                flops=spent.flops.true / dense.flops.true,
                time=seconds[name].median / seconds[DENSE].median if seconds else None,
                memory=spent.memory / max(1, dense.memory),
                to_dense=similarity(evaluation, name, DENSE),
                to_converged=similarity(evaluation, name, CONVERGED),
                quality=scores,
            )
        )
    return points, absent


def similarity(evaluation: Evaluation, name: str, other: str) -> float:
    """PSNR in dB between two candidates' images, the mean over prompts and seeds."""
    run = evaluation.run()
    found = [
        paired(run.pictures(name, seed), run.pictures(other, seed), lambda a, b: psnr(a, b).clamp(max=IDENTICAL))
        for seed in evaluation.seeds
    ]
    return statistics.fmean(float(values.mean()) for values in found)


# -- what it says ----------------------------------------------------------------------------------------


def pareto(points: Sequence[T], cost: Callable[[T], float], quality: Callable[[T], float]) -> list[T]:
    """The points that no other beats on both axes, from the cheapest on."""
    found: list[T] = []
    for point in sorted(points, key=lambda p: (cost(p), -quality(p))):
        if not found or quality(point) > quality(found[-1]):
            found.append(point)
    return found


def front(points: Sequence[Point], fidelity: str = "to_dense") -> list[Point]:
    return pareto(points, lambda point: point.cost, lambda point: getattr(point, fidelity))


def best(points: Sequence[Point], share: float) -> Point | None:
    """Of what costs at most a share of dense, the nearest to it."""
    able = [p for p in points if p.kind != "dense" and p.cost <= share + (0 if p.time is None else SLACK)]
    return max(able, key=lambda point: point.to_dense, default=None)


def advice(points: Sequence[Point]) -> list[str]:
    """For each share: what to use, and how far the best of the other side is behind."""
    told = []
    what = "FLOPs" if any(point.time is None for point in points) else "time"
    for share in SHARES:
        found = best(points, share)
        if found is None:
            told.append(f"for {share:.0%} of the {what} nothing here is fast enough; add fewer steps or lower budgets")
            continue
        others = [p for p in points if (p.kind == "tokens") != (found.kind == "tokens")]
        second = best(others, share)
        text = f"for {share:.0%} of the {what} use {found.name}: {found.to_dense:.1f} dB to dense"
        text += f", {found.to_converged:.1f} to the converged run ({found.cost:.0%} of the {what})"
        if second is not None:
            side = "without dropping tokens" if found.kind == "tokens" else "dropping tokens"
            text += f"; the best {side}, {second.name}, has {second.to_dense:.1f} and {second.to_converged:.1f} dB"
        told.append(text)
    return told


def table_of(evaluation: Evaluation, points: Sequence[Point], absent: Mapping[str, str]) -> Table:
    on = {point.name for point in front(points)}
    quality = [metric for metric in evaluation.metrics if any(metric.name in point.quality for point in points)]
    rows = [
        {
            "way": point.name,
            "front": "●" if point.name in on else "",
            "FLOPs": f"{point.flops:.0%}",
            "time": "" if point.time is None else f"{point.time:.0%}",
            "memory": f"{point.memory:.2f}x",
            "to dense, dB": "" if point.kind == "dense" else f"{point.to_dense:.2f}",
            "to converged, dB": f"{point.to_converged:.2f}",
            **{m.title: f"{point.quality[m.name]:.4g}" if m.name in point.quality else "" for m in quality},
        }
        for point in sorted(points, key=lambda p: -p.cost)
    ]
    run, left = evaluation.run(), "".join(f"; {name}: {why}" for name, why in absent.items())
    title = f"{run.settings.steps} steps, guidance {run.settings.guidance:g}, {len(run.prompts)} prompts"
    return Table.of(
        f"What to do for less time: {title}",
        rows,
        "FLOPs, time (medians of turns) and peak memory beyond the weights as shares of dense; PSNR to the dense run "
        f"of all steps and to {converged(run.settings.steps)} of them; front: nothing is both cheaper and nearer "
        f"to dense{left}",
    )


def document(points: Sequence[Point], told: Sequence[str], absent: Mapping[str, str]) -> dict[str, Any]:
    """For programs, and for the figure."""
    return {
        "points": [asdict(point) for point in points],
        "front": [point.name for point in front(points)],
        "front to converged": [point.name for point in front(points, "to_converged")],
        "advice": list(told),
        "absent": dict(absent),
    }
