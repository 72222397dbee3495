"""Selection on the embedded model: the learned router against rankings that need no training, one step and whole runs.

    python -m reproduce.claims.selection [--seeds 3]                    # routers and policies that it trains itself
    python -m reproduce.claims.selection --checkpoints DIR DIR DIR      # trained ones, such as three seeds of a recipe

All candidates keep 0.6 of the image tokens on average over a run; a dense first step, which cached updates need, is
paid for by the others. *One step*: MSE to the dense model's prediction at every step of the dense run, on the dense
run's own inputs. *Run*: PSNR of the final image to the dense run's, where errors meet again. The two can disagree.
Rankings share the flat ratio; the learned table stands beside it, and `shiva eval --protocol ratio` judges it. What
was computed last is known only where updates are kept, so its norm ranks under `cached` alone. Without checkpoints
each seed has a router and a policy trained by embedded.py, once with the output estimator and once with the paper's,
and no tuned backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import shiva
from reproduce.claims.common import FIRST, Claim, Result, Verdict, generator, main, ordered, progress, shown, weakest
from reproduce.claims.embedded import KEEP, Stats, Variant, arguments, bench_of, over_seeds, table
from reproduce.claims.trained_block import load
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.methods.rules import OLDEST_FIRST

ROUTERS = {"output": Variant(policy=True), "input (paper)": Variant({"estimator": "input"}, policy=True)}
RANKINGS = {
    "identity": ("router", "random", "norm"),
    "cached": ("router", "random", "norm", "update", "age"),
}
ADAPTIVE = "router, learned table"
PROMPTS = (
    "red apple", "pizza", "dog face", "octopus", "sunflower", "rocket", "castle", "guitar", "soccer ball", "crown",
    "light bulb", "robot", "ghost", "check mark", "smiling face with sunglasses", "rainbow",
)  # fmt: skip
COLUMNS = {"one step": "one-step MSE", "run": "PSNR of runs, dB", "keep": "mean keep", "flops": "true FLOPs of dense"}


@dataclass
class DenseRun:
    """What the dense pipeline did: each step's arguments and prediction, and the images."""

    calls: list[dict[str, Any]]
    predictions: list[Tensor]
    images: list[Any]


@dataclass(frozen=True)
class Task:
    """Prompts, noise and steps, the same for all."""

    pipe: Any
    prompts: Sequence[str]
    steps: int
    guidance: float

    def images(self) -> list[Any]:
        return self.pipe(
            prompt=list(self.prompts),
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            generator=[generator(1000 + i) for i in range(len(self.prompts))],
            max_sequence_length=0,
        ).images

    @torch.no_grad()
    def dense(self) -> DenseRun:
        calls: list[dict[str, Any]] = []
        predictions: list[Tensor] = []

        def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            calls.append(kwargs)
            predictions.append(output[0])

        handle = self.pipe.transformer.register_forward_hook(note, with_kwargs=True)
        try:
            images = self.images()
        finally:
            handle.remove()
        return DenseRun(calls, predictions, images)

    @torch.no_grad()
    def measure(self, session: shiva.Session, dense: DenseRun) -> Stats:
        """A ranking along the dense run, and on a run of its own."""
        pairs = zip(dense.calls, dense.predictions, strict=True)
        errors = [float(F.mse_loss(self.pipe.transformer(**call)[0], taught)) for call, taught in pairs]
        distances = [image_psnr(a, b) for a, b in zip(self.images(), dense.images, strict=True)]
        summary = session.summary()
        return {
            "one step": sum(errors) / len(errors),
            "run": sum(distances) / len(distances),
            "keep": summary.keep,
            "flops": summary.flops_share,
        }


@contextmanager
def ranked(pipe: Any, checkpoint: Path, rejected: str, ranking: str, seed: int = 0) -> Iterator[shiva.Session]:
    """A checkpoint that ranks as asked, at a flat ratio or by its own table; `seed` is of the random ranking."""
    score = "router" if ranking == ADAPTIVE else ranking
    with shiva.attach(
        pipe, checkpoint, budget=KEEP, fill=rejected, age=OLDEST_FIRST if score == "age" else 0.0
    ) as session:
        method: Any = session.method
        if score != "router":
            method.score = shiva.Ranked(score=score, seed=seed, fill=rejected).make_score()
        if ranking != ADAPTIVE:
            layers, dense = method.schedule.layers, sorted(method.schedule.dense)
            method.set_schedule(shiva.RatioSchedule.flat(KEEP, layers, dense))
        yield session


def rows_of(task: Task, checkpoint: Path, seed: int) -> dict[str, Stats]:
    """Every ranking of one checkpoint."""
    dense = task.dense()
    rows = {}
    pairs = [(rejected, ranking) for rejected, known in RANKINGS.items() for ranking in (ADAPTIVE, *known)]
    for rejected, ranking in progress(pairs, f"selection, {checkpoint.parent.name}"):
        with ranked(task.pipe, checkpoint, rejected, ranking, seed) as session:
            rows[f"{rejected}: {ranking}"] = task.measure(session, dense)
    return rows


def run(
    seeds: Sequence[int] = range(3),
    quick: bool = False,
    checkpoints: Sequence[Path] = (),
    prompts: int = 8,
    model: Path = FIRST,
    **where: Any,
) -> Result:
    if where.get("threads"):
        torch.set_num_threads(where["threads"])
    if checkpoints:
        groups = {"given": [Path(folder) for folder in checkpoints]}
    else:
        bench = bench_of(quick, seeds, model, **where)
        groups = {name: [bench.checkpoint(variant, seed) for seed in bench.seeds] for name, variant in ROUTERS.items()}
    task = Task(load(model), PROMPTS[: 2 if quick else prompts], 3 if quick else 25, 3.0)
    found = {}
    for group, folders in groups.items():
        trials = [rows_of(task, folder, seed) for seed, folder in enumerate(folders)]
        found[group] = {n: {key: over_seeds([t[n][key] for t in trials]) for key in COLUMNS} for n in trials[0]}
        table(f"Selection at keep {KEEP}: {group}, {len(folders)} checkpoints", found[group], COLUMNS)
    claims = tuple(claim_of(group, rows, len(groups[group])) for group, rows in found.items())
    details = {
        "groups": found,
        "prompts": list(task.prompts),
        "steps": task.steps,
        "guidance": task.guidance,
        "trained": "given" if checkpoints else bench.seen,
        "seeds": list(range(max(map(len, groups.values())))),
    }
    return Result("selection", "Learned and unlearned selection", claims, details)


def claim_of(group: str, rows: dict[str, dict[str, Stats]], count: int) -> Claim:
    def at(name: str, what: str) -> str:
        return ", ".join(f"{ranking} {shown(rows[f'identity: {ranking}'][what])}" for ranking in name.split("|"))

    def better(ranking: str, *others: str) -> dict[str, Verdict]:
        """Whether one is ahead of the others by one step, whose error should be low, and by whole runs."""
        found = {}
        for what, sign in (("one step", -1), ("run", 1)):
            by_name = {name: rows[f"identity: {name}"][what]["values"] for name in (ranking, *others)}
            signed = {name: [sign * value for value in values] for name, values in by_name.items()}
            found[what] = weakest(*(ordered(signed[ranking], signed[other]) for other in others))
        return found

    learned = better("router", "random", "norm")
    cached = {ranking: shown(rows[f"cached: {ranking}"]["run"]) for ranking in RANKINGS["cached"]}
    return Claim(
        f"the learned router beats random selection and the feature norm ({group})",
        "implied by the controls of table estimator_real; no figure",
        f"final images, dB: {at('router|random|norm', 'run')}; one-step MSE: {at('router|random|norm', 'one step')}",
        learned["run"],
        f"Final images decide, by PSNR to dense; one step alone: {learned['one step']}. With cached updates: router "
        f"{cached['router']}, random {cached['random']}, norm of the last update {cached['update']}. {count} seeds.",
    )


def draw(result: Result, axes: Any) -> None:
    for offset, (group, rows) in enumerate(result.details["groups"].items()):
        runs = [row["run"] for row in rows.values()]
        places = [place + 0.3 * offset - 0.15 for place in range(len(rows))]
        means, deviations = [r["mean"] for r in runs], [r["std"] for r in runs]
        axes.errorbar(means, places, xerr=deviations, fmt="o", markersize=4, capsize=2, label=group)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=6)
    axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    axes.set(xlabel=f"PSNR of final images to dense at keep {KEEP}, dB")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=(), help="trained Shiva checkpoints to measure")
    parser.add_argument("--prompts", type=int, default=8, help=f"images of a run; at most {len(PROMPTS)}")
    main("selection", parser)
