"""What a skipped token gets: the third answer of a pruner, with the state that it takes.

At inference, updates live in the run's state. Training draws single timesteps, so there is no run: the teacher's
updates at a noisier timestep of the same samples stand in for the cache (docs/training.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shiva.core.context import Earlier, StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, MethodConfig, Place
from shiva.core.options import Whole
from shiva.core.reduction import Reduction, flat_rows, select
from shiva.ops.fill import (
    FillFrom,
    cached_updates,
    filled,
    geometric_age,
    grow_older,
    most_similar,
    near_updates,
    spatially_nearest,
    stale_updates,
)
from shiva.ops.shortcut import Shortcut

CACHED_FROM = 4
"""Steps of a run from which `fill="auto"` caches; the experiment `rejected_tokens` measures short runs."""

FillName = Literal["identity", "near", "cached", "auto", "shortcut"]
CACHE_DTYPES = {"same": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

Key = tuple[str, int]
"""A site by its name, and a guidance branch: each has a state of its own."""


def key_of(site: Place, ctx: StepContext) -> Key:
    return site.name, ctx.branch


def keys_of_all(
    values: Tensor, indices: Tensor | None, kept: dict[Key, Tensor], key: Key, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Keys or values of all tokens, from those just made (B, K, D) at indices (B, K) and those kept of the others."""
    if values.shape[1] == tokens:
        kept[key] = values.detach().to(dtype, copy=True)
        return values
    assert indices is not None
    rows, known = flat_rows(indices, tokens), kept[key]
    known.flatten(0, 1).index_copy_(0, rows, values.detach().flatten(0, 1).to(known.dtype))
    if not values.requires_grad:
        return known.to(values.dtype)
    return known.to(values.dtype).flatten(0, 1).index_copy(0, rows, values.flatten(0, 1)).view_as(known)


def check_layers(name: str, layers: tuple[int, ...], spec: BackboneSpec) -> None:
    """Refuse a layer that the backbone does not have."""
    outside = [layer for layer in layers if not 0 <= layer < spec.layers]
    if outside:
        raise ValueError(f"{name}={layers} names layer {outside[0]}, but {spec.name} has {spec.layers}; count from 0")


@dataclass
class FillRun:
    """What a run carries: last updates, keys and values (B, N, D), and ages (B, N), of each site."""

    updates: dict[Key, Tensor] = field(default_factory=dict)
    keys: dict[Key, Tensor] = field(default_factory=dict)
    ages: dict[Key, Tensor] = field(default_factory=dict)
    missed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Of the first layer of each span and each guidance branch, what its regression missed, (B, N, D)."""
    begun: dict[int, Tensor] = field(default_factory=dict)
    """Of each guidance branch, what tokens were at the beginning of a span that runs all of them."""
    ended: dict[int, Tensor] = field(default_factory=dict)
    """Of each guidance branch, what tokens were at the end of the last span, (B, N, D)."""


@dataclass(frozen=True)
class FillOptions(MethodConfig):
    """Options of every method that leaves tokens out of a site."""

    fill: FillName = "identity"
    """What a skipped token gets: identity (nothing, the paper's), near (another's update), cached (its own last),
    auto (cached in runs of at least `CACHED_FROM` steps, near in shorter ones, where caches go stale), or, around
    whole blocks, shortcut (`methods.shortcut`)."""
    near: Literal["similar", "spatial"] = "similar"
    """Which token `near` takes the update of: the most similar selected one, or the spatially nearest."""
    dense_steps: tuple[Whole, ...] = ()
    """Steps, counted from a run's first, that run all tokens; with cached updates the first always does."""
    cache_dtype: Literal["same", "bfloat16", "float16"] = "same"
    """Precision of cached updates: same as the tokens, bfloat16 or float16."""
    cache_layers: tuple[Whole, ...] | None = None
    """Layers whose updates are cached; the others' skipped tokens ride the identity. None caches all."""

    fills: ClassVar[tuple[str, ...]] = ("identity", "near", "cached", "auto")
    """Those it can do with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fill not in self.fills:
            known = ", ".join(map(repr, self.fills))
            raise ValueError(f"fill={self.fill!r} is not for {type(self).__name__}; pass one of {known}")

    @property
    def may_cache(self) -> bool:
        return FILLS[self.fill].caches

    def make_fill(self, spec: BackboneSpec, tracks_age: bool = False) -> Fill:
        check_layers("cache_layers", self.cache_layers or (), spec)
        return FILLS[self.fill](self, spec, tracks_age)


class Fill:
    """Nothing: a skipped token rides the residual, as in the paper. The base of the others."""

    caches: ClassVar[bool] = False
    """Whether it may keep updates from step to step."""
    carries: bool = False
    """Whether it keeps anything else from step to step."""
    weights: Shortcut | None = None
    """What it learns, where it does; the method that has it trains and saves them."""

    def __init__(self, config: Any, spec: BackboneSpec, tracks_age: bool = False):
        self.config = config
        self.tracks_age = tracks_age
        """Whether the run holds how long each token has waited."""

    # -- inference -----------------------------------------------------------------------------------

    def begin_step(self, ctx: StepContext) -> None:
        """Once a call, before the transformer runs."""

    def in_this(self, ctx: StepContext) -> Fill:
        """The fill of this run: `auto` is settled here and nowhere else."""
        return self

    def dense_step(self, step: int, ctx: StepContext) -> bool:
        """Whether a step of this run is meant to see all tokens."""
        return step - ctx.first in self.config.dense_steps

    def ready(self, x: Tensor, site: Place, ctx: StepContext) -> bool:
        """Whether there is what a skipped token would get."""
        return True

    def of(self, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        """The reduction that runs the tokens of x (B, N, D) at indices (B, k)."""
        return select(indices, x.shape[1])

    def __call__(self, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        with ctx.phase("rejected"):
            if self.tracks_age and not ctx.reruns(site.name):
                run: FillRun = ctx.run
                run.ages[key_of(site, ctx)] = grow_older(self.age_of(x, site, ctx), indices)
            return self.in_this(ctx).of(indices, x, site, ctx)

    def refresh(self, out: Tensor, base: Tensor, site: Place, ctx: StepContext) -> None:
        """After a dense pass every token's update out - base (B, N, D) is new."""
        if self.tracks_age:
            run: FillRun = ctx.run
            run.ages[key_of(site, ctx)] = out.new_zeros(out.shape[:2], dtype=torch.float32)

    def all_keys(self, values: Tensor, indices: Tensor | None, site: Place, ctx: StepContext) -> Tensor:
        """Keys or values of all tokens, from those just made (B, K, D) of the selected ones."""
        return values

    def caches_layer(self, layer: int) -> bool:
        """Whether a layer's updates, keys and values may be kept from step to step."""
        return False

    def flops(self, counts: Sequence[float], layout: Layout) -> float:
        """Its own FLOPs a sample at a step whose layers run on so many of the tokens."""
        return 0.0

    def age_of(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Steps (B, N) that tokens x (B, N, D) have waited since they were last computed."""
        run: FillRun = ctx.run
        age = run.ages.get(key_of(site, ctx))
        if age is None or age.shape != x.shape[:2]:
            return x.new_zeros(x.shape[:2], dtype=torch.float32)
        return age

    # -- training ------------------------------------------------------------------------------------

    def simulated_age(self, x: Tensor, keep: float, ctx: StepContext) -> Tensor:
        """How long each token of x (B, N, D) has waited in training, as if every step kept a random share."""
        return x.new_zeros(x.shape[:2], dtype=torch.float32)

    def from_selected(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> FillFrom | None:
        """In training: what each token of x would get if it were skipped; None for nothing."""
        return None

    def trained(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> Reduction:
        """The reduction of training, for methods whose gradient does not pass through what skipped tokens get."""
        fill = self.from_selected(indices, x, age, layer, ctx)
        return select(indices, x.shape[1]) if fill is None else filled(indices, x.shape[1], fill)


class Near(Fill):
    """The update of the selected token that is most similar, or nearest."""

    def told_by(self, indices: Tensor, x: Tensor, ctx: StepContext, *, apart: bool = False) -> FillFrom:
        if self.config.near == "similar":
            return near_updates(indices, most_similar(x, indices, apart=apart))
        return near_updates(indices, spatially_nearest(indices, ctx.layout, apart=apart))

    def of(self, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        return filled(indices, x.shape[1], self.told_by(indices, x, ctx))

    def from_selected(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> FillFrom | None:
        return self.told_by(indices, x.detach(), ctx, apart=True)


class Cached(Fill):
    """The token's own last update; the first step, which has none, is dense."""

    caches = True

    def caches_layer(self, layer: int) -> bool:
        layers = self.config.cache_layers
        return layers is None or layer in layers

    def dense_step(self, step: int, ctx: StepContext) -> bool:
        return step == ctx.first or super().dense_step(step, ctx)

    def cache_of(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor | None:
        """Last updates of tokens x (B, N, D), if there are any of their shape."""
        run: FillRun = ctx.run
        cache = run.updates.get(key_of(site, ctx))
        return None if cache is None or cache.shape != x.shape else cache

    def ready(self, x: Tensor, site: Place, ctx: StepContext) -> bool:
        return not self.caches_layer(site.layer) or self.cache_of(x, site, ctx) is not None

    def of(self, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        if not self.caches_layer(site.layer):
            return super().of(indices, x, site, ctx)
        run: FillRun = ctx.run
        return cached_updates(indices, run.updates[key_of(site, ctx)])

    def refresh(self, out: Tensor, base: Tensor, site: Place, ctx: StepContext) -> None:
        super().refresh(out, base, site, ctx)
        if self.caches_layer(site.layer):
            run: FillRun = ctx.run
            run.updates[key_of(site, ctx)] = (out - base).detach().to(self.dtype_of(out))

    def all_keys(self, values: Tensor, indices: Tensor | None, site: Place, ctx: StepContext) -> Tensor:
        run: FillRun = ctx.run
        return keys_of_all(values, indices, run.keys, key_of(site, ctx), ctx.tokens, self.dtype_of(values))

    def dtype_of(self, values: Tensor) -> torch.dtype:
        return CACHE_DTYPES[self.config.cache_dtype] or values.dtype

    # -- training ------------------------------------------------------------------------------------

    def simulated_age(self, x: Tensor, keep: float, ctx: StepContext) -> Tensor:
        uniform = torch.rand(x.shape[:2], device=x.device)
        return geometric_age(uniform, keep, self.earlier(ctx).steps)

    def earlier(self, ctx: StepContext) -> Earlier:
        if ctx.teacher is None or ctx.teacher.earlier is None:
            raise ValueError(
                f"fill={self.config.fill!r} reuses updates of earlier steps; in training, record a dense pass at a "
                "noisier timestep as the teacher's `earlier`, as shiva.training does"
            )
        return ctx.teacher.earlier

    def from_selected(self, indices: Tensor, x: Tensor, age: Tensor, layer: int, ctx: StepContext) -> FillFrom | None:
        if not self.caches_layer(layer):
            return None
        assert ctx.teacher is not None
        earlier = self.earlier(ctx)
        stale = stale_updates(ctx.teacher.updates[layer], earlier.updates[layer], age, earlier.steps).to(x.dtype)
        return lambda updates: stale


class Auto(Cached):
    """Cached in runs that are long enough, near in others."""

    def __init__(self, config: FillOptions, spec: BackboneSpec, tracks_age: bool = False):
        super().__init__(config, spec, tracks_age)
        self.short = Near(config, spec, tracks_age)
        self.long = Cached(config, spec, tracks_age)

    def in_this(self, ctx: StepContext) -> Fill:
        return self.long if ctx.steps is None or ctx.steps - ctx.first >= CACHED_FROM else self.short

    def dense_step(self, step: int, ctx: StepContext) -> bool:
        return self.in_this(ctx).dense_step(step, ctx)

    def ready(self, x: Tensor, site: Place, ctx: StepContext) -> bool:
        return self.in_this(ctx).ready(x, site, ctx)

    def refresh(self, out: Tensor, base: Tensor, site: Place, ctx: StepContext) -> None:
        self.in_this(ctx).refresh(out, base, site, ctx)

    def all_keys(self, values: Tensor, indices: Tensor | None, site: Place, ctx: StepContext) -> Tensor:
        return self.in_this(ctx).all_keys(values, indices, site, ctx)


FILLS: dict[str, type[Fill]] = {"identity": Fill, "near": Near, "cached": Cached, "auto": Auto}
"""By name; `methods.shortcut` adds its own."""
