"""App. "Guidance Consistency Strategy": the two halves of guidance on the same tokens, or each on its own.

    python -m reproduce.claims.guidance_halves [--seeds 3] [--steps 120] [--prompts 8]

The paper scores both halves, takes the elementwise maximum and keeps the same tokens in both, because halves that
keep different tokens cause "severe artifacts"; it shows none. Here: routers of embedded.py at a flat ratio of 0.6,
final images of 25 steps against the dense run's, at guidance 3, which the model is used with, and 7, which weighs the
halves' difference more; "shared" gives both halves the tokens of the first, which has no prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shiva
from reproduce.claims.common import FIRST, Claim, Result, main, ordered, progress, shown
from reproduce.claims.embedded import KEEP, Stats, Variant, arguments, bench_of, over_seeds, table
from reproduce.claims.selection import PROMPTS, Task
from reproduce.claims.trained_block import load
from shiva.evaluate.metrics.pixels import image_psnr

POLICIES = {"maximum (paper)": "max", "each its own": "per-sample", "shared": "shared"}
GUIDANCE = (3.0, 7.0)
COLUMNS = {f"guidance {scale:g}": f"PSNR at guidance {scale:g}, dB" for scale in GUIDANCE}


def distances(tasks: Sequence[Task], dense: Sequence[list[Any]], checkpoint: Path, policy: str) -> list[float]:
    """Mean PSNR of each task's images to the dense ones."""
    with shiva.attach(tasks[0].pipe, checkpoint, budget=KEEP, guidance=policy) as session:
        method: Any = session.method
        method.set_schedule(shiva.RatioSchedule.flat(KEEP, method.schedule.layers, sorted(method.schedule.dense)))
        drawn = [task.images() for task in tasks]
    return [sum(map(image_psnr, ours, theirs)) / len(ours) for ours, theirs in zip(drawn, dense, strict=True)]


def run(
    seeds: Sequence[int] = range(3),
    quick: bool = False,
    prompts: int = 8,
    model: Path = FIRST,
    **where: Any,
) -> Result:
    bench = bench_of(quick, seeds, model, **where)
    pipe = load(model)
    named, steps = PROMPTS[: 2 if quick else prompts], 3 if quick else 25
    tasks = [Task(pipe, named, steps, scale) for scale in GUIDANCE]
    dense = [task.images() for task in tasks]
    trials: dict[str, list[list[float]]] = {name: [] for name in POLICIES}
    for seed in progress(list(bench.seeds), "guidance halves"):
        checkpoint = bench.checkpoint(Variant(), seed)
        for name, policy in POLICIES.items():
            trials[name].append(distances(tasks, dense, checkpoint, policy))
    rows = {
        name: {column: over_seeds(values) for column, values in zip(COLUMNS, zip(*found, strict=True), strict=True)}
        for name, found in trials.items()
    }
    table("Halves of guidance", rows, COLUMNS)
    details = {**bench.details(rows), "prompts": list(named), "run steps": steps}
    return Result("guidance_halves", "One choice of tokens for both halves", (claim_of(rows, bench.seen),), details)


def claim_of(rows: Mapping[str, Mapping[str, Stats]], seen: str) -> Claim:
    together, apart, _ = rows.values()
    at = [
        f"{', '.join(f'{name} {shown(row[column])}' for name, row in rows.items())} ({column})" for column in COLUMNS
    ]
    usual, strong = (ordered(together[column]["values"], apart[column]["values"]) for column in COLUMNS)
    return Claim(
        "halves of guidance that keep different tokens cause severe artifacts; their maximum resolves it",
        "no figure",
        "; ".join(at),
        usual,
        f"PSNR of final images to dense in dB; {seen}. Judged at the first guidance; at the second: {strong}.",
    )


def draw(result: Result, axes: Any) -> None:
    for column in COLUMNS:
        stats = [row[column] for row in result.details["rows"].values()]
        means, deviations = [s["mean"] for s in stats], [s["std"] for s in stats]
        axes.errorbar(means, list(result.details["rows"]), xerr=deviations, fmt="o", capsize=2, label=column)
    axes.grid(axis="x", alpha=0.3)
    axes.set(xlabel="PSNR of final images to dense, dB")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help=f"images of a run; at most {len(PROMPTS)}")
    main("guidance_halves", parser)
