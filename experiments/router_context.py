"""Table ablation_router (b): what a router reads beside the token itself.

    python -m experiments.router_context [--seeds 3] [--steps 200]

The paper: six combinations of time, prompt and layer at keep 0.6 on SD3-Medium. Here: the same six on the embedded
model, each trained separately as in router_sharing.py, with the paper's pairwise sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.common import Claim, Result, judge, main, shown
from experiments.embedded import Variant, arguments, bench_of, table

PAPER = {
    ("time", "prompt", "layer"): (0.894, 0.881),
    ("prompt", "layer"): (0.893, 0.879),
    ("time", "prompt"): (0.902, 0.878),
    ("time", "layer"): (0.943, 0.875),
    ("layer",): (0.914, 0.874),
    (): (0.934, 0.871),
}
"""MSE and similarity of each combination."""
VARIANTS = {" + ".join(signals) or "none": Variant({"signals": list(signals)}) for signals in PAPER}
COLUMNS = {"mse/keep_0.6": "MSE at keep 0.6", "cosine/keep_0.6": "cosine", "psnr": "PSNR of runs, dB"}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    table("Router context", rows, COLUMNS)
    cosine = {name: row["cosine/keep_0.6"] for name, row in rows.items()}
    means = {name: stats["mean"] for name, stats in cosine.items()}
    full = "time + prompt + layer"
    claim = Claim(
        "all three signals give the highest similarity, none the lowest",
        ", ".join(f"{name} {similarity}" for name, (_, similarity) in zip(VARIANTS, PAPER.values(), strict=True)),
        ", ".join(f"{name} {shown(stats)}" for name, stats in cosine.items()),
        judge(
            means[full] == max(means.values()) and means["none"] == min(means.values()),
            means[full] > means["none"],
        ),
        f"{bench.seen}; ± is over seeds. The paper's differences are within .01, without seeds.",
    )
    return Result("router_context", "What a router reads", (claim,), bench.details(rows))


if __name__ == "__main__":
    main("router_context", arguments(__doc__))
