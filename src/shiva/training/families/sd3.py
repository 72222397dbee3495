"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shiva.training.family import Family, Size, Text, times


class SD3Family(Family):
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")

    def prompts(self, prompts: list[str]) -> Text:
        unguided: Any = {"do_classifier_free_guidance": False, **self.length}
        hidden, _, pooled, _ = self.pipe.encode_prompt(prompts, None, None, **unguided)
        return {"hidden": hidden, "pooled": pooled}

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        prompt = {"encoder_hidden_states": text["hidden"], "pooled_projections": text["pooled"]}
        return {"hidden_states": noisy, "timestep": times(noisy, timestep), **prompt, "return_dict": False}

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": text["hidden"], "pooled_prompt_embeds": text["pooled"]}
        negative = {"negative_prompt_embeds": empty["hidden"], "negative_pooled_prompt_embeds": empty["pooled"]}
        return {**prompt, **negative, "height": size[0], "width": size[1]}
