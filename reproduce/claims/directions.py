"""The gradient directions that are compared: estimates of dL/dpi, and the discrete marginals they stand for.

A `Pruned` is anything whose loss depends on which tokens run: a frozen random block, or one of a trained model.
Estimates come from the library's own gates, so what is compared here is what trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, get_args

import torch
from torch import Tensor

from shiva.core.reduction import Reduction, select
from shiva.ops.topk import Guess, Selection, hard_topk, input_gated, output_gated

Gating = Callable[[Tensor], Reduction]
"""The reduction of a block's input x (B, N, D)."""

GUESSES: tuple[Guess, ...] = get_args(Guess)


class Pruned(Protocol):
    tokens: int
    teacher: Tensor  # (N, D): the dense pass's updates of the block

    def losses(self, gating: Gating, batch: int) -> Tensor:
        """Losses (B,) of `batch` copies of the same input under one reduction each."""


def estimate(task: Pruned, indices: Tensor, estimator: str) -> Tensor:
    """g-hat (B, N), what the backward pass puts in for dL/dpi when the tokens at indices (B, K) run.

    `estimator` is "input" (Eq. estimator) or a guess of the output estimator.
    """
    pi = torch.zeros(len(indices), task.tokens, dtype=task.teacher.dtype, requires_grad=True)
    selection = Selection(indices, pi)  # the gates are 0 in value, so pi's own value does not matter

    def gating(x: Tensor) -> Reduction:
        if estimator == "input":
            return input_gated(selection, task.tokens)
        return output_gated(selection, x, estimator, task.teacher.expand_as(x))  # type: ignore[arg-type]

    return torch.autograd.grad(task.losses(gating, len(indices)).sum(), pi)[0]


@torch.no_grad()
def losses(task: Pruned, indices: Tensor) -> Tensor:
    """Losses (B,) of the hard selections (B, K)."""
    return task.losses(lambda x: select(indices, task.tokens), len(indices))


def flips(scores: Tensor, k: int, only: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the k first of scores (N,): the k selections (k, k - 1) without one, the N - k (N - k, k + 1) with one more.

    Also the tokens dropped (k,) and added (N - k,). `only` some tokens, or all.
    """
    first = hard_topk(scores[None], k)[0]  # (k,)
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(0, first, True)
    asked = torch.arange(len(scores)) if only is None else only.sort().values
    chosen, others = asked[inside[asked]], asked[~inside[asked]]
    without = first.expand(len(chosen), k)[first != chosen[:, None]].view(len(chosen), k - 1)
    joined = torch.cat([first.expand(len(others), k), others[:, None]], dim=1)
    return without, joined.sort(dim=1).values, chosen, others


def two_path(task: Pruned, scores: Tensor, k: int, chunk: int = 512, only: Tensor | None = None) -> Tensor:
    """g* (N,) (Eq. ideal_grad): the executed path's half, and the other's from a pass with that token flipped.

    Of `only` some tokens, or all; of others it is the executed path's half.
    """
    g = estimate(task, hard_topk(scores[None], k), "input")[0]
    without, joined, chosen, others = flips(scores, k, only)
    for selections, tokens in ((without, chosen), (joined, others)):
        for part, at in zip(selections.split(chunk), tokens.split(chunk), strict=True):
            g[at] += estimate(task, part, "input").gather(1, at[:, None])[:, 0]
    return g


def coordinate_marginals(task: Pruned, scores: Tensor, k: int, chunk: int = 512, only: Tensor | None = None) -> Tensor:
    """L(m_i = 1) - L(m_i = 0) (N,), the other tokens' membership held (Eq. coordinate_marginal).

    Of `only` some tokens, or all; of others it is NaN.
    """
    now = losses(task, hard_topk(scores[None], k))
    without, joined, chosen, others = flips(scores, k, only)
    exact = torch.full_like(scores, torch.nan, dtype=now.dtype)
    for selections, tokens, sign in ((without, chosen, -1), (joined, others, 1)):
        for part, at in zip(selections.split(chunk), tokens.split(chunk), strict=True):
            exact[at] = sign * (losses(task, part) - now)
    return exact


def fixed_budget_marginals(
    task: Pruned, scores: Tensor, k: int, chunk: int = 512, only: Tensor | None = None
) -> Tensor:
    """L(i first) - L(i last) (N,), k tokens running in both: i changes places with the token at the boundary.

    Of `only` some tokens, or all; of others it is NaN.
    """
    now = losses(task, hard_topk(scores[None], k))
    tokens = torch.arange(len(scores)) if only is None else only
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(0, hard_topk(scores[None], k)[0], True)[tokens]
    moved = scores.expand(len(tokens), -1).clone()
    moved[torch.arange(len(tokens)), tokens] = torch.where(inside, scores.min() - 1, scores.max() + 1)
    swapped = torch.cat([losses(task, part) for part in hard_topk(moved, k).split(chunk)])
    exact = torch.full_like(scores, torch.nan, dtype=now.dtype)
    exact[tokens] = torch.where(inside, now - swapped, swapped - now)
    return exact


def gumbel_direction(task: Pruned, scores: Tensor, k: int) -> Tensor:
    """dL/ds (N,) of a Gumbel-sigmoid straight-through gate in the soft rank's place.

    Scores are taken to hold their logistic noise already; the threshold lies between the k-th and the next, so the
    mask is top-k's own. Each gate knows its own score alone, and no budget.
    """
    ordered = scores.sort(descending=True).values
    gate = torch.sigmoid(scores - (ordered[k - 1] + ordered[k]) / 2)
    return estimate(task, hard_topk(scores[None], k), "input")[0] * gate * (1 - gate)
