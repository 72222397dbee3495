"""LapSum (Struski et al., ICML 2025, arXiv 2503.06242): soft top-k with an exact budget, in closed form.

    p_i = F((s_i - b) / alpha),   F the Laplace distribution function,   sum_i p_i = k.

Between two neighbouring scores sum_i p_i is, in y = exp((b - s_j) / alpha), the function A / 2y + m - B y / 2,
where m scores lie above, A sums exp((s_i - s_j) / alpha) over those below and B exp((s_j - s_i) / alpha) over
those above. So after one sort b is the root of a quadratic. Everything is kept as logarithms: no temperature
under- or overflows. With q_i = exp(-|s_i - b| / alpha) / 2 and Q = sum q,

    dp_i/ds_m = q_i (delta_im - q_m / Q) / alpha,   dp_i/dk = q_i / Q,   dL/dalpha = -sum_m (s_m - b) dL/ds_m / alpha.

O(N log N) time, O(N) memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
