"""Table mc_accumulation: averaging over draws brings the single-path estimate closer to the two-path direction.

    python -m reproduce.claims.accumulation

A draw perturbs the scores and takes a new budget, on the same block and input; both g-hat and g* are averaged over
the draws before they are compared. Assumed: score noise of deviation 1 (the paper gives none; scores have unit
deviation), ratios uniform in [.2, .9], mean over 20 tasks. Both norms are measured; the paper does not say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reproduce.claims.common import Claim, Result, cosine, generator, judge, main, ordered, progress, spread
from reproduce.claims.directions import estimate, two_path
from reproduce.claims.residual_task import TOKENS, normal_scores, residual_task
from shiva.ops.topk import hard_topk, token_count

DRAWS = (1, 2, 5, 10, 25)
PAPER = (0.695, 0.781, 0.799, 0.799, 0.811)
NOISE, RATIOS = 1.0, (0.2, 0.9)


def directions(seed: int, pre_norm: bool, draws: int) -> tuple[Tensor, Tensor]:
    """g-hat and g*, (draws, N) each."""
    task, scores, source = residual_task(seed, pre_norm=pre_norm), normal_scores(seed), generator(seed + 20_000)
    single, both = [], []
    for _ in range(draws):
        perturbed = scores + NOISE * torch.randn(TOKENS, generator=source, dtype=scores.dtype)
        low, high = RATIOS
        k = token_count(low + (high - low) * float(torch.rand((), generator=source)), TOKENS)
        single.append(estimate(task, hard_topk(perturbed[None], k), "input")[0])
        both.append(two_path(task, perturbed, k))
    return torch.stack(single), torch.stack(both)


def accumulated(seed: int, pre_norm: bool) -> list[float]:
    """The cosine after 1, 2, 5, 10 and 25 draws."""
    single, both = directions(seed, pre_norm, max(DRAWS))
    return [float(cosine(single[:n].mean(0), both[:n].mean(0))) for n in DRAWS]


def run(seeds: Sequence[int] = range(20), quick: bool = False) -> Result:
    seeds = list(seeds)[:5] if quick else list(seeds)
    rows, order = {}, {}
    for norm in ("post-norm", "pre-norm"):
        table = [accumulated(seed, norm == "pre-norm") for seed in progress(seeds, f"accumulation, {norm}")]
        columns = list(zip(*table, strict=True))
        rows[norm], order[norm] = [spread(column) for column in columns], ordered(columns[-1], columns[0])
    means = {norm: [row["mean"] for row in columns] for norm, columns in rows.items()}
    gain, early = ({norm: values[at] - values[0] for norm, values in means.items()} for at in (-1, 2))
    grows, sure = means["post-norm"] == sorted(means["post-norm"]), order["post-norm"]
    claim = Claim(
        "agreement grows with accumulated draws: 1, 2, 5, 10, 25",
        " ".join(f"{value:.3f}" for value in PAPER),
        "; ".join(f"{norm} {' '.join(f'{value:.3f}' for value in values)}" for norm, values in means.items()),
        judge(grows and sure == "reproduced", gain["post-norm"] > 0),
        f"25 draws gain {gain['post-norm']:+.3f} with the post-norm block and {gain['pre-norm']:+.3f} with the "
        f"pre-norm one (the paper: +.116); five give {early['post-norm']:+.3f} and {early['pre-norm']:+.3f}.",
    )
    return Result("accumulation", "Accumulation over draws", (claim,), {"draws": DRAWS, "cosine": rows, "gain": gain})


def draw(result: Result, axes: Any) -> None:
    for norm, rows in result.details["cosine"].items():
        means, deviations = ([row[key] for row in rows] for key in ("mean", "std"))
        axes.errorbar(DRAWS, means, deviations, marker="o", capsize=2, label=norm)
    axes.plot(DRAWS, PAPER, "k--", label="paper")
    axes.set(xlabel="accumulated draws", ylabel="cos(mean single path, mean two-path)", xscale="log")
    axes.set_xticks(DRAWS, [str(n) for n in DRAWS])
    axes.legend()


if __name__ == "__main__":
    main("accumulation")
