"""Tiny pipelines of the real classes, saved to disk and loaded back, and how to call them without text encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtSigmaPipeline,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from tiny import TEXT, make_dit, make_flux, make_pixart, make_sd3, noise, randomized


def make_vae(channels: int) -> AutoencoderKL:
    model = AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=2,
        layers_per_block=1,
        shift_factor=0.0,
    )
    return randomized(model)


def sd3() -> DiffusionPipeline:
    missing = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    )
    return StableDiffusion3Pipeline(
        transformer=make_sd3(), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=make_vae(4), **missing
    )


def embeds(prompts: int) -> dict[str, Any]:
    """What two text encoders would make of prompts and empty ones, and the size of the image."""
    return {
        "prompt_embeds": noise(prompts, TEXT, 24, seed=4),
        "pooled_prompt_embeds": noise(prompts, 20, seed=5),
        "negative_prompt_embeds": noise(prompts, TEXT, 24, seed=6),
        "negative_pooled_prompt_embeds": noise(prompts, 20, seed=7),
        "height": 32,
        "width": 24,
    }


def call_sd3(prompts: int, guidance: float) -> dict[str, Any]:
    return {**embeds(prompts), "guidance_scale": guidance}


def flux() -> DiffusionPipeline:
    missing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(
        transformer=make_flux(), scheduler=FlowMatchEulerDiscreteScheduler(), vae=make_vae(1), **missing
    )


def call_flux(prompts: int, guidance: float) -> dict[str, Any]:
    return {**embeds(prompts), "true_cfg_scale": guidance}


def pixart() -> DiffusionPipeline:
    return PixArtSigmaPipeline(
        transformer=make_pixart(),
        scheduler=DPMSolverMultistepScheduler(),
        vae=make_vae(4),
        tokenizer=None,
        text_encoder=None,
    )


def call_pixart(prompts: int, guidance: float) -> dict[str, Any]:
    return {
        "prompt": None,
        "negative_prompt": None,
        "prompt_embeds": noise(prompts, TEXT, 24, seed=4),
        "prompt_attention_mask": torch.ones(prompts, TEXT),
        "negative_prompt_embeds": noise(prompts, TEXT, 24, seed=6),
        "negative_prompt_attention_mask": torch.ones(prompts, TEXT),
        "guidance_scale": guidance,
        "height": 32,
        "width": 24,
        "use_resolution_binning": False,
    }


def dit() -> DiffusionPipeline:
    return DiTPipeline(transformer=make_dit(), vae=make_vae(4), scheduler=DDIMScheduler())


def call_dit(prompts: int, guidance: float) -> dict[str, Any]:
    return {"class_labels": list(range(prompts)), "guidance_scale": guidance}


@dataclass(frozen=True)
class TinyPipeline:
    make: Callable[[], DiffusionPipeline]
    call: Callable[[int, float], dict[str, Any]]

    def load(self, folder: Path) -> DiffusionPipeline:
        """Through the disk, as a user's would come."""
        self.make().save_pretrained(folder)
        return self.load_from(folder)

    def load_from(self, folder: Path | str) -> DiffusionPipeline:
        made = self.make()
        absent = {name: None for name, part in made.components.items() if part is None}
        pipe = type(made).from_pretrained(folder, **absent)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def image(self, pipe: Any, prompts: int = 1, guidance: float = 3.0, steps: int = 3, **extra: Any) -> Tensor:
        """The final image of a run with a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        arguments = {**self.call(prompts, guidance), "num_inference_steps": steps, **extra}
        return torch.from_numpy(pipe(generator=generator, output_type="np", **arguments).images)


PIPELINES: dict[str, TinyPipeline] = {
    "sd3": TinyPipeline(sd3, call_sd3),
    "flux": TinyPipeline(flux, call_flux),
    "pixart": TinyPipeline(pixart, call_pixart),
    "dit": TinyPipeline(dit, call_dit),
}
