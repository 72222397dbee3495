"""SOFT top-k (Xie et al., NeurIPS 2020, arXiv 2002.06504): top-k as entropic optimal transport to two anchors.

Token i goes to the anchor "selected" or "rejected" at squared distance C_i1, C_i0. With only two anchors each
row of the plan is one logistic, a_i = sigma(z_i + b) with z_i = (C_i0 - C_i1) / epsilon, and the whole problem
is the scalar b for which sum_i a_i = k:

    sinkhorn      the released solver. A round of row and column scaling is b += logit-like correction
                  log(k / sum a) - log((n - k) / sum (1 - a)); the plan's row scalings never need storing.
    closed_form   bisection on b; exact to rounding, and k receives its gradient
                  da_i/dk = w_i / sum w, w = a (1 - a). The released code gives k none.

Both are differentiated implicitly at the fixed point, dL/dz = w (g - sum(w g) / sum w): O(N) memory, no unrolling.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shiva.core.options import choice

Solver = Literal["sinkhorn", "closed_form"]
SOLVERS = ("sinkhorn", "closed_form")
BISECTIONS = 80
LOGARITHMIC_BELOW = 0.01
"""The epsilon from which on Sinkhorn leaves logarithms, as released."""


def soft_topk(
    scores: Tensor,
    k: int | float | Tensor,
    epsilon: float = 0.1,
    solver: Solver = "sinkhorn",
    iterations: int = 200,
    scale: Tensor | None = None,
) -> Tensor:
    """Gates (B, N) in [0, 1] of scores (B, N), summing to k (a number, a 0-d tensor or (B, 1)).

    `scale` (B, 1) is the largest cost, by which costs are divided; it has no gradient. Centring the scores
    first makes it, and so the mask, blind to a shift of the scores; the release takes them raw.
    """
    choice("solver", solver, SOLVERS)
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    s = s - s.mean(dim=-1, keepdim=True).detach()
    if scale is None:
        scale = largest_cost(s)
    # The selected anchor lies at +1, the rejected at 0: (s - 0)^2 - (s - 1)^2 = 2 s - 1.
    z = (2 * s - 1) / (scale * epsilon)
    k = torch.as_tensor(k, dtype=s.dtype, device=s.device)
    logarithmic = epsilon <= LOGARITHMIC_BELOW
    mask: Tensor = _TwoAnchors.apply(z, k, solver, iterations, logarithmic)
    return mask


def largest_cost(scores: Tensor) -> Tensor:
    """The larger of the two anchors' costs over a row, (B, 1); per row, so samples do not affect each other."""
    s = scores.detach()
    return torch.maximum(s.square(), (s - 1).square()).amax(dim=-1, keepdim=True)


def sinkhorn(z: Tensor, k: Tensor, iterations: int, logarithmic: bool) -> Tensor:
    """The offset b (B, 1) after so many Sinkhorn rounds on z (B, N); logarithms cost more and never underflow."""
    log_sum = log_sum_in_logarithms if logarithmic else log_sum_of_sigmoids
    b = z.new_zeros(*z.shape[:-1], 1)
    log_odds = torch.logit(k / z.shape[-1])
    for _ in range(iterations):
        b = b + log_odds - (log_sum(z + b) - log_sum(-z - b))
    return b


def log_sum_of_sigmoids(z: Tensor) -> Tensor:
    return torch.sigmoid(z).sum(dim=-1, keepdim=True).log()


def log_sum_in_logarithms(z: Tensor) -> Tensor:
    return F.logsigmoid(z).logsumexp(dim=-1, keepdim=True)


def bisect(z: Tensor, k: Tensor) -> Tensor:
    """The offset b (B, 1) at which sigma(z + b) (B, N) sums to k."""
    log_odds = torch.logit(k / z.shape[-1])
    low = log_odds - z.amax(dim=-1, keepdim=True)
    high = log_odds - z.amin(dim=-1, keepdim=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = torch.sigmoid(z + middle).sum(dim=-1, keepdim=True) < k
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class _TwoAnchors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, k: Tensor, solver: Solver, iterations: int, logarithmic: bool) -> Tensor:
        wide, budget = z.double(), k.double()
        edge = 1e-9 * z.shape[-1]  # at k = 0 and k = N the offset is infinite
        budget = budget.clamp(edge, z.shape[-1] - edge)
        b = sinkhorn(wide, budget, iterations, logarithmic) if solver == "sinkhorn" else bisect(wide, budget)
        mask = torch.sigmoid(wide + b)
        ctx.save_for_backward(mask * torch.sigmoid(-wide - b))
        ctx.learns_k, ctx.dtype, ctx.k = solver == "closed_form", z.dtype, (k.dtype, k.shape)
        return mask.to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (w,) = ctx.saved_tensors
        g = grad.double()
        mean = (w * g).sum(dim=-1, keepdim=True) / w.sum(dim=-1, keepdim=True).clamp(min=1e-300)  # (B, 1)
        grad_k = None
        if ctx.learns_k and ctx.needs_input_grad[1]:
            dtype, shape = ctx.k
            grad_k = mean.sum_to_size(shape).to(dtype) if shape else mean.sum().to(dtype)
        return (w * (g - mean)).to(ctx.dtype), grad_k, None, None, None
