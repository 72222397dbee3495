"""What a global batch is drawn from: stratified timesteps and ratios, noise, and how each departs from inference.

Everything is a pure function of (seed, step), so any number of ranks and accumulation steps draws the same
global batch, and a resumed run needs no generator's state.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shiva.core.context import Exploration
from shiva.training.family import Text
from shiva.training.noise import FlowMatching, NoiseProcess
from shiva.training.recipe import Recipe
from shiva.training.sections import Stage, Temperatures


def seed_of(*key: int | str) -> int:
    """A 63-bit seed from any key; neighbouring keys give unrelated seeds."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(*key: int | str) -> torch.Generator:
    """A CPU generator for a key: the same numbers on every device."""
    return torch.Generator().manual_seed(seed_of(*key))


def strata(seed: int, step: int, count: int) -> list[float]:
    """One quantile from each of `count` equal intervals of [0, 1), in a random order: one per micro-batch."""
    generator = generator_of(seed, "timesteps", step)
    within = torch.rand(count, generator=generator, dtype=torch.float64)
    place = torch.randperm(count, generator=generator)
    return ((place + within) / count).tolist()


def stratified_ratios(seed: int, step: int, count: int, low: float, high: float, groups: int) -> list[float]:
    """A keep ratio for each micro-batch: `groups` ratios from disjoint intervals, dealt out evenly.

    With fewer micro-batches than groups, consecutive steps take turns at the groups.
    """
    generator = generator_of(seed, "ratios", step)
    within = torch.rand(groups, generator=generator, dtype=torch.float64)
    place = torch.randperm(count, generator=generator)
    group = (place + step * count) % groups
    return (low + (high - low) * (group + within[group]) / groups).tolist()


# -- one global batch --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Where a run is: the stage, and how many of its steps were taken."""

    stage: Stage
    step: int

    @property
    def last(self) -> bool:
        """Whether the stage ends with this step."""
        return self.step + 1 == self.stage.steps


def moment(stages: Sequence[Stage], step: int) -> Moment | None:
    """The stage that the global step falls in; None when all are done."""
    for stage in stages:
        if step < stage.steps:
            return Moment(stage, step)
        step -= stage.steps
    return None


@dataclass(frozen=True)
class Before:
    """A moment of the same sampling run, some sampler steps earlier."""

    timestep: float
    steps: float


@dataclass(frozen=True)
class MicroBatch:
    """All that one forward pass needs; its samples share a timestep."""

    latents: Tensor  # (B, C, h, w), clean
    noise: Tensor  # (B, C, h, w)
    text: Text
    timestep: float
    seed: int
    """Of whatever the method draws for itself."""
    exploration: Exploration
    before: Before | None = None
    """Where the noisier pass lies that stands in for a cache."""
    rolls_out: bool = False
    """Whether it is to stand where the reduced model's own run brings it."""
    reached: Tensor | None = None
    """Where that is (B, C, h, w); without it the clean latents and the noise are mixed."""
    aim: Tensor | None = None
    """The prediction (B, C, h, w) that leads from there back to the dense run, where that is the target."""

    def to(self, device: torch.device) -> MicroBatch:
        text = {name: value.to(device) for name, value in self.text.items()}
        return dataclasses.replace(self, latents=self.latents.to(device), noise=self.noise.to(device), text=text)

    def earlier(self) -> MicroBatch:
        """The same latents and noise, mixed at the noisier timestep: earlier on the same straight path."""
        assert self.before is not None
        return dataclasses.replace(self, timestep=self.before.timestep, before=None, reached=None, aim=None)

    def with_empty(self, dropped: Tensor, empty: Text) -> MicroBatch:
        """The same with the empty prompt where `dropped` (B) says."""
        text = {}
        for name, value in self.text.items():
            mask = dropped.view(-1, *[1] * (value.ndim - 1))
            text[name] = torch.where(mask, empty[name].to(value), value)
        return dataclasses.replace(self, text=text)


@dataclass(frozen=True)
class Draw:
    """What chance gives one micro-batch before its data is read."""

    timestep: float
    exploration: Exploration
    before: Before | None
    noise_key: tuple[int | str, ...]
    seed: int
    rolls_out: bool = False

    def micro_batch(
        self, latents: Tensor, text: Text, empty: Text, dropout: float, device: torch.device
    ) -> MicroBatch:
        """Noise for latents (B, C, h, w), and a share `dropout` of the captions replaced by the empty one."""
        generator = generator_of(*self.noise_key)
        noise = torch.randn(latents.shape, generator=generator)
        dropped = torch.rand(len(latents), generator=generator) < dropout
        how = (self.timestep, self.seed, self.exploration, self.before, self.rolls_out)
        return MicroBatch(latents, noise, text, *how).to(device).with_empty(dropped.to(device), empty)


def draw_batch(
    recipe: Recipe, process: NoiseProcess, now: Moment, step: int, tokens: Sequence[int], earlier: bool
) -> list[Draw]:
    """The draws of a step's micro-batches, whose samples have so many image tokens; `earlier` draws a `Before` too."""
    seed, sampling, reuse, count = recipe.seed, recipe.sampling, recipe.reuse, len(tokens)
    ratios: list[float | None] = [None] * count
    if now.stage.ratios == "stratified":
        low, high, groups = sampling.ratio_min, sampling.ratio_max, sampling.ratio_groups
        ratios = [*stratified_ratios(seed, step, count, low, high, groups)]
    draws = []
    for index, quantile in enumerate(strata(seed, step, count)):
        timestep, before = process.timestep(quantile, tokens[index]), None
        if earlier:
            ago = int(torch.randint(1, reuse.oldest + 1, (), generator=generator_of(seed, "age", step, index)))
            before = Before(process.earlier(timestep, ago / reuse.steps, tokens[index]), float(ago))
        ratio = 1.0 if isinstance(process, FlowMatching) and process.sees_all(timestep) else ratios[index]
        explore = exploration(now, recipe.temperatures, step, step / max(1, recipe.steps - 1), index, ratio)
        drawn = seed_of(seed, "method", step, index)
        rolls_out = float(torch.rand((), generator=generator_of(seed, "rollout", step, index))) < sampling.rollout
        draws.append(Draw(timestep, explore, before, (seed, "noise", step, index), drawn, rolls_out))
    return draws


def exploration(
    now: Moment, temperatures: Temperatures, step: int, progress: float, index: int, ratio: float | None
) -> Exploration:
    """What a method is told about one micro-batch."""
    tau_rank, tau_sel = temperatures.at(progress)
    noises = {"logit_noise": now.stage.logit_noise, "score_noise": now.stage.score_noise}
    return Exploration(ratio=ratio, tau_rank=tau_rank, tau_sel=tau_sel, step=step, index=index, **noises)
