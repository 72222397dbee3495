"""The real shapes of the paper's models and of the embedded one, with random weights: speed is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from torch import Tensor, nn

from shiva.core.options import unknown_key


@dataclass(frozen=True)
class Shape:
    """A model at a resolution: how to build it, and the arguments of one call."""

    name: str
    layers: tuple[int, ...]
    """Blocks of each kind; a slice keeps the width and has fewer."""
    batch: int
    """As its pipeline runs it: 2 under batched guidance."""
    height: int = 1024
    width: int = 1024
    token: int = 16
    """Pixels on a side of an image token."""

    def slice(self, layers: int) -> Shape:
        """The same model with about `layers` blocks in all, its kinds in proportion."""
        if not len(self.layers) <= layers <= sum(self.layers):
            raise ValueError(f"layers={layers} must be {len(self.layers)} to {sum(self.layers)} for {self.name}")
        shares = [max(1, round(layers * n / sum(self.layers))) for n in self.layers]
        shares[-1] = layers - sum(shares[:-1])
        return replace(self, layers=tuple(shares))

    @property
    def sliced(self) -> bool:
        return self.layers != SHAPES[self.name].layers

    @property
    def cfg(self) -> str:
        """For `attach`, where meta tensors hold no values to look at."""
        return "batched" if self.batch % 2 == 0 else "none"

    @property
    def described(self) -> str:
        blocks = sum(self.layers)
        part = f"a slice of {blocks} blocks" if self.sliced else f"{blocks} blocks"
        return f"{self.name} ({part}), {self.height}x{self.width}, batch {self.batch}, random weights"

    @property
    def grid(self) -> tuple[int, int]:
        return self.height // self.token, self.width // self.token

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
        """The transformer with random weights; on "meta" it takes no memory."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return _BUILDERS[self.name][0](self).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)

    def call(self, device: str = "cpu", dtype: torch.dtype = torch.float32, timestep: float = 500.0) -> dict[str, Any]:
        """Keyword arguments of one transformer call."""
        with torch.device(device):
            return _BUILDERS[self.name][1](self, dtype, timestep)


def _sd3(shape: Shape) -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=128,
        num_layers=shape.layers[0],
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=192,
    )


def _sd3_call(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    return {
        "hidden_states": _latents(shape, 16, dtype),
        "encoder_hidden_states": torch.randn(shape.batch, 77 + 256, 4096, dtype=dtype),
        "pooled_projections": torch.randn(shape.batch, 2048, dtype=dtype),
        "timestep": torch.full((shape.batch,), timestep),
    }


def _emoji(shape: Shape) -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=12,
        out_channels=12,
        num_layers=shape.layers[0],
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=256,
        caption_projection_dim=128,
        pooled_projection_dim=256,
        pos_embed_max_size=max(16, *shape.grid),
        qk_norm="rms_norm",
    )


def _emoji_call(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    return {
        "hidden_states": _latents(shape, 12, dtype, 4),
        "encoder_hidden_states": torch.randn(shape.batch, 16, 256, dtype=dtype),
        "pooled_projections": torch.randn(shape.batch, 256, dtype=dtype),
        "timestep": torch.full((shape.batch,), timestep),
    }


def _flux(shape: Shape) -> nn.Module:
    return FluxTransformer2DModel(num_layers=shape.layers[0], num_single_layers=shape.layers[1], guidance_embeds=True)


def _flux_call(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    rows, columns = shape.grid
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None]
    return {
        "hidden_states": torch.randn(shape.batch, rows * columns, 64, dtype=dtype),
        "encoder_hidden_states": torch.randn(shape.batch, 512, 4096, dtype=dtype),
        "pooled_projections": torch.randn(shape.batch, 768, dtype=dtype),
        "timestep": torch.full((shape.batch,), timestep / 1000, dtype=dtype),
        "guidance": torch.full((shape.batch,), 3.5, dtype=dtype),
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(512, 3),
    }


def _pixart(shape: Shape) -> nn.Module:
    return PixArtTransformer2DModel(
        sample_size=128, num_layers=shape.layers[0], use_additional_conditions=False, caption_channels=4096
    )


def _pixart_call(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    return {
        "hidden_states": _latents(shape, 4, dtype),
        "encoder_hidden_states": torch.randn(shape.batch, 300, 4096, dtype=dtype),
        "encoder_attention_mask": torch.ones(shape.batch, 300),
        "timestep": torch.full((shape.batch,), int(timestep)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _latents(shape: Shape, channels: int, dtype: torch.dtype, factor: int = 8) -> Tensor:
    """Under guidance both halves of the batch hold the same latents, as in a pipeline."""
    pairs = 2 if shape.batch % 2 == 0 else 1
    half = torch.randn(shape.batch // pairs, channels, shape.height // factor, shape.width // factor, dtype=dtype)
    return torch.cat([half] * pairs)


_BUILDERS: dict[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, Any]]]] = {
    "sd3-medium": (_sd3, _sd3_call),
    "flux-dev": (_flux, _flux_call),
    "pixart-sigma": (_pixart, _pixart_call),
    "emoji": (_emoji, _emoji_call),
}

SHAPES = {
    "sd3-medium": Shape("sd3-medium", layers=(24,), batch=2),
    "flux-dev": Shape("flux-dev", layers=(19, 38), batch=1),
    "pixart-sigma": Shape("pixart-sigma", layers=(28,), batch=2),
    "emoji": Shape("emoji", layers=(8,), batch=2, height=64, width=64, token=4),
}


def shape(name: str, **changes: Any) -> Shape:
    """A known shape, with batch, height or width changed."""
    if name not in SHAPES:
        raise ValueError(unknown_key(name, SHAPES, "shiva.measure.shapes"))
    return replace(SHAPES[name], **changes)
