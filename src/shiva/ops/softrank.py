"""Shiva-DiT, eq:rank and Algorithm alg:softrank: the descending soft rank, without the N x N matrix.

    r_i = 1 + sum_{j != i} sigma((s_j - s_i) / tau)

The hard rank counts the scores above s_i; the soft rank counts them by a logistic step of width tau. With
x = s / tau and the self term sigma(0) = 1/2 taken into the sum, r_i = 1/2 + sum_j sigma(x_j - x_i). With
K = sigma', which is even, the vector-Jacobian product (eq:self_sensitivity and the case below it) is

    v_m = (1 / tau) [ sum_i g_i K(x_m - x_i)  -  g_m D_m ],        D_m = sum_j K(x_j - x_m).

So forward and backward are sums of one fixed kernel over points of a line, and such sums need no pairs:

    direct   every pair; the definition, and the fastest for short rows
    cells    a fast multipole method on a regular grid: scores that span few temperatures, on a CPU
    soe      the kernel as a sum of exponentials, each a linear recurrence over the sorted scores: any scores,
             static shapes, no host synchronisation, so it compiles and suits a GPU

All three evaluate the same function to float32 accuracy (float64 scores: to about 1e-13) and keep O(N) for
the backward pass. Each is a pair of pure functions, `ranks` -> (r, D, order) and `kernel_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiva.ops import softrank_cells, softrank_soe
from shiva.ops.softrank_cells import FAR

Method = Literal["auto", "direct", "cells", "soe"]

# Up to here all pairs cost less than the other methods' many small steps: B x N x N, measured in eager mode on
# a CPU (reproduce/claims/softrank_speed.py), and N where kernels are fused or launched in parallel.
DIRECT_PAIRS = 1 << 18
DIRECT_TOKENS = 1024


class Backend(NamedTuple):
    ranks: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
    """(s, tau) -> r, D, and what else the backward pass should not compute again; s is finite, (B, N)."""
    kernel_sum: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """(s, tau, w, order) -> sum_i w_i K(x_m - x_i), float64 (B, N)."""


def soft_rank(scores: Tensor, tau: float | Tensor, method: Method = "auto") -> Tensor:
    """Descending soft ranks (eq:rank) along the last dimension; the largest score has the smallest rank.

    Args:
        scores: (..., N), any floating dtype. Infinite scores rank first or last, share ranks among equals and
            get no gradient; a NaN makes its whole row NaN.
        tau: the temperature tau_rank, a positive float or a 0-d tensor, which then receives a gradient.
        method: "direct", "cells" or "soe"; "auto" takes the fastest that suits the device and the scores.

    Returns:
        (..., N) ranks from 1 to N, float32 (float64 for float64 scores), once differentiable.
    """
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is unknown; pass one of {', '.join(get_args(Method))}")
    if not scores.is_floating_point() or scores.ndim == 0:
        raise ValueError(f"scores are {scores.dtype} of shape {tuple(scores.shape)}; pass a float tensor (..., N)")
    tau = _temperature(tau, scores)
    if scores.numel() == 0:
        return (scores / tau).to(_rank_dtype(scores))  # nothing to rank: keep both inputs in the graph

    rows = scores.reshape(-1, scores.shape[-1])  # (B, N)
    ranks: Tensor = _SoftRank.apply(rows, tau, method)
    return ranks.reshape(scores.shape)


def _temperature(tau: float | Tensor, scores: Tensor) -> Tensor:
    if not isinstance(tau, Tensor):
        if not 0 < tau < math.inf:
            raise ValueError(f"tau={tau} is not a positive number; pass a temperature above 0, such as 0.05")
        return torch.full((), tau, dtype=torch.float64, device=scores.device)
    if tau.ndim != 0 or not tau.is_floating_point():
        raise ValueError(f"tau is {tau.dtype} of shape {tuple(tau.shape)}; pass a float or a 0-d float tensor")
    # Reading a GPU's tau would stall the stream, and reading a traced one would break the graph.
    if not torch.compiler.is_compiling() and tau.device.type == "cpu" and not 0 < tau.item() < math.inf:
        raise ValueError(f"tau={tau.item()} is not a positive number; learn its logarithm to keep it above 0")
    return tau


def _rank_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def choose(s: Tensor, tau: Tensor) -> Literal["direct", "cells", "soe"]:
    """The method that `auto` takes for s (B, N). It looks at the values only in eager mode on a CPU."""
    batch, n = s.shape
    if torch.compiler.is_compiling() or s.device.type != "cpu":
        return "direct" if n <= DIRECT_TOKENS else "soe"
    if batch * n * n <= DIRECT_PAIRS:
        return "direct"
    return "cells" if softrank_cells.span(s, tau) < 256 + n / 16 else "soe"


class _SoftRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, tau: Tensor, method: Method) -> Tensor:
        poison = torch.where(scores.isnan().any(-1, keepdim=True), math.nan, 0.0)  # (B, 1): NaN or 0
        s = scores.to(_rank_dtype(scores)).nan_to_num(nan=0.0).clamp(-FAR, FAR)  # (B, N)
        ctx.method = choose(s, tau) if method == "auto" else method
        ctx.scores_dtype = scores.dtype

        r, D, order = BACKENDS[ctx.method].ranks(s, tau)
        ctx.save_for_backward(s, tau, D + poison, order)  # through D the gradient of that row is NaN too
        return (r + poison).to(s.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        s, tau, D, order = ctx.saved_tensors
        # The Jacobian annuls constants, so the mean may go first. Both terms of v sum the same values of K in
        # float64: what remains is sum_i K (g_i - g_m) with the error of K alone, and no residue of g_m K(0).
        g = grad.double()
        g = g - g.mean(-1, keepdim=True)
        v = (BACKENDS[ctx.method].kernel_sum(s, tau, g, order) - g * D) / tau.double()  # (B, N)
        infinite = s.abs() >= FAR
        v = torch.where(infinite, 0.0 * D, v)  # 0, or NaN in a poisoned row

        grad_tau = None
        if ctx.needs_input_grad[1]:
            # r depends on s / tau alone, hence dL/dtau = -(1 / tau) sum s v. As v sums to 0, s may be
            # measured from any origin; from the densest score, offsets and outliers cost no precision.
            densest = torch.where(infinite, -1.0, D).argmax(-1, keepdim=True)
            offset = s.double() - s.gather(-1, densest).double()
            grad_tau = (-(offset * v).sum() / tau.double()).to(tau.dtype)
        return v.to(ctx.scores_dtype), grad_tau, None


def direct_ranks(s: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, None]:
    """alg:softrank as it stands, self term included: O(N^2) time and working memory."""
    p = _below(s, tau)
    above = s.unsqueeze(-2) > s.unsqueeze(-1)  # (B, i, j): j outranks i
    r = 0.5 + torch.where(above, 1 - p, p).sum(-1)
    return r, (p * (1 - p)).sum(-1, dtype=torch.float64), None


def direct_kernel_sum(s: Tensor, tau: Tensor, w: Tensor, order: Tensor | None = None) -> Tensor:
    p = _below(s, tau)
    return (p * (1 - p) * w.unsqueeze(-2)).sum(-1)


def _below(s: Tensor, tau: Tensor) -> Tensor:
    """sigma(-|x_j - x_i|), (B, N, N). The smaller half of the pair keeps K = p (1 - p) exact in the tails."""
    return torch.sigmoid((s.unsqueeze(-2) - s.unsqueeze(-1)).abs() / -tau.to(s.dtype))


BACKENDS: dict[str, Backend] = {
    "direct": Backend(direct_ranks, direct_kernel_sum),
    "cells": Backend(softrank_cells.ranks, softrank_cells.kernel_sum),
    "soe": Backend(softrank_soe.ranks, softrank_soe.kernel_sum),
}
