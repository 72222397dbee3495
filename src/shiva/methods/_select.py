"""What the methods share that pick a block's tokens by score: the router, the choice, and the rejected tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Method, MethodConfig, Place, Run
from shiva.core.reduction import Reduction, Streams, select
from shiva.modules.rejected import (
    cached_updates,
    grow_older,
    most_similar,
    near_updates,
    spatially_nearest,
    with_age,
)
from shiva.modules.router import RouterBank

OLDEST_FIRST = 1e3
"""Weight of age beside scores of unit deviation: large enough that age alone decides."""

CACHE_DTYPES = {"same": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_layers(name: str, layers: tuple[int, ...], spec: BackboneSpec) -> None:
    """Refuse a layer that the backbone does not have."""
    outside = [layer for layer in layers if not 0 <= layer < spec.layers]
    if outside:
        raise ValueError(f"{name}={layers} names layer {outside[0]}, but {spec.name} has {spec.layers}; count from 0")


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
class SelectConfig(MethodConfig):
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
    """Context the router reads beside the token itself."""
    score: str = "router"
    """What tokens are ranked by: router, or without training random, age (oldest first), norm, update."""
    age: float = 0.0
    """Bonus of each step a token has waited, in deviations of the scores; with cached updates it avoids staleness."""
    rejected: str = "identity"
    """What a rejected token gets: identity (nothing, the paper's), near (another's update), cached (its own last)."""
    near: str = "similar"
    """Which token `near` takes the update of: the most similar selected one, or the spatially nearest."""
    dense_steps: tuple[int, ...] = ()
    """Steps that run all tokens; with cached updates the first always does."""
    cache_dtype: str = "same"
    """Precision of cached updates: same as the tokens, bfloat16 or float16."""
    cache_layers: tuple[int, ...] | None = None
    """Layers whose updates are cached; the others' rejected tokens ride the identity. None caches all."""
    seed: int = 0
    """Of the random scores."""

    fixed: ClassVar = frozenset({"sharing", "bottleneck", "signals"})

    def __post_init__(self) -> None:
        options.choice("guidance", self.guidance, ("shared", "per-sample", "max"))
        options.choice("score", self.score, ("router", "random", "age", "norm", "update"))
        options.choice("rejected", self.rejected, ("identity", "near", "cached"))
        options.choice("near", self.near, ("similar", "spatial"))
        options.choice("cache_dtype", self.cache_dtype, CACHE_DTYPES)
        if self.score == "update" and self.rejected != "cached":
            raise ValueError("score='update' ranks by cached updates; pass rejected='cached' too")
        for name in ("dense", "signals", "dense_steps", "cache_layers"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))


class SelectMethod(Method):
    """Scores tokens, picks the best k, and gives the rejected what the config says."""

    needs_signals = True
    config: SelectConfig

    def __init__(self, config: SelectConfig, spec: BackboneSpec):
        super().__init__(config, spec)
        check_layers("dense", config.dense, spec)
        check_layers("cache_layers", config.cache_layers or (), spec)
        self.guidance = config.guidance
        self.routers = RouterBank(
            spec.width,
            spec.time_width,
            spec.prompt_width,
            spec.layers,
            config.sharing,
            config.bottleneck,
            config.signals,
        )

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"router": list(self.routers.parameters())}

    def selects(self, site: Place) -> bool:
        return site.kind == "block" and site.layer not in self.config.dense

    def dense_step(self, step: int) -> bool:
        """Whether a step of a run is meant to see all tokens."""
        return step in self.config.dense_steps or (self.config.rejected == "cached" and step == 0)

    # -- which ---------------------------------------------------------------------------------------

    def scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D): higher is kept."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            if self.training or self.config.score == "router":
                # Gradient checkpointing runs a block twice; each pass then needs a context of its own.
                known = None if self.training else ctx.memory.setdefault(("contexts", ctx.branch), {})
                return self.routers(x, ctx.time_embedding, ctx.prompt, layer, known)
            return self._untrained_scores(x, layer, ctx)

    def _untrained_scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        kind = self.config.score
        if kind == "norm":
            return x.float().norm(dim=-1)
        if kind == "update":
            return ctx.run[self._key("update", layer, ctx)].float().norm(dim=-1)
        seed = hash((self.config.seed, ctx.step, layer)) % 2**63
        drawn = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(seed))
        return drawn.to(x.device).expand(x.shape[0], -1)

    def waited(self, scores: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Scores (B, N) with the bonus of age, where the config asks for one."""
        weight = OLDEST_FIRST if self.config.score == "age" else self.config.age
        age = ctx.run.get(self._key("age", layer, ctx))
        return scores if weight == 0 or age is None else with_age(scores, age, weight)

    # -- what the others get -------------------------------------------------------------------------

    @staticmethod
    def _key(what: str, layer: int, ctx: StepContext) -> tuple[str, int, int]:
        """A layer's place in the run's memory; the calls of sequential guidance have each their own."""
        return what, layer, ctx.branch

    def caches(self, layer: int) -> bool:
        layers = self.config.cache_layers
        return self.config.rejected == "cached" and (layers is None or layer in layers)

    def runs_dense(self, x: Tensor, layer: int, ctx: StepContext) -> bool:
        """All tokens are asked for, or there is no update yet that a rejected one could get."""
        if ctx.counts[layer] >= x.shape[1]:
            return True
        cache = ctx.run.get(self._key("update", layer, ctx))
        return self.caches(layer) and (cache is None or cache.shape != x.shape)

    def fill(self, indices: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Reduction:
        """The reduction that runs the tokens at indices (B, k)."""
        with ctx.phase("rejected"):
            age = self._key("age", layer, ctx)
            if age in ctx.run:
                ctx.run[age] = grow_older(ctx.run[age], indices)
            if self.caches(layer):
                return cached_updates(indices, ctx.run[self._key("update", layer, ctx)])
            if self.config.rejected == "near":
                similar = self.config.near == "similar"
                nearest = most_similar(x, indices) if similar else spatially_nearest(indices, ctx.grid)
                return near_updates(indices, nearest)
            return select(indices, x.shape[1])

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        out = super().around(run, x, base, site, ctx)
        if not self.training and ctx.kept[site.name] == x.shape[1]:
            self._refresh(x, out.image, site.layer, ctx)
        return out

    def _refresh(self, x: Tensor, out: Tensor, layer: int, ctx: StepContext) -> None:
        """After a dense pass every token's update is new."""
        if self.caches(layer):
            dtype = CACHE_DTYPES[self.config.cache_dtype] or x.dtype
            ctx.run[self._key("update", layer, ctx)] = (out - x).to(dtype)
        if self.config.age or self.config.score == "age":
            ctx.run[self._key("age", layer, ctx)] = x.new_zeros(x.shape[:2], dtype=torch.float32)
