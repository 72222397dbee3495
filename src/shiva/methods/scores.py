"""Which tokens are computed: the second answer of a pruner. Higher scores run."""

from __future__ import annotations

import contextlib
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
from shiva.ops.lattice import GOLDEN, lattice_scores
from shiva.ops.router import RouterBank, Signal, group_size
from shiva.ops.seeds import seeded


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
        behind = (torch.arange(layout.tokens) - start) % layout.tokens
        return -behind.float().expand(layers, -1)

    def turn(self, step: int, layer: int) -> Hashable:
        return step


class Lattice(Score):
    """Evenly over the grid, and each token in its turn over layers and steps: a Bayer order, turned."""

    drawn = True

    def draw(self, layout: Layout, step: int, layers: int) -> Tensor:
        return torch.stack([lattice_scores(layout.shape, step, layer) for layer in range(layers)])

    def turn(self, step: int, layer: int) -> Hashable:
        return step + layer


class Random(Score):
    drawn = True

    def __init__(self, seed: int = 0):
        self.seed = seed

    def draw(self, layout: Layout, step: int, layers: int) -> Tensor:
        return torch.rand(layers, layout.tokens, generator=seeded(self.seed, step))


class Norm(Score):
    """Length of the token's features."""

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        return x.float().norm(dim=-1)


class Update(Score):
    """Length of the token's last update, which a cached fill keeps."""

    def __call__(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        run: FillRun = ctx.run
        return run.updates[key_of(site, ctx)].float().norm(dim=-1)


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
            self.bottleneck,
            self.signals,
            self.signal_length == "unit",
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
