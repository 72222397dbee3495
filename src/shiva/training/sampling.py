"""What a global batch is drawn from: stratified timesteps and ratios, and how noise is mixed in at a timestep.

Everything is a pure function of (seed, step), so any number of ranks and accumulation steps draws the same
global batch, and a resumed run needs no generator's state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shiva.core.options import choice

DENSITIES = ("uniform", "scheduler", "logit-normal")


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


class NoiseProcess(Protocol):
    """How a pipeline's scheduler relates a timestep to the noise in a sample, and what the model predicts."""

    def timestep(self, quantile: float, tokens: int) -> float:
        """The timestep, 0 (image) to 1000 (noise), at a quantile of the training density."""

    def earlier(self, timestep: float, share: float, tokens: int) -> float:
        """The noisier timestep at which a sampler was this share of its run before."""

    def mix(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """The noisy sample."""

    def target(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """What the model should predict."""


@dataclass(frozen=True)
class FlowMatching:
    """x = (1 - sigma) * clean + sigma * noise, the model predicts noise - clean (SD3, Flux)."""

    density: str = "uniform"
    shift: float = 1.0
    dynamic: tuple[float, float, int, int] | None = None
    """Base shift, maximal shift and the token counts they belong to, where the shift depends on the size."""
    steps: int = 1000
    least: float = 1e-3
    """Smallest noise level; at 0 there is nothing to predict."""

    def timestep(self, quantile: float, tokens: int) -> float:
        sigma = quantile
        if self.density == "logit-normal":
            sigma = float(torch.sigmoid(torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64))))
        elif self.density == "scheduler":
            sigma = self._shifted(quantile, tokens)
        return max(sigma, self.least) * self.steps

    def earlier(self, timestep: float, share: float, tokens: int) -> float:
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

    def mix(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        sigma = timestep / self.steps
        return (1 - sigma) * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
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


def noise_process(scheduler: Any, density: str) -> NoiseProcess:
    """The noise process of a pipeline's scheduler, or an error naming what it lacks."""
    choice("sampling.density", density, DENSITIES)
    config = scheduler.config
    if type(scheduler).__name__.startswith("FlowMatch"):
        dynamic = None
        if config.get("use_dynamic_shifting"):
            dynamic = (config.base_shift, config.max_shift, config.base_image_seq_len, config.max_image_seq_len)
        return FlowMatching(density, float(config.shift or 1.0), dynamic, config.num_train_timesteps)
    prediction = config.get("prediction_type", "epsilon")
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or prediction not in ("epsilon", "v_prediction"):
        raise ValueError(
            f"{type(scheduler).__name__} with prediction_type={prediction!r} is not known to training; load the "
            "pipeline with a FlowMatch scheduler, or one that predicts epsilon or v"
        )
    return VariancePreserving(tuple(alphas.double().tolist()), prediction)
