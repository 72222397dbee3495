"""Beyond the paper: what a rejected token gets, over whole sampling runs of the embedded model.

    python -m reproduce.claims.rejected_tokens [--checkpoint models/shiva/60] [--aged outputs/emoji-cached/checkpoint]
    python -m reproduce.claims.rejected_tokens --table results/validate/rejected_tokens.json

Every candidate runs the same prompts, noise, steps and guidance. PSNR and LPIPS are distances of its final images to
the dense run's (of as many steps, but for the dense model in fewer); the text-image score and the Fréchet distance
(EfficientNet-Lite0, not FID) are held against the prompts and the real images. FLOPs are the true ones of the whole
run as a share of dense, its dense first step included, the method's own products not; time is that of a whole run of
one seed as a share of dense, all taking turns, at the keeps `--timed`. A budget is the mean keep over all steps of
the reduced layers, so a cache pays for its dense first step out of the others. Without a checkpoint there is no
trained router to rank by.

Each finished candidate is kept under `--state`; the same command continues after a kill.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from reproduce.bench.compose import add_cache
from reproduce.claims.common import FIRST, LABELS, ROOT, Claim, Result, main, progress
from reproduce.claims.rejected_grid import (
    RANKINGS,
    REJECTED,
    Runner,
    Setting,
    described,
    fewer_steps,
    others,
    selectors,
    short_runs,
    whole_step,
)
from shiva.evaluate.drawing import WITHOUT_T5, load_pipeline
from shiva.evaluate.frontier import pareto
from shiva.evaluate.prompts import read_prompts

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TIMED = (0.6,)
SHORT = (4, 6, 8, 16, 25)
PARTS = ("selectors", "others", "fewer-steps", "whole-step", "short")
COLUMNS = {
    "flops_share": "FLOPs",
    "time_share": "time",
    "psnr": "PSNR to dense, dB",
    "lpips": "LPIPS to dense",
    "text_image": "text-image",
    "frechet": "Fréchet (Lite0)",
    "cached_mib": "cache, MiB",
}


def run(
    model: Path = FIRST,
    checkpoint: Path | None = None,
    aged: Path | None = None,
    keeps: Sequence[float] = KEEPS,
    prompts: int = 32,
    seeds: int = 5,
    steps: int = 25,
    short: Sequence[int] = SHORT,
    guidance: float = 4.0,
    timed: Sequence[float] = TIMED,
    rounds: int = 3,
    parts: Sequence[str] = PARTS,
    state: Path = ROOT / "outputs" / "rejected_tokens",
    quick: bool = False,
) -> Result:
    if quick:
        keeps, prompts, seeds, steps, short, timed = (0.6,), 2, 1, 6, (4,), ()
    pipe = load_pipeline(model, without=WITHOUT_T5)
    setting = Setting(model, read_prompts(LABELS).limited(prompts), tuple(range(seeds)), guidance, state)
    runner = Runner(pipe, setting)
    ours = selectors(checkpoint, aged, keeps, steps) if "selectors" in parts else []
    theirs = others(steps) if "others" in parts else []
    if "fewer-steps" in parts:
        theirs += fewer_steps(steps)
    if "whole-step" in parts:
        theirs += whole_step(runner.dense(steps)["ratios"].tolist(), steps)
    few = short_runs(short) if "short" in parts else []
    measured = [runner.measure(point) for point in progress(ours + theirs, "whole runs")]
    lengths = [runner.measure(point) for point in progress(few, "short runs")]
    paced = [point for point in ours if point.keep in timed] + theirs if timed else []
    shares = runner.pace(paced, steps, rounds) if paced else {}
    for found in measured:
        found["time_share"] = shares.get(found["name"])
    refused = {}
    try:
        add_cache(pipe.transformer, 0.1)
    except ValueError as error:
        refused["FirstBlockCache"] = str(error)
    details = {
        **described(setting),
        "steps": steps,
        "points": measured,
        "short": lengths,
        "refused": refused,
        "front": [p["name"] for p in pareto(measured, itemgetter("flops_share"), itemgetter("psnr"))],
    }
    sentence = (
        f"{prompts} prompts of all groups, {seeds} seeds, {steps} steps, guidance {guidance:g}; PSNR to dense is "
        "closeness, not quality."
    )
    return Result("rejected_tokens", "What a rejected token gets", tuple(claims(measured, lengths, sentence)), details)


def best_within(points: Sequence[dict[str, Any]], series: str, flops: float) -> dict[str, Any] | None:
    """The closest to dense of the series that begin so, at no more FLOPs."""
    alone = [p for p in points if p["series"].startswith(series) and "MagCache" not in p["series"]]
    found = [p for p in alone if p["flops_share"] <= flops + 1e-3]
    return max(found, key=lambda p: p["psnr"], default=None)


def claims(points: Sequence[dict[str, Any]], lengths: Sequence[dict[str, Any]], sentence: str) -> list[Claim]:
    named = {point["name"]: point for point in points}
    found = []

    def add(claim: str, parts: Sequence[str], paper: str = "named as open") -> None:
        if parts:
            found.append(Claim(claim, paper, ", ".join(parts), "not in the paper", sentence))

    def gains(series: str, over: str) -> list[str]:
        pairs = [(named[f"{series}, {p['keep']:g}"], p) for p in points if p["series"] == over]
        return [f"{ours['psnr'] - theirs['psnr']:+.1f} dB at keep {theirs['keep']:g}" for ours, theirs in pairs]

    add(
        "a rejected token's own last update keeps a run closer to dense than the identity, at the same budget",
        gains("cached, random", "identity, random"),
    )
    add(
        "with it, a band of rows that moves at every step is better than tokens at random",
        gains("cached, sweep", "cached, random"),
    )
    add(
        "and better still if the band attends to all tokens, by the keys and values that the others last had",
        gains("cached, attending to all, sweep", "cached, sweep"),
    )
    margins = []
    for point in (p for p in points if p["series"] == "identity, router"):
        rival = best_within(points, "cached", point["flops_share"])
        if rival is not None:
            margins.append(f"{rival['psnr'] - point['psnr']:+.1f} dB at keep {point['keep']:g} ({rival['name']})")
    add("cached updates at the best selection against the paper's identity with its router, at no more FLOPs", margins)
    rivals = []
    for point in (p for p in points if p["series"].startswith("MagCache")):
        rival = best_within(points, "cached", point["flops_share"])
        if rival is not None:
            rivals.append(f"{rival['psnr'] - point['psnr']:+.1f} dB beside {point['series']} ({rival['name']})")
    add("cached updates against a whole-step cache, at no more FLOPs", rivals, "caching is future work")
    by_steps: dict[int, dict[str, float]] = {}
    for point in lengths:
        by_steps.setdefault(point["steps"], {})[point["series"]] = point["psnr"]
    add(
        "what suits short runs, at keep 0.6",
        [
            f"{n} steps: " + ", ".join(f"{kind} {value:.1f} dB" for kind, value in kinds.items())
            for n, kinds in sorted(by_steps.items())
        ],
    )
    return found


def table(details: dict[str, Any]) -> str:
    """All candidates in Markdown; the Pareto front in bold."""
    front = set(details["front"])
    lines = ["| candidate | steps | " + " | ".join(COLUMNS.values()) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for point in [*details["points"], *details["short"]]:
        cells = ["–" if point.get(key) is None else f"{point[key]:.3g}" for key in COLUMNS]
        on_front = point["name"] in front and point in details["points"]
        name = f"**{point['name']}**" if on_front else point["name"]
        lines.append(f"| {name} | {point['steps']} | " + " | ".join(cells) + " |")
    lines += [f"| {name} | | refused: {reason} |" for name, reason in details["refused"].items()]
    return "\n".join(lines)


def draw(result: Result, axes: Any) -> None:
    """Colour says what a rejected token gets, the mark what tokens are ranked by; other methods are grey."""
    series: dict[str, list[tuple[float, float]]] = {}
    for point in result.details["points"]:
        several = (kind for kind in ("MagCache", "dense in") if point["series"].startswith(kind))
        name = next(several, point["series"])
        series.setdefault(name, []).append((point["flops_share"], point["psnr"]))
    marks = dict(zip(RANKINGS, "os^DX", strict=True))
    colours = {kind: f"C{number}" for number, kind in enumerate(REJECTED)}
    others = iter("v<>Pdp*hx")
    for name, points in series.items():
        kind, _, ranking = name.rpartition(", ")
        known = kind in colours and ranking in marks
        look = (
            {"color": colours[kind], "marker": marks[ranking]} if known else {"color": "0.4", "marker": next(others)}
        )
        axes.plot(*zip(*sorted(points), strict=True), markersize=4, linewidth=1, label=name, **look)
    front = [p for p in result.details["points"] if p["name"] in result.details["front"]]
    edge = sorted((p["flops_share"], p["psnr"]) for p in front)
    axes.step(*zip(*edge, strict=True), where="post", color="0.6", linewidth=4, alpha=0.4, label="Pareto front")
    axes.set(xlabel="true FLOPs of the run, share of dense", ylabel="PSNR to dense, dB")
    axes.legend(fontsize=5, loc="center left", bbox_to_anchor=(1.01, 0.5))


def numbers(kind: type) -> Any:
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    if "--table" in sys.argv[1:]:
        print(table(json.loads(Path(sys.argv[-1]).read_text())["details"]))
        raise SystemExit
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FIRST)
    parser.add_argument("--checkpoint", type=Path, help="a trained Shiva checkpoint, to rank by its router too")
    parser.add_argument("--aged", type=Path, help="one trained with fill: cached and the age signal")
    parser.add_argument("--keeps", type=numbers(float), default=KEEPS, metavar="0.9,0.6,...")
    parser.add_argument("--prompts", type=int, default=32, help="labels, evenly spaced over all groups")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--short", type=numbers(int), default=SHORT, metavar="4,6,...", help="lengths of short runs")
    parser.add_argument("--timed", type=numbers(float), default=TIMED, help="keeps whose runs are timed, in turns")
    parser.add_argument("--rounds", type=int, default=3, help="turns each timed run takes")
    parser.add_argument("--parts", type=numbers(str), default=PARTS, help="of " + ", ".join(PARTS))
    parser.add_argument("--state", type=Path, default=ROOT / "outputs" / "rejected_tokens", help="finished candidates")
    main("rejected_tokens", parser)
