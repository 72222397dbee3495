"""The paper's two networks: the context-aware router (sec. 3.3), and the ratio policy (sec. 3.4) with its budget."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.core.options import choice

# -- which: one score a token, from its features and three signals -------------------------------------

SIGNALS = ("time", "prompt", "layer")
"""The paper's context."""
Signal = Literal["time", "prompt", "layer", "age"]
"""Beyond it: how many steps a token has waited, for routers that decide over reused updates."""


class ContextRouter(nn.Module):
    """s_i = w . LayerNorm(SiLU(Proj_x x_i + h_ctx)), h_ctx = Proj_t t + Proj_p c + Proj_l l.

    The layer signal is a learned embedding, so that a router shared by several layers can tell them apart.
    At the signals' own length, which is about a token's, a few of Adam's steps make them drown what sets tokens apart:
    with `unit` they are brought to length 1. The age signal, Proj_a log(1 + age_i), is each token's own and starts at
    zero weight.
    Weights stay in float32 and are cast to the tokens' dtype; scores are float32.
    """

    def __init__(
        self,
        width: int,
        time_width: int,
        prompt_width: int,
        layers: int,
        bottleneck: int = 64,
        signals: tuple[str, ...] = SIGNALS,
        unit: bool = True,
    ):
        super().__init__()
        self.unit = unit
        for signal in signals:
            choice("signal", signal, get_args(Signal))
        self.proj_x = nn.Linear(width, bottleneck)
        self.proj_t = nn.Linear(time_width, bottleneck, bias=False) if "time" in signals else None
        self.proj_p = nn.Linear(prompt_width, bottleneck, bias=False) if "prompt" in signals else None
        self.layer = nn.Embedding(layers, bottleneck) if "layer" in signals else None
        self.proj_l = nn.Linear(bottleneck, bottleneck, bias=False) if "layer" in signals else None
        self.norm = nn.LayerNorm(bottleneck)
        self.score = nn.Linear(bottleneck, 1, bias=False)
        self.proj_a = nn.Parameter(torch.zeros(bottleneck)) if "age" in signals else None

    def signal(self, vector: Tensor) -> Tensor:
        return F.normalize(vector.float(), dim=-1) if self.unit else vector.float()

    def contexts(self, time: Tensor | None, prompt: Tensor | None) -> Tensor:
        """h_ctx (members or 1, B or 1, bottleneck) in float32, of all layers that share the router."""
        context = self.proj_x.bias.float()[None]
        if self.proj_t is not None:
            assert time is not None
            context = context + self.proj_t(self.signal(time))
        if self.proj_p is not None:
            assert prompt is not None
            context = context + self.proj_p(self.signal(prompt))
        if self.layer is not None and self.proj_l is not None:
            return context + self.proj_l(self.signal(self.layer.weight))[:, None]
        return context[None]

    def forward(
        self, x: Tensor, time: Tensor | None, prompt: Tensor | None, member: int, age: Tensor | None = None
    ) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D); `member` is the layer's place among those sharing the router."""
        return self.scores(x, self.contexts(time, prompt), member, age)

    def scores(self, x: Tensor, contexts: Tensor, member: int, age: Tensor | None = None) -> Tensor:
        context = contexts[member if len(contexts) > 1 else 0]
        hidden = F.linear(x, self.proj_x.weight.to(x.dtype)).float() + context[:, None]  # (B, N, bottleneck)
        if self.proj_a is not None:
            assert age is not None
            hidden = hidden + age.log1p()[..., None] * self.proj_a
        return self.score(self.norm(F.silu(hidden))).squeeze(-1)


def group_size(sharing: str, layers: int) -> int:
    """Layers per router: "pairwise", "global", "independent", or "groups-n"."""
    sizes = {"pairwise": 2, "global": layers, "independent": 1}
    if sharing in sizes:
        return sizes[sharing]
    prefix, _, number = sharing.partition("-")
    if prefix == "groups" and number.isdecimal() and len(number) < 6 and int(number) > 0:
        return int(number)
    raise ValueError(f"sharing={sharing!r} is unknown; pass 'pairwise', 'global', 'independent' or 'groups-n'")


class RouterBank(nn.Module):
    """One router per group of adjacent layers; `options` are each one's."""

    def __init__(
        self,
        width: int,
        time_width: int,
        prompt_width: int,
        layers: int,
        sharing: str = "pairwise",
        **options: Any,
    ):
        super().__init__()
        self.size = group_size(sharing, layers)
        groups = -(-layers // self.size)
        self.routers = nn.ModuleList(
            ContextRouter(width, time_width, prompt_width, min(self.size, layers), **options) for _ in range(groups)
        )

    def forward(
        self,
        x: Tensor,
        time: Tensor | None,
        prompt: Tensor | None,
        layer: int,
        known: dict[int, Tensor],
        age: Tensor | None = None,
    ) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D) at a layer; `known` keeps contexts for the layers after it.

        `age` (B, N) is how many steps each token has waited, for routers that read it.
        """
        group, member = divmod(layer, self.size)
        router: Any = self.routers[group]
        if group not in known:
            known[group] = router.contexts(time, prompt)
        return router.scores(x, known[group], member, age)


def perturb(scores: Tensor, sigma: float) -> Tensor:
    """Exploration in training: both the hard selection and the soft rank see the perturbed scores."""
    return scores + sigma * torch.randn_like(scores) if sigma > 0 else scores


# -- how many: the ratio policy ------------------------------------------------------------------------

WIDTH = 256


def sinusoidal(timesteps: Tensor) -> Tensor:
    """Sinusoidal embedding (S, WIDTH) of timesteps (S,) in 0 to 1000, cosines first as in diffusers."""
    half = WIDTH // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=timesteps.device) / half)
    angles = timesteps.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def branch(out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, out))


def logit(share: float) -> float:
    return math.log(share) - math.log1p(-share)


class RatioPolicy(nn.Module):
    """logit r(t, l) = time(e_t) + layer(e_l) + anchor: a depth profile plus a time trend, both learned.

    The last layer of each branch starts at zero, so training starts from the flat target ratio.
    """

    def __init__(self, layers: int, target: float = 0.6):
        super().__init__()
        self.layer = nn.Embedding(layers, WIDTH)
        self.layer_branch = branch()
        self.time_branch = branch()
        self.anchor = nn.Parameter(torch.tensor(logit(min(max(target, 1e-3), 1 - 1e-3))))
        for head in (self.layer_branch[-1], self.time_branch[-1]):
            assert isinstance(head, nn.Linear)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def logits(self, timesteps: Tensor) -> Tensor:
        """Logits (S, L) of the keep ratio at timesteps (S,)."""
        depth = self.layer_branch(self.layer.weight).T  # (1, L)
        trend = self.time_branch(sinusoidal(timesteps))  # (S, 1)
        return trend + depth + self.anchor

    def forward(self, timesteps: Tensor) -> Tensor:
        """Keep ratios (S, L)."""
        return torch.sigmoid(self.logits(timesteps))


class FiLMPolicy(RatioPolicy):
    """logit r = (1 + gamma(e_t)) * layer(e_l) + beta(e_t) + anchor: the multiplicative form, for the ablation.

    Scaling 1 + gamma by 1/c and layer(e_l) by c changes nothing: its factors are not identified.
    """

    def __init__(self, layers: int, target: float = 0.6):
        super().__init__(layers, target)
        self.time_branch = branch(2)
        head = self.layer_branch[-1]
        assert isinstance(head, nn.Linear)
        nn.init.normal_(head.weight, std=0.02)

    def logits(self, timesteps: Tensor) -> Tensor:
        depth = self.layer_branch(self.layer.weight).T  # (1, L)
        gamma, beta = self.time_branch(sinusoidal(timesteps)).split(1, dim=-1)  # (S, 1) each
        return (1 + gamma) * depth + beta + self.anchor


POLICIES: dict[str, type[RatioPolicy]] = {"additive": RatioPolicy, "film": FiLMPolicy}


class BudgetController(nn.Module):
    """Steers the long-run mean keep to a target without forcing every batch to meet it.

    mu = beta * mean + (1 - beta) * mu, and the loss is mean * sg[2 (mu - R)]. That is proportional
    control, which settles beside R when the task pulls; `dual` > 0 adds the integral term
    nu += dual * (mu - R), which removes the offset.
    """

    mu: Tensor
    nu: Tensor

    def __init__(self, target: float, beta: float = 0.2, dual: float = 0.0):
        super().__init__()
        self.target, self.beta, self.dual = target, beta, dual
        self.register_buffer("mu", torch.tensor(float(target)))
        self.register_buffer("nu", torch.tensor(0.0))

    @torch.no_grad()
    def observe(self, mean: Tensor | float) -> None:
        """Take in the mean keep of a whole global batch, once a step."""
        self.mu.lerp_(torch.as_tensor(mean).to(self.mu), self.beta)  # Eq. ema_avg
        if self.dual > 0:
            self.nu.add_(self.dual * (self.mu - self.target))

    @property
    def pressure(self) -> Tensor:
        """What a unit of mean keep costs now; negative below the target."""
        return (2 * (self.mu - self.target) + self.nu).detach().clone()

    def forward(self, mean: Tensor) -> Tensor:
        """Observe a batch and give its loss."""
        if self.training:
            self.observe(mean.detach())
        return mean * self.pressure  # Eq. budget_loss
