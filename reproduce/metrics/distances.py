"""Pure functions on features: Fréchet distance, kernel distance, retrieval."""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Between two Gaussians fitted to (A, D) and (B, D) features.

    tr((S1 S2)^1/2) is the sum of the singular values of X1 X2^T of the centred, scaled features, which needs no
    square root of a D x D matrix and stays exact with fewer samples than dimensions.
    """
    first, second = first.double(), second.double()
    means = (first.mean(0) - second.mean(0)).square().sum()
    x = (first - first.mean(0)) / (len(first) - 1) ** 0.5
    y = (second - second.mean(0)) / (len(second) - 1) ** 0.5
    cross = torch.linalg.svdvals(x @ y.T).sum()
    return (means + x.square().sum() + y.square().sum() - 2 * cross).item()


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """Unbiased squared MMD with the cubic kernel of the kernel inception distance, on (A, D) and (B, D)."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def within(a: Tensor) -> Tensor:
        gram = kernel(a, a)
        return (gram.sum() - gram.diagonal().sum()) / (len(a) * (len(a) - 1))

    first, second = first.double(), second.double()
    return (within(first) + within(second) - 2 * kernel(first, second).mean()).item()


def ranks_of(scores: Tensor, right: Tensor) -> Tensor:
    """How many labels beat the right one: (B, L) scores and (B,) label numbers -> (B,), 0 the best."""
    own = scores.gather(1, right[:, None])
    return (scores > own).sum(1)


def retrieval(scores: Tensor, right: Tensor) -> dict[str, float]:
    ranks = ranks_of(scores, right)
    return {
        "top1": (ranks < 1).float().mean().item(),
        "top5": (ranks < 5).float().mean().item(),
        "median_rank": ranks.median().item() + 1,
        "text_image_score": scores.gather(1, right[:, None]).mean().item(),
    }
