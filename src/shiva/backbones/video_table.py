"""The video transformers that a pattern describes, an entry each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shiva.backbones.base import Call, register
from shiva.backbones.grids import GivenFrames, Latents, first_given, told_by_sizes
from shiva.backbones.patterns import IMAGE_TEXT, Inner, PatternBackbone, Prompt, Stack, Time
from shiva.backbones.per_token import KeyMask, PerTokens, Rope, Rows, SharedRope, SquareMask, rope_of_each_head
from shiva.core.layout import Layout

CLIP = Latents("BCFHW")
CROSS, FFN = Inner("attn2", "cross_attention"), Inner("ff", "ffn")


def crossed(path: str, block: PerTokens, attention: PerTokens, ffn: Inner = FFN) -> Stack:
    """Blocks with attention over the clip, then to the text, then a feed-forward."""
    inner = Inner("attn1", "attention", per_token=attention, keys="apart")
    return Stack(path, per_token=block, inner=(inner, CROSS, ffn))


WAN_FFN = Inner("ffn", "ffn")

WAN_ROPE: PerTokens = {"rotary_emb": Rope()}
WAN = PatternBackbone(
    transformers=("WanTransformer3DModel", "WanVACETransformer3DModel"),
    stacks=(crossed("blocks", {**WAN_ROPE, "temb": Rows(only_with_axes=4)}, WAN_ROPE, WAN_FFN),),
    grid=GivenFrames(CLIP),
    layout_reads=("timestep",),
    clock="scheduler",
    time=Time("condition_embedder.timesteps_proj", "condition_embedder.time_embedder"),
    prompt=Prompt(through=("condition_embedder.text_embedder",)),
    notes="of two experts, attach to pipe and to pipe.transformer_2; VACE's control blocks run dense",
)

SKYREELS_ATTENTION: PerTokens = {**WAN_ROPE, "attention_mask": SquareMask()}
SKYREELS_BLOCK: PerTokens = {**SKYREELS_ATTENTION, "temb": Rows(axis=2, only_with_axes=4)}
SKYREELS = replace(
    WAN,
    transformers=("SkyReelsV2Transformer3DModel",),
    stacks=(crossed("blocks", SKYREELS_BLOCK, SKYREELS_ATTENTION, WAN_FFN),),
    grid=CLIP,
    layout_reads=(),
    notes="not asynchronous diffusion forcing, whose steps cannot be told apart",
)

LTX_ROPE: PerTokens = {"image_rotary_emb": Rope()}
LTX = PatternBackbone(
    transformers=("LTXVideoTransformer3DModel",),
    stacks=(crossed("transformer_blocks", {**LTX_ROPE, "temb": Rows()}, LTX_ROPE),),
    grid=GivenFrames(told_by_sizes),
    layout_reads=("timestep", "video_coords"),
    clock="scheduler",
    time=Time("time_embed.emb.time_proj", "time_embed.emb.timestep_embedder"),
    prompt=Prompt(through=("caption_projection",), mask="encoder_attention_mask"),
)

LTX2 = replace(
    LTX,
    transformers=("LTX2VideoTransformer3DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            {
                "video_rotary_emb": Rope(-2),
                "ca_video_rotary_emb": Rope(-2),
                "temb": Rows(),
                "temb_ca_scale_shift": Rows(),
                "temb_ca_gate": Rows(),
                "self_attention_mask": SquareMask(),
            },
            inner=(
                Inner(
                    "attn1",
                    "attention",
                    per_token={"query_rotary_emb": Rope(-2), "attention_mask": SquareMask()},
                    keys="apart",
                ),
                Inner("video_to_audio_attn", "keys", keys="apart"),
                CROSS,
                FFN,
            ),
        ),
    ),
    extra={"isolate_modalities": False, "spatio_temporal_guidance_blocks": None, "perturbation_mask": None},
    notes="the video stream; audio runs whole, and with attends='selected' sees the video tokens that run",
)


def hunyuan_grid(transformer: Any, call: Call) -> Layout:
    """The first frame is given where its tokens replace the noise."""
    layout = Latents("BCFHW", patch_t="patch_size_t")(transformer, call)
    given = transformer.config.image_condition_type == "token_replace" and layout.frames > 1
    return first_given(layout, 1) if given else layout


JOINT_KEYS = KeyMask()
HUNYUAN_ATTENTION: PerTokens = {"image_rotary_emb": SharedRope(), "attention_mask": JOINT_KEYS}
HUNYUAN = PatternBackbone(
    transformers=("HunyuanVideoTransformer3DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            {"freqs_cis": SharedRope(), "attention_mask": JOINT_KEYS},
            inner=(Inner("attn", "attention", IMAGE_TEXT, HUNYUAN_ATTENTION, keys="apart"), FFN),
        ),
        Stack(
            "single_transformer_blocks",
            IMAGE_TEXT,
            HUNYUAN_ATTENTION,
            inner=(Inner("attn", "attention", IMAGE_TEXT, HUNYUAN_ATTENTION, keys="trails"),),
            single_stream=True,
        ),
    ),
    grid=hunyuan_grid,
    clock="scheduler",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder"),
    prompt=Prompt("pooled_projections", config="pooled_projection_dim"),
)

HUNYUAN15 = PatternBackbone(
    transformers=("HunyuanVideo15Transformer3DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            {"freqs_cis": SharedRope()},
            inner=(Inner("attn", "attention", IMAGE_TEXT, {"image_rotary_emb": SharedRope()}), FFN),
        ),
    ),
    grid=Latents("BCFHW", patch_t="patch_size_t"),
    priced_by_running=True,
    clock="scheduler",
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder"),
    prompt=Prompt(through=("context_embedder.proj_in",), mask="encoder_attention_mask"),
    notes="its attention builds a square mask from the queries, so attends='selected'",
)

IMAGE_ROPE: PerTokens = {"image_rotary_emb": SharedRope()}
COGVIDEOX = PatternBackbone(
    transformers=("CogVideoXTransformer3DModel",),
    toward=0,
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            IMAGE_ROPE,
            inner=(
                Inner("attn1", "attention", IMAGE_TEXT, IMAGE_ROPE, keys="leads"),
                Inner("ff", "ffn", text="leads"),
            ),
        ),
    ),
    grid=Latents("BFCHW", patch_t="patch_size_t"),
    channel_axis=2,
    clock="scheduler",
    time=Time("time_proj", "time_embedding"),
    prompt=Prompt(through=("patch_embed.text_proj",)),
)

HEAD_ROPE: PerTokens = {"image_rotary_emb": rope_of_each_head}
MOCHI = PatternBackbone(
    transformers=("MochiTransformer3DModel",),
    toward=-1,
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            HEAD_ROPE,
            inner=(Inner("attn1", "attention", IMAGE_TEXT, HEAD_ROPE), FFN),
        ),
    ),
    grid=CLIP,
    priced_by_running=True,
    clock="rising",
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder"),
    prompt=Prompt(through=("time_embed.caption_proj",), mask="encoder_attention_mask"),
)

COSMOS_BLOCK: PerTokens = {
    **IMAGE_ROPE,
    "embedded_timestep": Rows(only_with_axes=3),
    "temb": Rows(only_with_axes=3),
    "extra_pos_emb": Rows(),
}
COSMOS = PatternBackbone(
    transformers=("CosmosTransformer3DModel",),
    toward=0,
    stacks=(crossed("transformer_blocks", COSMOS_BLOCK, IMAGE_ROPE),),
    grid=GivenFrames(CLIP),
    layout_reads=("timestep",),
    clock="scheduler",
    time=Time("time_embed.time_proj", "time_embed.t_embedder"),
    prompt=Prompt(config="text_embed_dim"),
    notes="1, 2 and 2.5, each with timesteps of its own scheduler",
)


def kandinsky_heads(config: Any) -> int:
    return config.model_dim // sum(config.axes_dims)


KANDINSKY5 = PatternBackbone(
    transformers=("Kandinsky5Transformer3DModel",),
    stacks=(
        Stack(
            "visual_transformer_blocks",
            per_token={"rope": Rows()},
            image="visual_embed",
            inner=(
                Inner("self_attention", "attention", per_token={"rotary_emb": Rows()}),
                Inner("cross_attention", "cross_attention"),
                Inner("feed_forward", "ffn"),
            ),
        ),
    ),
    grid=Latents("BFHWC"),
    channel_axis=-1,
    clock="scheduler",
    time=Time(None, "time_embeddings"),
    prompt=Prompt("pooled_projections", config="in_text_dim2"),
    heads=kandinsky_heads,
    width="model_dim",
    notes="not with attention_type='nabla', whose tiles need the whole grid",
)

TABLE = (WAN, SKYREELS, LTX, LTX2, HUNYUAN, HUNYUAN15, COGVIDEOX, MOCHI, COSMOS, KANDINSKY5)
for backbone in TABLE:
    register(backbone)
