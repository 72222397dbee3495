"""Soft rank as a sum of exponentials: O(N log N) time, O(N) memory, static shapes, any scores.

For a distance d >= 0 put z = e^-d. Then sigma(-d) = z / (1 + z) and K(d) = z / (1 + z)^2, and on 0 <= z <= 1
both factors of z are so smooth (the pole is at z = -1) that a polynomial of degree n - 1 meets them to
5.83^-n:

    sigma(-d) = sum_{k=1..n} a_k e^{-k d},        K(d) = sum_{k=1..n} b_k e^{-k d}.

Over sorted points a sum of e^{-k d} is a linear recurrence: carry M_k along the line, let it decay over each
gap, add each point. No split by distance is needed, however near or far the points are.

The recurrence runs over blocks of neighbours; inside a block all pairs are evaluated. What lies to the right
is what lies to the left of the mirrored line, so both sides run as one batch of 2B rows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16  # m; measured best of 8, 16 and 32: longer blocks have more pairs, shorter ones a longer recurrence
PAD = -3e38  # below every score, so far that its kernels are 0
RADIX_FROM = 32768  # the row length from which torch sorts integers on a CPU by radix, ten times faster


def _series(n: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The coefficients a_1..a_n of sigma(-d) and b_1..b_n of K(d).

    With omega(z) = prod (z - z_i) over the n nodes, the interpolant of 1/(1+z) is (1 - omega(z)/omega(-1)) /
    (1+z): it meets the function where omega is 0, and the pole is divided out. Likewise for 1/(1+z)^2 with a
    linear factor that matches value and slope at -1. No sum here cancels: omega's coefficients alternate in
    sign, and division by 1+z propagates errors with factor 1.

    The nodes include z = 1 and z = 0: ties count exactly 1/2 and far tails have a_1 = b_1 = 1 exactly.
    """
    nodes = [(1 + math.cos(math.pi * i / (n - 1))) / 2 for i in range(n)]
    nodes[-1] = 0.0
    omega = [1.0]  # ascending powers
    for node in nodes:
        omega = [up - node * stay for up, stay in zip([0.0, *omega], [*omega, 0.0], strict=True)]
    at_pole = math.prod(-1 - node for node in nodes)
    slope = sum(1 / (1 + node) for node in nodes) / at_pole  # of 1 / omega at -1

    def divide(c: list[float]) -> list[float]:
        quotient = [c[0]]
        for coefficient in c[1:-1]:
            quotient.append(coefficient - quotient[-1])
        return quotient

    one = [1.0] + [0.0] * n
    a = divide([e - w / at_pole for e, w in zip(one, omega, strict=True)])
    value = 1 / at_pole + slope  # at 0 of the line through (-1, 1 / omega) with that slope
    pole = [value * w + slope * up for w, up in zip([*omega, 0.0], [0.0, *omega], strict=True)]
    b = divide(divide([e - w for e, w in zip([*one, 0.0], pole, strict=True)]))
    return tuple(a), tuple(b)


SERIES = {torch.float32: _series(12), torch.float64: _series(20)}


def ranks(s: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r (B, N) and D (B, N), float64, and the ascending order of the scores, (B, N) int64."""
    order = ascending(s)
    x = _blocks(s.gather(-1, order), PAD)  # (m, B, blocks)
    a, b = SERIES[s.dtype]

    p = _near(x, tau)  # (j, i, B, blocks)
    near_kernel = torch.zeros_like(x, dtype=torch.float64)
    for kernel_j in p * (1 - p):
        near_kernel += kernel_j
    lower = torch.ones(p.shape[:2], dtype=s.dtype, device=s.device).triu()  # 1 where j <= i
    near_sigma = p.mul_((2 * lower - 1)[..., None, None]).sum(0)
    sigma, kernel = _far(x, None, tau, (a, b))  # each (m, 2, B, blocks): from the left, from the right

    # A score above counts 1 - sigma(-d), a score below sigma(-d): the ones are the hard rank, known exactly.
    n = s.shape[-1]
    hard = torch.arange(n - 1, -1, -1, dtype=torch.float64, device=s.device)
    r = 0.5 + hard + _rows(near_sigma + (sigma[:, 0] - sigma[:, 1]), n)
    D = _rows(near_kernel + (kernel[:, 0] + kernel[:, 1]), n)
    return torch.empty_like(r).scatter(-1, order, r), torch.empty_like(D).scatter(-1, order, D), order


def kernel_sum(s: Tensor, tau: Tensor, w: Tensor, order: Tensor | None) -> Tensor:
    """sum_i w_i K(x_m - x_i), float64 (B, N)."""
    assert order is not None
    x = _blocks(s.gather(-1, order), PAD)
    weights = _blocks(w.gather(-1, order), 0.0)
    _, b = SERIES[s.dtype]

    p = _near(x, tau)
    near = torch.zeros_like(weights)
    for kernel_j, w_j in zip(p.mul_(1 - p), weights, strict=True):  # one at a time: float64 pairs are too many
        near += kernel_j * w_j
    (kernel,) = _far(x, weights, tau, (b,))
    total = _rows(near + (kernel[:, 0] + kernel[:, 1]), s.shape[-1])
    return torch.empty_like(total).scatter(-1, order, total)


def ascending(s: Tensor) -> Tensor:
    """argsort of each row. Long float32 rows on a CPU are sorted through integers in the same order."""
    if torch.compiler.is_compiling() or s.device.type != "cpu" or s.dtype != torch.float32:
        return s.argsort(-1)
    if s.shape[-1] < RADIX_FROM:
        return s.argsort(-1)
    bits = s.contiguous().view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats order by falling magnitude
    return torch.stack([row.argsort() for row in keys])


def _blocks(rows: Tensor, fill: float) -> Tensor:
    """(B, N) -> (m, B, blocks), padded in front; neighbours lie apart, so that each step is one long vector."""
    padded = F.pad(rows, (-rows.shape[-1] % BLOCK, 0), value=fill)
    return padded.reshape(rows.shape[0], -1, BLOCK).permute(2, 0, 1).contiguous()


def _rows(blocks: Tensor, n: int) -> Tensor:
    """(m, B, blocks) -> (B, N)."""
    return blocks.permute(1, 2, 0).flatten(1)[:, -n:]


def _near(x: Tensor, tau: Tensor) -> Tensor:
    """sigma(-|x_i - x_j|) of the pairs inside each block, (m, m, B, blocks). In place: it is large."""
    return (x.unsqueeze(0) - x.unsqueeze(1)).abs_().mul_(-1 / tau.double()).sigmoid_()


def _prefix(M: Tensor, hi: Tensor, k: Tensor) -> Tensor:
    """M_b + sum_{c < b} e^{-k (hi_b - hi_c)} M_c for every block b; M is (n, 2, B, blocks), hi without n.

    Merges neighbours, solves for the half as many pairs, and completes the blocks between (Brent-Kung): O(blocks)
    work in 2 log2(blocks) steps. Every decay is that of a true distance, never a product of shorter ones.
    """
    blocks = hi.shape[-1]
    if blocks == 1:
        return M
    odd = hi[..., 1::2]
    pairs = M[..., 1::2] + torch.exp(k * (hi[..., :-1:2] - odd)) * M[..., :-1:2]
    at_odd = _prefix(pairs, odd, k)
    between = (blocks - 1) // 2
    decay = torch.exp(k * (odd[..., :between] - hi[..., 2::2]))
    at_even = torch.cat([M[..., :1], M[..., 2::2] + decay * at_odd[..., :between]], dim=-1)
    return torch.stack([at_even, F.pad(at_odd, (0, blocks % 2))], dim=-1).flatten(-2)[..., :blocks]


def _far(x: Tensor, w: Tensor | None, tau: Tensor, series: tuple[tuple[float, ...], ...]) -> list[Tensor]:
    """sum_k c_k sum_j w_j e^{-k |x_i - x_j|} over all j in other blocks, for each c in `series`.

    Returns one (m, 2, B, blocks) float64 per series: from the blocks below, then from those above.
    """
    x = x.double() / tau.double()
    lines = torch.stack([x, -x.flip(0, -1)], dim=1)  # (m, 2, B, blocks), ascending in both
    lo, hi = lines[0], lines[-1]  # (2, B, blocks)
    n = len(series[0])
    k = torch.arange(1, n + 1, dtype=x.dtype, device=x.device).view(n, 1, 1, 1)

    # Moments of each block, seen from its upper end: M_k = sum_j w_j e^{-k (hi - x_j)}.
    z = torch.exp(lines - hi)
    power = z.clone() if w is None else z * torch.stack([w, w.flip(0, -1)], dim=1)
    moments = [power.sum(0)]
    for _ in range(n - 1):
        power.mul_(z)
        moments.append(power.sum(0))
    M = torch.stack(moments)  # (n, 2, B, blocks)

    M = _prefix(M, hi, k)

    # Hand over to the lower end of the next block, and evaluate there by Horner's rule in e^{-(x - lo)}.
    S = F.pad(torch.exp(k * (hi[..., :-1] - lo[..., 1:])) * M[..., :-1], (1, 0))  # (n, 2, B, blocks)
    z = torch.exp(lo - lines)
    sums = []
    for c in series:
        total = c[-1] * S[-1] * z
        for i in range(n - 2, -1, -1):
            total.add_(c[i] * S[i]).mul_(z)
        sums.append(torch.stack([total[:, 0], total[:, 1].flip(0, -1)], dim=1))
    return sums
