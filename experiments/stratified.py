"""App. variance_analysis: one timestep from each of B strata makes the batch's mean ratio a better estimate.

    python -m experiments.stratified

The library's own timestep draws at B = 16, against independent ones, on three ratio schedules r(t): a linear ramp,
for which theory gives Var(uniform) / Var(stratified) = B^2 exactly; a late sigmoid ramp, for which the strata's
variances are integrated numerically; and the same ramp under a density that a scheduler shifts: draws are quantiles,
so a density only makes another schedule of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.common import Claim, Result, generator, judge, main, progress
from shiva.training.sampling import strata

BATCH = 16

SCHEDULES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear ramp": lambda t: 0.3 + 0.6 * t,
    "late sigmoid": lambda t: 0.3 + 0.6 * torch.sigmoid(12 * (t - 0.7)),
    "late sigmoid, shift 3": lambda t: 0.3 + 0.6 * torch.sigmoid(12 * (3 * t / (1 + 2 * t) - 0.7)),
}


def theory(schedule: Callable[[Tensor], Tensor], points: int = 4096) -> float:
    """sigma^2 over the mean variance within strata (the law of total variance)."""
    r = schedule((torch.arange(BATCH * points, dtype=torch.float64) + 0.5) / (BATCH * points))
    return float(r.var(correction=0) / r.view(BATCH, points).var(dim=1, correction=0).mean())


def run(seeds: Sequence[int] = range(1), quick: bool = False) -> Result:
    seed = next(iter(seeds))
    batches = 20_000 if quick else 100_000
    drawn = [strata(seed, step, BATCH) for step in progress(range(batches), "stratified draws")]
    stratified = torch.tensor(drawn, dtype=torch.float64)  # (batches, B)
    uniform = torch.rand(batches, BATCH, generator=generator(seed), dtype=torch.float64)
    rows = {}
    for name, schedule in SCHEDULES.items():
        variances = [float(schedule(t).mean(1).var()) for t in (uniform, stratified)]
        rows[name] = {"ratio": variances[0] / variances[1], "theory": theory(schedule)}
    worst = max(abs(row["ratio"] / row["theory"] - 1) for row in rows.values())
    claim = Claim(
        "stratified timesteps have a lower variance of the batch's mean ratio than uniform ones",
        "lower; theory B² = 256 on a ramp, B = 16",
        "; ".join(
            f"{name}: {row['ratio']:.1f} times lower (theory {row['theory']:.1f})" for name, row in rows.items()
        ),
        judge(worst < 0.03, all(row["ratio"] > 1 for row in rows.values())),
        f"Largest departure from the derivation: {worst:.1%}, over {batches} batches of the trainer's draws.",
    )
    details = {"batch": BATCH, "batches": batches, "schedules": rows}
    return Result("stratified", "Stratified against uniform timesteps", (claim,), details)


def draw(result: Result, axes: Any) -> None:
    rows = result.details["schedules"]
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [r["ratio"] for r in rows.values()], 0.4, label="measured")
    axes.bar([p + 0.2 for p in places], [r["theory"] for r in rows.values()], 0.4, label="theory")
    axes.set_xticks(places, rows, fontsize=7)
    axes.set(ylabel="Var(uniform) / Var(stratified)")
    axes.legend()


if __name__ == "__main__":
    main("stratified")
