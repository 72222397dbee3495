"""SparseDiT (Chang et al., 2024, arXiv 2412.06028): sparse-dense modules, in our own adaptation to text-to-image DiTs.

The blocks between some dense ones form modules, each split into (generate, sparse, recover, dense) blocks:

    generate   queries are the tokens of the grid pooled to m x m, keys and values all tokens; from here on
               the pooled tokens are the image
    sparse     ordinary blocks on m x m tokens
    recover    merged = W1 upsampled + W2 (the module's input) are the queries, the sparse tokens keys and values
    dense      ordinary blocks on all tokens

The share of tokens pooled away follows the timestep: its least in the last quarter of denoising, more towards
noise. W1 starts at 0 and W2 at the identity. Everything is known from grid and timestep, so both guidance
halves are reduced alike and all counts are static.

The release is class-conditional and square; there is no official text-to-image version. Here text joins
queries and keys of every block unchanged, grids may be h x w (pooled to the nearest integers), there are no
pooling blocks without queries (they would erase the text), and the objective is the trainer's. With both
rates 0 there are no modules and the model is dense. Flux is refused: a pooled token lies between grid positions,
where its rotary table has no row, and its single blocks fuse attention with the FFN, so that generate and recover
blocks could not spare the keys the FFN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.core.context import NOISE, StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, MethodConfig, Place, RunSite, Trainable
from shiva.core.options import Share, Whole
from shiva.core.reduction import Reduction, Streams

Role = Literal["generate", "sparse", "recover", "dense"]
ROLES: tuple[Role, ...] = ("generate", "sparse", "recover", "dense")


@dataclass(frozen=True)
class SparseDiT(MethodConfig):
    """Pool the image to a coarse grid inside modules of blocks, and recover it at their end."""

    rates: tuple[Share, Share] = (0.61, 0.86)
    """Share of tokens pooled away: least (near the clean image) and most (at pure noise)."""
    split: tuple[Whole, Whole, Whole, Whole] = (1, 3, 1, 1)
    """Generate, sparse, recover and dense blocks of a module; exactly one generates and one recovers."""
    bottom: Whole = 2
    """Dense blocks before the first module."""
    top: Whole = 4
    """Dense blocks, at least, after the last module."""
    modules: Whole | None = None
    """Number of modules; None takes as many as fit."""

    presets: ClassVar = {"paper": {"rates": (0.39, 0.42)}}
    fixed: ClassVar = frozenset({"split", "bottom", "top", "modules"})
    knob: ClassVar = "rates"
    steps_differ: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rates[0] <= self.rates[1] < 1:
            raise ValueError(f"rates={self.rates} must rise and stay below 1; pass (least, most), as (0.61, 0.86)")
        if (self.split[0], self.split[2]) != (1, 1):
            raise ValueError(f"split={self.split} must be (1, sparse, 1, dense); pass (1, 3, 1, 1) as released")

    def turned(self, at: float) -> dict[str, Any]:
        scale = 0.97 * at / max(self.rates)
        return {"rates": [rate * scale for rate in self.rates]}

    def build(self, spec: BackboneSpec) -> SparseDiTMethod:
        return SparseDiTMethod(self, spec)


def pruning_rate(timestep: float, least: float, most: float) -> float:
    """r(t): `least` below T/4, then linear up to `most` at T; `least` too where t is not known."""
    if not timestep > NOISE / 4:
        return least
    return ((4 * NOISE - 4 * timestep) * least + (4 * timestep - NOISE) * most) / (3 * NOISE)


def sparse_grid(grid: tuple[int, int], rate: float) -> tuple[int, int]:
    """Rows and columns of the pooled grid: the nearest integers to each side times sqrt(1 - rate)."""
    side = math.sqrt(1 - rate)
    rows, columns = (max(1, math.floor(length * side + 0.5)) for length in grid)
    return rows, columns


def planes_of(x: Tensor, frames: int, grid: tuple[int, int]) -> Tensor:
    """Tokens (B, f h w, D) as planes (B f, D, h, w)."""
    return x.unflatten(1, (frames, *grid)).flatten(0, 1).permute(0, 3, 1, 2)


def tokens_of(planes: Tensor, frames: int) -> Tensor:
    """The reverse of `planes_of`."""
    return planes.flatten(2).transpose(1, 2).unflatten(0, (-1, frames)).flatten(1, 2)


def pool(x: Tensor, layout: Layout, coarse: tuple[int, int]) -> Tensor:
    """Tokens (B, f h w, D) averaged over the cells of a coarse grid of each frame: (B, f m n, D)."""
    planes = planes_of(x, layout.frames, layout.shape[1:])
    return tokens_of(F.adaptive_avg_pool2d(planes, coarse), layout.frames)


def upsample(x: Tensor, coarse: tuple[int, int], layout: Layout) -> Tensor:
    """Tokens (B, f m n, D) of a coarse grid copied to the nearest of the full one: (B, f h w, D)."""
    planes = planes_of(x, layout.frames, coarse)
    return tokens_of(F.interpolate(planes, size=layout.shape[1:], mode="nearest"), layout.frames)


def cell_centres(layout: Layout, coarse: tuple[int, int], device: torch.device) -> Tensor:
    """The full grid's token (f m n,) nearest to the centre of each coarse cell."""
    frames, *grid = layout.shape
    rows, columns = (
        (torch.arange(few, device=device) * 2 + 1) * many // (2 * few) for many, few in zip(grid, coarse, strict=True)
    )
    cell = rows[:, None] * layout.columns + columns
    return (torch.arange(frames, device=device)[:, None, None] * (layout.rows * layout.columns) + cell).flatten()


class Merge(nn.Module):
    """merged = W1 up + W2 dense; the module's input alone at first."""

    def __init__(self, width: int):
        super().__init__()
        self.sparse = nn.Linear(width, width, bias=False)
        self.dense = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.sparse.weight)
        nn.init.eye_(self.dense.weight)

    def forward(self, up: Tensor, dense: Tensor) -> Tensor:
        dtype = dense.dtype
        return F.linear(up, self.sparse.weight.to(dtype)) + F.linear(dense, self.dense.weight.to(dtype))


@dataclass
class SparseDiTStep:
    coarse: tuple[int, int] = (0, 0)
    """Rows and columns that this step pools to."""
    inputs: dict[int, Tensor] = field(default_factory=dict)  # module -> (B, N, D), its input
    queries: int | None = None
    """Inside a generate or recover block: how many tokens of its sequence are queries."""
    keys: Tensor | None = None  # (B, S, D), the others


class SparseDiTMethod(Trainable):
    """The chain of modules."""

    sites = frozenset({"block", "attention", "keys", "cross_attention", "ffn"})
    requires = frozenset({"keys"})
    guidance = "shared"
    holds = True
    config: SparseDiT
    new_step = SparseDiTStep

    def __init__(self, config: SparseDiT, spec: BackboneSpec):
        super().__init__(config, spec)
        length = sum(config.split)
        room = spec.layers - config.bottom - config.top
        modules = room // length if config.modules is None else config.modules
        if modules < 1 or modules * length > room:
            raise ValueError(
                f"{modules} modules of split={config.split} between bottom={config.bottom} and top={config.top} "
                f"dense blocks do not fit the {spec.layers} layers of {spec.name}; pass fewer of them"
            )
        roles = [role for role, times in zip(ROLES, config.split, strict=True) for _ in range(times)]
        self.roles: dict[int, tuple[Role, int]] = {
            config.bottom + module * length + i: (role, module)
            for module in range(modules)
            for i, role in enumerate(roles)
        }
        self.merges = nn.ModuleList(Merge(spec.width) for _ in range(modules))

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"merge": list(self.merges.parameters())}

    def selects(self, site: Place) -> bool:
        if site.rotary:
            raise ValueError(
                f"SparseDiT is not defined on {self.spec.name}: pooled tokens lie between the positions of its rotary "
                "table, and its single blocks fuse attention and FFN; use SD3, PixArt or DiT"
            )
        return site.kind in self.sites and self.roles.get(site.layer, ("dense", 0))[0] != "dense"

    def begin_step(self, ctx: StepContext) -> None:
        if not ctx.blocks_adjoin:
            raise ValueError(
                "a ControlNet adds to all tokens between blocks, where SparseDiT holds fewer; detach one of them"
            )

    def coarse_grid(self, ctx: StepContext) -> tuple[int, int]:
        """Rows and columns that this step pools to."""
        explored = ctx.explore.ratio if self.training else None
        rate = pruning_rate(ctx.timestep, *self.config.rates) if explored is None else 1 - explored
        return sparse_grid(ctx.layout.shape[1:], rate)

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        ctx.now.coarse = self.coarse_grid(ctx)
        coarse = ctx.layout.frames * math.prod(ctx.now.coarse)
        pooled = {"generate", "sparse"}
        roles = (self.roles.get(layer, ("dense", 0))[0] for layer in range(self.spec.layers))
        return tuple(coarse if role in pooled else ctx.tokens for role in roles)

    # -- blocks --------------------------------------------------------------------------------------

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if site.kind != "block":
            return self.inside(run, x, site, ctx)
        if ctx.now.coarse == ctx.layout.shape[1:]:
            return run(x, None)
        return self.block(run, x, ctx.now.coarse, site, ctx)

    def block(self, run: RunSite, x: Tensor, coarse: tuple[int, int], site: Place, ctx: StepContext) -> Streams:
        """A block of a module on x: all tokens (B, N, D) at its start, the coarse grid's (B, m n, D) from then on."""
        role, module = self.roles[site.layer]
        if role == "generate":
            ctx.now.inputs[module] = x
            return self.across(run, pool(x, ctx.layout, coarse), x, ctx)
        if role == "recover":
            merged = self.merges[module](upsample(x, coarse, ctx.layout), ctx.now.inputs[module])
            return self.across(run, merged, x, ctx)
        centres = cell_centres(ctx.layout, coarse, x.device).expand(x.shape[0], -1)
        return run(x, Reduction(lambda full: full, lambda values, base: values, centres))

    def across(self, run: RunSite, queries: Tensor, keys: Tensor, ctx: StepContext) -> Streams:
        """The block on queries (B, Q, D) that attend to keys (B, S, D), both normed and modulated by the block.

        It is called on both in one sequence; inside, attention and FFN update the queries only, so that
        nothing but norms and residuals is spent on the keys.
        """
        count = queries.shape[1]
        ctx.now.queries = count
        try:
            out = run(torch.cat([queries, keys], dim=1), None)
        finally:
            ctx.now.queries = None
        return out._replace(image=out.image[:, :count], ran=count)

    def inside(self, run: RunSite, x: Tensor, site: Place, ctx: StepContext) -> Streams:
        """An attention, its keys or an FFN inside a block."""
        now: SparseDiTStep = ctx.now
        if now.queries is None:
            return run(x, None)
        if site.kind == "keys":
            assert now.keys is not None
            return run(now.keys, None)
        queries, now.keys = x[:, : now.queries], x[:, now.queries :]
        out = run(queries, None)
        return out._replace(image=F.pad(out.image, (0, 0, 0, x.shape[1] - now.queries)))  # keys get no update
