"""What the methods share that pick a block's tokens by score: the router and the choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Place, Run
from shiva.core.reduction import Streams
from shiva.methods._rejected import RejectedConfig, RejectedMethod, check_layers
from shiva.modules.rejected import with_age
from shiva.modules.router import KNOWN_SIGNALS, RouterBank

OLDEST_FIRST = 1e3
"""Weight of age beside scores of unit deviation: large enough that age alone decides."""


def full_precision(device: torch.device, training: bool) -> contextlib.AbstractContextManager[object]:
    """Training under autocast still scores and counts in float32: an order needs the digits."""
    return torch.autocast(device.type, enabled=False) if training else contextlib.nullcontext()


def shared_indices(layer: int, policy: GuidancePolicy, ctx: StepContext, choose: Callable[[], Tensor]) -> Tensor:
    """A layer's tokens (B, k); under sequential guidance the second call of a step takes the first's."""
    key = ("indices", layer)
    if ctx.branch and policy != "per-sample" and key in ctx.memory:
        return ctx.memory[key]
    ctx.memory[key] = choose()
    return ctx.memory[key]


@dataclass(frozen=True)
class SelectConfig(RejectedConfig):
    """Options of every method that picks a block's tokens by score."""

    dense: tuple[int, ...] = (0,)
    """Layers that always see all tokens; the paper bypasses the first."""
    guidance: GuidancePolicy = "max"
    """How the two guidance halves agree on tokens: the elementwise maximum of scores in the paper."""
    sharing: str = "pairwise"
    """Which layers share a router: pairwise, global, independent, or groups-n."""
    bottleneck: int = 64
    """Width of the router."""
    signals: tuple[str, ...] = ("time", "prompt", "layer")
    """Context the router reads beside the token itself: time, prompt, layer, and, where updates are reused, age."""
    signal_length: str = "unit"
    """Length that time, prompt and layer are brought to: unit, or own, as in the paper, which drowns the tokens."""
    score: str = "router"
    """What tokens are ranked by: router, or without training random, age (oldest first), norm, update."""
    age: float = 0.0
    """Bonus of each step a token has waited, in deviations of the scores; with cached updates it avoids staleness."""
    seed: int = 0
    """Of the random scores."""

    fixed: ClassVar = frozenset({"sharing", "bottleneck", "signals", "signal_length"})

    def __post_init__(self) -> None:
        super().__post_init__()
        options.choice("guidance", self.guidance, ("shared", "per-sample", "max"))
        options.choice("score", self.score, ("router", "random", "age", "norm", "update"))
        if self.score == "update" and self.rejected != "cached":
            raise ValueError("score='update' ranks by cached updates; pass rejected='cached' too")
        options.choice("signal_length", self.signal_length, ("unit", "own"))
        for signal in self.signals:
            options.choice("signal", signal, KNOWN_SIGNALS)
        for name in ("dense", "signals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class SelectMethod(RejectedMethod):
    """Scores tokens and picks the best k."""

    needs_signals = True
    config: SelectConfig

    def __init__(self, config: SelectConfig, spec: BackboneSpec):
        super().__init__(config, spec)
        check_layers("dense", config.dense, spec)
        self.tracks_age = bool(config.age) or config.score == "age" or "age" in config.signals
        self.guidance = config.guidance
        self.routers = RouterBank(
            spec.width,
            spec.time_width,
            spec.prompt_width,
            spec.layers,
            config.sharing,
            config.bottleneck,
            config.signals,
            config.signal_length == "unit",
        )

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"router": list(self.routers.parameters())}

    def selects(self, site: Place) -> bool:
        return site.kind == "block" and site.layer not in self.config.dense

    # -- which ---------------------------------------------------------------------------------------

    def scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D): higher is kept."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            if self.training or self.config.score == "router":
                # Gradient checkpointing runs a block twice; each pass then needs a context of its own.
                known = None if self.training else ctx.memory.setdefault(("contexts", ctx.branch), {})
                age = self.age_of(x, layer, ctx) if "age" in self.config.signals else None
                scores = self.routers(x, ctx.time_embedding, ctx.prompt, layer, known, age)
            else:
                scores = self._untrained_scores(x, layer, ctx)
        if ctx.trace is not None:
            ctx.trace.scores[ctx.step, layer] = scores.detach()
        return scores

    def _untrained_scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        kind = self.config.score
        if kind == "norm":
            return x.float().norm(dim=-1)
        if kind == "update":
            return ctx.run[self.key("update", layer, ctx)].float().norm(dim=-1)
        seed = hash((self.config.seed, ctx.step, layer)) % 2**63
        drawn = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(seed))
        return drawn.to(x.device).expand(x.shape[0], -1)

    def waited(self, scores: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D) with the bonus of age, where the config asks for one."""
        weight = OLDEST_FIRST if self.config.score == "age" else self.config.age
        return scores if weight == 0 else with_age(scores, self.age_of(x, layer, ctx), weight)

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        out = super().around(run, x, base, site, ctx)
        if not self.training and ctx.kept[site.name] == x.shape[1]:
            self.refresh(out.image, base, site.layer, ctx)
        return out
