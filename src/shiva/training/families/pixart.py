"""PixArt, and DiT by classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiva.core.options import unknown_key
from shiva.training.family import Family, Size, Text, times


class PixArtFamily(Family):
    text_encoders = ("text_encoder",)

    def prompts(self, prompts: list[str]) -> Text:
        hidden, mask, _, _ = self.pipe.encode_prompt(prompts, do_classifier_free_guidance=False, **self.length)
        return {"hidden": hidden, "mask": mask}

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        batch, _, height, width = noisy.shape
        added: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if self.transformer.config.sample_size == 128 and self.transformer.use_additional_conditions:
            pixels = [[height * self.factor, width * self.factor]]
            side = torch.tensor(pixels, dtype=noisy.dtype, device=noisy.device)
            added = {"resolution": side.expand(batch, 2), "aspect_ratio": (side[:, :1] / side[:, 1:]).expand(batch, 1)}
        prompt = {"encoder_hidden_states": text["hidden"], "encoder_attention_mask": text["mask"]}
        where = {"timestep": times(noisy, int(timestep)), "added_cond_kwargs": added}
        return {"hidden_states": noisy, **where, **prompt, "return_dict": False}

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        return {
            "prompt": None,
            "negative_prompt": None,
            "prompt_embeds": text["hidden"],
            "prompt_attention_mask": text["mask"],
            "negative_prompt_embeds": empty["hidden"],
            "negative_prompt_attention_mask": empty["mask"],
            "height": size[0],
            "width": size[1],
            "use_resolution_binning": False,
        }


class DiTFamily(Family):
    """Class-conditional: a caption is a class name of the pipeline, or a class number."""

    def prompts(self, prompts: list[str]) -> Text:
        null = self.transformer.config.num_embeds_ada_norm
        labels = [null if not p else int(p) if p.isdigit() else self._label(p) for p in prompts]
        return {"label": torch.tensor(labels, device=self.transformer.device)}

    def _label(self, name: str) -> int:
        if name not in self.pipe.labels:
            raise ValueError(unknown_key(name, self.pipe.labels, "the pipeline's list of classes"))
        return self.pipe.labels[name]

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        where = {"timestep": times(noisy, int(timestep)), "class_labels": text["label"]}
        return {"hidden_states": noisy, **where, "return_dict": False}

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        return {"class_labels": text["label"].tolist()}

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        """The pipeline gives images only; their latents are encoded again."""
        return self.latents(self.draw(text, size, steps, guidance, seeds, "pt") * 2 - 1)
