"""Figure router_comparison_grid: a router warmed up at stratified ratios against one at a fixed ratio.

    python -m experiments.training_strategy [--seeds 3] [--steps 200]

The paper shows a broader histogram of scores and better selections across budgets, in pictures only. Here: the
deviation of scores over an image's tokens (mean over layers and held-out samples) and the MSE to dense at keeps 0.3 to
0.9, of routers that differ in the warm-up's ratios alone: stratified over [.2, .9] in 4 groups, or always 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.common import Claim, Result, judge, main, shown
from experiments.embedded import KEEP, KEEPS, Variant, arguments, bench_of, draw_by_keep, table

VARIANTS = {
    "stratified": Variant(),
    "fixed": Variant(sampling={"ratio_min": KEEP, "ratio_max": KEEP, "ratio_groups": 1}),
}
COLUMNS = {"score deviation": "score deviation", **{f"mse/keep_{k:g}": f"MSE at {k:g}" for k in KEEPS}}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    table("Training strategy", rows, COLUMNS)
    wide, narrow = (rows[name]["score deviation"] for name in VARIANTS)
    ratios = {
        k: rows["fixed"][f"mse/keep_{k:g}"]["mean"] / rows["stratified"][f"mse/keep_{k:g}"]["mean"] for k in KEEPS
    }
    away = [ratio for keep, ratio in ratios.items() if keep != KEEP]
    claims = (
        Claim(
            "stratified ratios spread the scores",
            "a broader histogram; no figure",
            f"deviation {shown(wide)} against {shown(narrow)} at a fixed ratio",
            judge(wide["mean"] > narrow["mean"] + narrow["std"], wide["mean"] > narrow["mean"]),
            f"{bench.seen}.",
        ),
        Claim(
            "a router warmed up at one ratio transfers worse to others",
            "degrades when the operating point shifts; no figure",
            "MSE over stratified: " + ", ".join(f"{ratio:.2f}x at {keep:g}" for keep, ratio in ratios.items()),
            judge(min(away) > 1, sum(away) / len(away) > 1),
            "Trained at 0.6; above 1 means worse than stratified.",
        ),
    )
    return Result("training_strategy", "Stratified against fixed-ratio warm-up", claims, bench.details(rows))


draw = draw_by_keep

if __name__ == "__main__":
    main("training_strategy", arguments(__doc__))
