"""Figure synthetic_val (a): one run learns which tokens matter and how many.

    python -m reproduce.claims.joint_learning

From the paper: N = 100, D = 16, 20 signal tokens of mean 10, k from 50, Adam (.1) for the router, SGD (2.0) for k,
100 steps of warm-up with k fixed and 700 with both, lambda = .1. Assumed: unit noise on both kinds of token; the loss
sum over rejected ||x||^2 / (N D) + lambda k, so that it reaches rejected tokens and a signal token weighs about 1; the
library's router without context, one input per seed; tau_rank = .2 and tau_sel = .1 N (Eq. norm_prob_select). `k` is
the mean of the last 100 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reproduce.claims.common import Claim, Result, generator, judge, main, progress, shown, spread
from shiva.ops.networks import ContextRouter
from shiva.ops.topk import Selection, input_gated, select_tokens

TOKENS, WIDTH, SIGNAL, START = 100, 16, 20, 50.0
WARMUP, ADAPTATION, PENALTY = 100, 700, 0.1


def tokens_of(seed: int) -> Tensor:
    """x (1, N, D), the signal tokens first."""
    x = torch.randn(1, TOKENS, WIDTH, generator=generator(seed + 50_000))
    x[:, :SIGNAL] += 10.0
    return x


def task_loss(x: Tensor, selection: Selection) -> Tensor:
    """sum over rejected ||x||^2 / (N D): the block takes all there is out of a selected token."""
    reduction = input_gated(selection, TOKENS)
    y = reduction.restore(torch.zeros_like(reduction.reduce(x)), x)  # (1, N, D)
    return y.square().sum() / (TOKENS * WIDTH)


def learn(seed: int, tau_sel: float = 0.1) -> dict[str, list[float]]:
    """The budget, and the shares of signal kept (recall) and of kept tokens that are signal (precision), by step."""
    x = tokens_of(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = ContextRouter(WIDTH, 1, 1, layers=1, bottleneck=WIDTH, signals=())
    budget = torch.tensor(START, requires_grad=True)
    ranking = torch.optim.Adam(router.parameters(), lr=0.1)
    budgeting = torch.optim.SGD([budget], lr=2.0)
    course: dict[str, list[float]] = {"k": [], "recall": [], "precision": []}
    for step in range(WARMUP + ADAPTATION):
        k = int(budget.detach())
        selection = select_tokens(router(x, None, None, 0), k, budget, tau_rank=0.2, tau_sel=tau_sel)
        loss = task_loss(x, selection) + PENALTY * budget
        ranking.zero_grad()
        budgeting.zero_grad()
        loss.backward()
        ranking.step()
        if step >= WARMUP:
            budgeting.step()
        with torch.no_grad():
            budget.clamp_(1.0, TOKENS)
        kept = int((selection.indices < SIGNAL).sum())
        for name, value in (("k", float(budget.detach())), ("recall", kept / SIGNAL), ("precision", kept / k)):
            course[name].append(value)
    return course


def final_mean(course: list[float]) -> float:
    return sum(course[-100:]) / 100


def run(seeds: Sequence[int] = range(5), quick: bool = False) -> Result:
    seeds = list(seeds)[:2] if quick else list(seeds)
    courses = [learn(seed) for seed in progress(seeds, "joint learning")]
    k, recall, precision = (spread([final_mean(c[name]) for c in courses]) for name in ("k", "recall", "precision"))
    unnormalised = spread([final_mean(learn(seed, tau_sel=1 / TOKENS)["k"]) for seed in seeds[:2]])
    reached = 17.5 <= k["mean"] <= 20
    claim = Claim(
        "scores and budget are learned together: k falls from 50 and settles below k* = 20",
        "k ≈ 18, about 95 % of signal kept",
        f"k = {shown(k)}, {recall['mean']:.0%} of signal kept",
        judge(reached and recall["mean"] >= 0.88, k["mean"] < 25 and recall["mean"] > 0.75),
        f"Of the tokens kept {precision['mean']:.0%} are signal; 18 of 20 can be 90 % of the signal at most. The loss "
        "must reach rejected tokens; with the un-normalised tau_sel = 1 of Eq. prob_select k ends at "
        f"{unnormalised['mean']:.1f}.",
    )
    details: dict[str, Any] = {
        "k": k,
        "recall": recall,
        "precision": precision,
        "k_unnormalised": unnormalised,
        "courses": [{name: values[::10] for name, values in c.items()} for c in courses[:1]],
    }
    return Result("joint_learning", "Joint learning of scores and budget", (claim,), details)


def draw(result: Result, axes: Any) -> None:
    course = result.details["courses"][0]
    steps = range(0, 10 * len(course["k"]), 10)
    axes.plot(steps, course["k"], label="budget k")
    axes.axhline(SIGNAL, linestyle=":", color="0.3", label="signal tokens k*")
    axes.axvline(WARMUP, color="0.8")
    axes.set(xlabel="step", ylabel="k", ylim=(0, 55))
    share = axes.twinx()
    share.plot(steps, course["recall"], color="#E69F00", label="signal kept")
    share.set(ylabel="share of signal kept", ylim=(0, 1.1))
    axes.legend(handles=[*axes.lines[:2], *share.lines], loc="center right")


if __name__ == "__main__":
    main("joint_learning")
