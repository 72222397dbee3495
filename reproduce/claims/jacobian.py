"""App. soft_rank_jacobian: a token's own score improves its rank, every competitor's worsens it, and all balance.

    python -m reproduce.claims.jacobian

Each way of computing the soft rank is differentiated entry by entry in float64 and held to Eq. self_sensitivity and
the case below it. From those, every row and column of d r / d s sums to 0, so whatever the loss, the scores'
gradient sums to 0: selection can only be traded between tokens, and k alone decides how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reproduce.claims.common import Claim, Result, generator, judge, main
from shiva.ops.softrank import BACKENDS, Method, soft_rank

TOKENS, TAU = 64, 0.2


def jacobian(scores: Tensor, method: Method) -> Tensor:
    """d r_i / d s_m, (N, N)."""
    return torch.autograd.functional.jacobian(lambda s: soft_rank(s, TAU, method), scores)


def analytic(scores: Tensor) -> Tensor:
    p = torch.sigmoid((scores[None, :] - scores[:, None]) / TAU)
    kernel = p * (1 - p) / TAU
    return kernel - torch.diag(kernel.sum(1))


def gradient_sum(scores: Tensor, g: Tensor, method: Method) -> float:
    """|sum grad_s| over sum |grad_s|, for an arbitrary gradient g at the ranks."""
    leaf = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(soft_rank(leaf, TAU, method), leaf, g)
    return float(gradient.sum().abs() / gradient.abs().sum())


def run(seeds: Sequence[int] = range(10), quick: bool = False) -> Result:
    seeds = list(seeds)[:3] if quick else list(seeds)
    diagonal, others, error, total = -torch.inf, torch.inf, 0.0, 0.0
    for seed in seeds:
        source = generator(seed)
        scores = torch.randn(TOKENS, generator=source, dtype=torch.float64)
        reference = analytic(scores)
        for method in BACKENDS:
            found = jacobian(scores, method)  # type: ignore[arg-type]
            diagonal = max(diagonal, float(found.diagonal().max()))
            others = min(others, float(found[~torch.eye(TOKENS, dtype=torch.bool)].min()))
            error = max(error, float((found - reference).abs().max() / reference.abs().max()))
            g = torch.randn(TOKENS, generator=source, dtype=torch.float64)
            total = max(total, gradient_sum(scores, g, method))  # type: ignore[arg-type]
    signs = diagonal < 0 < others
    claims = (
        Claim(
            "raising a score improves its own rank and worsens every other",
            "∂r_i/∂s_i < 0 < ∂r_i/∂s_m",
            f"largest diagonal {diagonal:.2g}, least other {others:.2g}; error to the derivation {error:.0e}",
            judge(signs and error < 1e-9, signs),
            f"Holds for all {len(BACKENDS)} ways of computing the soft rank.",
        ),
        Claim(
            "whatever the loss, the gradient of the scores sums to 0",
            "Σ ∇_s = 0, implied by the Jacobian",
            f"|Σ ∇_s| / Σ |∇_s| ≤ {total:.0e}",
            judge(total < 1e-10, total < 1e-5),
            "Scores only trade places; how many tokens run is the budget's gradient alone.",
        ),
    )
    details = {"diagonal_max": diagonal, "others_min": others, "error": error, "gradient_sum": total}
    return Result("jacobian", "Soft-rank Jacobian", claims, details)


def draw(result: Result, axes: Any) -> None:
    scores = torch.randn(TOKENS, generator=generator(0), dtype=torch.float64).sort(descending=True).values
    found = jacobian(scores, "direct")
    picture = axes.imshow(found, cmap="RdBu", vmin=-1, vmax=1)
    axes.set(xlabel="score of token m, best first", ylabel="rank of token i")
    axes.figure.colorbar(picture, label="∂r_i/∂s_m (clipped to ±1)")


if __name__ == "__main__":
    main("jacobian")
