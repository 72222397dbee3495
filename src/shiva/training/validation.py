"""On samples held out of training: the distance of the reduced model's predictions to their targets, and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from shiva.core.context import Exploration
from shiva.ops.schedule import RatioSchedule
from shiva.training.call import as_trained, at_keep, dense, trained
from shiva.training.draws import Before, MicroBatch, generator_of, seed_of
from shiva.training.feed import Items
from shiva.training.log import grid_of, heat_map
from shiva.training.noise import FlowMatching
from shiva.training.objectives import Objectives, untouched_scheduler
from shiva.training.sections import Reuse, Validation


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
            rolls_out = isinstance(process, FlowMatching) and bool(process.levels)
            batch = MicroBatch(latents, noise, text, timestep, 0, Exploration(), before, rolls_out)
            batches.append(batch.to(self.device))
        return batches

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """MSE and cosine of predictions to their targets: at each uniform keep, and as the method would run."""
        session = self.objectives.session
        results: dict[str, float] = {}
        with as_trained(session), untouched_scheduler(self.objectives.family.pipe) as scheduler:
            batches, process = self.batches(), self.objectives.process
            if isinstance(process, FlowMatching) and process.levels:  # by which a method knows how long the run is
                scheduler.timesteps = torch.tensor(process.levels) * process.steps
            for keep in (*self.options.keeps, None):
                context = at_keep(session, keep)
                if context is None:
                    continue
                with context:
                    distances = [self._distance(batch) for batch in batches]
                name = "schedule" if keep is None else f"keep_{keep:g}"
                for measure, values in zip(("mse", "cosine"), zip(*distances, strict=True), strict=True):
                    results[f"{measure}/{name}"] = sum(values) / len(values)
        return results

    def _distance(self, batch: MicroBatch) -> tuple[float, float]:
        """Of the reduced model's prediction to its target: in a run's own step, if there is one to follow."""
        objectives = self.objectives
        batch = objectives.rolled_out(batch)
        begins = batch.reached is None
        if batch.reached is None and trained(objectives.session).needs_earlier:
            objectives.call(batch.earlier(), begins=True)  # a run of two steps, of which the first fills the cache
            begins = False
        reduced, _ = objectives.call(batch, begins=begins)
        taught = objectives.teach(batch).prediction if batch.aim is None else batch.aim
        cosine = F.cosine_similarity(reduced.flatten(1), taught.flatten(1))
        return float(F.mse_loss(reduced, taught)), float(cosine.mean())

    def pictures(self) -> dict[str, Any]:
        """The schedule's heat map, and a grid of samples: dense above, reduced below."""
        session, made = self.objectives.session, {}
        with as_trained(session):
            schedule = getattr(session.method, "schedule", None)
            if isinstance(schedule, RatioSchedule):
                made["schedule"] = heat_map(schedule.ratios(), schedule.timesteps)
            if self.options.images > 0:
                with dense(session):
                    above = self._draw()
                made["samples"] = grid_of([above, self._draw()])
        return made

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
