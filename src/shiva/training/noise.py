"""How a pipeline's scheduler relates a timestep to the noise in a sample, and what the model predicts there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-3
"""Noise level that is trained on; at 0 there is nothing to predict."""


@dataclass(frozen=True)
class FlowMatching:
    """x = (1 - sigma) * clean + sigma * noise, the model predicts noise - clean (SD3, Flux, Wan)."""

    density: str = "uniform"
    shift: float = 1.0
    dynamic: tuple[float, float, int, int] | None = None
    """Base shift, maximal shift and the token counts they belong to, where the shift depends on the size."""
    steps: int = 1000
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
        return max(sigma, LEAST) * self.steps

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


def noise_process(scheduler: Any, density: str) -> NoiseProcess:
    """That of a pipeline's scheduler, or an error naming what it lacks."""
    config = scheduler.config
    if type(scheduler).__name__.startswith("FlowMatch"):
        dynamic = None
        if config.get("use_dynamic_shifting"):
            dynamic = (config.base_shift, config.max_shift, config.base_image_seq_len, config.max_image_seq_len)
        return FlowMatching(density, float(config.shift or 1.0), dynamic, config.num_train_timesteps)
    if density == "run":
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
    if density == "logit-normal":
        raise ValueError(
            f"sampling.density=logit-normal is of noise levels, and {type(scheduler).__name__} has whole timesteps; "
            "set it to uniform or scheduler, which are one here"
        )
    return VariancePreserving(tuple(alphas.double().tolist()), prediction)
