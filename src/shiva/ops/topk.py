"""Hard top-k forward, and the two straight-through estimators behind it (paper sec. 3.2, ESTIMATOR)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shiva.core.reduction import Reduction, flat_rows, gather, scatter
from shiva.ops.fill import FillFrom
from shiva.ops.softrank import soft_rank

Guess = Literal["zero", "mean", "ridge", "teacher"]


def token_count(ratio: float, tokens: int) -> int:
    """k = floor(N * r), at least 1; a ratio that is a whole count up to rounding gives that count."""
    return max(1, min(tokens, int(tokens * ratio + 1e-6)))


def check_scores(scores: Tensor) -> None:
    """Refuse scores that have no order. On an accelerator the check does not wait for the device."""
    message = "router scores hold NaN or infinity; check the checkpoint's weights, or run in float32 or bfloat16"
    if torch.compiler.is_compiling() or scores.is_meta:
        return
    if scores.device.type != "cpu":
        torch._assert_async(scores.isfinite().all(), message)
    elif not scores.isfinite().all():
        raise ValueError(message)


def hard_topk(scores: Tensor, k: int) -> Tensor:
    """Indices (B, k) of the k largest of scores (B, N), ascending; of equal scores the earlier token wins."""
    check_scores(scores)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values


def inclusion(scores: Tensor, k: Tensor, tau_rank: float, tau_sel: float) -> Tensor:
    """pi (B, N), the relaxed indicator of being among the k first (Eq. norm_prob_select).

    Gradients reach the scores through the soft ranks, and the continuous k directly.
    """
    tokens = scores.shape[-1]
    ranks = soft_rank(scores, tau_rank)  # (B, N), Eq. rank
    return torch.sigmoid((k - ranks) / (tau_sel * tokens))


class Selection(NamedTuple):
    """Which tokens run in a training step, and the relaxed inclusion that carries the gradient."""

    indices: Tensor  # (B, k), ascending
    inclusion: Tensor  # (B, N)


def select_tokens(scores: Tensor, k: int, budget: Tensor, tau_rank: float = 0.2, tau_sel: float = 0.1) -> Selection:
    """The k best tokens of scores (B, N), and their inclusion under the continuous `budget`."""
    return Selection(hard_topk(scores.detach(), k), inclusion(scores, budget, tau_rank, tau_sel))


def straight_through(pi: Tensor) -> Tensor:
    """Zero in the forward pass, d/dpi = 1 in the backward; (B, N) -> (B, N, 1)."""
    return (pi - pi.detach())[..., None]


def input_gated(selection: Selection, tokens: int, fill: FillFrom | None = None) -> Reduction:
    """The paper's estimator (Eq. grad_injection_main): gate what each path reads.

    A selected token enters the block as pi * x, a skipped one the identity path as (1 - pi) * x, so
    dL/dpi is <dL/dx, x> for the first and -<dL/dx, x> for the second. Values are those of the hard forward,
    in which a skipped token may get an update; the gate does not see it.
    """
    rows = flat_rows(selection.indices, tokens)
    gate = straight_through(selection.inclusion)

    def reduce(x: Tensor) -> Tensor:
        return gather(x, rows) * (1 + gather(gate, rows).to(x.dtype))

    def restore(values: Tensor, base: Tensor) -> Tensor:
        skipped = base * (1 - gate.to(base.dtype))
        if fill is not None:
            skipped = skipped + fill(values - gather(base, rows))
        return scatter(values, skipped, rows)

    return Reduction(reduce, restore, selection.indices)


def output_gated(
    selection: Selection,
    x: Tensor,
    guess: Guess,
    teacher: Tensor | None = None,
    fill: FillFrom | None = None,
) -> Reduction:
    """Gate what the block adds: y = x + (m + pi - sg[pi]) * update, so dL/dpi = <dL/dy, update>.

    The update of a skipped token was never computed; a detached guess stands in for it: zero, the mean
    of the selected updates, a ridge fit of update on input over the selected, or the teacher's update.

    Where a skipped token gets a fill r, the gate moves it from r to its own:
    y = x + g * update + (1 - g) * r with g = m + pi - sg[pi], so dL/dpi = <dL/dy, update - r>. A selected
    token's r is what it would get if it were skipped.
    """
    rows = flat_rows(selection.indices, x.shape[1])
    gate = straight_through(selection.inclusion).to(x.dtype)

    def restore(values: Tensor, base: Tensor) -> Tensor:
        inputs = gather(base, rows)
        updates = values - inputs
        own = guess_updates(guess, updates.detach(), inputs.detach(), base.detach(), teacher)
        if fill is None:
            return scatter(values + gather(gate, rows) * updates, base + gate * own, rows)
        others = fill(updates)
        contrast = scatter(updates.detach(), own, rows) - others.detach()
        return scatter(values, base + others, rows) + gate * contrast

    return Reduction(lambda full: gather(full, rows), restore, selection.indices)


def guess_updates(guess: Guess, updates: Tensor, inputs: Tensor, full: Tensor, teacher: Tensor | None) -> Tensor:
    """Stand-in (B, N, D) for what the block would have added to each token of full (B, N, D)."""
    if guess == "zero":
        return torch.zeros_like(full)
    if guess == "mean":
        return updates.mean(dim=1, keepdim=True).expand_as(full)
    if guess == "teacher":
        if teacher is None:
            raise ValueError(
                "guess='teacher' needs the teacher's updates; record a dense pass and hand it to session.call"
            )
        return teacher.detach().to(full.dtype)
    return ridge_fit(inputs, updates, full, 1e-2)


def ridge_fit(inputs: Tensor, updates: Tensor, full: Tensor, strength: float) -> Tensor:
    """Linear prediction of updates from inputs (B, k, D), applied to full (B, N, D)."""
    work = torch.float32
    mean_in, mean_out = inputs.to(work).mean(1, keepdim=True), updates.to(work).mean(1, keepdim=True)
    a, b = inputs.to(work) - mean_in, updates.to(work) - mean_out
    gram = a.transpose(1, 2) @ a  # (B, D, D)
    scale = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=1e-12)
    eye = torch.eye(gram.shape[-1], device=gram.device, dtype=work)
    solution = torch.linalg.solve(gram + strength * scale[:, None, None] * eye, a.transpose(1, 2) @ b)
    return ((full.to(work) - mean_in) @ solution + mean_out).to(full.dtype)
