"""What a global batch is drawn from: stratified timesteps and ratios, and how noise is mixed in at a timestep.

Everything is a pure function of (seed, step), so any number of ranks and accumulation steps draws the same
global batch, and a resumed run needs no generator's state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiva.core.context import Exploration
from shiva.training.family import Text
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


@dataclass(frozen=True)
class FlowMatching:
    """x = (1 - sigma) * clean + sigma * noise, the model predicts noise - clean (SD3, Flux, Wan)."""

    density: str = "uniform"
    shift: float = 1.0
    dynamic: tuple[float, float, int, int] | None = None
    """Base shift, maximal shift and the token counts they belong to, where the shift depends on the size."""
    steps: int = 1000
    least: float = 1e-3  # noise level; at 0 there is nothing to predict
    levels: tuple[float, ...] = ()
    """With density "run": the noise levels at which the run's steps begin."""
    dense_steps: tuple[int, ...] = ()
    """Steps of that run that see all tokens."""
    followed: tuple[float, ...] = ()
    """The noise levels at which the steps of a dense run begin that rollouts are led back to."""

    def timestep(self, quantile: float, tokens: int) -> float:
        """The timestep, 0 (image) to 1000 (noise), at a quantile of the training density."""
        sigma = quantile
        if self.density == "run":
            sigma = self.levels[-1 - int(quantile * len(self.levels))]
        elif self.density == "logit-normal":
            sigma = float(torch.sigmoid(torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64))))
        elif self.density == "scheduler":
            sigma = self._shifted(quantile, tokens)
        return max(sigma, self.least) * self.steps

    def earlier(self, timestep: float, share: float, tokens: int) -> float:
        """The noisier timestep at which a sampler was this share of its run before."""
        shift, sigma = self._shift(tokens), timestep / self.steps
        quantile = sigma / (shift - (shift - 1) * sigma)
        return self._shifted(min(quantile + share, 1.0), tokens) * self.steps

    def _shifted(self, quantile: float, tokens: int) -> float:
        """The noise level that a sampler of evenly spaced steps has at a quantile of its run, counted from the end."""
        shift = self._shift(tokens)
        return shift * quantile / (1 + (shift - 1) * quantile)

    def _shift(self, tokens: int) -> float:
        if self.dynamic is None:
            return self.shift
        low, high, few, many = self.dynamic
        return math.exp(low + (high - low) * (tokens - few) / (many - few))

    def way_to(self, timestep: float) -> list[tuple[float, float]]:
        """The steps, as pairs of timesteps, by which the run comes from noise to a timestep of its own."""
        passed = [level * self.steps for level in self.levels if level * self.steps >= timestep]
        return list(itertools.pairwise(passed))

    def after(self, timestep: float) -> float:
        """The timestep that the run's step from one of its own leads to."""
        return max((level * self.steps for level in self.levels if level * self.steps < timestep), default=0.0)

    def way_along(self, timestep: float) -> list[tuple[float, float]]:
        """The steps, as pairs of timesteps, by which the dense run comes from noise to a timestep."""
        passed = [level * self.steps for level in self.followed if level * self.steps > timestep]
        return list(itertools.pairwise([*passed, timestep]))

    def sees_all(self, timestep: float) -> bool:
        """Whether the run's step at a timestep is one that sees all tokens."""
        return any(
            level * self.steps == timestep for step, level in enumerate(self.levels) if step in self.dense_steps
        )

    def advance(self, noisy: Tensor, prediction: Tensor, now: float, following: float) -> Tensor:
        """Where a step from one timestep to the next brings a sample."""
        return noisy + (following - now) / self.steps * prediction

    def mix(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """The noisy sample."""
        sigma = timestep / self.steps
        return (1 - sigma) * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """What the model should predict."""
        return noise - clean


@dataclass(frozen=True)
class VariancePreserving:
    """x = sqrt(a) * clean + sqrt(1 - a) * noise over whole timesteps (PixArt, DiT); predicts epsilon or v."""

    alphas: Sequence[float]
    """Cumulative products, by timestep."""
    prediction: str = "epsilon"

    def timestep(self, quantile: float, tokens: int) -> float:
        return float(min(int(quantile * len(self.alphas)), len(self.alphas) - 1))

    def earlier(self, timestep: float, share: float, tokens: int) -> float:
        return float(min(round(timestep + share * len(self.alphas)), len(self.alphas) - 1))

    def _parts(self, timestep: float) -> tuple[float, float]:
        alpha = self.alphas[int(timestep)]
        return math.sqrt(alpha), math.sqrt(1 - alpha)

    def mix(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        signal, sigma = self._parts(timestep)
        return signal * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        signal, sigma = self._parts(timestep)
        return signal * noise - sigma * clean


NoiseProcess = FlowMatching | VariancePreserving
"""How a pipeline's scheduler relates a timestep to the noise in a sample, and what the model predicts."""


def noise_process(
    scheduler: Any,
    density: str,
    levels: Sequence[float] = (),
    dense_steps: Sequence[int] = (),
    followed: Sequence[float] = (),
) -> NoiseProcess:
    """That of a pipeline's scheduler, or an error naming what it lacks; at the `levels` of a run, if given."""
    config = scheduler.config
    if type(scheduler).__name__.startswith("FlowMatch"):
        dynamic = None
        if config.get("use_dynamic_shifting"):
            dynamic = (config.base_shift, config.max_shift, config.base_image_seq_len, config.max_image_seq_len)
        steps = config.num_train_timesteps
        shift, run = float(config.shift or 1.0), (tuple(levels), tuple(dense_steps), tuple(followed))
        return FlowMatching(density, shift, dynamic, steps, 1e-3, *run)
    if levels:
        raise ValueError(
            f"sampling.density=run follows the noise levels of a FlowMatch scheduler, and this is a "
            f"{type(scheduler).__name__}; use another density"
        )
    prediction = config.get("prediction_type", "epsilon")
    if prediction == "flow_prediction":
        return FlowMatching(density, float(config.flow_shift or 1.0), None, config.num_train_timesteps)
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or prediction not in ("epsilon", "v_prediction"):
        raise ValueError(
            f"{type(scheduler).__name__} with prediction_type={prediction!r} is not known to training; load the "
            "pipeline with a FlowMatch scheduler, or one that predicts epsilon or v"
        )
    return VariancePreserving(tuple(alphas.double().tolist()), prediction)


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
        return dataclasses.replace(self, timestep=self.before.timestep, before=None)

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
