"""Figure router_comparison_grid: a router warmed up at stratified ratios against one at a fixed ratio.

    python -m reproduce.claims.training_strategy [--seeds 3] [--steps 120]

The paper shows a broader histogram of scores and better selections across budgets, in pictures only. Here: the
deviation of scores over an image's tokens (mean over layers and held-out samples) and the MSE to dense at keeps 0.3
to 0.9, of routers that differ in the warm-up's ratios alone: stratified over [.2, .9] in 4 groups, or always 0.6.
"Degrades when the operating point shifts" is read as: its error over the stratified router's is larger at every other
keep than at 0.6. The router is trained by the output estimator. Heatmaps and histograms are in router_maps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduce.claims.common import Claim, Result, main, ordered, shown, weakest
from reproduce.claims.embedded import KEEP, KEEPS, Stats, Variant, arguments, bench_of, draw_by_keep, table

VARIANTS = {
    "stratified": Variant(),
    "fixed": Variant(sampling={"ratio_min": KEEP, "ratio_max": KEEP, "ratio_groups": 1}),
}
COLUMNS = {"score deviation": "score deviation", **{f"mse/keep_{k:g}": f"MSE at {k:g}" for k in KEEPS}}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    table("Training strategy", rows, COLUMNS)
    return Result(
        "training_strategy", "Stratified against fixed-ratio warm-up", claims_of(rows, bench.seen), bench.details(rows)
    )


def claims_of(rows: dict[str, dict[str, Stats]], seen: str) -> tuple[Claim, ...]:
    wide, narrow = (rows[name]["score deviation"] for name in VARIANTS)
    errors = {k: [rows[name][f"mse/keep_{k:g}"]["values"] for name in ("fixed", "stratified")] for k in KEEPS}
    ratios = {k: [fixed / ours for fixed, ours in zip(*pair, strict=True)] for k, pair in errors.items()}
    means = {k: sum(values) / len(values) for k, values in ratios.items()}
    transfer = {k: ordered(values, ratios[KEEP]) for k, values in ratios.items() if k != KEEP}
    worse = [f"{k:g}" for k, verdict in transfer.items() if verdict != "not reproduced"]
    return (
        Claim(
            "stratified ratios spread the scores",
            "a broader histogram; no figure",
            f"deviation {shown(wide)} against {shown(narrow)} at a fixed ratio",
            ordered(wide["values"], narrow["values"]),
            f"{seen}.",
        ),
        Claim(
            "a router warmed up at one ratio transfers worse to others",
            "degrades when the operating point shifts; no figure",
            "MSE over stratified: " + ", ".join(f"{ratio:.2f}x at {keep:g}" for keep, ratio in means.items()),
            weakest(*transfer.values()),
            f"Trained at {KEEP}; above 1 means worse than stratified. Further behind than at {KEEP} itself at: "
            f"{', '.join(worse) or 'none'}.",
        ),
    )


draw = draw_by_keep

if __name__ == "__main__":
    main("training_strategy", arguments(__doc__))
