"""What the tokens get that a method leaves out: nothing, another's update, or their own last one.

At inference, updates and ages live in the run's memory. Training draws single timesteps, so there is no run: the
teacher's updates at a noisier timestep of the same samples stand in for the cache (docs/training.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Method, MethodConfig
from shiva.core.reduction import Reduction, flat_rows, gather, select
from shiva.modules.rejected import (
    cached_updates,
    geometric_age,
    grow_older,
    most_similar,
    near_updates,
    spatially_nearest,
    stale_updates,
    with_received,
)

CACHED_FROM = 4
"""Steps of a run from which `rejected="auto"` caches; experiments/rejected_tokens.py measures short runs."""

CACHE_DTYPES = {"same": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_layers(name: str, layers: tuple[int, ...], spec: BackboneSpec) -> None:
    """Refuse a layer that the backbone does not have."""
    outside = [layer for layer in layers if not 0 <= layer < spec.layers]
    if outside:
        raise ValueError(f"{name}={layers} names layer {outside[0]}, but {spec.name} has {spec.layers}; count from 0")


@dataclass(frozen=True)
class RejectedConfig(MethodConfig):
    """Options of every method that leaves tokens out of a site."""

    rejected: str = "identity"
    """What a rejected token gets: identity (nothing, the paper's), near (another's update), cached (its own last),
    or auto: cached in runs of at least `CACHED_FROM` steps and near in shorter ones, where caches go stale."""
    near: str = "similar"
    """Which token `near` takes the update of: the most similar selected one, or the spatially nearest."""
    dense_steps: tuple[int, ...] = ()
    """Steps, counted from a run's first, that run all tokens; with cached updates the first always does."""
    cache_dtype: str = "same"
    """Precision of cached updates: same as the tokens, bfloat16 or float16."""
    cache_layers: tuple[int, ...] | None = None
    """Layers whose updates are cached; the others' rejected tokens ride the identity. None caches all."""

    def __post_init__(self) -> None:
        options.choice("rejected", self.rejected, ("identity", "near", "cached", "auto"))
        options.choice("near", self.near, ("similar", "spatial"))
        options.choice("cache_dtype", self.cache_dtype, CACHE_DTYPES)
        for name in ("dense_steps", "cache_layers"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    @property
    def may_cache(self) -> bool:
        return self.rejected in ("cached", "auto")


class RejectedMethod(Method):
    """Gives rejected tokens what the config says, and keeps what that takes."""

    config: RejectedConfig
    tracks_age: bool = False
    """Whether the run's memory holds how long each token has waited."""

    def __init__(self, config: RejectedConfig, spec: BackboneSpec):
        super().__init__(config, spec)
        check_layers("cache_layers", config.cache_layers or (), spec)
        self.needs_updates = self.needs_earlier = config.may_cache

    def rejected(self, ctx: StepContext) -> str:
        """What rejected tokens get in this run: the one place where `auto` is settled."""
        if self.config.rejected != "auto":
            return self.config.rejected
        if self.training or ctx.steps is None or ctx.steps - ctx.first >= CACHED_FROM:
            return "cached"
        return "near"

    def ever_caches(self, layer: int) -> bool:
        """Whether a layer's updates are ever kept."""
        layers = self.config.cache_layers
        return self.config.may_cache and (layers is None or layer in layers)

    def caches(self, layer: int, ctx: StepContext) -> bool:
        return self.rejected(ctx) == "cached" and self.ever_caches(layer)

    def dense_step(self, step: int, ctx: StepContext) -> bool:
        """Whether a step of this run is meant to see all tokens."""
        place = step - ctx.first
        return place in self.config.dense_steps or (place == 0 and self.rejected(ctx) == "cached")

    # -- inference -----------------------------------------------------------------------------------

    @staticmethod
    def key(what: str, layer: int, ctx: StepContext) -> tuple[str, int, int]:
        """A layer's place in the run's memory; the calls of sequential guidance have each their own."""
        return what, layer, ctx.branch

    def cache_of(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor | None:
        """Last updates of tokens x (B, N, D), if there are any of their shape."""
        cache = ctx.run.get(self.key("update", layer, ctx))
        return None if cache is None or cache.shape != x.shape else cache

    def age_of(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Steps (B, N) that tokens x (B, N, D) have waited since they were last computed."""
        age = ctx.memory.get(("age", layer)) if self.training else ctx.run.get(self.key("age", layer, ctx))
        if age is None or age.shape != x.shape[:2]:
            return x.new_zeros(x.shape[:2], dtype=torch.float32)
        return age

    def runs_dense(self, x: Tensor, layer: int, ctx: StepContext) -> bool:
        """All tokens are asked for, or there is no update yet that a rejected one could get."""
        if ctx.counts[layer] >= x.shape[1]:
            return True
        return self.caches(layer, ctx) and self.cache_of(x, layer, ctx) is None

    def nearest(self, x: Tensor, indices: Tensor, ctx: StepContext, *, apart: bool = False) -> Tensor:
        if self.config.near == "similar":
            return most_similar(x, indices, apart=apart)
        return spatially_nearest(indices, ctx.grid, apart=apart)

    def fill(self, indices: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Reduction:
        """The reduction that runs the tokens at indices (B, k)."""
        with ctx.phase("rejected"):
            if self.tracks_age:
                ctx.run[self.key("age", layer, ctx)] = grow_older(self.age_of(x, layer, ctx), indices)
            if self.caches(layer, ctx):
                return cached_updates(indices, ctx.run[self.key("update", layer, ctx)])
            if self.rejected(ctx) == "near":
                return near_updates(indices, self.nearest(x, indices, ctx))
            return select(indices, x.shape[1])

    def cache_dtype(self, values: Tensor) -> torch.dtype:
        return CACHE_DTYPES[self.config.cache_dtype] or values.dtype

    def refresh(self, out: Tensor, base: Tensor, layer: int, ctx: StepContext) -> None:
        """After a dense pass every token's update out - base (B, N, D) is new."""
        if self.caches(layer, ctx):
            ctx.run[self.key("update", layer, ctx)] = (out - base).detach().to(self.cache_dtype(out))
        if self.tracks_age:
            ctx.run[self.key("age", layer, ctx)] = out.new_zeros(out.shape[:2], dtype=torch.float32)

    # -- training ------------------------------------------------------------------------------------

    def simulate_age(self, x: Tensor, keep: float, layer: int, ctx: StepContext) -> None:
        """Draw how long each token of x (B, N, D) has waited, as if every step kept a random share."""
        if not self.needs_earlier:
            return
        earlier = None if ctx.teacher is None else ctx.teacher.earlier
        if earlier is None:
            raise ValueError(
                f"rejected={self.config.rejected!r} reuses updates of earlier steps; in training, record a dense pass "
                "at a noisier timestep and set session.teacher.earlier, as shiva.training does"
            )
        uniform = torch.rand(x.shape[:2], device=x.device)
        ctx.memory["age", layer] = geometric_age(uniform, keep, earlier.steps)

    def received(self, indices: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Callable[[Tensor], Tensor] | None:
        """What each token of x would get if it were rejected, from the selected updates; None for nothing."""
        if self.caches(layer, ctx):
            now, earlier = ctx.teacher.updates[layer], ctx.teacher.earlier
            stale = stale_updates(now, earlier.updates[layer], self.age_of(x, layer, ctx), earlier.steps).to(x.dtype)
            return lambda updates: stale
        if self.rejected(ctx) == "near":
            sources = flat_rows(self.nearest(x.detach(), indices, ctx, apart=True), indices.shape[1])
            return lambda updates: gather(updates, sources)
        return None

    def fill_trained(self, indices: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Reduction:
        """`fill` in training, for methods whose gradient does not pass through what rejected tokens get."""
        received = self.received(indices, x, layer, ctx)
        return select(indices, x.shape[1]) if received is None else with_received(indices, x.shape[1], received)
