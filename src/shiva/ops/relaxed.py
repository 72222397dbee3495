"""Three relaxations of top-k: gates (B, N) of scores (B, N) that sum to k, through which a router learns."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shiva.core.options import choice

# NeuralSort (Grover et al., ICLR 2019, arXiv 1903.08850): the sorting permutation, relaxed row by row.
#
# With b_j = sum_m |s_j - s_m|, row q of the relaxed permutation (descending order) is
#
#     P_q = softmax_j(((n + 1 - 2q) s_j - b_j) / tau),   q = 1 ... n.
#
# Rows sum to 1, columns need not. The factor n + 1 - 2q reaches n, so everything is float32 at least and the
# temperature is given as a share of n. Time and memory are O(k N) for k rows.


def total_distance(s: Tensor) -> Tensor:
    """sum_m |s_j - s_m| (B, N) of scores (B, N), by one sort: each is above the ones before it and below the rest."""
    n = s.shape[-1]
    ordered, order = s.double().sort(dim=-1)
    sums = ordered.cumsum(dim=-1)
    place = torch.arange(1, n + 1, device=s.device)
    distance = (2 * place - n) * ordered + sums[..., -1:] - 2 * sums
    return torch.zeros_like(distance).scatter(-1, order, distance).to(s.dtype)


def relaxed_permutation(scores: Tensor, tau: float, rows: int | None = None) -> Tensor:
    """The first `rows` rows (B, rows, N) of the relaxed permutation of scores (B, N); all N if None."""
    n = scores.shape[-1]
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    s = s - s.mean(dim=-1, keepdim=True).detach()  # a shift changes no row, and small scores lose fewer digits
    b = total_distance(s)  # (B, N)
    q = torch.arange(1, (n if rows is None else rows) + 1, device=s.device, dtype=s.dtype)
    logits = (n + 1 - 2 * q)[:, None] * s.unsqueeze(-2) - b.unsqueeze(-2)  # (B, rows, N)
    return torch.softmax(logits / tau, dim=-1)


def neuralsort_topk(scores: Tensor, k: int, tau: float) -> Tensor:
    """Gates (B, N) of being among the k first: column sums of the first k rows, so they sum to k.

    `tau` is a share of N. A single gate may exceed 1, as columns are not normalised.
    """
    return relaxed_permutation(scores, tau * scores.shape[-1], k).sum(dim=-2)


# SOFT top-k (Xie et al., NeurIPS 2020, arXiv 2002.06504): top-k as entropic optimal transport to two anchors.
#
# Token i goes to the anchor "selected" or "rejected" at squared distance C_i1, C_i0. With only two anchors each
# row of the plan is one logistic, a_i = sigma(z_i + b) with z_i = (C_i0 - C_i1) / epsilon, and the whole problem
# is the scalar b for which sum_i a_i = k:
#
#     sinkhorn      the released solver. A round of row and column scaling is b += logit-like correction
#                   log(k / sum a) - log((n - k) / sum (1 - a)); the plan's row scalings never need storing.
#     closed_form   bisection on b; exact to rounding, and k receives its gradient
#                   da_i/dk = w_i / sum w, w = a (1 - a). The released code gives k none.
#
# Both are differentiated implicitly at the fixed point, dL/dz = w (g - sum(w g) / sum w): O(N) memory, no unrolling.

Solver = Literal["sinkhorn", "closed_form"]
BISECTIONS = 80
LOGARITHMIC_BELOW = 0.01
"""The epsilon from which on Sinkhorn leaves logarithms, as released."""


def soft_topk(
    scores: Tensor,
    k: int | float | Tensor,
    epsilon: float = 0.1,
    solver: Solver = "sinkhorn",
    iterations: int = 200,
) -> Tensor:
    """Gates (B, N) in [0, 1] of scores (B, N), summing to k (a number, a 0-d tensor or (B, 1)).

    Costs are divided by the largest, which has no gradient. Centring the scores first makes it, and so the
    mask, blind to a shift of the scores; the release takes them raw.
    """
    choice("solver", solver, get_args(Solver))
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    s = s - s.mean(dim=-1, keepdim=True).detach()
    # The selected anchor lies at +1, the rejected at 0: (s - 0)^2 - (s - 1)^2 = 2 s - 1.
    z = (2 * s - 1) / (largest_cost(s) * epsilon)
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


# LapSum (Struski et al., ICML 2025, arXiv 2503.06242): soft top-k with an exact budget, in closed form.
#
#     p_i = F((s_i - b) / alpha),   F the Laplace distribution function,   sum_i p_i = k.
#
# Between two neighbouring scores sum_i p_i is, in y = exp((b - s_j) / alpha), the function A / 2y + m - B y / 2,
# where m scores lie above, A sums exp((s_i - s_j) / alpha) over those below and B exp((s_j - s_i) / alpha) over
# those above. So after one sort b is the root of a quadratic. Everything is kept as logarithms: no temperature
# under- or overflows. With q_i = exp(-|s_i - b| / alpha) / 2 and Q = sum q,
#
#   dp_i/ds_m = q_i (delta_im - q_m / Q) / alpha,   dp_i/dk = q_i / Q,   dL/dalpha = -sum_m (s_m - b) dL/ds_m / alpha.
#
# O(N log N) time, O(N) memory.


def lapsum_topk(scores: Tensor, k: float | Tensor, alpha: float | Tensor) -> Tensor:
    """Gates (B, N) in (0, 1) of scores (B, N), summing to k exactly.

    k is a number, a 0-d tensor or (B, 1), strictly between 0 and N; alpha a positive number or 0-d tensor.
    Scores, k and alpha all receive gradients.
    """
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    k = torch.as_tensor(k, dtype=s.dtype, device=s.device)
    alpha = torch.as_tensor(alpha, dtype=s.dtype, device=s.device)
    gates: Tensor = _LapSum.apply(s, k, alpha)
    return gates


def offset(t: Tensor, k: Tensor) -> Tensor:
    """b / alpha (B, 1) for the scaled scores t = s / alpha (B, N) and k (B, 1), float64."""
    n = t.shape[-1]
    t = t.sort(dim=-1).values
    nothing = torch.full_like(t[..., :1], -torch.inf)
    below = torch.cat([nothing, t.logcumsumexp(dim=-1)], dim=-1)  # (B, N + 1): log sum of exp(t_i), i <= j
    above = torch.cat([(-t).flip(-1).logcumsumexp(dim=-1).flip(-1), nothing], dim=-1)  # log sum exp(-t_i), i > j
    over = n - torch.arange(1, n + 1, device=t.device, dtype=t.dtype)  # scores above t_j
    at_knots = (below[..., 1:] - t).exp() / 2 + over - (above[..., 1:] + t).exp() / 2  # (B, N), decreasing
    j = (at_knots >= k).sum(dim=-1, keepdim=True)  # b lies between the j-th and the next score
    origin = t.gather(-1, (j - 1).clamp(min=0))
    log_a = below.gather(-1, j) - origin
    log_b = above.gather(-1, j) + origin
    d = k - (n - j)
    # B y^2 / 2 + d y - A / 2 = 0, by the form of the root that adds instead of cancelling.
    size = d.abs().log()
    larger = torch.logaddexp(size, torch.logaddexp(2 * size, log_a + log_b) / 2)
    return origin + torch.where(d < 0, larger - log_b, log_a - larger)


class _LapSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, k: Tensor, alpha: Tensor) -> Tensor:
        edge = 1e-9 * s.shape[-1]  # at k = 0 and k = N the offset is infinite
        budget = k.double().clamp(edge, s.shape[-1] - edge).expand(*s.shape[:-1], 1)
        t = s.double() / alpha.double()
        t = t - offset(t, budget)  # (s - b) / alpha
        q = (-t.abs()).exp() / 2
        ctx.save_for_backward(t, alpha)
        ctx.k = k.shape
        return torch.where(t > 0, 1 - q, q).to(s.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        t, alpha = ctx.saved_tensors
        g, q = grad.double(), (-t.abs()).exp() / 2
        mean = (q * g).sum(dim=-1, keepdim=True) / q.sum(dim=-1, keepdim=True).clamp(min=1e-300)  # (B, 1) = dL/dk
        grad_s = q * (g - mean) / alpha.double()
        grad_k = grad_alpha = None
        if ctx.needs_input_grad[1]:
            grad_k = (mean.sum_to_size(ctx.k) if ctx.k else mean.sum()).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_alpha = -(t * grad_s).sum().to(alpha.dtype)
        return grad_s.to(grad.dtype), grad_k, grad_alpha
