"""The closed form of `ops.shortcut`'s regression: sums over tokens, least squares, the best map of low rank.

One layer, fitted on some prompts and judged on others:

    fit, held = NormalEquations(width), NormalEquations(width)
    fit.add(x, updates, sigma)                       # and so on, over dense runs; so for held
    full = fit.solve()
    low = fit.reduce_rank(full, 32)
    held.r_squared(full), held.r_squared(low)
    shortcut.set_layer(layer, low)
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.ops.shortcut import Factors, normed

SLOPES, ONE, ALL = slice(None, -1), slice(-1, None), slice(None)
"""Of n = [LN(x), 1]: the first, the second, both."""


class NormalEquations:
    """Sums over tokens that one layer's regression is solved from, and judged by.

    With n = [LN(x), 1] the features of a token are sigma^g n, g = 0 to degree (0 knows nothing of the noise level).
    Their Gram matrix has only the 2 degree + 1 different blocks sum sigma^p n n', so a batch of one noise level
    costs one product, and the sums of a layer hold 5 (D + 1)^2 numbers at degree 1: in float64 94 MB at a width of
    1536 and 378 MB at 3072, and the solve about twice as much for a while. On large models fit a few layers at a
    time, or sum in float32. Products are those of the tokens, in float32 at least.
    """

    def __init__(
        self,
        width: int,
        degree: int = 1,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ):
        self.width, self.degree = width, degree
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        self.gram = zeros(2 * degree + 1, width + 1, width + 1)  # sum sigma^p n n'
        self.cross = zeros(degree + 1, width + 1, width)  # sum sigma^g n update'
        self.power = zeros(())  # sum |update|^2

    @property
    def tokens(self) -> int:
        return round(float(self.gram[0, -1, -1]))

    @torch.no_grad()
    def add(self, x: Tensor, updates: Tensor, sigma: float, stride: int = 1) -> None:
        """Tokens x (B, N, D) that got updates (B, N, D) at a noise level; every stride-th."""
        work = torch.promote_types(x.dtype, torch.float32)
        n = F.pad(normed(x[:, ::stride].flatten(0, 1).to(work)), (0, 1), value=1.0)  # (T, D + 1)
        updates = updates[:, ::stride].flatten(0, 1).to(work)
        gram, cross = (n.T @ n).to(self.gram), (n.T @ updates).to(self.cross)
        for p, total in enumerate(self.gram):
            total.add_(gram, alpha=sigma**p)
        for p, total in enumerate(self.cross):
            total.add_(cross, alpha=sigma**p)
        self.power += updates.square().sum(dtype=self.power.dtype)

    def blocks(self, rows: slice, columns: slice) -> Tensor:
        """The Gram matrix of all features, their G terms in turn, of some rows and columns of each block."""
        terms = range(self.degree + 1)
        return torch.cat([torch.cat([self.gram[a + b, rows, columns] for b in terms], dim=1) for a in terms])

    def solve(self, ridge: float = 1e-4) -> Factors:
        """The best map of full rank, its directions in the order of what they explain.

        It minimises |Y - F W - K b|^2 + lambda |W|^2, Y being the updates, F the terms of LN(x) and K those of 1,
        lambda `ridge` times F's mean power. With b solved for first, b = (K'K)^-1 K'(Y - F W), what remains is
        least squares on F and Y without what K explains of them (Frisch and Waugh):

            W = (A + lambda)^-1 C,   A = F'F - F'K (K'K)^-1 K'F,   C = F'Y - F'K (K'K)^-1 K'Y
        """
        explained = self.offset_solver() @ self.blocks(ONE, SLOPES)  # (K'K)^-1 K'F
        inner = self.blocks(SLOPES, SLOPES).sub_(self.blocks(SLOPES, ONE) @ explained)
        outer = self.cross[:, SLOPES].flatten(0, 1) - explained.T @ self.cross[:, -1]
        inner.diagonal().add_(ridge * inner.diagonal().mean().clamp(min=torch.finfo(inner.dtype).tiny))
        weights = torch.cholesky_solve(outer, torch.linalg.cholesky(inner))  # (G D, D)
        fitted = weights.T @ outer
        directions = torch.linalg.eigh((fitted + fitted.T) / 2).eigenvectors.flip(1)  # (D, D)
        return self.with_bias(weights @ directions, directions.T)

    def reduce_rank(self, full: Factors, rank: int) -> Factors:
        """The best map of a rank, from the full one of `solve`: reduced-rank regression (Izenman, 1975).

        W of full rank leaves a residual that is orthogonal to F, so for every other map M

            |Y - F M|^2 = |Y - F W|^2 + |F W - F M|^2

        and the best F M of rank r is that of the r first right singular vectors P of the fitted values F W (Eckart
        and Young): M = W P P', with P the first eigenvectors of W'F'F W, down = W P and up = P'. The ridge is rows
        sqrt(lambda) below F and zeros below Y, which makes that matrix W'(A + lambda) W = W'C. Offsets are never
        reduced, but depend on M.
        """
        return self.with_bias(full.down[..., :rank].flatten(0, 1), full.up[:rank])

    def r_squared(self, factors: Factors) -> float:
        """Share of the updates' power that a map, perhaps fit on other tokens, explains of those summed here.

        The tokens are not needed: |Y - F M|^2 = |Y|^2 - 2 tr(M'F'Y) + tr(M'F'F M).
        """
        columns = torch.cat([factors.down @ factors.up, factors.bias[:, None]], dim=1).to(self.cross).flatten(0, 1)
        error = self.power + (columns * (self.blocks(ALL, ALL) @ columns - 2 * self.cross.flatten(0, 1))).sum()
        return float(1 - error / self.power)

    def offset_solver(self) -> Tensor:
        """(K'K)^-1; where all tokens had one noise level, its terms share the offset."""
        return torch.linalg.pinv(self.blocks(ONE, ONE), hermitian=True)

    def with_bias(self, down: Tensor, up: Tensor) -> Factors:
        """The map of down (G D, r) and up (r, D), with the offsets that suit it best."""
        bias = self.offset_solver() @ (self.cross[:, -1] - self.blocks(ONE, SLOPES) @ down @ up)
        return Factors(down.view(self.degree + 1, self.width, -1), up, bias)
