"""Fit the probe of Refresh, by regression on a few dense runs of any pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiva.api import attach
from shiva.backbones.base import backbone_of
from shiva.checkpoint import ShivaCheckpoint
from shiva.compat import transformer_of
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Method, Place
from shiva.core.reduction import Reduction
from shiva.evaluate.drawing import draw
from shiva.fitting import Watching, calls
from shiva.methods.refresh import Refresh, RefreshMethod
from shiva.ops.probe import Moves, in_few, look, regress
from shiva.step import NOISE


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
class Probed:
    """A fitted Refresh, and how well its guess is."""

    method: RefreshMethod
    explained: float
    """Share of the variance of log distances, on held-out prompts."""
    alone: float
    """The same of how far the look of a token moved, with nothing fitted but a line."""
    samples: int
    seconds: float

    def checkpoint(self, base_model: str | None = None) -> ShivaCheckpoint:
        return ShivaCheckpoint.of(self.method, base_model=base_model)


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
    return Probed(method, explained, alone, len(fitted.target), time.perf_counter() - start)
