"""ToMA: Token Merge with Attention for diffusion models (Lu et al., ICML 2025; github.com/WenboLuu/ToMA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place
from shiva.core.options import Count, Positive, Share, Whole
from shiva.core.reduction import Reduction
from shiva.ops.merging import unit


@dataclass(frozen=True)
class ToMA(MethodConfig):
    """Merge tokens by a soft assignment to destinations that cover each tile of the grid best."""

    ratio: Share = 0.5
    """Share of image tokens merged away; in each tile, rounded down to whole tokens."""
    tile: Count = 4
    """Side of a tile in tokens; on a grid it does not divide, the divisor nearest to it."""
    scale: Positive = 1000.0
    """Sharpness of the assignment; large values make it nearly hard."""
    site: Literal["attention", "block", "mixed"] = "mixed"
    """attention, block, or mixed: attention in two-stream blocks and the whole block in single-stream ones (Flux)."""
    skip: Whole = 5
    """Dense blocks at the start of each stack of blocks."""
    every: Count = 3
    """Merge at every n-th step; the others run dense."""
    select_every: Count = 1
    """Steps between new destinations."""
    assign_every: Count = 1
    """Steps between new assignments to the same destinations."""
    select_from: Literal["first", "cond", "mean"] = "first"
    """Sample whose features choose destinations: first, cond (of the conditional half), or mean over the batch."""
    guidance: Literal["shared", "per-sample"] = "shared"
    """Whether all samples have the same destinations; assignments are always each sample's own."""

    presets: ClassVar = {"paper": {"ratio": 0.25, "site": "block", "skip": 1, "every": 1}}

    def turned(self, at: float) -> dict[str, Any]:
        return {"ratio": 0.93 * at}

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


def tiling(layout: Layout, side: int) -> Tiling:
    """Tiles of about side x side tokens, each in one frame."""
    frames, rows, columns = layout.shape
    height, width = (nearest_divisor(length, side) for length in (rows, columns))
    return Tiling(frames * rows // height, height, columns // width, width)


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


StackKey = tuple[str, int]
"""A stack of blocks, and a guidance branch."""


@dataclass
class Carried:
    """Tensors that serve several steps, and the step at which each was made.

    As an object's own, these numbers are nothing that a compiled graph depends on.
    """

    tensors: dict[StackKey, Tensor] = field(default_factory=dict)
    made_at: dict[StackKey, int] = field(default_factory=dict)

    def find(self, key: StackKey, batch: int, make: Callable[[], Tensor]) -> Tensor:
        """What is held under the key for this many samples; made here where there is none."""
        known = self.tensors.get(key)
        if known is None or known.shape[0] != batch:
            known = self.tensors[key] = make()
        return known

    def drop(self, key: StackKey) -> None:
        del self.tensors[key], self.made_at[key]

    def date(self, step: int) -> None:
        """Note the step of what was made since the last time."""
        for key in self.tensors.keys() - self.made_at.keys():
            self.made_at[key] = step


@dataclass
class ToMARun:
    destinations: Carried = field(default_factory=Carried)  # (B or 1, T, d)
    assignments: Carried = field(default_factory=Carried)  # (B, T, d, n)


@dataclass
class ToMAStep:
    merges: bool = False


class ToMAMethod(Method):
    """Destinations and assignment come from the first merged block of a stack and serve the whole stack."""

    sites = frozenset({"block", "attention"})
    config: ToMA
    new_run = ToMARun
    new_step = ToMAStep

    def selects(self, site: Place) -> bool:
        whole = self.config.site == "block" or (self.config.site == "mixed" and site.single_stream)
        return site.index >= self.config.skip and site.kind == ("block" if whole else "attention")

    def removed_per_tile(self, tiles: Tiling) -> int:
        return min(int(self.config.ratio * tiles.size), tiles.size - 1)

    # -- from step to step: what counts steps stays out of the blocks, so that one graph serves many of them -------

    def begin_step(self, ctx: StepContext) -> None:
        """Settle whether this step merges, and drop what is due to be made anew."""
        config, tiles, run = self.config, tiling(ctx.layout, self.config.tile), ctx.run
        removed = self.removed_per_tile(tiles)
        if not removed and int(config.ratio * config.tile**2):
            raise ValueError(
                f"tile={config.tile} cuts a {ctx.layout.rows}x{ctx.layout.columns} grid into tiles of "
                f"{tiles.height}x{tiles.width}, of which ratio={config.ratio} removes nothing; "
                "pass a larger tile, or an image size whose sides in tokens it divides"
            )
        ctx.now.merges = removed > 0 and (ctx.step - ctx.first) % config.every == 0
        for key, made in list(run.destinations.made_at.items()):
            if ctx.step - made >= config.select_every:
                run.destinations.drop(key)
        for key, made in list(run.assignments.made_at.items()):
            chosen = run.destinations.made_at.get(self.destinations_key(*key))
            if chosen is None or chosen > made or ctx.step - made >= config.assign_every:
                run.assignments.drop(key)

    def end_step(self, output: Tensor, ctx: StepContext) -> None:
        ctx.run.destinations.date(ctx.step)
        ctx.run.assignments.date(ctx.step)

    def destinations_key(self, stack: str, branch: int) -> StackKey:
        """A second branch of the same step finds the first's destinations, where they are shared."""
        return stack, 0 if self.guidance == "shared" else branch

    # -- one stack of blocks -------------------------------------------------------------------------

    def match(self, x: Tensor, stack: str, tiles: Tiling, ctx: StepContext) -> None:
        """Destinations and assignment of a stack, from the input x (B, N, D) of its first merged block."""
        batch = x.shape[0]
        with ctx.phase("match"), torch.no_grad():
            tokens = tiles.fold(unit(x.float()))  # (B, T, n, D)
            chosen = ctx.run.destinations.find(
                self.destinations_key(stack, ctx.branch),
                1 if self.guidance == "shared" else batch,
                lambda: self.destinations(tokens, tiles.size - self.removed_per_tile(tiles), ctx),
            )
            ctx.run.assignments.find(
                (stack, ctx.branch), batch, lambda: assign(tokens, chosen.expand(batch, -1, -1), self.config.scale)
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
        if not ctx.now.merges:
            return None
        tiles = tiling(ctx.layout, self.config.tile)
        if site.index == self.config.skip:
            assert ctx.block_input is not None
            self.match(ctx.block_input, site.stack, tiles, ctx)
        assignment = ctx.run.assignments.tensors[site.stack, ctx.branch]
        chosen = ctx.run.destinations.tensors[self.destinations_key(site.stack, ctx.branch)]
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
