"""Temperatures of the soft rank and of the selection: do routers depend on them, and is the default right?

    python -m reproduce.claims.temperatures [--seeds 3] [--steps 120]

The paper gives the temperatures' starts, anneals them, and studies neither. Here: routers warmed up on the embedded
model with the paper's starts (tau_rank .2 to .1, tau_sel .1 to .05 of N, exponential; the ends are ours) and with one
thing changed at a time: both held at their start, ranks half and twice as soft, selection half and twice as soft.
Judged by one-step MSE at keep 0.6; the final images of whole runs stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduce.claims.common import Claim, Result, main, ordered, shown
from reproduce.claims.embedded import Stats, Variant, arguments, bench_of, draw_rows, table

PAPERS = "the paper's starts"
VARIANTS = {
    PAPERS: Variant(),
    "held at the start": Variant(temperatures={"rank_end": 0.2, "select_end": 0.1}),
    "ranks half as soft": Variant(temperatures={"rank_start": 0.1, "rank_end": 0.05}),
    "ranks twice as soft": Variant(temperatures={"rank_start": 0.4, "rank_end": 0.2}),
    "selection half as soft": Variant(temperatures={"select_start": 0.05, "select_end": 0.025}),
    "selection twice as soft": Variant(temperatures={"select_start": 0.2, "select_end": 0.1}),
}
COLUMNS = {"mse/keep_0.6": "MSE at keep 0.6", "cosine/keep_0.6": "cosine", "psnr": "PSNR of runs, dB"}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    table("Temperatures", rows, COLUMNS)
    return Result("temperatures", "Temperatures of the relaxation", (claim_of(rows, bench.seen),), bench.details(rows))


def claim_of(rows: dict[str, dict[str, Stats]], seen: str) -> Claim:
    error = {name: row["mse/keep_0.6"] for name, row in rows.items()}
    usual = error[PAPERS]["values"]
    better = [name for name, stats in error.items() if ordered(usual, stats["values"]) == "reproduced"]
    images = ", ".join(f"{name} {shown(row['psnr'])}" for name, row in rows.items())
    return Claim(
        "how much the temperatures matter to the router",
        "annealed; no study",
        ", ".join(f"{name} {shown(stats)}" for name, stats in error.items()),
        "not in the paper",
        f"One-step MSE at keep 0.6; {seen}. Below the paper's in every seed and beyond two standard errors: "
        f"{', '.join(better) or 'none'}. Final images, PSNR in dB to dense: {images}.",
    )


def draw(result: Result, axes: Any) -> None:
    draw_rows(result, axes, "mse/keep_0.6", "MSE to dense at keep 0.6")


if __name__ == "__main__":
    main("temperatures", arguments(__doc__))
