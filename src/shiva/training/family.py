"""A pipeline family: prompts and images to tensors, tensors to a call of the bare transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.options import unknown_key

Text = dict[str, Tensor]
"""What a family's prompts become, each tensor with the batch first."""
Size = tuple[int, int]
"""Height and width, in pixels."""


class Family:
    """A pipeline and how training calls its transformer. Latents are always (B, C, h, w)."""

    text_encoders: ClassVar[tuple[str, ...]] = ()
    """Components that only prompts need; training may drop them once prompts are encoded."""
    guided_by: ClassVar[str] = "guidance_scale"
    """The pipeline's argument with the guidance scale."""

    def __init__(self, pipe: Any, text_length: int | None = None, guidance: float = 3.5):
        self.pipe, self.transformer, self.guidance = pipe, pipe.transformer, guidance
        self.length = {} if text_length is None else {"max_sequence_length": text_length}
        self.empty: Text = {}
        """The empty prompt, a batch of one; kept when the text encoders go."""
        self._ids: dict[torch.Size, Tensor] = {}
        """Position ids by the shape of latents, one tensor each: the backbone reads the grid off it once."""

    # -- to tensors ----------------------------------------------------------------------------------

    def prompts(self, prompts: list[str]) -> Text:
        """Embeddings of prompts (B)."""
        raise NotImplementedError

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Text:
        return self.prompts(list(prompts))

    def keep_empty(self) -> None:
        self.empty = self.empty or self.encode([""])

    def drop_text_encoders(self) -> None:
        """Free the memory of the text encoders; the empty prompt stays."""
        self.keep_empty()
        for name in self.text_encoders:
            if getattr(self.pipe, name, None) is not None:
                setattr(self.pipe, name, None)

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        """Latents (B, C, h, w) of pixels (B, 3, H, W) in [-1, 1]: the mode of the autoencoder's distribution."""
        vae = self.pipe.vae
        mean = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        return (mean - shift) * vae.config.scaling_factor

    @property
    def factor(self) -> int:
        """Pixels along a latent's side."""
        return 2 ** (len(self.pipe.vae.config.block_out_channels) - 1)

    @property
    def patch(self) -> int:
        """Latent pixels along a token's side."""
        return self.transformer.config.patch_size

    def tokens(self, grid: tuple[int, int]) -> int:
        """Image tokens of latents with this height and width."""
        return (grid[0] // self.patch) * (grid[1] // self.patch)

    # -- one call ------------------------------------------------------------------------------------

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        """Keyword arguments of the transformer."""
        raise NotImplementedError

    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        """The prediction (B, C, h, w) in a transformer's output; a learned variance is cut off."""
        return output[:, : noisy.shape[1]]

    # -- whole pictures ------------------------------------------------------------------------------

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        """The pipeline's arguments for embeddings made beforehand, and for as many empty prompts."""
        raise NotImplementedError

    @torch.no_grad()
    def draw(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int], output: str) -> Any:
        """Run the pipeline on embeddings; `output` is the pipeline's output_type."""
        self.keep_empty()
        self.pipe.set_progress_bar_config(disable=True)
        empty = {name: value.expand(len(seeds), *value.shape[1:]) for name, value in self.empty.items()}
        drawn = self.pipe(
            **self.arguments(text, empty, size),
            **{self.guided_by: guidance},
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type=output,
        )
        return drawn.images if hasattr(drawn, "images") else drawn.frames

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        """Latents (B, C, h, w) that the pipeline itself makes."""
        return self.draw(text, size, steps, guidance, seeds, "latent")


def times(noisy: Tensor, value: float) -> Tensor:
    """A value for each sample of a batch."""
    return torch.full((len(noisy),), value, device=noisy.device)


def normalised(vae: Any, latents: Tensor) -> Tensor:
    """Latents (B, C, F, h, w) with the mean and deviation that a video autoencoder gives for each channel."""
    mean, deviation = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / deviation


def padded(hidden: Tensor, mask: Tensor | None, length: int) -> Text:
    """Embeddings (B, T, D) at one length for all prompts, and which of them are text."""
    mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    missing = length - hidden.shape[1]
    return {"hidden": F.pad(hidden, (0, 0, 0, missing)), "mask": F.pad(mask, (0, missing))}


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


class FluxFamily(Family):
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")

    @property
    def patch(self) -> int:
        return 2

    def prompts(self, prompts: list[str]) -> Text:
        hidden, pooled, _ = self.pipe.encode_prompt(prompts, None, **self.length)
        return {"hidden": hidden, "pooled": pooled}

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        grid = noisy.shape[-2:]
        if grid not in self._ids:
            rows, columns, make = grid[0] // 2, grid[1] // 2, self.pipe._prepare_latent_image_ids
            self._ids[grid] = make(1, rows, columns, noisy.device, torch.float32)
        guided = self.transformer.config.guidance_embeds
        return {
            "hidden_states": self.pipe._pack_latents(noisy, *noisy.shape),
            "timestep": times(noisy, timestep / 1000),
            "guidance": times(noisy, self.guidance) if guided else None,
            "encoder_hidden_states": text["hidden"],
            "pooled_projections": text["pooled"],
            "txt_ids": torch.zeros(text["hidden"].shape[1], 3, device=noisy.device),
            "img_ids": self._ids[grid],
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
