"""Which tokens are computed: the second answer of a pruner. Higher scores run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, MethodConfig, Place
from shiva.core.options import Size
from shiva.methods.fills import Fill, FillRun, key_of
from shiva.ops import seeded
from shiva.ops.networks import RouterBank, Signal, group_size
from shiva.ops.shortcut import Shape


def full_precision(device: torch.device, training: bool) -> contextlib.AbstractContextManager[object]:
    """Training under autocast still scores and counts in float32: an order needs the digits."""
    return torch.autocast(device.type, enabled=False) if training else contextlib.nullcontext()


@dataclass
class ScoreRun:
    """What scoring carries from step to step."""

    reference: Tensor | None = None  # (B, N, C), the picture that is edited, as latents
    departure: Tensor | None = None  # (B, N), how far the picture was from it at the last step


@dataclass
class ScoreStep:
    """What scoring keeps for the sites of one step."""

    drawn: Tensor | None = None  # (L, N), scores that look at no token
    settled: list[Tensor] | None = None  # of each layer (B, k), the tokens that such scores alone choose
    contexts: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """Of each guidance branch, each router's context."""
    cover: Tensor | None = None  # (L, N), the lattice that a bonus for cover follows


class Score:
    """How tokens are ranked."""

    drawn: ClassVar[bool] = False
    """Whether it looks at no token, so that it is settled before a step starts."""
    observes: ClassVar[bool] = False
    """Whether it looks at what the transformer is given and predicts."""

    def observe(self, prediction: Tensor, ctx: StepContext) -> None:
        """See the model's prediction at the end of a step."""

    def draw(self, layout: Layout, step: int, layers: int) -> Tensor:
        """Scores (L, N) of every layer at a step, where they are drawn."""
        raise NotImplementedError

    def turn(self, step: int, layer: int) -> Hashable:
        """What those of a layer at a step depend on."""
        return step, layer

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D)."""
        now: ScoreStep = ctx.now
        if now.drawn is None:  # a subclass may ask, where the tokens are settled without
            now.drawn = self.draw(ctx.layout, ctx.step, len(ctx.counts))
        return now.drawn[site.layer].expand(x.shape[0], -1)


class Band(Score):
    """A band of rows, frame by frame, that moves at every step by the golden ratio of the image.

    At multiples of it bands of any width overlap least.
    """

    drawn = True

    def draw(self, layout: Layout, step: int, layers: int) -> Tensor:
        start = round(GOLDEN * step * layout.tokens)
        behind = (torch.arange(layout.tokens, device="cpu") - start) % layout.tokens
        return -behind.float().expand(layers, -1)

    def turn(self, step: int, layer: int) -> Hashable:
        return step


class Lattice(Score):
    """Evenly over the grid, and each token in its turn over spans of layers and steps: a Bayer order, turned."""

    drawn = True

    def __init__(self, span: int = 1):
        self.span = span

    def draw(self, layout: Layout, step: int, layers: int) -> Tensor:
        spans = range(-(-layers // self.span))
        drawn = torch.stack([lattice_scores(layout.shape, step, span) for span in spans])
        return drawn.repeat_interleave(self.span, dim=0)[:layers]

    def turn(self, step: int, layer: int) -> Hashable:
        return step + layer // self.span


class Random(Score):
    drawn = True

    def __init__(self, seed: int = 0):
        self.seed = seed

    def draw(self, layout: Layout, step: int, layers: int) -> Tensor:
        return torch.rand(layers, layout.tokens, generator=seeded(self.seed, step), device="cpu")


class Norm(Score):
    """Length of the token's features."""

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        return x.float().norm(dim=-1)


class Update(Score):
    """Length of the token's last update, which a cached fill keeps."""

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        run: FillRun = ctx.run
        known = run.updates.get(key_of(site, ctx))
        if known is None:
            raise ValueError(
                f"layer {site.layer} ranks tokens by their last updates, and none are kept; pass fill='cached' and "
                "cache_layers=None, and run 4 steps or more where fill='auto'"
            )
        return known.float().norm(dim=-1)


class Departure(Score):
    """How far a token of the picture, as the last step foresaw it, is from the reference that is edited.

    With cached updates the steps are then spent on what the prompt changes, as in RegionE and SpotEdit. The foreseen
    picture is that of flow matching, latents - sigma * prediction.
    """

    observes = True

    def observe(self, prediction: Tensor, ctx: StepContext) -> None:
        run: ScoreRun = ctx.run
        latents, layout = ctx.latents, ctx.layout
        assert latents is not None
        assert ctx.sigma is not None
        if layout.reference:
            run.reference = reference_picture(latents, layout)
        if run.reference is None:
            raise ValueError(
                "score='departure' compares the picture with a reference, and this call has none; draw with an "
                "editing pipeline (Kontext, FLUX.2 or Qwen-Image with image=...), or pass another score"
            )
        if ctx.branch:
            return
        own = slice(layout.before, layout.before + layout.tokens)
        made = prediction[:, own] if prediction.shape[1] > layout.tokens else prediction
        foreseen = latents[:, own].float() - ctx.sigma * made.float()
        run.departure = (foreseen - run.reference.float()).norm(dim=-1).detach()

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        run: ScoreRun = ctx.run
        return x.new_zeros(x.shape[:2]).float() if run.departure is None else run.departure


def reference_picture(latents: Tensor, layout: Layout) -> Tensor:
    """The first reference (B, N, C) among packed latents (B, N + R, C), which must be as large as the image."""
    if latents.ndim != 3 or max(layout.before, layout.after) % layout.tokens:
        raise ValueError(
            f"score='departure' needs a reference of the image's own {layout.tokens} tokens, and the call has "
            f"{layout.reference} beside them; draw at the size of the reference"
        )
    start = 0 if layout.before else layout.tokens
    return latents[:, start : start + layout.tokens]


@dataclass(frozen=True)
class RouterOptions(MethodConfig):
    """Options of a trained router; they shape its weights."""

    sharing: str = "pairwise"
    """Which layers share a router: pairwise, global, independent, or groups-n."""
    bottleneck: Size = 64
    """Width of the router."""
    signals: tuple[Signal, ...] = ("time", "prompt", "layer")
    """Context the router reads beside the token itself: time, prompt, layer, and, where updates are reused, age."""
    signal_length: Literal["unit", "own"] = "unit"
    """Length that time, prompt and layer are brought to: unit, or own, as in the paper, which drowns the tokens."""

    fixed: ClassVar = frozenset({"sharing", "bottleneck", "signals", "signal_length"})

    def __post_init__(self) -> None:
        super().__post_init__()
        group_size(self.sharing, 1)

    def make_routers(self, spec: BackboneSpec) -> RouterBank:
        return RouterBank(
            spec.width,
            spec.time_width,
            spec.prompt_width,
            spec.layers,
            self.sharing,
            bottleneck=self.bottleneck,
            signals=self.signals,
            unit=self.signal_length == "unit",
        )


class Router(Score):
    """A trained router; the weights belong to the method, which trains and saves them."""

    def __init__(self, routers: RouterBank, fill: Fill | None):
        self.routers = routers
        self.fill = fill
        """Knows how long tokens have waited, for routers that read it."""

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        now: ScoreStep = ctx.now
        age = None if self.fill is None else self.fill.age_of(x, site, ctx)
        known = now.contexts.setdefault(ctx.branch, {})
        return self.routers(x, ctx.time_embedding, ctx.prompt, site.layer, known, age)


# -- evenly over the grid, and each in its turn --------------------------------------------------------
#
# Ordered dither (Bayer, 1973) numbers a grid so that the first k numbers, for every k, lie evenly. Turned by the
# golden ratio from layer to layer, no token waits long.

GOLDEN = (math.sqrt(5) - 1) / 2


@functools.lru_cache(maxsize=64)
def lattice_ranks(shape: Shape) -> Tensor:
    """Place of every token in the Bayer order of the grid: (N,), a permutation of 0 to N - 1.

    A token's lowest coordinate bits are its rank's highest digits: which corner of the 2x2x2 cell it is, then which
    corner of the 4x4x4 cell, and so on. Corners go by parity first, so that the first half is a checkerboard; in a
    single frame this is Bayer's matrix. Other sizes than powers of two are cut out of the next larger one.
    """
    axes = (torch.arange(length, device="cpu") for length in shape)
    frame, row, column = torch.meshgrid(*axes, indexing="ij")
    order = torch.zeros(shape, dtype=torch.long, device="cpu")
    for level in range((max(shape) - 1).bit_length()):
        f, r, c = ((place >> level) & 1 for place in (frame, row, column))
        order = order * 8 + 4 * (f ^ r ^ c) + 2 * (f ^ r) + f
    return order.flatten().argsort().argsort()


def turned(ranks: Tensor, turns: float) -> Tensor:
    """Scores (N,) in (0, 1] of ranks (N,) that are moved on by a number of turns; the lowest rank scores highest."""
    tokens = ranks.numel()
    moved = (ranks + round(turns % 1 * tokens)) % tokens
    return 1 - moved.float() / tokens


def lattice_scores(shape: Shape, step: int, layer: int) -> Tensor:
    """Scores (N,) of the grid's tokens at a layer of a step, all different; the higher is computed first.

    The ranks are turned by the golden ratio, not the pattern moved over the grid: turned, a token waits at most 4, 2
    and 2 layers at a keep of .25, .4 and .6 whatever their number (moved by whole tokens, up to 24, 16 and 8 on odd
    grids, as which corner of its cell a token is hardly changes). Any run of Bayer ranks covers as evenly as the
    first ones: at those keeps no token of a grid of even sides is farther than 1.4, 1.4 and 1 from a computed one.

    A step counts as much as a layer, so that one layer waits no longer over the steps than a step over the layers.
    Make the scores before a step begins: a compiler would make a graph for every step and layer.
    """
    return turned(lattice_ranks(shape), GOLDEN * (layer + step))


def with_bonus(scores: Tensor, bonus: Tensor, weight: float) -> Tensor:
    """Scores (B, N), brought to unit deviation, plus so many deviations of a bonus."""
    spread = scores.std(dim=-1, keepdim=True).clamp(min=1e-6)
    return (scores - scores.mean(dim=-1, keepdim=True)) / spread + weight * bonus


def cell_leaders(scores: Tensor, layout: Layout) -> Tensor:
    """The best token (B, C) of each 2x2 cell, by scores (B, N)."""
    members = layout.windows(device=scores.device).members
    best = scores[:, members].argmax(dim=2, keepdim=True)
    return members.expand(scores.shape[0], -1, -1).gather(2, best).squeeze(2)
