"""The image transformers that a pattern describes, an entry each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shiva.backbones.base import TextPlace, register
from shiva.backbones.grids import Latents, PositionIds, told_by_shapes
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
    key_columns,
    text_mask_before_ones,
)

TEXT_THEN_IMAGE_ROPE: PerTokens = {"image_rotary_emb": SharedRope(after_text=True)}
FFN = Inner("ff", "ffn")


def two_streams(block: PerTokens, attention: PerTokens, keys: TextPlace | None = "apart") -> Stack:
    """Blocks in which text and image attend to both, and have a feed-forward each."""
    inner = Inner("attn", "attention", IMAGE_TEXT, attention, keys=keys)
    return Stack("transformer_blocks", TEXT_IMAGE, block, inner=(inner, FFN))


def one_stream(block: PerTokens, attention: PerTokens, keys: TextPlace | None = "leads") -> Stack:
    """Blocks over one sequence, the text first, with attention and feed-forward in one."""
    inner = Inner("attn", "attention", per_token=attention, keys=keys)
    return Stack("single_transformer_blocks", per_token=block, text="leads", inner=(inner,), single_stream=True)


FUSED = Stack(
    "single_transformer_blocks",
    TEXT_IMAGE,
    TEXT_THEN_IMAGE_ROPE,
    inner=(Inner("attn", "attention", per_token=TEXT_THEN_IMAGE_ROPE, text="leads", keys="leads"),),
    single_stream=True,
)

MASKED = {"attention_mask": key_columns}


def sd3_variant(config: Any) -> str:
    return f"{len(config.dual_attention_layers)} dual attentions, qk_norm {config.qk_norm}"


SD3 = PatternBackbone(
    transformers=("SD3Transformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            TEXT_IMAGE,
            inner=(
                Inner("attn", "attention", IMAGE_TEXT, keys="apart"),
                Inner("attn2", "attention", keys="apart"),
                FFN,
            ),
            rotary=False,
        ),
    ),
    grid=Latents(),
    clock="scheduler",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder"),
    prompt=Prompt("pooled_projections", config="pooled_projection_dim"),
    variant=sd3_variant,
    extra={"skip_layers": None},
    notes="3 and 3.5",
)

PIXART = PatternBackbone(
    transformers=("PixArtTransformer2DModel",),
    toward=0,
    stacks=(
        Stack(
            "transformer_blocks",
            per_token=MASKED,
            inner=(
                Inner("attn1", "attention", per_token=MASKED, keys="apart"),
                Inner("attn2", "cross_attention"),
                FFN,
            ),
            rotary=False,
        ),
    ),
    grid=Latents(),
    clock="scheduler",
    time=Time("adaln_single.emb.time_proj", "adaln_single.emb.timestep_embedder"),
    prompt=Prompt(through=("caption_projection",), mask="encoder_attention_mask", config="cross_attention_dim"),
    notes="alpha and Sigma",
)

DIT_EMBEDDING = "transformer_blocks.0.norm1.emb"
DIT = PatternBackbone(
    transformers=("DiTTransformer2DModel",),
    toward=0,
    stacks=(
        Stack(
            "transformer_blocks",
            per_token=MASKED,
            inner=(Inner("attn1", "attention", per_token=MASKED, keys="apart"), FFN),
            rotary=False,
        ),
    ),
    grid=Latents(text=None),
    conditional_half=0,
    clock="scheduler",
    time=Time(f"{DIT_EMBEDDING}.time_proj", f"{DIT_EMBEDDING}.timestep_embedder"),
    # The table itself: in training mode the module around it would drop labels at random.
    prompt=Prompt("class_labels", through=(f"{DIT_EMBEDDING}.class_embedder.embedding_table",)),
)

FLUX = PatternBackbone(
    transformers=("FluxTransformer2DModel",),
    stacks=(two_streams(TEXT_THEN_IMAGE_ROPE, TEXT_THEN_IMAGE_ROPE), FUSED),
    grid=PositionIds(),
    layout_reads=("img_ids",),
    clock="fraction",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder", scale=1000),
    prompt=Prompt("pooled_projections", config="pooled_projection_dim"),
    notes="reference tokens (Kontext) always run; Fill and Control too",
)

FLUX2 = replace(
    FLUX,
    transformers=("Flux2Transformer2DModel",),
    stacks=(
        two_streams({**TEXT_THEN_IMAGE_ROPE, "temb_mod_img": Rows(only_with_axes=3)}, TEXT_THEN_IMAGE_ROPE),
        one_stream(
            {**TEXT_THEN_IMAGE_ROPE, "temb_mod": Rows(after_text=True, only_with_axes=3)},
            TEXT_THEN_IMAGE_ROPE,
            keys=None,
        ),
    ),
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
    grid=told_by_shapes,
    layout_reads=("img_shapes",),
    clock="fraction",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder", scale=1000),
    prompt=Prompt(through=("txt_norm", "txt_in"), mask="encoder_hidden_states_mask"),
    notes="Edit, Edit Plus and Layered too: reference tokens always run",
)

CHROMA_BLOCK: PerTokens = {**TEXT_THEN_IMAGE_ROPE, "attention_mask": KeyMask(after_text=True)}
CHROMA_ATTENTION: PerTokens = {**TEXT_THEN_IMAGE_ROPE, "attention_mask": SquareMask(after_text=True)}
CHROMA = replace(
    FLUX,
    transformers=("ChromaTransformer2DModel",),
    stacks=(
        two_streams(CHROMA_BLOCK, CHROMA_ATTENTION, keys=None),
        one_stream(CHROMA_BLOCK, CHROMA_ATTENTION, keys=None),
    ),
    time=Time("time_text_embed.time_proj", None, scale=1000),
    prompt=Prompt(through=("context_embedder",)),
    notes="its blocks build a square mask from the queries, so attends='selected'",
)

OVIS = replace(
    FLUX,
    transformers=("OvisImageTransformer2DModel",),
    time=Time("time_proj", "timestep_embedder", scale=1000),
    prompt=Prompt(through=("context_embedder_norm", "context_embedder")),
    notes="",
)

LONGCAT = replace(
    FLUX,
    transformers=("LongCatImageTransformer2DModel",),
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder", scale=1000),
    prompt=Prompt(through=("context_embedder",)),
    notes="Edit too: reference tokens always run",
)

BRIA = replace(
    FLUX,
    transformers=("BriaTransformer2DModel",),
    clock="scheduler",
    time=Time("time_embed.time_proj", "time_embed.timestep_embedder"),
    prompt=Prompt(through=("context_embedder",)),
    notes="",
)

FIBO_MASK = KeyMask(after_text=True)
FIBO_BLOCK: PerTokens = {**TEXT_THEN_IMAGE_ROPE, "joint_attention_kwargs": Within("attention_mask", FIBO_MASK)}
FIBO_ATTENTION: PerTokens = {**TEXT_THEN_IMAGE_ROPE, "attention_mask": FIBO_MASK}
FIBO = replace(
    BRIA,
    transformers=("BriaFiboTransformer2DModel",),
    stacks=(two_streams(FIBO_BLOCK, FIBO_ATTENTION), one_stream(FIBO_BLOCK, FIBO_ATTENTION)),
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

TABLE = (SD3, PIXART, DIT, FLUX, FLUX2, QWEN, CHROMA, OVIS, LONGCAT, BRIA, FIBO, AURAFLOW, COGVIEW4, HUNYUAN_IMAGE)
for backbone in TABLE:
    register(backbone)
