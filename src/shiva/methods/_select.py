"""What the methods share that pick a block's tokens by score: the router and the choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Place, Run
from shiva.core.reduction import Reduction, Streams, flat_rows
from shiva.methods._rejected import RejectedConfig, RejectedMethod, check_layers
from shiva.modules.rejected import with_age
from shiva.modules.router import KNOWN_SIGNALS, RouterBank

OLDEST_FIRST = 1e3
"""Weight of age beside scores of unit deviation: large enough that age alone decides."""

GOLDEN = (5**0.5 - 1) / 2
"""How far a sweep moves at each step, as a share of the image: at multiples of it bands of any width overlap least."""

DRAWN = ("random", "age", "sweep")
"""Scores that look at no token: they are settled before a step starts."""


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
    """What tokens are ranked by: router, or without training sweep (a band of rows that moves at every step, for
    cached updates), random, age (oldest first), norm, update."""
    age: float = 0.0
    """Bonus of each step a token has waited, in deviations of the scores; with cached updates it avoids staleness."""
    attends: str = "selected"
    """What the selected attend to: selected (the paper), or all, by the keys and values that the others last had."""
    seed: int = 0
    """Of the random scores."""

    fixed: ClassVar = frozenset({"sharing", "bottleneck", "signals", "signal_length"})

    def __post_init__(self) -> None:
        super().__post_init__()
        options.choice("guidance", self.guidance, ("shared", "per-sample", "max"))
        options.choice("score", self.score, ("router", "norm", "update", *DRAWN))
        if self.score == "update" and self.rejected != "cached":
            raise ValueError("score='update' ranks by cached updates; pass rejected='cached' too")
        options.choice("attends", self.attends, ("selected", "all"))
        if self.attends == "all" and not self.may_cache:
            raise ValueError("attends='all' keeps keys and values from step to step; pass rejected='cached' too")
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

    @property
    def needs_training(self) -> bool:
        return self.config.score == "router"

    def dense_layers(self) -> Collection[int]:
        """Layers that always see all tokens."""
        return self.config.dense

    def selects(self, site: Place) -> bool:
        if site.layer in self.dense_layers():
            return False
        return site.kind == "block" or (site.kind == "keys" and self.whole_keys(site.layer))

    def whole_keys(self, layer: int) -> bool:
        return self.config.attends == "all" and self.ever_caches(layer)

    def check_sites(self, sites: Sequence[Place]) -> None:
        if self.config.attends == "all" and not any(site.kind == "keys" for site in sites):
            raise ValueError(
                f"attends='all' needs separate projections to keys and values, which {self.spec.name} lacks here; "
                "call unfuse_qkv_projections() first, or pass attends='selected'"
            )

    # -- which ---------------------------------------------------------------------------------------

    def begin_step(self, ctx: StepContext) -> None:
        """Settle the scores (L, N) that look at no token, where nothing is compiled or recorded."""
        if self.training and self.config.attends == "all":
            raise ValueError("attends='all' is for inference; train with attends='selected', then pass it to attach")
        if not self.training and self.config.score in DRAWN:
            drawn = self._sweep(ctx) if self.config.score == "sweep" else self._random(ctx)
            ctx.memory["drawn"] = drawn.to(next(self.routers.parameters()).device)

    def _sweep(self, ctx: StepContext) -> Tensor:
        start = round(GOLDEN * ctx.step * ctx.tokens)
        behind = (torch.arange(ctx.tokens) - start) % ctx.tokens
        return -behind.float().expand(self.spec.layers, -1)

    def _random(self, ctx: StepContext) -> Tensor:
        seeds = [hash((self.config.seed, ctx.step, layer)) % 2**63 for layer in range(self.spec.layers)]
        return torch.stack([torch.rand(ctx.tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

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
        return ctx.memory["drawn"][layer].expand(x.shape[0], -1)

    def waited(self, scores: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D) with the bonus of age, where the config asks for one."""
        weight = OLDEST_FIRST if self.config.score == "age" else self.config.age
        return scores if weight == 0 else with_age(scores, self.age_of(x, layer, ctx), weight)

    def fill(self, indices: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Reduction:
        whole = self.whole_keys(layer) and self.caches(layer, ctx)
        return replace(super().fill(indices, x, layer, ctx), whole_keys=whole)

    def all_keys(self, values: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Keys or values (B, N, D) of all tokens, from those just made (B, K, D) of the selected ones."""
        if not self.caches(site.layer, ctx):
            return values
        key = self.key(site.name, site.layer, ctx)
        if values.shape[1] == ctx.tokens:
            ctx.run[key] = values.detach().to(self.cache_dtype(values), copy=True)
            return values
        rows = flat_rows(ctx.memory["indices", site.layer], ctx.tokens)
        known = ctx.run[key]
        known.flatten(0, 1).index_copy_(0, rows, values.detach().flatten(0, 1).to(known.dtype))
        if not values.requires_grad:
            return known.to(values.dtype)
        return known.to(values.dtype).flatten(0, 1).index_copy(0, rows, values.flatten(0, 1)).view_as(known)

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if site.kind == "keys":
            made = run(x, None)
            return made._replace(image=self.all_keys(made.image, site, ctx))
        out = super().around(run, x, base, site, ctx)
        if not self.training and ctx.kept[site.name] == x.shape[1]:
            self.refresh(out.image, base, site.layer, ctx)
        return out
