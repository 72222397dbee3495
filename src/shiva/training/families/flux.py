"""FLUX.1 and FLUX.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shiva.training.family import Family, Size, Text, times


class FluxFamily(Family):
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")

    def __init__(self, pipe: Any, text_length: int | None = None, guidance: float = 3.5):
        super().__init__(pipe, text_length, guidance)
        self._ids: dict[tuple[int, int], Tensor] = {}

    @property
    def patch(self) -> int:
        return 2

    def prompts(self, prompts: list[str]) -> Text:
        hidden, pooled, _ = self.pipe.encode_prompt(prompts, None, **self.length)
        return {"hidden": hidden, "pooled": pooled}

    def image_ids(self, noisy: Tensor) -> Tensor:
        """Position ids (h/2 * w/2, 3), one tensor per shape: the backbone reads the grid off it once."""
        rows, columns = noisy.shape[-2] // 2, noisy.shape[-1] // 2
        if (rows, columns) not in self._ids:
            make = self.pipe._prepare_latent_image_ids
            self._ids[rows, columns] = make(1, rows, columns, noisy.device, torch.float32)
        return self._ids[rows, columns]

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        guided = self.transformer.config.guidance_embeds
        return {
            "hidden_states": self.pipe._pack_latents(noisy, *noisy.shape),
            "timestep": times(noisy, timestep / 1000),
            "guidance": times(noisy, self.guidance) if guided else None,
            "encoder_hidden_states": text["hidden"],
            "pooled_projections": text["pooled"],
            "txt_ids": torch.zeros(text["hidden"].shape[1], 3, device=noisy.device),
            "img_ids": self.image_ids(noisy),
            "return_dict": False,
        }

    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        return self.unpack(output, noisy.shape[-2], noisy.shape[-1])

    @staticmethod
    def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
        """(B, h/2 * w/2, 4C) to (B, C, h, w)."""
        batch, _, packed = tokens.shape
        tokens = tokens.view(batch, height // 2, width // 2, packed // 4, 2, 2)
        return tokens.permute(0, 3, 1, 4, 2, 5).reshape(batch, packed // 4, height, width)

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": text["hidden"], "pooled_prompt_embeds": text["pooled"]}
        return {**prompt, "height": size[0], "width": size[1]}

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        packed = self.draw(text, size, steps, guidance, seeds, "latent")
        return self.unpack(packed, size[0] // self.factor, size[1] // self.factor)


class Flux2Family(Family):
    """FLUX.2 and klein. Latents are the autoencoder's in patches of 2x2, normalised: (B, 4C, h, w), one a token."""

    text_encoders = ("text_encoder",)
    patch = 1

    def __init__(self, pipe: Any, text_length: int | None = None, guidance: float = 3.5):
        super().__init__(pipe, text_length, guidance)
        self._ids: dict[torch.Size, Tensor] = {}

    @property
    def factor(self) -> int:
        return 2 * super().factor

    def prompts(self, prompts: list[str]) -> Text:
        hidden, _ = self.pipe.encode_prompt(prompts, **self.length)
        return {"hidden": hidden}

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        return self.pipe._encode_vae_image(pixels.to(vae.device, vae.dtype), None)

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        if noisy.shape not in self._ids:
            self._ids[noisy.shape] = self.pipe._prepare_latent_ids(noisy).to(noisy.device)
        guided = self.transformer.config.guidance_embeds
        return {
            "hidden_states": self.pipe._pack_latents(noisy),
            "timestep": times(noisy, timestep / 1000),
            "guidance": times(noisy, self.guidance) if guided else None,
            "encoder_hidden_states": text["hidden"],
            "txt_ids": self.pipe._prepare_text_ids(text["hidden"]).to(noisy.device),
            "img_ids": self._ids[noisy.shape],
            "return_dict": False,
        }

    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        return output.transpose(1, 2).reshape(noisy.shape)

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        guided = {"negative_prompt_embeds": empty["hidden"]} if "Klein" in type(self.pipe).__name__ else {}
        return {"prompt_embeds": text["hidden"], **guided, "height": size[0], "width": size[1]}

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        """As training has them, in patches and normalised; klein's pipeline gives the autoencoder's own."""
        drawn = self.draw(text, size, steps, guidance, seeds, "latent")
        if drawn.ndim == 3:
            return drawn.transpose(1, 2).unflatten(2, (size[0] // self.factor, size[1] // self.factor))
        drawn = self.pipe._patchify_latents(drawn)
        norm = self.pipe.vae.bn
        mean, variance = (part.view(1, -1, 1, 1).to(drawn) for part in (norm.running_mean, norm.running_var))
        return (drawn - mean) / torch.sqrt(variance + self.pipe.vae.config.batch_norm_eps)
