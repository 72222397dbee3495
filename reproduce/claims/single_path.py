"""Figure synthetic_val (b): does the executed path's gradient point where the two-path gradient does, at any budget?

    python -m reproduce.claims.single_path

A trial is a seed: a frozen block, an input and scores (see residual_task.py). The paper names neither the ratios nor
the block's norm; here r = .1 to .9 and a pre-norm block, as in a DiT; the post-norm form is in the details.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from reproduce.claims.common import Claim, Result, cosine, judge, main, progress, spread
from reproduce.claims.directions import estimate, two_path
from reproduce.claims.residual_task import TOKENS, ResidualTask, normal_scores, residual_task
from shiva.ops.topk import hard_topk, token_count

RATIOS = tuple(r / 10 for r in range(1, 10))


def agreement(task: ResidualTask, scores: Tensor, ratio: float) -> float:
    """cos(g-hat, g*) at a keep ratio."""
    k = token_count(ratio, TOKENS)
    single = estimate(task, hard_topk(scores[None], k), "input")[0]
    return float(cosine(single, two_path(task, scores, k)))


def run(seeds: Sequence[int] = range(40), quick: bool = False) -> Result:
    seeds = list(seeds)[:10] if quick else list(seeds)
    cosines: dict[str, dict[float, dict[str, float]]] = {}
    for norm in ("pre-norm", "post-norm"):
        tasks = [residual_task(seed, pre_norm=norm == "pre-norm") for seed in seeds]
        cosines[norm] = {
            ratio: spread(
                [agreement(task, normal_scores(seed), ratio) for seed, task in zip(seeds, tasks, strict=True)]
            )
            for ratio in progress(RATIOS, f"single path, {norm}")
        }
    means = [row["mean"] for row in cosines["pre-norm"].values()]
    least = min(row["min"] for row in cosines["pre-norm"].values())
    half = cosines["pre-norm"][0.5]["mean"]
    claim = Claim(
        "the single-path gradient agrees with the two-path one at every budget, in every trial",
        "cos .61 to .76, all 40 > 0",
        f"cos {min(means):.2f} to {max(means):.2f}, {half:.2f} at r = .5; least of {9 * len(seeds)}: {least:.2f}",
        judge(least > 0 and min(means) > 0.56 and max(means) < 0.81, least > 0),
        f"From r = .1 to .9: {' '.join(f'{mean:.2f}' for mean in means)}. What g* itself is worth is another "
        "question: see `estimators`.",
    )
    details: dict[str, Any] = {"ratios": RATIOS, "trials": len(seeds), "cosine": cosines}
    return Result("single_path", "Single path against two paths, over budgets", (claim,), details)


def draw(result: Result, axes: Any) -> None:
    for norm, rows in result.details["cosine"].items():
        means, deviations = ([row[key] for row in rows.values()] for key in ("mean", "std"))
        axes.errorbar(RATIOS, means, deviations, marker="o", capsize=2, label=norm)
    axes.axhspan(0.61, 0.76, color="0.85", label="paper's range of means")
    axes.set(xlabel="keep ratio", ylabel="cos(single path, two-path)", ylim=(0, 1))
    axes.legend()


if __name__ == "__main__":
    main("single_path")
