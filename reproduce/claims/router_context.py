"""Table ablation_router (b): what a router reads beside the token itself.

    python -m reproduce.claims.router_context [--seeds 3] [--steps 120]

The paper: six combinations of time, prompt and layer at keep 0.6 on SD3-Medium. Here: the same six on the embedded
model, each trained separately as in router_sharing.py, with the paper's pairwise sharing. The paper does not say how
long its signals are. Ours are brought to length 1; all three are shown at the backbone's own length too. The router is
trained by the output estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduce.claims.common import Claim, Result, judge, main, ordered, shown, weakest
from reproduce.claims.embedded import Stats, Variant, arguments, bench_of, draw_rows, table

PAPER = {
    ("time", "prompt", "layer"): (0.894, 0.881),
    ("prompt", "layer"): (0.893, 0.879),
    ("time", "prompt"): (0.902, 0.878),
    ("time", "layer"): (0.943, 0.875),
    ("layer",): (0.914, 0.874),
    (): (0.934, 0.871),
}
"""MSE and similarity of each combination."""
COMBINATIONS = {" + ".join(signals) or "none": Variant({"signals": list(signals)}) for signals in PAPER}
FULL, OWN = "time + prompt + layer", "all three at their own length"
VARIANTS = {**COMBINATIONS, OWN: Variant({"signal_length": "own"})}
COLUMNS = {"mse/keep_0.6": "MSE at keep 0.6", "cosine/keep_0.6": "cosine", "psnr": "PSNR of runs, dB"}


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    rows = bench.compare(VARIANTS)
    table("Router context", rows, COLUMNS)
    return Result("router_context", "What a router reads", claims_of(rows, bench.seen), bench.details(rows))


def claims_of(rows: dict[str, dict[str, Stats]], seen: str) -> tuple[Claim, ...]:
    error, cosine = ({name: rows[name][key] for name in COMBINATIONS} for key in ("mse/keep_0.6", "cosine/keep_0.6"))
    full, none = cosine[FULL]["values"], cosine["none"]["values"]
    between = [stats["values"] for name, stats in cosine.items() if name not in (FULL, "none")]
    order = weakest(*(ordered(full, other) for other in between), *(ordered(other, none) for other in between))
    combinations = Claim(
        "all three signals give the highest similarity, none the lowest",
        ", ".join(f"{name} {similarity}" for name, (_, similarity) in zip(COMBINATIONS, PAPER.values(), strict=True)),
        ", ".join(f"{name} {shown(stats)}" for name, stats in cosine.items()),
        judge(order == "reproduced", ordered(full, none) != "not reproduced"),
        f"Seed by seed; {seen}. The paper's differences are within .01, without a spread.",
    )
    left_out = {"prompt": "time + layer", "layer": "time + prompt"}
    raised = {signal: ordered(error[name]["values"], error[FULL]["values"]) for signal, name in left_out.items()}
    removal = Claim(
        "removing prompt or layer raises the MSE; removing time leaves it",
        ", ".join(f"{name} {mse}" for name, (mse, _) in zip(COMBINATIONS, PAPER.values(), strict=True)),
        ", ".join(f"{name} {shown(stats)}" for name, stats in error.items()),
        weakest(*raised.values()),
        "Seed by seed: " + ", ".join(f"without the {signal}: {verdict}" for signal, verdict in raised.items()) + ".",
    )
    length = Claim(
        "signals of length 1 let the router see the tokens",
        "–",
        ", ".join(f"{name}: MSE {shown(rows[name]['mse/keep_0.6'])}" for name in (FULL, OWN)),
        "not in the paper",
        "Deviation of the scores "
        + ", ".join(f"{shown(rows[name]['score deviation'])} ({name})" for name in (FULL, OWN, "none"))
        + f"; final images {shown(rows[FULL]['psnr'])} and {shown(rows[OWN]['psnr'])} dB to dense.",
    )
    return combinations, removal, length


def draw(result: Result, axes: Any) -> None:
    draw_rows(result, axes, "cosine/keep_0.6", "cosine to dense at keep 0.6")


if __name__ == "__main__":
    main("router_context", arguments(__doc__))
