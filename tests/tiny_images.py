"""Tiny transformers of the image classes of the pattern table, and calls for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from tiny import TEXT, Tiny, noise, randomized

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
FLUX_LIKE = {**HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 8}
AXES = (4, 4, 8)


def make(name: str, gain: float = 1.0, **sizes: Any) -> nn.Module:
    """A model of a class by its name; a gain where its gates would hide the blocks."""
    if not hasattr(diffusers, name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    model = randomized(getattr(diffusers, name)(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    return model


def grid_ids(rows: int, columns: int, width: int = 3, first: float = 0, start: int = 0) -> Tensor:
    """Position ids (rows * columns, width): its index, the row, the column, and zeros."""
    ids = torch.zeros(rows, columns, width)
    ids[..., 0] = first
    ids[..., 1] = torch.arange(rows)[:, None] + start
    ids[..., 2] = torch.arange(columns)[None] + start
    return ids.reshape(-1, width)


def packed(batch: int, rows: int, columns: int, timestep: float = 500.0, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, rows * columns, channels),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=2),
        "timestep": torch.full((batch,), timestep / 1000),
    }


def with_ids(batch: int, rows: int, columns: int, timestep: float = 500.0, start: int = 0) -> dict[str, Any]:
    ids = {"img_ids": grid_ids(rows, columns, start=start), "txt_ids": torch.zeros(TEXT, 3)}
    return {**packed(batch, rows, columns, timestep), **ids}


def bria(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {**with_ids(batch, rows, columns), "timestep": torch.full((batch,), timestep)}


def fibo(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    """Text of each layer for each block, and a mask over keys inside a dictionary."""
    mask = torch.zeros(batch, 1, 1, TEXT + rows * columns)
    mask[..., TEXT - 1] = -1e4
    texts = [noise(batch, TEXT, 12, seed=layer) for layer in range(4)]
    more = {"text_encoder_layers": texts, "joint_attention_kwargs": {"attention_mask": mask}}
    return {**bria(batch, rows, columns, timestep), **more}


def flux2(batch: int, rows: int, columns: int, timestep: float = 500.0, references: int = 0) -> dict[str, Any]:
    """References of 2x3 tokens follow the image, as in editing."""
    call = packed(batch, rows, columns, timestep)
    ids = [grid_ids(rows, columns, 4)] + [grid_ids(2, 3, 4, first=10.0 * (i + 1)) for i in range(references)]
    call["img_ids"] = torch.cat(ids).expand(batch, -1, -1)
    call["txt_ids"] = torch.zeros(batch, TEXT, 4)
    call["hidden_states"] = torch.cat([call["hidden_states"], noise(batch, 6 * references, 4, seed=5)], dim=1)
    return call


def kontext(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = with_ids(batch, rows, columns, timestep)
    call["img_ids"] = torch.cat([call["img_ids"], grid_ids(2, 3, first=1)])
    call["hidden_states"] = torch.cat([call["hidden_states"], noise(batch, 6, 4, seed=5)], dim=1)
    return {**call, "pooled_projections": noise(batch, 20, seed=3)}


def qwen(batch: int, rows: int, columns: int, timestep: float = 500.0, references: int = 0) -> dict[str, Any]:
    call = packed(batch, rows, columns, timestep, channels=16)
    call["hidden_states"] = torch.cat([call["hidden_states"], noise(batch, 6 * references, 16, seed=5)], dim=1)
    call["img_shapes"] = [[(1, rows, columns), *[(1, 2, 3)] * references]] * batch
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[:, -1] = False
    return {**call, "encoder_hidden_states_mask": mask}


def chroma(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT + rows * columns, dtype=torch.bool)
    mask[:, TEXT - 1] = False
    return {**with_ids(batch, rows, columns, timestep), "attention_mask": mask}


def pictures(batch: int, rows: int, columns: int, timestep: float = 500.0, patch: int = 2) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, patch * rows, patch * columns),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=2),
        "timestep": torch.full((batch,), timestep),
    }


def auraflow(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {**pictures(batch, rows, columns), "timestep": torch.full((batch,), timestep / 1000)}


def cogview4(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    size = torch.tensor([[16.0 * rows, 16.0 * columns]]).repeat(batch, 1)
    call = pictures(batch, rows, columns, timestep)
    return {**call, "original_size": size, "target_size": size, "crop_coords": torch.zeros(batch, 2)}


def lumina2(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = pictures(batch, rows, columns)
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    return {**call, "timestep": torch.full((batch,), 1 - timestep / 1000), "encoder_attention_mask": mask}


def hunyuan_image(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT)
    mask[:, -1] = 0
    return {**pictures(batch, rows, columns, timestep, patch=1), "encoder_attention_mask": mask}


def krea2(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = packed(batch, rows, columns, timestep)
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[:, -1] = False
    ids = torch.cat([torch.zeros(TEXT, 3), grid_ids(rows, columns)])
    text = noise(batch, TEXT, 3, 8, seed=2)
    return {**call, "encoder_hidden_states": text, "position_ids": ids, "encoder_attention_mask": mask}


def zimage(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        "x": list(noise(batch, 4, 1, 2 * rows, 2 * columns)),
        "t": torch.full((batch,), 1 - timestep / 1000),
        "cap_feats": list(noise(batch, TEXT, 8, seed=2)),
        "return_dict": False,
    }


def qwen21(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    """A reference of 2x4 tokens in two slots among five tokens of text, then the image, a slot for four tokens."""
    tokens = rows * columns
    slots = torch.tensor([False, False, True, True, False, False, False] + [True] * (tokens // 4))
    return {
        **packed(batch, rows, columns, timestep),
        "hidden_states": noise(batch, 8 + tokens, 4),
        "encoder_hidden_states": noise(batch, TEXT + 2, 8, seed=2),
        "img_shapes": [[(1, 2, 4), (1, rows, columns)]] * batch,
        "img_mask": slots.expand(batch, -1),
    }


def hidream(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "timesteps": torch.full((batch,), timestep),
        "encoder_hidden_states_t5": noise(batch, TEXT, 8, seed=2),
        "encoder_hidden_states_llama3": noise(2, batch, TEXT, 8, seed=3),
        "pooled_embeds": noise(batch, 20, seed=4),
    }


FLUX_AXES = {**FLUX_LIKE, "axes_dims_rope": AXES}
QWEN = partial(
    make,
    "QwenImageTransformer2DModel",
    **HEADS,
    in_channels=16,
    out_channels=4,
    num_layers=4,
    joint_attention_dim=8,
    axes_dims_rope=AXES,
)
IMAGES: dict[str, Tiny] = {
    "flux2": Tiny(
        partial(
            make,
            "Flux2Transformer2DModel",
            **FLUX_LIKE,
            axes_dims_rope=(4,) * 4,
            timestep_guidance_channels=32,
            guidance_embeds=False,
        ),
        partial(flux2, references=2),
        keys=False,
    ),
    "kontext": Tiny(partial(make, "FluxTransformer2DModel", **FLUX_AXES, pooled_projection_dim=20), kontext),
    "qwen": Tiny(QWEN, partial(qwen, references=2)),
    "qwen-zero-t": Tiny(partial(QWEN, zero_cond_t=True), partial(qwen, references=1)),
    "chroma": Tiny(
        partial(
            make,
            "ChromaTransformer2DModel",
            **FLUX_AXES,
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        chroma,
        keys=False,
    ),
    "ovis": Tiny(partial(make, "OvisImageTransformer2DModel", **FLUX_AXES, out_channels=4), with_ids),
    "bria": Tiny(partial(make, "BriaTransformer2DModel", **FLUX_AXES), bria),
    "fibo": Tiny(partial(make, "BriaFiboTransformer2DModel", **FLUX_AXES, text_encoder_dim=12), fibo),
    "longcat": Tiny(partial(make, "LongCatImageTransformer2DModel", **FLUX_AXES), partial(with_ids, start=512)),
    "auraflow": Tiny(
        partial(
            make,
            "AuraFlowTransformer2DModel",
            gain=2.0,
            num_attention_heads=2,
            attention_head_dim=8,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pos_embed_max_size=256,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            sample_size=32,
        ),
        auraflow,
    ),
    "cogview4": Tiny(
        partial(
            make,
            "CogView4Transformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            text_embed_dim=8,
            time_embed_dim=8,
            condition_dim=4,
            rope_axes_dim=(8, 8),
            sample_size=32,
        ),
        cogview4,
    ),
    "lumina2": Tiny(
        partial(
            make,
            "Lumina2Transformer2DModel",
            hidden_size=24,
            num_layers=4,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=4,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(32, 16, 16),
            cap_feat_dim=8,
            in_channels=4,
            sample_size=32,
        ),
        lumina2,
        rises=True,
        attention=False,
    ),
    "hunyuan-image": Tiny(
        partial(
            make,
            "HunyuanImageTransformer2DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=8,
            rope_axes_dim=(8, 8),
        ),
        hunyuan_image,
    ),
    "krea2": Tiny(
        partial(
            make,
            "Krea2Transformer2DModel",
            **HEADS,
            in_channels=4,
            num_layers=4,
            num_key_value_heads=1,
            intermediate_size=16,
            timestep_embed_dim=16,
            text_hidden_dim=8,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=AXES,
        ),
        krea2,
    ),
    "qwen21": Tiny(
        partial(
            make,
            "QwenImage21Transformer2DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            context_in_dim=8,
            axes_dims_rope=AXES,
        ),
        qwen21,
        attention=False,
        keys=False,
    ),
    "zimage": Tiny(
        partial(
            make,
            "ZImageTransformer2DModel",
            in_channels=4,
            dim=32,
            n_heads=2,
            n_kv_heads=2,
            n_layers=4,
            n_refiner_layers=1,
            cap_feat_dim=8,
            axes_dims=[4, 4, 8],
            axes_lens=[256, 32, 32],
        ),
        zimage,
        time="t",
        rises=True,
    ),
    "hidream": Tiny(
        partial(
            make,
            "HiDreamImageTransformer2DModel",
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=4,
            attention_head_dim=8,
            caption_channels=[8, 8],
            text_emb_dim=20,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(32, 32),
            llama_layers=(0, 1, 0, 1),
        ),
        hidream,
        time="timesteps",
        attention=False,
        keys=False,
    ),
}
