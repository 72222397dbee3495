"""The residual task (Eq. residual_toy): a frozen attention-plus-FFN block, a loss against its unpruned output.

The paper gives N = 100 and D = 16. Assumed: torch's own encoder layer at its default initialisation, 4 heads, an FFN
of width 4 D, normal inputs, a new block for every seed. `pre_norm` is what DiTs are; in the post-norm form the layer
normalises its own output, and that output is what is added to x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from reproduce.claims.common import generator
from reproduce.claims.directions import Gating

TOKENS, WIDTH, HEADS = 100, 16, 4


class ResidualTask:
    """x (1, N, D), the pruned block (B, K, D) -> (B, K, D) with its skip, and the unpruned rest of the network."""

    def __init__(self, x: Tensor, block: Callable[[Tensor], Tensor], tail: Callable[[Tensor], Tensor]):
        self.x, self.block, self.tail = x, block, tail
        self.tokens = x.shape[1]
        with torch.no_grad():
            dense = block(x)
            self.teacher = (dense - x)[0]  # (N, D)
            self.target = tail(dense)  # (1, N, D)

    def losses(self, gating: Gating, batch: int) -> Tensor:
        x = self.x.expand(batch, -1, -1)
        reduction = gating(x)
        y = self.tail(reduction.restore(self.block(reduction.reduce(x)), x))
        return (y - self.target).square().sum((1, 2))


def frozen_layer(width: int, pre_norm: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, norm_first=pre_norm, batch_first=True)
    return layer.double().requires_grad_(False)


def residual_task(
    seed: int, *, pre_norm: bool = True, radial: float = 0.0, blocks: int = 1, tokens: int = TOKENS
) -> ResidualTask:
    """The task of a seed. `radial` adds that multiple of x to the block's update; only the first block is pruned."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [frozen_layer(WIDTH, pre_norm) for _ in range(blocks)]
    x = torch.randn(1, tokens, WIDTH, generator=generator(seed + 50_000), dtype=torch.float64)

    def block(z: Tensor) -> Tensor:
        return layers[0](z) + (radial if pre_norm else 1.0 + radial) * z

    return ResidualTask(x, block, nn.Sequential(*layers[1:]) if blocks > 1 else lambda y: y)


def normal_scores(seed: int, tokens: int = TOKENS) -> Tensor:
    """Scores (N,) of an untrained router."""
    return torch.randn(tokens, generator=generator(seed + 10_000), dtype=torch.float64)
