"""Models at their real shapes, with random weights: speed is the same. Known by name, others from their folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from shiva.core.options import unknown_key


@dataclass(frozen=True)
class Shape:
    """A transformer at a resolution: how to build it, and the arguments of one call."""

    name: str
    cls: str
    """Its class in diffusers."""
    config: Mapping[str, Any]
    layers: tuple[int, ...]
    """Blocks of each kind; a slice keeps the width and has fewer."""
    batch: int
    """As its pipeline runs it: 2 under batched guidance."""
    text: int
    """Text tokens."""
    height: int = 1024
    width: int = 1024
    token: int = 16
    """Pixels on a side of an image token."""
    latent: int = 8
    """Pixels on a side of a latent."""
    sliced: bool = False

    def slice(self, layers: int) -> Shape:
        """The same model with about `layers` blocks in all, its kinds in proportion."""
        if not len(self.layers) <= layers <= sum(self.layers):
            raise ValueError(f"layers={layers} must be {len(self.layers)} to {sum(self.layers)} for {self.name}")
        shares = [max(1, round(layers * n / sum(self.layers))) for n in self.layers]
        shares[-1] = layers - sum(shares[:-1])
        return replace(self, layers=tuple(shares), sliced=self.sliced or tuple(shares) != self.layers)

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
        config = {**self.config, **dict(zip(DEPTHS[self.cls], self.layers, strict=True))}
        if "pos_embed_max_size" in config:
            config["pos_embed_max_size"] = max(config["pos_embed_max_size"], *self.grid)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return getattr(diffusers, self.cls)(**config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)

    def call(self, device: str = "cpu", dtype: torch.dtype = torch.float32, timestep: float = 500.0) -> dict[str, Any]:
        """Keyword arguments of one transformer call."""
        with torch.device(device):
            return CALLS[self.cls](self, dtype, timestep)

    def latents(self, dtype: torch.dtype) -> Tensor:
        """Under guidance both halves of the batch hold the same latents, as in a pipeline."""
        pairs = 2 if self.batch % 2 == 0 else 1
        size = self.height // self.latent, self.width // self.latent
        return torch.cat([torch.randn(self.batch // pairs, self.config["in_channels"], *size, dtype=dtype)] * pairs)


def _sd3(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    config = shape.config
    return {
        "hidden_states": shape.latents(dtype),
        "encoder_hidden_states": torch.randn(shape.batch, shape.text, config["joint_attention_dim"], dtype=dtype),
        "pooled_projections": torch.randn(shape.batch, config["pooled_projection_dim"], dtype=dtype),
        "timestep": torch.full((shape.batch,), timestep),
    }


def _flux(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    config, (rows, columns) = shape.config, shape.grid
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None]
    guided = {"guidance": torch.full((shape.batch,), 3.5, dtype=dtype)} if config.get("guidance_embeds") else {}
    return {
        "hidden_states": torch.randn(shape.batch, rows * columns, config["in_channels"], dtype=dtype),
        "encoder_hidden_states": torch.randn(shape.batch, shape.text, config["joint_attention_dim"], dtype=dtype),
        "pooled_projections": torch.randn(shape.batch, config["pooled_projection_dim"], dtype=dtype),
        "timestep": torch.full((shape.batch,), timestep / 1000, dtype=dtype),
        **guided,
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(shape.text, 3),
    }


def _pixart(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    return {
        "hidden_states": shape.latents(dtype),
        "encoder_hidden_states": torch.randn(shape.batch, shape.text, shape.config["caption_channels"], dtype=dtype),
        "encoder_attention_mask": torch.ones(shape.batch, shape.text),
        "timestep": torch.full((shape.batch,), int(timestep)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _dit(shape: Shape, dtype: torch.dtype, timestep: float) -> dict[str, Any]:
    labels = torch.zeros(shape.batch, dtype=torch.long)
    times = torch.full((shape.batch,), int(timestep))
    return {"hidden_states": shape.latents(dtype), "timestep": times, "class_labels": labels}


CALLS: dict[str, Callable[[Shape, torch.dtype, float], dict[str, Any]]] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "PixArtTransformer2DModel": _pixart,
    "DiTTransformer2DModel": _dit,
}
DEPTHS = {name: ("num_layers", "num_single_layers") if "Flux" in name else ("num_layers",) for name in CALLS}
"""What a config calls its numbers of blocks."""
TEXT = {"SD3Transformer2DModel": 77 + 256, "FluxTransformer2DModel": 512, "PixArtTransformer2DModel": 300}
SD3 = {"in_channels": 16, "sample_size": 128, "num_attention_heads": 24, "joint_attention_dim": 4096}
SD3 |= {"caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 192}
FLUX = {"in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True}
PIXART = {"in_channels": 4, "sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False}
EMOJI: dict[str, Any] = {
    "in_channels": 12,
    "out_channels": 12,
    "sample_size": 16,
    "patch_size": 1,
    "num_attention_heads": 4,
}
EMOJI |= {"attention_head_dim": 32, "joint_attention_dim": 256, "caption_projection_dim": 128}
EMOJI |= {"pooled_projection_dim": 256, "pos_embed_max_size": 16, "qk_norm": "rms_norm"}
SIDE: Any = {"height": 64, "width": 64, "token": 4, "latent": 4}
SHAPES = {
    "sd3-medium": Shape("sd3-medium", "SD3Transformer2DModel", SD3, (24,), 2, 333),
    "flux-dev": Shape("flux-dev", "FluxTransformer2DModel", FLUX, (19, 38), 1, 512),
    "pixart-sigma": Shape("pixart-sigma", "PixArtTransformer2DModel", PIXART, (28,), 2, 300),
    "emoji": Shape("emoji", "SD3Transformer2DModel", EMOJI, (8,), 2, 16, **SIDE),
}


def shape(name: str, **changes: Any) -> Shape:
    """A known shape or that of a pipeline's folder, with batch, height or width changed."""
    if name in SHAPES:
        return replace(SHAPES[name], **changes)
    if (Path(name) / "transformer" / "config.json").is_file():
        return replace(shape_of_folder(Path(name)), **changes)
    raise ValueError(f"{unknown_key(name, SHAPES, '--model')}; or pass the folder of a pipeline")


def shape_of_folder(folder: Path) -> Shape:
    """Of a pipeline on disk, by its configs alone: no weights are read."""
    config = json.loads((folder / "transformer" / "config.json").read_bytes())
    cls = config["_class_name"]
    if cls not in CALLS:
        raise ValueError(f"{folder} has a {cls}; benchmarks know {', '.join(CALLS)}")
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    vae = folder / "vae" / "config.json"
    stages = json.loads(vae.read_bytes())["block_out_channels"] if vae.is_file() else [0] * 4
    latent, layers = 2 ** (len(stages) - 1), tuple(config[key] for key in DEPTHS[cls])
    token = latent * (2 if "Flux" in cls else config["patch_size"])  # Flux's pipeline packs 2 x 2 latents in a token
    side = config.get("sample_size", 128) * latent
    batch = 1 if "Flux" in cls else 2
    return Shape(folder.name, cls, config, layers, batch, TEXT.get(cls, 0), side, side, token, latent)
