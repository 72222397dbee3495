"""Fit what a method reads from a few dense runs of any pipeline, in minutes; the backbone is not trained.

fitted = shiva.fitting.fit(pipe, prompts, steps=(4,), guidance=3.0)           # Lattice: a map a layer, in closed form
fitted.checkpoint().save_pretrained("shortcut")                               # then shiva.attach(pipe, "shortcut")

`fit_probe` learns which tokens Refresh runs, `fitting.table` how many tokens each step and layer runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiva.api import attach
from shiva.backbones.base import backbone_of
from shiva.checkpoint import ShivaCheckpoint
from shiva.compat import transformer_of
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, RunSite
from shiva.core.reduction import Reduction, Streams
from shiva.evaluate.drawing import draw
from shiva.methods.refresh import Refresh
from shiva.methods.rules import Lattice
from shiva.ops.probe import Moves, in_few, look, regress
from shiva.ops.shortcut_fit import NormalEquations
from shiva.step import NOISE

HELD_OUT = 5
"""Of so many prompts, one judges the fit instead of making it."""
LOW = 0.4
"""Held-out R² below which a layer's skipped tokens are better not trusted to it."""
SUMS_BYTES = 4 * 2**30
"""Memory that the sums of the layers fitted at once may take, unless one is asked for."""

SUBJECTS: tuple[str, ...] = ("a red fox", "an old sailor", "a bowl of ramen", "a steam train", "a portrait of a woman")
SUBJECTS += ("a glass castle", "a mountain lake", "a robot", "a vase of tulips", "a city street", "a sleeping cat")
PLACES = ("at dawn", "in the rain", "on a plain background", "in a forest", "at night under neon light", "by the sea")
MANNERS = ("photograph", "oil painting", "watercolour", "3d render", "pencil drawing", "illustration", "film still")


def everyday_prompts(count: int) -> list[str]:
    """So many different prompts for whoever has none, spread over subjects, places and manners."""
    texts = [", ".join(parts) for parts in itertools.product(SUBJECTS, PLACES, MANNERS)]
    if not 2 <= count <= len(texts):
        raise ValueError(f"{count} prompts are not to be had; pass 2 to {len(texts)}, or a file of prompts")
    return [texts[place * 211 % len(texts)] for place in range(count)]


# -- what is summed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watching(MethodConfig):
    """Dense runs in which some layers' updates are summed."""


class Watcher(Method):
    """Runs all tokens, and adds what the spans from some layers on did with them to these layers' equations."""

    def __init__(
        self, spec: BackboneSpec, layers: Sequence[int], degree: int, stride: int, device: torch.device, span: int = 1
    ):
        super().__init__(Watching(), spec)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.stride, self.held_out, self.span = stride, False, span
        self.waiting: dict[int, Tensor] = {}
        """Of layers whose span has not ended, what they were given."""
        self.fit, self.held = (
            {layer: NormalEquations(spec.width, degree, dtype, device) for layer in layers} for _ in range(2)
        )

    def selects(self, site: Place) -> bool:
        return site.kind == "block"

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        out = run(x, None)
        if site.layer in self.fit:
            self.waiting[site.layer] = x
        if (site.layer + 1) % self.span == 0 or site.layer + 1 == self.spec.layers:
            sums = self.held if self.held_out else self.fit
            for layer, given in self.waiting.items():
                sums[layer].add(given, out.image.float() - given.float(), ctx.timestep / NOISE, self.stride)
            self.waiting.clear()
        return out


def bytes_a_layer(width: int, degree: int) -> int:
    """Of a layer's two sums, in float64."""
    return 2 * 8 * (width + 1) ** 2 * (3 * degree + 2)


# -- the fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explained:
    """Share of the power of what a layer and those after it in its span add that its maps explain; on held-out
    prompts."""

    layer: int
    constant: float
    full: float
    low: float
    """Of the rank that is kept."""


@dataclass(frozen=True)
class Fit:
    """A method that has what it reads, and the time that took."""

    method: Any
    seconds: float

    def checkpoint(self, base_model: str | None = None) -> ShivaCheckpoint:
        return ShivaCheckpoint.of(self.method, base_model=base_model)


@dataclass(frozen=True)
class Fitted(Fit):
    """A fitted Lattice, and how well it is."""

    layers: tuple[Explained, ...]
    tokens: int
    """Of each layer, that were fitted on."""

    @property
    def weak(self) -> list[int]:
        """Layers of which little is explained, of those that begin a span."""
        begun = {span.start for span in self.method.spans.values()}
        return [row.layer for row in self.layers if row.layer in begun and not row.low >= LOW]


def fit(
    pipe: Any,
    prompts: Sequence[str],
    *,
    steps: Sequence[int] = (4,),
    guidance: float = 4.5,
    rank: int = 32,
    degree: int = 1,
    span: int = 1,
    stride: int = 1,
    seed: int = 0,
    batch: int = 4,
    layers_at_once: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    arguments: Mapping[str, Any] | None = None,
) -> Fitted:
    """Run the prompts dense, sum what each block adds, and solve for the best map of a rank.

    Every `HELD_OUT`-th prompt judges. A layer's map tells what it and those after it in its span add. `stride` takes
    only every so manieth token; `layers_at_once` bounds the memory of wide models, at the price of running the prompts
    again for each group of layers.
    """
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompt cannot be both fitted and held out; pass at least 2")
    start, transformer = time.perf_counter(), transformer_of(pipe)
    spec = backbone_of(transformer).spec(transformer)
    with torch.random.fork_rng(devices=[]):
        method = Lattice(rank=rank, degree=degree, span=span).build(spec)
    assert method.shortcut is not None
    size = layers_at_once or max(1, SUMS_BYTES // bytes_a_layer(spec.width, degree))
    groups = [range(first, min(first + size, spec.layers)) for first in range(0, spec.layers, size)]
    device = next(transformer.parameters()).device
    rows: list[Explained] = []
    tokens = 0
    for number, layers in enumerate(groups):
        watcher = Watcher(spec, layers, degree, stride, device, span)
        with attach(pipe, watcher), torch.no_grad():
            for done, (places, held_out, count) in enumerate(calls(len(prompts), steps, batch)):
                progress(f"layers {layers[0]} to {layers[-1]} (group {number + 1} of {len(groups)}): call {done + 1}")
                watcher.held_out = held_out
                called = [prompts[place] for place in places]
                draw(pipe, called, seed, places, count, guidance, output_type="latent", **(arguments or {}))
        for layer in layers:
            progress(f"solving layer {layer}")
            full = watcher.fit[layer].solve()
            low = watcher.fit[layer].reduce_rank(full, method.shortcut.up.shape[1])
            constant = watcher.fit[layer].reduce_rank(full, 0)
            rows.append(Explained(layer, *(watcher.held[layer].r_squared(made) for made in (constant, full, low))))
            method.shortcut.set_layer(layer, low)
        tokens = watcher.fit[layers[0]].tokens
    method.trained = True
    return Fitted(method, time.perf_counter() - start, tuple(rows), tokens)


def calls(prompts: int, steps: Sequence[int], batch: int) -> Iterator[tuple[list[int], bool, int]]:
    """Places of each call's prompts, whether they are held out, and the call's number of steps."""
    held = [place for place in range(prompts) if place % HELD_OUT == HELD_OUT - 1] or [prompts - 1]
    fitted = [place for place in range(prompts) if place not in held]
    for count in steps:
        for places, held_out in ((fitted, False), (held, True)):
            for first in range(0, len(places), batch):
                yield places[first : first + batch], held_out, count


class ProbeWatcher(Method):
    """Runs all tokens, and notes at each call how tokens looked after the first blocks, and what the others added."""

    sites = frozenset({"model"})

    def __init__(self, spec: BackboneSpec, leading: int):
        super().__init__(Watching(), spec)
        self.leading = leading
        self.looks: list[Tensor] = []
        self.totals: list[Tensor] = []
        self.levels: list[float] = []

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        def note(values: Tensor, base: Tensor) -> Tensor:
            if not ctx.branch:
                self.looks.append(look(x))
                self.totals.append(in_few(values - base))
                self.levels.append(ctx.timestep / NOISE)
            return values

        every = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        return Reduction(lambda tokens: tokens, note, every)

    def moves(self, generator: torch.Generator) -> Moves:
        """What the run since the last time tells of tokens that wait."""
        found = Moves.of(self.looks, self.totals, self.levels, generator)
        self.looks, self.totals, self.levels = [], [], []
        return found


@dataclass(frozen=True)
class Probed(Fit):
    """A fitted Refresh, and how well its guess is."""

    explained: float
    """Share of the variance of log distances, on held-out prompts."""
    alone: float
    """The same of how far the look of a token moved, with nothing fitted but a line."""
    samples: int


def fit_probe(
    pipe: Any,
    prompts: Sequence[str],
    *,
    steps: Sequence[int] = (16,),
    guidance: float = 4.5,
    seed: int = 0,
    batch: int = 4,
    updates: int = 2000,
    progress: Callable[[str], None] = lambda text: None,
    arguments: Mapping[str, Any] | None = None,
) -> Probed:
    """Run the prompts dense, and learn how far what a token holds is off after some steps of waiting."""
    if len(prompts) < 2 or min(steps) < 3:
        raise ValueError(f"{len(prompts)} prompts of {min(steps)} steps tell too little; pass at least 2 of 3")
    start, transformer = time.perf_counter(), transformer_of(pipe)
    spec = backbone_of(transformer).spec(transformer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = Refresh(score="probe").build(spec)
    assert method.probe is not None
    watcher, generator = ProbeWatcher(spec, method.leading), torch.Generator().manual_seed(seed)
    found: dict[bool, list[Moves]] = {False: [], True: []}
    with attach(pipe, watcher), torch.no_grad():
        for done, (places, held_out, count) in enumerate(calls(len(prompts), steps, batch)):
            progress(f"dense runs: call {done + 1}")
            called = [prompts[place] for place in places]
            draw(pipe, called, seed, places, count, guidance, output_type="latent", **(arguments or {}))
            found[held_out].append(watcher.moves(generator))
    fitted, held = Moves.join(found[False]), Moves.join(found[True])
    progress(f"regression on {len(fitted.target)} waits")
    explained, alone = regress(method.probe, fitted, held, updates, generator)
    method.trained = True
    return Probed(method, time.perf_counter() - start, explained, alone, len(fitted.target))
