"""Wan: clips of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiva.training.family import Family, Size, Text, normalised, times


class WanFamily(Family):
    """Clips of `frames` latent frames as (B, C * F, h, w), so that all else of training takes them for pictures.

    Captioned pictures are clips of one frame; clips of more are those that the pipeline draws from prompts alone.
    """

    text_encoders = ("text_encoder",)

    def __init__(self, pipe: Any, text_length: int | None = None, guidance: float = 3.5):
        super().__init__(pipe, text_length, guidance)
        self.frames = 1
        if getattr(pipe, "transformer_2", None) is not None:
            raise ValueError(
                "this Wan has two experts, of which each sees a part of the timesteps, and training would show the "
                "first all of them; train Wan 2.1 or TI2V, or fit each expert with shiva fit"
            )

    @property
    def factor(self) -> int:
        return self.pipe.vae_scale_factor_spatial

    @property
    def patch(self) -> int:
        return self.transformer.config.patch_size[-1]

    def prompts(self, prompts: list[str]) -> Text:
        unguided: Any = {"do_classifier_free_guidance": False, **{"max_sequence_length": 512, **self.length}}
        hidden, _ = self.pipe.encode_prompt(prompts, **unguided)
        return {"hidden": hidden}

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        clips = pixels.to(vae.device, vae.dtype)[:, :, None]
        return normalised(vae, vae.encode(clips).latent_dist.mode()).flatten(1, 2)

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        clips = noisy.unflatten(1, (self.transformer.config.in_channels, -1))
        time = times(noisy, timestep)
        if self.pipe.config.get("expand_timesteps"):
            time = time[:, None].expand(-1, clips.shape[2] * self.tokens((noisy.shape[-2], noisy.shape[-1])))
        return {
            "hidden_states": clips,
            "timestep": time,
            "encoder_hidden_states": text["hidden"],
            "return_dict": False,
        }

    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        return output.flatten(1, 2)

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": text["hidden"], "negative_prompt_embeds": empty["hidden"]}
        pixels = 1 + (self.frames - 1) * self.pipe.vae_scale_factor_temporal
        return {**prompt, "height": size[0], "width": size[1], "num_frames": pixels}

    def draw(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int], output: str) -> Any:
        drawn = super().draw(text, size, steps, guidance, seeds, output)
        return drawn if output == "latent" else [clip[0] for clip in drawn]

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        return self.draw(text, size, steps, guidance, seeds, "latent").flatten(1, 2)
