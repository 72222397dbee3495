"""Figure ratio_ablation (b) and the logit noise of stage 2: what shape a learned ratio table has.

    python -m reproduce.claims.learned_schedule [--seeds 3] [--steps 120]

The paper: keep about 0.4 in the early, noisy steps and about 0.8 in the last ones, shallow layers preserved; noise
N(0, 1) on the logits, without which the policy would collapse into a flat ratio. Here: tables of the additive policy,
learned over one frozen router with and without that noise, shifted to a mean of 0.6, and those of the two shipped
checkpoints, which had all three stages. "Early" and "late" are the noisiest and the cleanest fifth of the timesteps,
"shallow" and "deep" the first and the last half of the reduced layers. Collapse is judged by the table's deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduce.claims.common import ROOT, Claim, Result, judge, main, ordered, shown
from reproduce.claims.embedded import KEEP, Bench, Stats, Variant, arguments, bench_of, over_seeds, table
from shiva.checkpoint import ShivaCheckpoint
from shiva.ops.schedule import RatioSchedule

NOISY, PLAIN = "with logit noise", "without"
VARIANTS = {NOISY: Variant(policy=True), PLAIN: Variant(policy=True, logit_noise=0.0)}
SHIPPED = {"emoji": "models/shiva/{}", "emoji-128": "models/128/shiva-{}"}
"""Where the checkpoints of each model are, by their budget."""
BUDGETS = {"Shiva 60": 60, "Shiva 80": 80}
PARTS = ("early", "late", "shallow", "deep", "deviation")
TIMES = tuple(float(t) for t in range(1000, -1, -50))


def schedule_of(folder: Path) -> RatioSchedule:
    """A checkpoint's table at every 50th timestep."""
    method: Any = ShivaCheckpoint.from_pretrained(folder).method()
    return method.schedule.resample(TIMES)


def shape_of(schedule: RatioSchedule) -> dict[str, float]:
    ratios = schedule.ratios()[:, schedule.reduced]  # (steps, layers)
    fifth, half = len(ratios) // 5, ratios.shape[1] // 2
    parts = (ratios[:fifth], ratios[-fifth:], ratios[:, :half], ratios[:, -half:])
    return {
        **{name: float(part.mean()) for name, part in zip(PARTS, parts, strict=False)},
        "deviation": float(ratios.std()),
    }


def tables_of(bench: Bench, variant: Variant) -> list[RatioSchedule]:
    return [schedule_of(bench.checkpoint(variant, seed)).shift(KEEP) for seed in bench.seeds]


def run(seeds: Sequence[int] = range(3), quick: bool = False, **where: Any) -> Result:
    bench = bench_of(quick, seeds, **where)
    found = {name: tables_of(bench, variant) for name, variant in VARIANTS.items()}
    found |= {
        name: [schedule_of(ROOT / SHIPPED.get(bench.model.name, SHIPPED["emoji"]).format(share))]
        for name, share in BUDGETS.items()
    }
    rows = {}
    for name, schedules in found.items():
        shapes = [shape_of(schedule) for schedule in schedules]
        rows[name] = {part: over_seeds([shape[part] for shape in shapes]) for part in PARTS}
    table("Learned ratio tables", rows, {part: part for part in PARTS})
    images = {name: row["psnr"] for name, row in bench.compare(VARIANTS).items()}
    mean = sum(schedule.ratios()[:, schedule.reduced] for schedule in found[NOISY]) / len(found[NOISY])
    details = {**bench.details(rows), "timesteps": TIMES, "table": mean.tolist(), "psnr": images}
    return Result("learned_schedule", "The learned ratio table", claims_of(rows, images, bench.seen), details)


def claims_of(rows: Mapping[str, Mapping[str, Stats]], images: Mapping[str, Stats], seen: str) -> tuple[Claim, ...]:
    learned, plain = rows[NOISY], rows[PLAIN]

    def pair(name: str, first: str, second: str) -> str:
        return f"{shown(rows[name][first])} to {shown(rows[name][second])}"

    def shipped(first: str, second: str) -> str:
        return ", ".join(f"{pair(name, first, second)} in {name}" for name in BUDGETS)

    rises = ordered(learned["late"]["values"], learned["early"]["values"])
    met = abs(learned["early"]["mean"] - 0.4) < 0.05 and abs(learned["late"]["mean"] - 0.8) < 0.05
    return (
        Claim(
            "the learned table keeps little in the noisy steps and most in the last ones",
            "about 0.4 to about 0.8",
            pair(NOISY, "early", "late"),
            judge(met and rises == "reproduced", rises != "not reproduced"),
            f"Policy learning alone; {seen}. After all three stages: {shipped('early', 'late')}.",
        ),
        Claim(
            "the learned table preserves shallow layers",
            "shallow layers keep more; no figure",
            f"shallow to deep: {pair(NOISY, 'shallow', 'deep')}",
            ordered(learned["shallow"]["values"], learned["deep"]["values"]),
            f"The first layer is dense and not counted. After all three stages: {shipped('shallow', 'deep')}.",
        ),
        Claim(
            "logit noise keeps the policy from collapsing into a flat ratio",
            "prevents it; no figure",
            f"deviation of the table {shown(learned['deviation'])} with noise, {shown(plain['deviation'])} without",
            ordered(learned["deviation"]["values"], plain["deviation"]["values"]),
            f"Final images, PSNR in dB to dense: {shown(images[NOISY])} with, {shown(images[PLAIN])} without.",
        ),
    )


def draw(result: Result, axes: Any) -> None:
    ratios, times = result.details["table"], result.details["timesteps"]
    extent = (0.5, len(ratios[0]) + 0.5, times[-1], times[0])
    picture = axes.imshow(ratios, aspect="auto", extent=extent, cmap="viridis")
    axes.set(xlabel="layer", ylabel="timestep (1000 is noise)", title="keep, mean over seeds")
    axes.figure.colorbar(picture, ax=axes)


if __name__ == "__main__":
    main("learned_schedule", arguments(__doc__))
