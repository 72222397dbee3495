"""Tiny transformers of the real classes, and calls for them, for table-driven tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import Tensor, nn

TEXT = 5


@dataclass(frozen=True)
class Tiny:
    """One backbone of the table."""

    make: Callable[[], nn.Module]
    call: Callable[..., dict[str, Any]]
    """call(batch, rows, columns, timestep=500.0) -> keyword arguments of the transformer"""
    frames: int = 1
    """Of its calls, without those that are given."""
    time: str = "timestep"
    """The argument with the timestep."""
    rises: bool = False
    """Timesteps rise from noise to image."""
    attention: bool = True
    """Tokens may be reduced at its attention."""
    keys: bool = True
    """Keys may be more than queries."""


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that every block matters; zero-initialised gates would hide it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * (0.5 / max((1, *parameter.shape)) ** 0.5)
            )
    return model.eval()


def sample(call: dict[str, Any], index: int) -> dict[str, Any]:
    """One sample of a call of two: what has two entries is batched, but for what has layers before the batch."""
    part = slice(index, index + 1)

    def of(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(key, entry) for key, entry in value.items()}
        if name.endswith("layers"):
            return [entry[part] for entry in value]
        if name.endswith("llama3"):
            return value[:, part]
        return value[part] if isinstance(value, (Tensor, list)) and len(value) == 2 else value

    return {name: of(name, value) for name, value in call.items()}


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_sd3(dual: tuple[int, ...] = (), layers: int = 4) -> nn.Module:
    return randomized(
        SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            num_layers=layers,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=24,
            caption_projection_dim=32,
            pooled_projection_dim=20,
            out_channels=4,
            pos_embed_max_size=16,
            dual_attention_layers=dual,
            qk_norm="rms_norm" if dual else None,
        )
    )


def call_sd3(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, TEXT, 24, seed=2),
        "pooled_projections": noise(batch, 20, seed=3),
        "timestep": torch.full((batch,), timestep),
    }


def make_flux() -> nn.Module:
    return randomized(
        FluxTransformer2DModel(
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            axes_dims_rope=(4, 6, 6),
        )
    )


def call_flux(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None]
    return {
        "hidden_states": noise(batch, rows * columns, 4),
        "encoder_hidden_states": noise(batch, TEXT, 24, seed=2),
        "pooled_projections": noise(batch, 20, seed=3),
        "timestep": torch.full((batch,), timestep / 1000),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def make_pixart() -> nn.Module:
    return randomized(
        PixArtTransformer2DModel(
            sample_size=16,
            num_layers=4,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=32,
            caption_channels=24,
            use_additional_conditions=False,
        )
    )


def call_pixart(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT)
    mask[:, -2:] = 0
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, TEXT, 24, seed=2),
        "encoder_attention_mask": mask,
        "timestep": torch.full((batch,), int(timestep)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def make_dit() -> nn.Module:
    return randomized(
        DiTTransformer2DModel(
            sample_size=16,
            num_layers=4,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            in_channels=4,
            out_channels=8,
        )
    )


def call_dit(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "timestep": torch.full((batch,), int(timestep)),
        "class_labels": torch.arange(batch),
    }


BACKBONES: dict[str, Tiny] = {
    "sd3": Tiny(make_sd3, call_sd3),
    "sd35": Tiny(lambda: make_sd3(dual=(0, 1, 2)), call_sd3),
    "flux": Tiny(make_flux, call_flux),
    "pixart": Tiny(make_pixart, call_pixart),
    "dit": Tiny(make_dit, call_dit),
}


def fitted(method: Any) -> Any:
    """Weights that add something, as after a fit."""
    torch.manual_seed(3)
    for parameter in method.shortcut.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return method


@torch.no_grad()
def run(model: Any, call: dict[str, Any]) -> Tensor:
    return model(**call)[0]
