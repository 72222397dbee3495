"""Tiny transformers of the video classes of the pattern table, and calls of two frames for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tiny_images import make

from tiny import TEXT, Tiny, noise

FRAMES = 2


def clip(
    batch: int, rows: int, columns: int, timestep: float = 500.0, channels: int = 4, patch: int = 2
) -> dict[str, Any]:
    """(B, C, F, H, W)"""
    return {
        "hidden_states": noise(batch, channels, FRAMES, patch * rows, patch * columns),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=2),
        "timestep": torch.full((batch,), timestep),
    }


def padded_text(batch: int) -> torch.Tensor:
    mask = torch.ones(batch, TEXT)
    mask[:, -1] = 0
    return mask


def wan_per_token(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    """The first frame is given, so its tokens are at timestep 0."""
    times = torch.full((batch, FRAMES * rows * columns), timestep)
    times[:, : rows * columns] = 0
    return {**clip(batch, rows, columns), "timestep": times}


def vace(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    control = noise(batch, 6, FRAMES, 2 * rows, 2 * columns, seed=4)
    return {**clip(batch, rows, columns, timestep), "control_hidden_states": control}


def ltx(batch: int, rows: int, columns: int, timestep: float = 500.0, per_token: bool = False) -> dict[str, Any]:
    tokens = FRAMES * rows * columns
    times = torch.full((batch, tokens), timestep)
    times[:, : rows * columns] = 0
    return {
        "hidden_states": noise(batch, tokens, 4),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=2),
        "encoder_attention_mask": padded_text(batch),
        "timestep": times if per_token else torch.full((batch,), timestep),
        "num_frames": FRAMES,
        "height": rows,
        "width": columns,
    }


def ltx2(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        **ltx(batch, rows, columns, timestep, per_token=True),
        "audio_hidden_states": noise(batch, 3, 4, seed=4),
        "audio_encoder_hidden_states": noise(batch, TEXT, 8, seed=5),
        "audio_encoder_attention_mask": padded_text(batch),
        "audio_timestep": torch.full((batch,), timestep),
        "fps": 24.0,
        "audio_num_frames": 3,
    }


def hunyuan(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = clip(batch, rows, columns, timestep, patch=1)
    return {**call, "encoder_attention_mask": padded_text(batch), "pooled_projections": noise(batch, 20, seed=3)}


def hunyuan15(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        **clip(batch, rows, columns, timestep, patch=1),
        "encoder_attention_mask": padded_text(batch),
        "encoder_hidden_states_2": noise(batch, 3, 6, seed=3),
        "encoder_attention_mask_2": torch.ones(batch, 3),
        "image_embeds": torch.zeros(batch, 2, 12),
    }


def cogvideox(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    """Latents are (B, F, C, H, W), and rotary rows come from the caller."""
    angles = noise(FRAMES * rows * columns, 8, seed=6).repeat_interleave(2, dim=1)
    return {
        **clip(batch, rows, columns, timestep),
        "hidden_states": noise(batch, FRAMES, 4, 2 * rows, 2 * columns),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def mochi(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = clip(batch, rows, columns, 1000 - timestep)
    return {**call, "encoder_attention_mask": padded_text(batch).bool()}


def cosmos(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    """A timestep for each frame."""
    times = torch.full((batch, 1, FRAMES, 1, 1), timestep / 1000)
    times[:, :, 0] = 0
    return {**clip(batch, rows, columns), "timestep": times, "fps": 24}


def kandinsky(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    return {
        **clip(batch, rows, columns, timestep),
        "hidden_states": noise(batch, FRAMES, 2 * rows, 2 * columns, 4),
        "pooled_projections": noise(batch, 20, seed=3),
        "visual_rope_pos": [torch.arange(length) for length in (FRAMES, rows, columns)],
        "text_rope_pos": torch.arange(TEXT),
    }


WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 16,
    "num_layers": 4,
}
HUNYUAN = {"num_attention_heads": 2, "attention_head_dim": 10, "rope_axes_dim": (2, 4, 4), "num_refiner_layers": 1}
LTX = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
}
LTX2 = {
    **LTX,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
}
VIDEOS: dict[str, Tiny] = {
    "wan": Tiny(partial(make, "WanTransformer3DModel", **WAN), clip, FRAMES),
    "wan-per-token": Tiny(partial(make, "WanTransformer3DModel", **WAN), wan_per_token),
    "wan-vace": Tiny(
        partial(make, "WanVACETransformer3DModel", **WAN, vace_layers=[0, 2], vace_in_channels=6), vace, FRAMES
    ),
    "skyreels": Tiny(partial(make, "SkyReelsV2Transformer3DModel", **WAN), clip, FRAMES),
    "ltx": Tiny(partial(make, "LTXVideoTransformer3DModel", **LTX), ltx, FRAMES),
    "ltx-per-token": Tiny(partial(make, "LTXVideoTransformer3DModel", **LTX), partial(ltx, per_token=True)),
    "ltx2": Tiny(partial(make, "LTX2VideoTransformer3DModel", **LTX2), ltx2),
    "ltx2-split": Tiny(partial(make, "LTX2VideoTransformer3DModel", **LTX2, rope_type="split"), ltx2),
    "hunyuan-video": Tiny(
        partial(
            make,
            "HunyuanVideoTransformer3DModel",
            **HUNYUAN,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=2,
            patch_size=1,
            guidance_embeds=False,
            text_embed_dim=8,
            pooled_projection_dim=20,
        ),
        hunyuan,
        FRAMES,
    ),
    "hunyuan-video-15": Tiny(
        partial(
            make,
            "HunyuanVideo15Transformer3DModel",
            **HUNYUAN,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            text_embed_dim=8,
            text_embed_2_dim=6,
            image_embed_dim=12,
        ),
        hunyuan15,
        FRAMES,
        keys=False,
    ),
    "cogvideox": Tiny(
        partial(
            make,
            "CogVideoXTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=8,
            num_layers=4,
            sample_width=16,
            sample_height=16,
            sample_frames=5,
            max_text_seq_length=TEXT,
            use_rotary_positional_embeddings=True,
            norm_elementwise_affine=False,
        ),
        cogvideox,
        FRAMES,
    ),
    "mochi": Tiny(
        partial(
            make,
            "MochiTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=4,
            pooled_projection_dim=16,
            in_channels=4,
            text_embed_dim=8,
            time_embed_dim=16,
            max_sequence_length=TEXT,
        ),
        mochi,
        FRAMES,
        keys=False,
    ),
    "cosmos": Tiny(
        partial(
            make,
            "CosmosTransformer3DModel",
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=4,
            text_embed_dim=8,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            concat_padding_mask=False,
        ),
        cosmos,
    ),
    "kandinsky5": Tiny(
        partial(
            make,
            "Kandinsky5Transformer3DModel",
            in_text_dim=8,
            in_text_dim2=20,
            time_dim=16,
            model_dim=32,
            ff_dim=16,
            num_text_blocks=1,
            num_visual_blocks=4,
            axes_dims=(4, 4, 8),
        ),
        kandinsky,
        FRAMES,
        keys=False,
    ),
}
