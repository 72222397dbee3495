"""Distance to the dense model at several keeps, sample grids, and the learned schedule as a picture."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shiva.core.method import Exploration
from shiva.modules.schedule import RatioSchedule
from shiva.training.adapter import adapters_off
from shiva.training.feed import Items
from shiva.training.images import save_grid, save_heat_map
from shiva.training.objectives import Before, MicroBatch, Objectives
from shiva.training.recipe import Reuse, Validation
from shiva.training.sampling import generator_of, seed_of


@dataclass
class Validator:
    """Measures on samples that training does not see, at fixed timesteps and noise."""

    objectives: Objectives
    items: Items
    indices: list[int]
    options: Validation
    reuse: Reuse
    seed: int
    device: torch.device

    def batches(self) -> list[MicroBatch]:
        family, process = self.objectives.family, self.objectives.process
        batches = []
        for place, index in enumerate(self.indices):
            latents, text = self.items.encode(self.items.read([index]))
            noise = torch.randn(latents.shape, generator=generator_of(self.seed, "validation", place))
            tokens = family.tokens((latents.shape[-2], latents.shape[-1]))
            timestep = process.timestep((place + 0.5) / len(self.indices), tokens)
            before = Before(process.earlier(timestep, 1 / self.reuse.steps, tokens), 1.0)
            batches.append(MicroBatch(latents, noise, text, timestep, 0, Exploration(), before).to(self.device))
        return batches

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """MSE and cosine of predictions to the dense model's: at each uniform keep, and as the method would run."""
        method = self.objectives.session.method
        training = method.training
        method.eval()
        method.finish()
        results: dict[str, float] = {}
        try:
            batches = self.batches()
            dense = [self.objectives.teach(batch).prediction for batch in batches]
            for keep in (*self.options.keeps, None):
                context = contextlib.nullcontext() if keep is None else method.at_keep(keep)
                if context is None:
                    continue
                with context:
                    distances = [self._distance(b, d) for b, d in zip(batches, dense, strict=True)]
                name = "schedule" if keep is None else f"keep_{keep:g}"
                results[f"mse/{name}"] = sum(mse for mse, _ in distances) / len(distances)
                results[f"cosine/{name}"] = sum(cosine for _, cosine in distances) / len(distances)
        finally:
            method.train(training)
        return results

    def _distance(self, batch: MicroBatch, dense: torch.Tensor) -> tuple[float, float]:
        session = self.objectives.session
        if session.method.needs_earlier:  # a run of two steps, of which the first fills the cache
            session.begin_run()
            self.objectives.forward(batch.earlier())
        reduced = self.objectives.forward(batch)
        cosine = F.cosine_similarity(reduced.flatten(1), dense.flatten(1))
        return float(F.mse_loss(reduced, dense)), float(cosine.mean())

    def pictures(self, folder: Path, step: int) -> None:
        """The schedule's heat map, and a grid: dense above, reduced below."""
        session = self.objectives.session
        method, training = session.method, session.method.training
        method.eval()
        try:
            schedule = getattr(method, "schedule", None)
            if isinstance(schedule, RatioSchedule):
                save_heat_map(schedule.ratios(), schedule.timesteps, folder / f"schedule-{step:08d}.png")
            if self.options.images > 0 and self.indices:
                with session.disabled(), adapters_off(session.transformer):
                    dense = self._draw()
                save_grid([dense, self._draw()], folder / f"samples-{step:08d}.png")
        finally:
            method.train(training)

    def _draw(self) -> list[Any]:
        family, pictures = self.objectives.family, []
        for index in self.indices[: self.options.images]:
            latents, text = self.items.encode(self.items.read([index]))
            text = {name: value.to(self.device) for name, value in text.items()}
            size = (latents.shape[-2] * family.factor, latents.shape[-1] * family.factor)
            seeds = [seed_of(self.seed, "picture", index)]
            steps, guidance = self.options.image_steps, self.options.image_guidance
            pictures.extend(family.draw(text, size, steps, guidance, seeds, "pil"))
        return pictures
