"""NeuralSort (Grover et al., ICLR 2019, arXiv 1903.08850): the sorting permutation, relaxed row by row.

With b_j = sum_m |s_j - s_m|, row q of the relaxed permutation (descending order) is

    P_q = softmax_j(((n + 1 - 2q) s_j - b_j) / tau),   q = 1 ... n.

Rows sum to 1, columns need not. The factor n + 1 - 2q reaches n, so everything is float32 at least and the
temperature is given as a share of n. Time and memory are O(k N) for k rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
