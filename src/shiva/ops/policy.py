"""The ratio policy (paper sec. 3.4): how many tokens a layer keeps at a timestep."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WIDTH = 256


def sinusoidal(timesteps: Tensor, width: int = WIDTH) -> Tensor:
    """Sinusoidal embedding (S, width) of timesteps (S,) in 0 to 1000, cosines first as in diffusers."""
    half = width // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=timesteps.device) / half)
    angles = timesteps.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def branch(width: int, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, out))


def logit(share: float) -> float:
    return math.log(share) - math.log1p(-share)


class RatioPolicy(nn.Module):
    """logit r(t, l) = time(e_t) + layer(e_l) + anchor: a depth profile plus a time trend, both learned.

    The last layer of each branch starts at zero, so training starts from the flat target ratio.
    """

    def __init__(self, layers: int, target: float = 0.6, width: int = WIDTH):
        super().__init__()
        self.width = width
        self.layer = nn.Embedding(layers, width)
        self.layer_branch = branch(width)
        self.time_branch = branch(width)
        self.anchor = nn.Parameter(torch.tensor(logit(min(max(target, 1e-3), 1 - 1e-3))))
        for head in (self.layer_branch[-1], self.time_branch[-1]):
            assert isinstance(head, nn.Linear)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def logits(self, timesteps: Tensor) -> Tensor:
        """Logits (S, L) of the keep ratio at timesteps (S,)."""
        depth = self.layer_branch(self.layer.weight).T  # (1, L)
        trend = self.time_branch(sinusoidal(timesteps, self.width))  # (S, 1)
        return trend + depth + self.anchor

    def forward(self, timesteps: Tensor) -> Tensor:
        """Keep ratios (S, L)."""
        return torch.sigmoid(self.logits(timesteps))


class FiLMPolicy(RatioPolicy):
    """logit r = (1 + gamma(e_t)) * layer(e_l) + beta(e_t) + anchor: the multiplicative form, for the ablation.

    Scaling 1 + gamma by 1/c and layer(e_l) by c changes nothing: its factors are not identified.
    """

    def __init__(self, layers: int, target: float = 0.6, width: int = WIDTH):
        super().__init__(layers, target, width)
        self.time_branch = branch(width, 2)
        head = self.layer_branch[-1]
        assert isinstance(head, nn.Linear)
        nn.init.normal_(head.weight, std=0.02)

    def logits(self, timesteps: Tensor) -> Tensor:
        depth = self.layer_branch(self.layer.weight).T  # (1, L)
        gamma, beta = self.time_branch(sinusoidal(timesteps, self.width)).split(1, dim=-1)  # (S, 1) each
        return (1 + gamma) * depth + beta + self.anchor


POLICIES: dict[str, type[RatioPolicy]] = {"additive": RatioPolicy, "film": FiLMPolicy}
