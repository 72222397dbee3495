"""The paper's tables of inference time, read from what `shiva bench` measured on a CPU.

    shiva bench step --baselines --layers 8 --rounds 2
    shiva bench step --model flux-dev --layers 3 --budgets 0.8,0.6 --sweeps 0.6 --rounds 2 --name step-flux
    shiva bench step --model pixart-sigma --layers 4 --budgets 0.8,0.6 --sweeps 0.6 --name step-pixart
    shiva bench anatomy --layers 4 --rounds 2
    shiva bench compile --layers 8 --batch 1 --rounds 2
    shiva bench compose --model sd3-medium --layers 2 --height 256 --width 256 --name compose-sd3
    shiva bench scale
    python -m reproduce.claims.speed_tables

Slices of the real shapes with random weights; the paper's are whole images on an RTX 4090. So ratios are compared.
"""

from __future__ import annotations

from typing import Any

from reproduce.claims.common import Claim, Result, judge, main
from reproduce.claims.tables import RESULTS, Reading, Tables, listed, load, near, rows
from reproduce.paper import BENCHED

NAMES = ("step", "step-flux", "step-pixart", "anatomy", "compile", "compose-sd3", "scale")
BUDGETS = (0.9, 0.8, 0.7, 0.6)
SPEEDUPS = [BENCHED[f"shiva {budget}"].speedup for budget in BUDGETS]
ARCHITECTURES = {"step-flux": ("Flux", 1.25, 0.240), "step-pixart": ("PixArt", 1.12, 0.172)}
"""The paper's speed-up, and the share of FLOPs that it saves."""


def tables() -> Tables:
    return load(RESULTS / "bench", NAMES)


def stages(t: Tables) -> list[dict[str, Any]]:
    """The configurations of the anatomy: dense, then each budget."""
    found = rows(t["anatomy"], "configurations")
    return [found["dense"], *(found[f"shiva {budget}"] for budget in BUDGETS)]


def speedups(t: Tables) -> Claim:
    methods = rows(t["step"])
    found = [methods[f"shiva {budget}"]["speedup"] for budget in BUDGETS]
    limits = [methods[f"shiva {budget}"]["limit"] for budget in BUDGETS]
    return Claim(
        "FLOPs saved become time: the speed-up of Shiva at 0.9 / 0.8 / 0.7 / 0.6",
        f"{listed(SPEEDUPS, '.2f')} (RTX 4090, 50 steps)",
        f"{listed(found, '.2f')} (a step of 8 SD3 blocks, CPU)",
        judge(all(ours >= 0.9 * paper for ours, paper in zip(found, SPEEDUPS, strict=True)), min(found) > 1),
        f"True FLOPs allow {listed(limits, '.2f')}. Another device, and the transformer alone; two rounds.",
    )


def architectures(t: Tables) -> Claim:
    paper, ours, met, faster = [], [], [], []
    for name, (label, speedup, saved) in ARCHITECTURES.items():
        methods = rows(t[name])
        dense = methods["dense"]["tflops_paper"]
        paper.append(f"{label} {speedup:.2f} at {saved:.1%} saved")
        for budget in (0.8, 0.6):
            row = methods[f"shiva {budget}"]
            left = row["tflops_paper"] / dense
            ours.append(f"{label} {row['speedup']:.2f} at {1 - left:.1%}")
            met.append(row["speedup"] * left >= 0.9 * speedup * (1 - saved))
            faster.append(row["speedup"] > 1)
    return Claim(
        "the saving becomes time on Flux and PixArt too",
        ", ".join(paper),
        ", ".join(ours),
        judge(all(met), all(faster)),
        "FLOPs as the paper counts them. Reproduced where the speed-up times the share of FLOPs left is within a "
        "tenth of the paper's or above it. Slices of 3 and 4 blocks, CPU; no images of either were made.",
    )


def attention_and_ffn(t: Tables) -> Claim:
    dense, *_, least = stages(t)
    attention, ffn = (1 - least["stages"][part] / dense["stages"][part] for part in ("attention", "ffn"))
    share = dense["stages"]["attention"] / dense["step"]
    return Claim(
        "at 0.6 attention and FFN take that much less time",
        "38.5% and 30.5%",
        f"{attention:.1%} and {ffn:.1%}",
        judge(near(attention, 0.385) and near(ffn, 0.305), min(attention, ffn) > 0),
        f"A slice of 4 blocks, of which 3 are reduced. Attention, its projections included, is {share:.0%} of a "
        "dense step on this CPU; the paper has 45.4%.",
    )


def overhead(t: Tables) -> Claim:
    dense, *reduced = stages(t)
    paths = [row["path"] for row in reduced]
    whole = [row["stages"]["router"] + row["stages"]["sort"] for row in reduced]
    ratio = max(paths) / min(paths)
    return Claim(
        "the pruning path costs nearly the same at every ratio",
        "202.6 / 206.0 / 210.2 / 209.6 ms an image, 2.7% of the dense one",
        f"{listed(paths, '.0f')} ms a step, {paths[0] / dense['step']:.1%} to {paths[-1] / dense['step']:.1%} of the "
        "dense one",
        judge(ratio <= 1.1, ratio <= 1.5),
        f"Router and sort, which see all tokens, stay within {max(whole) / min(whole):.2f} of each other; gather and "
        "scatter move the kept tokens, and on a CPU bytes are time, where the paper's are launches.",
    )


def scatter(t: Tables) -> Claim:
    found = [row["stages"]["scatter"] for row in stages(t)[1:]]
    return Claim(
        "scatter costs more at lower ratios",
        "42.8 / 45.6 / 49.4 / 50.7 ms",
        f"{listed(found, '.0f')} ms",
        judge(near(found[-1] / found[0], 50.7 / 42.8), found == sorted(found)),
        "Ours copies the stream and writes the kept rows into it: fewer rows, less to write.",
    )


def batching(t: Tables) -> Claim:
    one, two = (
        next(row for row in t["scale"]["growth"] if (row["batch"], row["layers"]) == (batch, 2)) for batch in (2, 4)
    )
    gains = {name: 1 - two[name]["seconds"] / 2 / one[name]["seconds"] for name in ("shiva", "dense")}
    noise = max(row[name]["spread"] for row in (one, two) for name in gains)
    wider = two["shiva"]["speedup"] / one["shiva"]["speedup"] - 1
    return Claim(
        "two images together take less time each with Shiva, and not without",
        "9.5% less, dense unchanged",
        f"{gains['shiva']:.1%} less, dense {gains['dense']:.1%} less; the speed-up {wider:+.1%}",
        judge(near(gains["shiva"], 0.095) and abs(gains["dense"]) < 0.01, wider > noise),
        f"Within the spread of the runs, {noise:.0%}; two blocks at 512², CPU.",
    )


def compiled(t: Tables) -> Claim:
    dense, ours = (rows(t["compile"])[name] for name in ("dense", "shiva 0.6"))
    eager, compiled = (dense[how] / ours[how] for how in ("eager", "compiled"))
    return Claim(
        "compiled Shiva-60 remains faster than compiled Vanilla",
        "1.29x (eager 1.41x)",
        f"{compiled:.2f}x (eager {eager:.2f}x)",
        judge(compiled >= 0.9 * 1.29, compiled > 1),
        f"8 blocks, CPU, inductor, two rounds. Compiling gains {dense['eager'] / dense['compiled'] - 1:+.0%} for "
        f"dense and {ours['eager'] / ours['compiled'] - 1:+.0%} for Shiva; the paper {7912.7 / 6823.1 - 1:+.0%} and "
        f"{5625.5 / 5304.7 - 1:+.0%}.",
    )


def shapes(t: Tables) -> Claim:
    ours, threshold = (
        [not step["refused"] for step in t["compile"]["export"][name]] for name in ("shiva 0.6", "dydit")
    )
    return Claim(
        "a deterministic budget has all shapes before a step, a threshold has not",
        "every step captured; a threshold's is rejected",
        f"{sum(ours)} of {len(ours)} steps export with plain numbers, DyDiT's {sum(threshold)} of {len(threshold)}",
        judge(all(ours) and not any(threshold), all(ours)),
        "By `torch.export`; capture as a CUDA graph needs a GPU and was not run.",
    )


def int8_time(t: Tables) -> Claim:
    mixes = rows(t["compose-sd3"], "mixes")
    gain = mixes["shiva"]["seconds"] / mixes["int8 + shiva"]["seconds"]
    return Claim(
        "INT8 makes the pruned model faster still",
        "1.08x (104.5 to 96.6 ms)",
        f"{gain:.2f}x",
        judge(gain >= 0.9 * 104.5 / 96.6 and gain > 1, gain > 1),
        "torchao's dynamic INT8 on a CPU without fast integer products; it says nothing of a GPU.",
    )


def int8_weights(t: Tables) -> Claim:
    mixes = rows(t["compose-sd3"], "mixes")
    dense, ours, both = (mixes[name]["weights"] for name in ("dense", "shiva", "int8 + shiva"))
    return Claim(
        "INT8 shrinks the weights, pruning does not",
        "3.90 GB dense, 3.92 GB with Shiva, 3.50 GB with both (-10.7%)",
        f"{listed([dense / 1e6, ours / 1e6, both / 1e6], '.0f')} MB ({both / ours - 1:.1%})",
        judge(ours >= dense and near(1 - both / ours, 1 - 3.50 / 3.92), both < dense <= ours),
        "A slice of two blocks, whose image FFNs are converted.",
    )


READINGS: tuple[Reading, ...] = (
    speedups,
    architectures,
    attention_and_ffn,
    overhead,
    scatter,
    batching,
    compiled,
    shapes,
    int8_time,
    int8_weights,
)


def run(quick: bool = False) -> Result:
    found = tables()
    claims = tuple(reading(found) for reading in READINGS)
    return Result(
        "speed_tables", "Time by `shiva bench`", claims, {"read": [f"results/bench/{name}.json" for name in NAMES]}
    )


if __name__ == "__main__":
    main("speed_tables")
