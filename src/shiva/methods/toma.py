"""ToMA: Token Merge with Attention for diffusion models (Lu et al., ICML 2025; github.com/WenboLuu/ToMA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Method, MethodConfig, Place
from shiva.core.reduction import Reduction
from shiva.modules.merging import unit


@dataclass(frozen=True)
class ToMA(MethodConfig):
    """Merge tokens by a soft assignment to destinations that cover each tile of the grid best."""

    ratio: float = 0.5
    """Share of image tokens merged away; in each tile, rounded down to whole tokens."""
    tile: int = 4
    """Side of a tile in tokens; on a grid it does not divide, the divisor nearest to it."""
    scale: float = 1000.0
    """Sharpness of the assignment; large values make it nearly hard."""
    site: str = "mixed"
    """attention, block, or mixed: attention in two-stream blocks and the whole block in single-stream ones (Flux)."""
    skip: int = 5
    """Dense blocks at the start of each stack of blocks."""
    every: int = 3
    """Merge at every n-th step; the others run dense."""
    select_every: int = 1
    """Steps between new destinations."""
    assign_every: int = 1
    """Steps between new assignments to the same destinations."""
    select_from: str = "first"
    """Sample whose features choose destinations: first, cond (of the conditional half), or mean over the batch."""
    guidance: GuidancePolicy = "shared"
    """Whether all samples have the same destinations; assignments are always each sample's own."""

    presets: ClassVar = {"paper": {"ratio": 0.25, "site": "block", "skip": 1, "every": 1}}

    def __post_init__(self) -> None:
        options.share("ratio", self.ratio, zero=True)
        for name in ("tile", "every", "select_every", "assign_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be above 0")
        if self.skip < 0:
            raise ValueError(f"skip={self.skip} must be at least 0")
        options.choice("site", self.site, ("attention", "block", "mixed"))
        options.choice("select_from", self.select_from, ("first", "cond", "mean"))
        options.choice("guidance", self.guidance, ("shared", "per-sample"))

    def build(self, spec: BackboneSpec) -> ToMAMethod:
        return ToMAMethod(self, spec)


# -- tiles -------------------------------------------------------------------------------------------


class Tiling(NamedTuple):
    """A grid cut into equal tiles."""

    down: int
    height: int
    across: int
    width: int

    @property
    def size(self) -> int:
        return self.height * self.width

    def fold(self, x: Tensor) -> Tensor:
        """(B, N, D) in grid order to (B, tiles, tokens of a tile, D)."""
        cut = x.view(x.shape[0], self.down, self.height, self.across, self.width, x.shape[-1])
        return cut.transpose(2, 3).reshape(x.shape[0], self.down * self.across, self.size, x.shape[-1])

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of `fold`."""
        cut = x.view(x.shape[0], self.down, self.across, self.height, self.width, x.shape[-1])
        return cut.transpose(2, 3).reshape(x.shape[0], -1, x.shape[-1])


def tiling(grid: tuple[int, int], side: int) -> Tiling:
    """Tiles of about side x side tokens."""
    height, width = (nearest_divisor(length, side) for length in grid)
    return Tiling(grid[0] // height, height, grid[1] // width, width)


def nearest_divisor(length: int, side: int) -> int:
    divisors = [d for d in range(1, length + 1) if length % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / side)))


# -- destinations and assignment ---------------------------------------------------------------------


def facility_location(similarity: Tensor, count: int) -> Tensor:
    """Greedy choice of `count` tokens per tile that cover all its tokens best: (..., n, n) -> (..., count).

    Coverage of token j is its highest similarity to a chosen token; each round takes the largest gain.
    """
    gain, coverage = similarity.sum(dim=-1), torch.full_like(similarity[..., 0, :], -torch.inf)
    chosen: list[Tensor] = []
    for _ in range(count):
        taken = gain.argmax(dim=-1, keepdim=True)  # (..., 1)
        chosen.append(taken)
        row = similarity.gather(-2, taken[..., None].expand_as(similarity[..., :1, :]))[..., 0, :]
        coverage = torch.maximum(coverage, row)
        gain = (similarity - coverage[..., None, :]).relu().sum(dim=-1)
        gain = gain.scatter(-1, torch.cat(chosen, dim=-1), -torch.inf)
    return torch.cat(chosen, dim=-1)


def assign(tokens: Tensor, destinations: Tensor, scale: float) -> Tensor:
    """How much of each token goes to each destination: unit tokens (B, T, n, D), (B, T, d) -> A (B, T, d, n)."""
    index = destinations[..., None].expand(*destinations.shape, tokens.shape[-1])
    return (scale * (tokens.gather(2, index) @ tokens.transpose(-1, -2))).softmax(dim=2)


def merge(x: Tensor, assignment: Tensor, tiles: Tiling) -> Tensor:
    """Weighted means (B, T * d, D) of tokens x (B, N, D)."""
    means = (assignment / assignment.sum(dim=-1, keepdim=True)).to(x.dtype)
    return (means @ tiles.fold(x)).flatten(1, 2)


def unmerge(values: Tensor, assignment: Tensor, tiles: Tiling) -> Tensor:
    """Each token's convex mix (B, N, D) of destinations' values (B, T * d, D)."""
    split = values.view(*assignment.shape[:3], values.shape[-1])
    return tiles.unfold(assignment.transpose(-1, -2).to(values.dtype) @ split)


Key = tuple[str, str, int]
"""What a run carries: destinations or assignment, of a stack of blocks, of a guidance branch."""


@dataclass
class Made:
    """At which step a run made what it carries. As an object's own, these numbers are nothing a graph depends on."""

    at: dict[Key, int] = field(default_factory=dict)


class ToMAMethod(Method):
    """Destinations and assignment come from the first merged block of a stack and serve the whole stack."""

    config: ToMA

    def __init__(self, config: ToMA, spec: BackboneSpec):
        super().__init__(config, spec)
        self.guidance = config.guidance

    def selects(self, site: Place) -> bool:
        stack, index = stack_of(site)
        whole = self.config.site == "block" or (self.config.site == "mixed" and stack.startswith("single"))
        return index >= self.config.skip and site.kind == ("block" if whole else "attention")

    def removed_per_tile(self, tiles: Tiling) -> int:
        return min(int(self.config.ratio * tiles.size), tiles.size - 1)

    # -- from step to step: what counts steps stays out of the blocks, so that one graph serves many of them -------

    def begin_step(self, ctx: StepContext) -> None:
        """Settle whether this step merges, and drop what is due to be made anew."""
        config, tiles = self.config, tiling(ctx.grid, self.config.tile)
        removed = self.removed_per_tile(tiles)
        if not removed and int(config.ratio * config.tile**2):
            raise ValueError(
                f"tile={config.tile} cuts a {ctx.grid[0]}x{ctx.grid[1]} grid into tiles of "
                f"{tiles.height}x{tiles.width}, of which ratio={config.ratio} removes nothing; "
                "pass a larger tile, or an image size whose sides in tokens it divides"
            )
        ctx.memory["merges"] = removed > 0 and ctx.step % config.every == 0
        made: dict[Key, int] = ctx.run.setdefault("made", Made()).at
        for kind in ("destinations", "assignment"):
            for key in [key for key in made if key[0] == kind and self.due(key, made, ctx.step)]:
                del made[key], ctx.run[key]

    def due(self, key: Key, made: dict[Key, int], step: int) -> bool:
        """Whether something made at an earlier step is too old, or an assignment to destinations that are gone."""
        kind, stack, branch = key
        if kind == "destinations":
            return step - made[key] >= self.config.select_every
        chosen = made.get(self.destinations_key(stack, branch))
        return chosen is None or chosen > made[key] or step - made[key] >= self.config.assign_every

    def end_step(self, output: Tensor, ctx: StepContext) -> None:
        made: dict[Key, int] = ctx.run["made"].at
        for key in ctx.run.keys() - made.keys() - {"made"}:
            made[key] = ctx.step

    def destinations_key(self, stack: str, branch: int) -> Key:
        """A second branch of the same step finds the first's destinations, where they are shared."""
        return "destinations", stack, 0 if self.guidance == "shared" else branch

    # -- one stack of blocks -------------------------------------------------------------------------

    def observe(self, x: Tensor, site: Place, ctx: StepContext) -> None:
        stack, index = stack_of(site)
        if index != self.config.skip or not ctx.memory["merges"]:
            return
        batch, tiles = x.shape[0], tiling(ctx.grid, self.config.tile)
        with ctx.phase("match"):
            tokens = tiles.fold(unit(x.float()))  # (B, T, n, D)
            chosen = carried(
                self.destinations_key(stack, ctx.branch),
                1 if self.guidance == "shared" else batch,
                lambda: self.destinations(tokens, tiles.size - self.removed_per_tile(tiles), ctx),
                ctx,
            )
            carried(
                ("assignment", stack, ctx.branch),
                batch,
                lambda: assign(tokens, chosen.expand(batch, -1, -1), self.config.scale),
                ctx,
            )

    def destinations(self, tokens: Tensor, count: int, ctx: StepContext) -> Tensor:
        """Chosen tokens of each tile: (1, T, d) for the whole batch, or (B, T, d)."""
        if self.guidance == "shared":
            if self.config.select_from == "mean":
                tokens = unit(tokens.mean(dim=0, keepdim=True))
            else:
                conditional = self.config.select_from == "cond" and ctx.guidance_pairs
                tokens = (tokens.chunk(2)[ctx.conditional_half] if conditional else tokens)[:1]
        return facility_location(tokens @ tokens.transpose(-1, -2), count)

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        if not ctx.memory["merges"]:
            return None
        stack, _ = stack_of(site)
        tiles = tiling(ctx.grid, self.config.tile)
        assignment = ctx.run["assignment", stack, ctx.branch]
        chosen = ctx.run[self.destinations_key(stack, ctx.branch)]
        places = tiles.fold(torch.arange(ctx.tokens, device=x.device).view(1, -1, 1))[..., 0]  # (1, T, n)
        positions = places.expand(chosen.shape[0], -1, -1).gather(2, chosen).flatten(1)

        def restore(values: Tensor, base: Tensor) -> Tensor:
            """Around a whole block, the block's update is unmerged and added to the untouched tokens."""
            if site.kind != "block":
                return unmerge(values, assignment, tiles)
            return base + unmerge(values - merge(base, assignment, tiles), assignment, tiles)

        return Reduction(
            reduce=lambda x: merge(x, assignment, tiles),
            restore=restore,
            positions=positions.expand(x.shape[0], -1),
        )


def carried(key: Key, batch: int, make: Callable[[], Tensor], ctx: StepContext) -> Tensor:
    """What the run holds under key for this many samples; made here where it holds none."""
    known: Tensor | None = ctx.run.get(key)
    if known is None or known.shape[0] != batch:
        known = ctx.run[key] = make()
    return known


def stack_of(site: Place) -> tuple[str, int]:
    """The list of blocks a site is in, and its block's place there."""
    stack, index = site.name.split(".")[:2]
    return stack, int(index)
