"""On samples held out of training: the distance of the reduced model's predictions to their targets, and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.context import Exploration
from shiva.core.needs import need
from shiva.ops.schedule import RatioSchedule
from shiva.training.call import as_trained, at_keep, dense, learner
from shiva.training.draws import Before, MicroBatch, generator_of, seed_of
from shiva.training.feed import Items
from shiva.training.noise import FlowMatching
from shiva.training.objectives import Objectives, untouched_scheduler
from shiva.training.sections import Reuse, Validation

VIRIDIS = torch.tensor([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])
ROWS = 50
"""Most steps that a heat map shows."""


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
        if batch.reached is None and learner(objectives.session).needs_earlier:
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
            session.begin_run()
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


# -- pictures ----------------------------------------------------------------------------------------


def grid_of(rows: list[list[Any]]) -> Any:
    """PIL images in rows as one, with room for the largest."""
    width, height = (max(sides) for sides in zip(*(picture.size for row in rows for picture in row), strict=True))
    sheet = need("PIL.Image", "train").new("RGB", (width * len(rows[0]), height * len(rows)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * width, y * height))
    return sheet


def colours(values: Tensor) -> Tensor:
    """Colours (..., 3) of the viridis map for values in 0 to 1."""
    position = values.clamp(0, 1) * (len(VIRIDIS) - 1)
    left = position.long().clamp(max=len(VIRIDIS) - 2)
    return torch.lerp(VIRIDIS[left].float(), VIRIDIS[left + 1].float(), (position - left)[..., None]).round().byte()


def heat_map(ratios: Tensor, timesteps: tuple[float, ...]) -> Any:
    """Keep ratios (steps, layers) as a picture: layers to the right, time downwards from noise to image."""
    pil, margin, cell = need("PIL.Image", "train"), 44, 14
    shown = torch.linspace(0, len(ratios) - 1, min(ROWS, len(ratios))).round().long()
    steps, layers = len(shown), ratios.shape[1]
    sheet = pil.new("RGB", (max(margin + layers * cell + 60, 300), max(margin + steps * cell, 220)), "white")
    draw = need("PIL.ImageDraw", "train").Draw(sheet)

    def paste(values: Tensor, left: int) -> None:
        pixels = pil.fromarray(colours(values.detach().float().cpu()).numpy())
        sheet.paste(
            pixels.resize((values.shape[1] * cell, len(values) * cell), pil.Resampling.NEAREST), (left, margin)
        )

    draw.text((4, 4), "keep by layer (right) and timestep (down)", fill="black")
    paste(ratios[shown], margin)
    for y in range(0, steps, max(1, steps // 10)):
        draw.text((4, margin + y * cell), f"{timesteps[int(shown[y])]:.0f}", fill="black")
    for x in range(0, layers, max(1, layers // 12)):
        draw.text((margin + x * cell, margin - 14), str(x), fill="black")
    scale, left = torch.linspace(1, 0, 11)[:, None], margin + layers * cell + 10
    paste(scale, left)
    for i, value in enumerate(scale.flatten().tolist()):
        draw.text((left + cell + 4, margin + i * cell), f"{value:.1f}", fill="black")
    return sheet
