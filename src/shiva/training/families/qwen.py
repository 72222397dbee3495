"""Qwen-Image and Z-Image: captions of any length, padded to one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from shiva.training.families.flux import FluxFamily
from shiva.training.family import Family, Size, Text, normalised, padded, times


class QwenFamily(FluxFamily):
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    guided_by = "true_cfg_scale"
    longest: ClassVar[int] = 512
    """Text tokens, unless the recipe says otherwise; all samples have as many, their padding masked."""

    @property
    def factor(self) -> int:
        return self.pipe.vae_scale_factor

    def prompts(self, prompts: list[str]) -> Text:
        length = self.length.get("max_sequence_length", self.longest)
        hidden, mask = self.pipe.encode_prompt(prompts, max_sequence_length=length)
        return padded(hidden, mask, length)

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        pictures = pixels.to(vae.device, vae.dtype)[:, :, None]
        return normalised(vae, vae.encode(pictures).latent_dist.mode())[:, :, 0]

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        batch, _, height, width = noisy.shape
        return {
            "hidden_states": self.pipe._pack_latents(noisy, *noisy.shape),
            "timestep": times(noisy, timestep / 1000),
            "encoder_hidden_states": text["hidden"],
            "encoder_hidden_states_mask": text["mask"],
            "img_shapes": [[(1, height // 2, width // 2)]] * batch,
            "return_dict": False,
        }

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": text["hidden"], "prompt_embeds_mask": text["mask"]}
        negative = {"negative_prompt_embeds": empty["hidden"], "negative_prompt_embeds_mask": empty["mask"]}
        return {**prompt, **negative, "height": size[0], "width": size[1]}


class ZImageFamily(QwenFamily):
    """Pictures and captions are lists; the transformer predicts clean - noise, and its time rises."""

    guided_by = "guidance_scale"

    @property
    def factor(self) -> int:
        return 2 ** (len(self.pipe.vae.config.block_out_channels) - 1)

    def prompts(self, prompts: list[str]) -> Text:
        length = self.length.get("max_sequence_length", self.longest)
        found, _ = self.pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=length)
        texts = [padded(hidden[None], None, length) for hidden in found]
        return {name: torch.cat([text[name] for text in texts]) for name in ("hidden", "mask")}

    latents = Family.latents

    def captions(self, text: Text) -> list[Tensor]:
        """Each without its padding, (L, D)."""
        return [hidden[: int(mask.sum())] for hidden, mask in zip(text["hidden"], text["mask"], strict=True)]

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        return {
            "x": list(noisy[:, :, None]),
            "t": times(noisy, 1 - timestep / 1000),
            "cap_feats": self.captions(text),
            "return_dict": False,
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        return -torch.stack(list(output))[:, :, 0]

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": self.captions(text), "negative_prompt_embeds": self.captions(empty)}
        return {**prompt, "height": size[0], "width": size[1]}

    draw_latents = Family.draw_latents
