"""Table ablation_router (a): which layers share a router, at two widths.

    python -m reproduce.claims.router_sharing [--seeds 3] [--steps 120]

The paper: SD3-Medium's 24 layers, widths 64 and 512 of 1536, MSE and similarity to dense at keep 0.6 on 1980 images.
Here: the embedded model's 8 layers, widths 16 and 64 of 128, the same two measures on held-out samples, and the PSNR
of whole runs. Assumed: stage 1 alone is compared (router warm-up, stratified ratios), "similarity" is the cosine
of the predictions, the router is trained by the output estimator (`Shiva`'s default) and not the paper's. See
embedded.py for what a training is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduce.claims.common import Claim, Result, judge, main, ordered, shown, weakest
from reproduce.claims.embedded import Stats, Variant, arguments, bench_of, draw_rows, table

SHARING = ("global", "groups-4", "groups-3", "pairwise", "independent")
WIDTHS = (16, 64)
VARIANTS = {
    f"{sharing}, {width}": Variant({"sharing": sharing, "bottleneck": width})
    for width in WIDTHS
    for sharing in SHARING
}
PAPER = {
    "global, narrow": (2.102, 0.829),
    "global, wide": (1.254, 0.862),
    "groups of 6": (1.074, 0.858),
    "groups of 3": (0.906, 0.879),
    "pairwise": (0.894, 0.881),
    "independent, narrow": (1.072, 0.862),
    "independent, wide": (1.831, 0.805),
}
"""MSE and similarity of each configuration."""
COLUMNS = {
    "router parameters": "parameters",
    "mse/keep_0.6": "MSE at keep 0.6",
    "cosine/keep_0.6": "cosine",
    "psnr": "PSNR of runs, dB",
}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    table("Router sharing", rows, COLUMNS)
    return Result("router_sharing", "Which layers share a router", (claim_of(rows, bench.seen),), bench.details(rows))


def claim_of(rows: dict[str, dict[str, Stats]], seen: str) -> Claim:
    error = {name: row["mse/keep_0.6"] for name, row in rows.items()}
    best = min(error, key=lambda name: error[name]["mean"])

    def at_its_best(sharing: str) -> Stats:
        return min((error[f"{sharing}, {width}"] for width in WIDTHS), key=lambda stats: stats["mean"])

    pair = at_its_best("pairwise")
    against = {s: ordered(at_its_best(s)["values"], pair["values"]) for s in SHARING if s != "pairwise"}
    below = ", ".join(f"{sharing}: {verdict}" for sharing, verdict in against.items())
    images = ", ".join(f"{name} {shown(row['psnr'])}" for name, row in rows.items())
    return Claim(
        "pairwise sharing has the lowest error; larger groups, one router for all layers and one for each have more",
        "MSE / similarity: " + ", ".join(f"{name} {mse} / {cosine}" for name, (mse, cosine) in PAPER.items()),
        f"lowest: {best}; MSE / similarity: "
        + ", ".join(f"{n} {shown(s)} / {rows[n]['cosine/keep_0.6']['mean']:.3f}" for n, s in error.items()),
        judge(weakest(*against.values()) == "reproduced", error[best] is pair),
        f"Each sharing at its better width, seed by seed; {seen}. Pairwise below {below}. Final images, PSNR in dB to "
        f"dense: {images}.",
    )


def draw(result: Result, axes: Any) -> None:
    draw_rows(result, axes, "mse/keep_0.6", "MSE to dense at keep 0.6")


if __name__ == "__main__":
    main("router_sharing", arguments(__doc__))
