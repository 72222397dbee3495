"""App. variance_analysis: one timestep from each of B strata makes the batch's mean ratio a better estimate.

    python -m reproduce.claims.stratified

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

from reproduce.claims.common import Claim, Result, generator, judge, main, progress, spread
from shiva.training.draws import strata

BATCH = 16

SCHEDULES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear ramp": lambda t: 0.3 + 0.6 * t,
    "late sigmoid": lambda t: 0.3 + 0.6 * torch.sigmoid(12 * (t - 0.7)),
    "late sigmoid, shift 3": lambda t: 0.3 + 0.6 * torch.sigmoid(12 * (3 * t / (1 + 2 * t) - 0.7)),
}


def theory(schedule: Callable[[Tensor], Tensor]) -> float:
    """sigma^2 over the mean variance within strata (the law of total variance)."""
    points = 4096
    r = schedule((torch.arange(BATCH * points, dtype=torch.float64) + 0.5) / (BATCH * points))
    return float(r.var(correction=0) / r.view(BATCH, points).var(dim=1, correction=0).mean())


def ratios(seed: int, batches: int) -> dict[str, float]:
    """How many times lower the variance of the stratified mean is, by schedule."""
    stratified = torch.tensor([strata(seed, step, BATCH) for step in range(batches)], dtype=torch.float64)
    uniform = torch.rand(batches, BATCH, generator=generator(seed), dtype=torch.float64)
    found = {}
    for name, schedule in SCHEDULES.items():
        independent, one_of_each = (float(schedule(t).mean(1).var()) for t in (uniform, stratified))
        found[name] = independent / one_of_each
    return found


def run(seeds: Sequence[int] = range(3), quick: bool = False) -> Result:
    seeds, batches = list(seeds), 7_000 if quick else 40_000
    trials = [ratios(seed, batches) for seed in progress(seeds, "stratified draws")]
    rows = {n: {"ratio": spread([t[n] for t in trials]), "theory": theory(s)} for n, s in SCHEDULES.items()}
    worst = max(abs(row["ratio"]["mean"] / row["theory"] - 1) for row in rows.values())
    claim = Claim(
        "stratified timesteps have a lower variance of the batch's mean ratio than uniform ones",
        "lower; theory B² = 256 on a ramp, B = 16",
        "; ".join(
            f"{name}: {row['ratio']['mean']:.1f} ± {row['ratio']['std']:.1f} times lower (theory {row['theory']:.1f})"
            for name, row in rows.items()
        ),
        judge(worst < 0.03, all(row["ratio"]["min"] > 1 for row in rows.values())),
        f"Largest departure of a mean from the derivation: {worst:.1%}; {len(seeds)} seeds, {batches} batches of the "
        "trainer's draws each.",
    )
    details = {"batch": BATCH, "batches": batches, "schedules": rows}
    return Result("stratified", "Stratified against uniform timesteps", (claim,), details)


def draw(result: Result, axes: Any) -> None:
    rows = result.details["schedules"]
    places = range(len(rows))
    means, deviations = ([row["ratio"][key] for row in rows.values()] for key in ("mean", "std"))
    axes.bar([p - 0.2 for p in places], means, 0.4, yerr=deviations, capsize=2, label="measured")
    axes.bar([p + 0.2 for p in places], [r["theory"] for r in rows.values()], 0.4, label="theory")
    axes.set_xticks(places, rows, fontsize=7)
    axes.set(ylabel="Var(uniform) / Var(stratified)")
    axes.legend()


if __name__ == "__main__":
    main("stratified")
