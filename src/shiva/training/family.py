"""A pipeline family: prompts and images to tensors, tensors to a call of the bare transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

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
