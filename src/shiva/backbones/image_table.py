"""The image transformers that a pattern describes, an entry each."""

from __future__ import annotations

from shiva.backbones.base import register
from shiva.backbones.grids import Latents, PositionIds, Shapes
from shiva.backbones.patterns import (
    IMAGE_TEXT,
    TEXT_IMAGE,
    Inner,
    PatternBackbone,
    Prompt,
    Stack,
    Time,
)
from shiva.backbones.per_token import (
    KeyMask,
    PerTokens,
    Rows,
    SharedRope,
    SquareMask,
    Within,
    image_and_text_rope,
    text_mask_before_ones,
)

TEXT_THEN_IMAGE_ROPE: PerTokens = {"image_rotary_emb": SharedRope(after_text=True)}
FFN = Inner("ff", "ffn")
JOINT = Stack(
    "transformer_blocks",
    TEXT_IMAGE,
    TEXT_THEN_IMAGE_ROPE,
    inner=(Inner("attn", "attention", IMAGE_TEXT, TEXT_THEN_IMAGE_ROPE, keys="apart"), FFN),
)
FUSED = Stack(
    "single_transformer_blocks",
    TEXT_IMAGE,
    TEXT_THEN_IMAGE_ROPE,
    inner=(Inner("attn", "attention", ("image",), TEXT_THEN_IMAGE_ROPE, text="leads", keys="leads"),),
    single_stream=True,
)

FLUX = PatternBackbone(
    transformers=("FluxTransformer2DModel",),
    stacks=(JOINT, FUSED),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="fraction",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder", scale=1000),
    prompt=Prompt("pooled_projections", config="pooled_projection_dim"),
    notes="reference tokens (Kontext) always run; Fill and Control too",
)

FLUX2 = PatternBackbone(
    transformers=("Flux2Transformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            TEXT_IMAGE,
            {**TEXT_THEN_IMAGE_ROPE, "temb_mod_img": Rows(only_with_axes=3)},
            inner=JOINT.inner,
        ),
        Stack(
            "single_transformer_blocks",
            per_token={**TEXT_THEN_IMAGE_ROPE, "temb_mod": Rows(after_text=True, only_with_axes=3)},
            text="leads",
            inner=(Inner("attn", "attention", ("image",), TEXT_THEN_IMAGE_ROPE),),
            single_stream=True,
        ),
    ),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="fraction",
    time=Time("time_guidance_embed.time_proj", "time_guidance_embed.timestep_embedder", scale=1000),
    prompt=Prompt(through=("context_embedder",)),
    unpriced=("kv_cache", "kv_cache_mode"),
    notes="klein and KV too; reference tokens always run; single blocks have no keys apart, so attends='selected'",
)

QWEN_ATTENTION: PerTokens = {
    "image_rotary_emb": image_and_text_rope,
    "encoder_hidden_states_mask": text_mask_before_ones,
}
QWEN = PatternBackbone(
    transformers=("QwenImageTransformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            TEXT_IMAGE,
            {**QWEN_ATTENTION, "modulate_index": Rows()},
            inner=(Inner("attn", "attention", IMAGE_TEXT, QWEN_ATTENTION, keys="apart"), Inner("img_mlp", "ffn")),
        ),
    ),
    grid=Shapes(),
    layout_reads=("img_shapes",),
    clock="fraction",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder", scale=1000),
    prompt=Prompt(through=("txt_norm", "txt_in"), mask="encoder_hidden_states_mask"),
    notes="Edit, Edit Plus and Layered too: reference tokens always run",
)

CHROMA = PatternBackbone(
    transformers=("ChromaTransformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            TEXT_IMAGE,
            {**TEXT_THEN_IMAGE_ROPE, "attention_mask": KeyMask(after_text=True)},
            inner=(
                Inner(
                    "attn",
                    "attention",
                    IMAGE_TEXT,
                    {**TEXT_THEN_IMAGE_ROPE, "attention_mask": SquareMask(after_text=True)},
                ),
                FFN,
            ),
        ),
        Stack(
            "single_transformer_blocks",
            per_token={**TEXT_THEN_IMAGE_ROPE, "attention_mask": KeyMask(after_text=True)},
            text="leads",
            inner=(
                Inner(
                    "attn",
                    "attention",
                    per_token={**TEXT_THEN_IMAGE_ROPE, "attention_mask": SquareMask(after_text=True)},
                ),
            ),
            single_stream=True,
        ),
    ),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="fraction",
    time=Time("time_text_embed.time_proj", None, scale=1000),
    prompt=Prompt(through=("context_embedder",)),
    notes="its blocks build a square mask from the queries, so attends='selected'",
)

OVIS = PatternBackbone(
    transformers=("OvisImageTransformer2DModel",),
    stacks=(JOINT, FUSED),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="fraction",
    time=Time("time_proj", "timestep_embedder", scale=1000),
    prompt=Prompt(through=("context_embedder_norm", "context_embedder")),
)

LONGCAT = PatternBackbone(
    transformers=("LongCatImageTransformer2DModel",),
    stacks=(JOINT, FUSED),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="fraction",
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder", scale=1000),
    prompt=Prompt(through=("context_embedder",)),
    notes="Edit too: reference tokens always run",
)

BRIA = PatternBackbone(
    transformers=("BriaTransformer2DModel",),
    stacks=(JOINT, FUSED),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="scheduler",
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder"),
    prompt=Prompt(through=("context_embedder",)),
)

FIBO_MASK = KeyMask(after_text=True)
FIBO_BLOCK: PerTokens = {**TEXT_THEN_IMAGE_ROPE, "joint_attention_kwargs": Within("attention_mask", FIBO_MASK)}
FIBO_ATTENTION: PerTokens = {**TEXT_THEN_IMAGE_ROPE, "attention_mask": FIBO_MASK}
FIBO = PatternBackbone(
    transformers=("BriaFiboTransformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            TEXT_IMAGE,
            FIBO_BLOCK,
            inner=(Inner("attn", "attention", IMAGE_TEXT, FIBO_ATTENTION, keys="apart"), FFN),
        ),
        Stack(
            "single_transformer_blocks",
            per_token=FIBO_BLOCK,
            text="leads",
            inner=(Inner("attn", "attention", per_token=FIBO_ATTENTION, keys="leads"),),
            single_stream=True,
        ),
    ),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="scheduler",
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder"),
    prompt=Prompt(through=("context_embedder",)),
    notes="Edit too: reference tokens always run",
)

AURAFLOW = PatternBackbone(
    transformers=("AuraFlowTransformer2DModel",),
    stacks=(
        Stack(
            "joint_transformer_blocks",
            TEXT_IMAGE,
            inner=(Inner("attn", "attention", IMAGE_TEXT, keys="apart"), FFN),
            rotary=False,
        ),
        Stack(
            "single_transformer_blocks",
            text="leads",
            inner=(Inner("attn", "attention", keys="leads"), FFN),
            rotary=False,
        ),
    ),
    grid=Latents(added_text=8),
    clock="fraction",
    time=Time("time_step_embed", "time_step_proj", scale=1000),
    prompt=Prompt(through=("context_embedder",)),
)

IMAGE_ROPE: PerTokens = {"image_rotary_emb": SharedRope()}
COGVIEW4 = PatternBackbone(
    transformers=("CogView4Transformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            IMAGE_ROPE,
            inner=(Inner("attn1", "attention", IMAGE_TEXT, IMAGE_ROPE, keys="leads"),),
        ),
    ),
    grid=Latents(),
    clock="scheduler",
    time=Time("time_condition_embed.time_proj", "time_condition_embed.timestep_embedder"),
    prompt=Prompt(through=("patch_embed.text_proj",)),
    notes="its FFN runs twice a block, on image and on text, and is no site",
)

MASKED_IMAGE_ROPE: PerTokens = {**IMAGE_ROPE, "attention_mask": KeyMask()}
HUNYUAN_IMAGE = PatternBackbone(
    transformers=("HunyuanImageTransformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            IMAGE_TEXT,
            MASKED_IMAGE_ROPE,
            inner=(Inner("attn", "attention", IMAGE_TEXT, MASKED_IMAGE_ROPE, keys="apart"), FFN),
        ),
        Stack(
            "single_transformer_blocks",
            IMAGE_TEXT,
            MASKED_IMAGE_ROPE,
            inner=(Inner("attn", "attention", IMAGE_TEXT, MASKED_IMAGE_ROPE, keys="trails"),),
            single_stream=True,
        ),
    ),
    grid=Latents(),
    clock="scheduler",
    time=Time("time_guidance_embed.time_proj", "time_guidance_embed.timestep_embedder"),
    prompt=Prompt(through=("context_embedder.proj_in",), mask="encoder_attention_mask"),
)

TABLE = (FLUX, FLUX2, QWEN, CHROMA, OVIS, LONGCAT, BRIA, FIBO, AURAFLOW, COGVIEW4, HUNYUAN_IMAGE)
for backbone in TABLE:
    register(backbone)
