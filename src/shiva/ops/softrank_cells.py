"""Soft rank on a grid of cells: a one-dimensional fast multipole method. O(N + range / tau), no sort.

The line is cut into cells of h = 2 temperatures. A score in cell c has the local coordinate -1 <= u <= 1.
Between a cell and the one at offset o the kernel f is smooth in both local coordinates,

    f(x_j - x_i) = f(2o + v - u) = sum_{k,l < P} T[o, k, l] u^k v^l,

so all that a cell's scores do to others is in its P moments M_l = sum_j w_j v_j^l, and the cells talk by a
convolution of moments with T, which does not even depend on tau. Beyond W cells K is below e^-28 and sigma is
0 or 1. Symmetric Chebyshev nodes keep sigma - 1/2 odd and K even in the approximation: the ranks sum to
N (N + 1) / 2 and the gradient to 0, to rounding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

H = 2.0  # a cell's width in temperatures
MAX_CELLS = 1 << 16  # per row; the convolution takes 2 to 7 kB of working memory for each
FAR = 1e38  # where an infinite score stands: no kernel reaches so far, and differences are still finite


class Size(NamedTuple):
    P: int
    """Moments of a cell."""
    W: int
    """Cells to each side within which the kernel is evaluated."""


SIZES = {torch.float32: Size(P=10, W=14), torch.float64: Size(P=20, W=20)}


@lru_cache
def _table(size: Size) -> Tensor:
    """T of sigma and of K as the weights of one convolution, (2P, P, 2W + 1) float64."""
    P, W = size
    q = P + 6  # nodes; interpolate higher, then truncate
    theta = (torch.arange(q, dtype=torch.float64) + 0.5) * (math.pi / q)
    u = theta.cos()
    to_chebyshev = torch.cos(torch.arange(P).unsqueeze(-1) * theta) * (2 / q)  # (P, q)
    to_chebyshev[0] /= 2
    monomials = torch.zeros(P, P, dtype=torch.float64)  # row k: T_k = 2 u T_{k-1} - T_{k-2} in powers of u
    monomials[0, 0] = monomials[1, 1] = 1
    for k in range(2, P):
        monomials[k, 1:] = 2 * monomials[k - 1, :-1]
        monomials[k] -= monomials[k - 2]

    o = torch.arange(-W, W + 1).view(-1, 1, 1)
    p = torch.sigmoid(-(H * o + u - u.unsqueeze(-1)).abs())  # (2W + 1, q of u, q of v)
    above = H * o + u - u.unsqueeze(-1) > 0
    values = torch.stack([torch.where(above, 1 - p, p), p * (1 - p)])
    # First to Chebyshev coefficients, which fall off, then to powers: the other way round loses six digits.
    T = monomials.T @ (to_chebyshev @ values @ to_chebyshev.T) @ monomials  # (2, 2W + 1, P, P)
    return T.permute(0, 2, 3, 1).reshape(2 * P, P, 2 * W + 1).contiguous()


class Grid(NamedTuple):
    cell: Tensor
    """(B * N) int64: the cell of each score, the rows one after another."""
    u: Tensor
    """(B * N) float64: the place inside the cell, -1 to 1."""
    shape: tuple[int, int]
    """Rows, cells in a row."""


def extent(s: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest finite score of each row, (B, 1) float64; 0 and 0 if there is none."""
    lo, hi = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
    if bool((torch.maximum(-lo, hi) >= FAR).any()):
        infinite = s.abs() >= FAR
        lo = s.masked_fill(infinite, FAR).amin(-1, keepdim=True)
        hi = s.masked_fill(infinite, -FAR).amax(-1, keepdim=True)
        lo, hi = torch.where(lo > hi, 0.0, lo), torch.where(lo > hi, 0.0, hi)
    return lo.double(), hi.double()


def span(s: Tensor, tau: Tensor) -> float:
    """How many cells the finite scores of the widest row cover. Reads the values."""
    lo, hi = extent(s)
    return float((hi - lo).max() / (H * tau.double()))


def _grid(s: Tensor, tau: Tensor, W: int) -> Grid:
    lo, hi = extent(s)
    width = H * tau.double()
    widest = float((hi - lo).max() / width)
    if not widest < MAX_CELLS:
        raise ValueError(
            f"the scores span {H * widest:.3g} temperatures, above the {H * MAX_CELLS:.3g} that cells allow; "
            "use method='auto' or 'soe'"
        )
    margin = W + 2  # an infinite score lives just out of every finite one's reach
    cells = math.floor(widest) + 2 * margin + 2  # one to spare: y may round up to the next whole number
    y = ((s.double() - lo) / width).clamp(-margin, widest + margin) + margin  # (B, N)
    c = y.floor()
    first = torch.arange(s.shape[0], device=s.device).unsqueeze(-1) * cells
    return Grid((c.long() + first).flatten(), (2 * (y - c) - 1).flatten(), (s.shape[0], cells))


def _moments(grid: Grid, w: Tensor, P: int) -> Tensor:
    """M_l = sum_j w_j v_j^l of each cell, (B, P, cells)."""
    rows, cells = grid.shape
    M = w.new_zeros(P, rows * cells)
    for l in range(P):
        M[l].scatter_add_(0, grid.cell, w)
        w = w * grid.u
    return M.view(P, rows, cells).transpose(0, 1)


def _evaluate(grid: Grid, C: Tensor) -> Tensor:
    """sum_k C[cell, k] u^k by Horner's rule; C is (B, P, cells)."""
    C = C.transpose(0, 1).flatten(1)  # (P, B * cells): one index_select per power is 4x faster than C[cell]
    total = C[-1].index_select(0, grid.cell)
    for coefficients in C[:-1].flip(0):
        total = torch.addcmul(coefficients.index_select(0, grid.cell), total, grid.u)
    return total


def ranks(s: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, None]:
    """r (B, N) and D (B, N), float64."""
    P, W = SIZES[s.dtype]
    grid = _grid(s, tau, W)
    M = _moments(grid, torch.ones_like(grid.u), P)
    C = F.conv1d(M, _table(SIZES[s.dtype]).to(s.device), padding=W)  # (B, 2P, cells)

    population = M[:, 0].cumsum(-1)  # (B, cells): scores in this cell or below
    n = s.shape[-1]
    beyond = n - F.pad(population[:, W:], (0, W), value=n)  # (B, cells): scores more than W cells above
    C[:, 0] += beyond  # each of them outranks the whole cell

    r = 0.5 + _evaluate(grid, C[:, :P])
    return r.view_as(s), _evaluate(grid, C[:, P:]).view_as(s), None


def kernel_sum(s: Tensor, tau: Tensor, w: Tensor, order: Tensor | None = None) -> Tensor:
    """sum_i w_i K(x_m - x_i), float64 (B, N)."""
    P, W = SIZES[s.dtype]
    grid = _grid(s, tau, W)
    M = _moments(grid, w.flatten(), P)
    C = F.conv1d(M, _table(SIZES[s.dtype])[P:].to(s.device), padding=W)
    return _evaluate(grid, C).view_as(s)
