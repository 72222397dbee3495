"""Beyond the paper: routers trained on the embedded model with each gradient estimator.

    python -m reproduce.claims.router_estimators [--seeds 3] [--steps 120]

The paper's estimator gates what a block reads (`input`); ours gates what it adds (`output`), with a stand-in for the
update of a rejected token: zero, the mean of the selected, a ridge fit, or the dense teacher's own. Judged by one-step
MSE to dense, and by the final image of whole runs: the two can disagree. All but the estimator is ours: signals of
length 1 and no score noise; the row of `Shiva.preset("paper")` has the paper's signals too. The router that was
trained for one step stands for chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduce.claims.common import Claim, Result, main, shown
from reproduce.claims.embedded import KEEPS, Variant, arguments, bench_of, draw_by_keep, table

GUESSES = ("zero", "mean", "ridge", "teacher")
VARIANTS = {
    "input (paper)": Variant({"estimator": "input"}),
    "input, signals as they are (preset paper)": Variant({"estimator": "input", "signal_length": "own"}),
    **{f"output, {guess}": Variant({"estimator": "output", "guess": guess}) for guess in GUESSES},
}
COLUMNS = {**{f"mse/keep_{k:g}": f"MSE at {k:g}" for k in KEEPS}, "psnr": "PSNR of runs at 0.6, dB"}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    rows["one step"] = bench_of(quick, seeds, **{**where, "steps": 1}).compare({"": Variant()})[""]
    table("Routers by estimator", rows, COLUMNS)
    at = {name: row["mse/keep_0.6"] for name, row in rows.items()}
    best = min(at, key=lambda name: at[name]["mean"])
    claim = Claim(
        "which estimator trains the better router",
        "–",
        f"lowest MSE at keep 0.6: {best}; " + ", ".join(f"{name} {shown(stats)}" for name, stats in at.items()),
        "not in the paper",
        "Final images, PSNR in dB to dense: "
        + ", ".join(f"{name} {shown(row['psnr'])}" for name, row in rows.items()),
    )
    return Result("router_estimators", "Routers trained with each estimator", (claim,), bench.details(rows))


draw = draw_by_keep

if __name__ == "__main__":
    main("router_estimators", arguments(__doc__))
