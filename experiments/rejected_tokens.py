"""Beyond the paper: what a rejected token gets, over whole sampling runs of the embedded model.

    python -m experiments.rejected_tokens --model models/emoji [--checkpoint models/shiva/60]

Every contender runs the same prompts, noise, steps and guidance; the figure is the PSNR of its final images to the
dense run's, against the true FLOPs of the whole run (dense first step included, the method's own products not). A
budget is the mean keep over all steps of the reduced layers, so a cache pays for its dense first step out of the
others. Without a checkpoint there is no trained router to rank by, and none is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shiva
from experiments.common import Claim, Result, main
from shiva.measure.generate import Contender, generate, load_pipeline, psnr

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
PROMPTS = (
    "red apple", "pizza", "dog face", "octopus", "sunflower", "rocket", "castle", "guitar", "soccer ball", "crown",
    "light bulb", "robot", "ghost", "check mark", "smiling face with sunglasses", "rainbow",
)  # fmt: skip
REJECTED = ("identity", "near", "cached")


def contenders(checkpoint: Path | None, keeps: Sequence[float]) -> dict[str, Contender]:
    """Rejected x ranking at every keep, and the methods a user would compare with."""
    rankings: dict[str, dict[str, Any]] = {"random": {"score": "random"}, "oldest": {"score": "age"}}
    if checkpoint is not None:
        rankings |= {"router": {}, "router + age": {"age": 0.5}}
    found = {"dense": Contender(None)}
    for rejected in REJECTED:
        for ranking, options in rankings.items():
            if ranking in ("oldest", "router + age") and rejected != "cached":
                continue
            for keep in keeps:
                chosen = {**options, "rejected": rejected, "budget": keep}
                source = shiva.Shiva(**chosen) if checkpoint is None else checkpoint
                found[f"{rejected}, {ranking}, {keep:g}"] = Contender(source, {} if checkpoint is None else chosen)
    for ratio in (0.25, 0.5):
        found[f"ToMeSD, attention, {1 - ratio:g}"] = Contender(shiva.ToMeSD(ratio=ratio))
    found["SDTM, release, 0.7"] = Contender(shiva.SDTM.preset("release"))
    return found


def run(
    model: Path = Path("models/emoji"),
    checkpoint: Path | None = None,
    seeds: Sequence[int] = range(2),
    steps: int = 25,
    guidance: float = 4.0,
    quick: bool = False,
) -> Result:
    keeps, prompts, seeds = (KEEPS[1::2], PROMPTS[:4], list(seeds)[:1]) if quick else (KEEPS, PROMPTS, list(seeds))
    pipe = load_pipeline(model, text_encoder_3=None, tokenizer_3=None)
    points: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        outcomes = generate(
            pipe,
            prompts,
            contenders(checkpoint, keeps),
            steps=steps,
            guidance=guidance,
            seed=1000 * seed,
            max_sequence_length=0,
        )
        dense = outcomes["dense"]
        for name, outcome in outcomes.items():
            if outcome.summary is None:
                continue
            distances = [psnr(a, b) for a, b in zip(outcome.images, dense.images, strict=True)]
            point = points.setdefault(name, {"psnr": [], "flops_share": [], "cached_mib": []})
            point["psnr"].append(sum(distances) / len(distances))
            point["flops_share"].append(outcome.summary.flops_share)
            point["cached_mib"].append(outcome.summary.cached_bytes / 2**20)
    means = {name: {key: sum(v) / len(v) for key, v in point.items()} for name, point in points.items()}
    closeness = {name: point["psnr"] for name, point in means.items()}
    gains = {k: closeness[f"cached, random, {k:g}"] - closeness[f"identity, random, {k:g}"] for k in keeps}
    claim = Claim(
        claim="a rejected token's own last update keeps a run closer to dense than the identity, at the same budget",
        paper="named as open",
        ours=", ".join(f"{gain:+.1f} dB at keep {keep:g}" for keep, gain in gains.items()),
        verdict="not in the paper",
        sentence=f"Random choice, {len(prompts)} prompts, {len(seeds)} seeds, {steps} steps; closeness, not quality.",
    )
    details = {"points": means, "per_seed": points, "steps": steps, "guidance": guidance, "prompts": list(prompts)}
    return Result("rejected_tokens", "What a rejected token gets", (claim,), details)


def draw(result: Result, axes: Any) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for name, point in result.details["points"].items():
        method, ranking, _ = name.split(", ")
        series.setdefault(f"{method}, {ranking}", []).append((point["flops_share"], point["psnr"]))
    for name, points in series.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=3, label=name)
    axes.set(xlabel="true FLOPs of the run, share of dense", ylabel="PSNR to dense, dB")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--checkpoint", type=Path, help="a trained Shiva checkpoint, to rank by its router too")
    main("rejected_tokens", parser)
