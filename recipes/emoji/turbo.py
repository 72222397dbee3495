"""Distil the model of 1024 tokens to four steps without guidance.

    python -m recipes.emoji.turbo --threads 2              # starts, or resumes where it stopped
    python -m recipes.emoji.turbo --threads 2 --finish 15  # last sitting: decay the rate over 15 minutes, end

The student runs from noise to one of its own noise levels, without gradient; from there the guided teacher goes to the
next level in small steps, and the student regresses the mean velocity of that way. A target is used twice, because
making one costs more than learning from it. Runs of 2, 3 and 8 steps are learned in a smaller share, so that taking
fewer steps is a fair rival of whatever makes a step cheaper.

The stock scheduler places the last of n steps at a noise level of .002, where nothing is left to do: of four steps
three count. The turbo's own (`shift_terminal`) begins its last step at `TERMINAL`, so that all of them do.
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor
from torch.nn import functional as F

from recipes.emoji.assemble import SHIFT, TERMINAL, load_transformer
from recipes.emoji.autoencoder import psnr
from recipes.emoji.common import save_grid, state_folder, to_unit
from recipes.emoji.conditioning import Text
from recipes.emoji.flow import guided_velocity, sample, scheduler_sigmas, velocity
from recipes.emoji.sitting import add_arguments, sit
from recipes.emoji.transformer import GRID_PROMPTS, Prepared

SUBSTEPS = {2: 6, 3: 4, 4: 3, 8: 2}
"""Steps that the teacher takes on the way between two levels of a run of so many steps."""
SHARES = {2: 0.08, 3: 0.12, 4: 0.7, 8: 0.1}
"""How often a run of so many steps is learned."""


@dataclass(frozen=True)
class Lesson:
    """States of a run, and the mean velocity with which the teacher leaves them."""

    latents: Tensor  # (B, C, S, S)
    sigma: Tensor  # (B,)
    text: Text
    target: Tensor  # (B, C, S, S)


@torch.no_grad()
def few_steps(model: SD3Transformer2DModel, latents: Tensor, text: Text, sigmas: Tensor) -> Tensor:
    """Run from the first of the noise levels to the last, without guidance."""
    for now, following in pairwise(sigmas):
        latents = latents + (following - now) * velocity(model, latents, now.expand(len(latents)), text)
    return latents


@torch.no_grad()
def way_of_teacher(
    teacher: SD3Transformer2DModel,
    latents: Tensor,
    start: Tensor,
    end: Tensor,
    text: Text,
    empty: Text,
    guidance: float,
    substeps: int,
) -> Tensor:
    """The mean velocity (B, C, S, S) of the guided flow from one noise level to another, each (B,).

    Two-step Adams-Bashforth after a first Euler step: second order at one guided call a step.
    """
    size = (end - start) / substeps
    here, before = latents, None
    for number in range(substeps):
        now = guided_velocity(teacher, here, start + number * size, text, empty, guidance)
        ahead = now if before is None else 1.5 * now - 0.5 * before
        here, before = here + size.view(-1, 1, 1, 1) * ahead, now
    return (here - latents) / (end - start).view(-1, 1, 1, 1)


class School:
    """Makes lessons, and hands them out."""

    def __init__(
        self,
        teacher: SD3Transformer2DModel,
        ema: SD3Transformer2DModel,
        prepared: Prepared,
        options: argparse.Namespace,
    ) -> None:
        self.teacher, self.ema, self.prepared, self.options = teacher, ema, prepared, options
        self.waiting: deque[Lesson] = deque()
        self.kept: deque[Lesson] = deque(maxlen=48)

    def draw(self, generator: torch.Generator) -> Lesson:
        """A new lesson, and after it an old one, in turns."""
        if not self.waiting:
            fresh = self.make(generator)
            self.kept.append(fresh)
            again = self.kept[int(torch.randint(0, len(self.kept), (), generator=generator))]
            self.waiting += [fresh, again]
        return self.waiting.popleft()

    def make(self, generator: torch.Generator) -> Lesson:
        steps = list(SHARES)[int(torch.multinomial(torch.tensor(list(SHARES.values())), 1, generator=generator))]
        sigmas = scheduler_sigmas(steps, SHIFT, TERMINAL)
        place = int(torch.randint(0, steps, (), generator=generator))
        clean, texts = self.prepared.latents["train"], self.prepared.texts["train"]
        pick = torch.randint(0, len(clean), (self.options.batch,), generator=generator)
        variant = torch.randint(0, texts.pooled.shape[1], (self.options.batch,), generator=generator)
        text = texts[pick, variant]
        if torch.rand((), generator=generator) < self.options.zero_tokens:
            text = text.with_zero_tokens()
        noise = torch.randn(clean[pick].shape, generator=generator)
        start, end = (sigmas[i].expand(len(pick)) for i in (place, place + 1))
        if torch.rand((), generator=generator) < self.options.noised:
            latents = (1 - sigmas[place]) * clean[pick] + sigmas[place] * noise
        else:
            latents = few_steps(self.ema, noise, text, sigmas[: place + 1])
        empty = self.prepared.empty
        if text.hidden.shape[1] > empty.hidden.shape[1]:
            empty = empty.with_zero_tokens()
        target = way_of_teacher(self.teacher, latents, start, end, text, empty, self.options.guidance, SUBSTEPS[steps])
        return Lesson(latents, start, text, target)


class Probe:
    """How near the student's pictures are to the teacher's, from the same noise."""

    def __init__(
        self, teacher: SD3Transformer2DModel, ema: SD3Transformer2DModel, prepared: Prepared, guidance: float
    ) -> None:
        self.ema, self.prepared = ema, prepared
        self.text = prepared.encoder(list(GRID_PROMPTS[:16]))
        shape = (16, *prepared.latents["train"].shape[1:])
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        self.wanted = self.pictures(sample(teacher, self.noise, self.text, prepared.empty, 16, guidance, SHIFT))
        few = self.pictures(sample(teacher, self.noise, self.text, prepared.empty, 4, guidance, SHIFT))
        print(f"the teacher itself in 4 guided steps: {psnr(few, self.wanted).mean():.2f} dB to its 16", flush=True)

    def pictures(self, latents: Tensor) -> Tensor:
        return to_unit(self.prepared.decode(latents))

    def __call__(self) -> dict[str, float]:
        found = {}
        for steps in SUBSTEPS:
            sigmas = scheduler_sigmas(steps, SHIFT, TERMINAL)
            made = self.pictures(few_steps(self.ema, self.noise, self.text, sigmas))
            found[f"psnr_{steps}"] = round(psnr(made, self.wanted).mean().item(), 3)
        return found


@torch.no_grad()
def carry_over(model: SD3Transformer2DModel, turbo: str, base: str) -> None:
    """Add what an earlier turbo had learned over its own teacher: a better teacher's student need not begin anew."""
    learned, taught = (
        SD3Transformer2DModel.from_pretrained(p, subfolder="transformer").float() for p in (turbo, base)
    )
    before, after = taught.state_dict(), learned.state_dict()
    model.load_state_dict({key: value + after[key] - before[key] for key, value in model.state_dict().items()})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, name="turbo", batch=8, rate=3e-4, muon=6e-4, ema=0.995)
    parser.add_argument("--teacher", default="transformer-128", help="name of the teacher's run")
    parser.add_argument("--guidance", type=float, default=3.0, help="folded into the student")
    parser.add_argument("--noised", type=float, default=0.15, help="share of lessons that begin at noised data")
    parser.add_argument(
        "--carry", nargs=2, metavar=("TURBO", "BASE"), help="pipelines of an earlier turbo and its teacher"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    state = state_folder(options.state)
    teacher = load_transformer(state / f"{options.teacher}.safetensors")[0].requires_grad_(False)
    model = copy.deepcopy(teacher).requires_grad_(True).train()
    if options.carry:
        carry_over(model, *options.carry)
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    prepared = Prepared(state, 128, variants=8, paraphrases=8, small=False)
    school = School(teacher, ema, prepared, options)

    def loss_of(generator: torch.Generator) -> tuple[Tensor, int]:
        lesson = school.draw(generator)
        learned = velocity(model, lesson.latents, lesson.sigma, lesson.text)
        return F.mse_loss(learned, lesson.target), len(lesson.latents)

    def draw(path: Path) -> None:
        text = prepared.encoder(list(GRID_PROMPTS))
        shape = (len(GRID_PROMPTS), *prepared.latents["train"].shape[1:])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        save_grid(prepared.decode(few_steps(ema, noise, text, scheduler_sigmas(4, SHIFT, TERMINAL))), path, columns=8)

    sit(options, state, model, ema, loss_of, Probe(teacher, ema, prepared, options.guidance), draw)


if __name__ == "__main__":
    main()
