"""Image transformers that a pattern describes but for one part, which is code."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shiva.backbones.base import Call, register
from shiva.backbones.grids import Latents, PositionIds
from shiva.backbones.patterns import IMAGE_TEXT, Inner, PatternBackbone, Prompt, Stack, Time
from shiva.backbones.per_token import Chosen, KeyMask, PerTokens, Rope, Rows, SharedRope, shared_rows
from shiva.core.layout import Layout

SEQUENCE_ROPE = Rope(after_text=True)
SEQUENCE_MASK = KeyMask(after_text=True)


# -- Z-Image: lists of pictures and captions, both padded to a multiple ------------------------------

ZIMAGE_MULTIPLE = 32


def zimage_grid(transformer: Any, call: Call) -> Layout:
    """Image, its padding, then the longest padded caption; padding is learned tokens, which always run."""
    if isinstance(call["x"][0], list):
        raise ValueError("Z-Image Omni is not supported: its sequence holds several pictures, each padded")
    _, frames, height, width = call["x"][0].shape
    patch, patch_t = call.get("patch_size", 2), call.get("f_patch_size", 1)
    rows, columns, frames = height // patch, width // patch, frames // patch_t
    captions = max(-(-caption.shape[0] // ZIMAGE_MULTIPLE) for caption in call["cap_feats"]) * ZIMAGE_MULTIPLE
    return Layout(rows, columns, frames, text=-(rows * columns * frames) % ZIMAGE_MULTIPLE + captions)


@dataclass(frozen=True)
class Captions(Prompt):
    """The mean of each caption of a list."""

    def __call__(self, transformer: Any, call: Call) -> Tensor:
        embed = transformer.get_submodule(self.through[0])
        return torch.stack([embed(caption).mean(dim=0) for caption in call[self.argument]])


@dataclass(frozen=True, kw_only=True)
class ZImage(PatternBackbone):
    def latents_of(self, call: Call) -> Tensor:
        return torch.stack(call["x"])


ZIMAGE_SEQUENCE: PerTokens = {"freqs_cis": Rope(), "attention_mask": KeyMask()}
ZIMAGE = ZImage(
    transformers=("ZImageTransformer2DModel",),
    toward=-1,
    stacks=(
        Stack(
            "layers",
            per_token={"freqs_cis": Rope(), "attn_mask": KeyMask()},
            image="x",
            text="trails",
            inner=(
                Inner("attention", "attention", per_token=ZIMAGE_SEQUENCE, keys="trails"),
                Inner("feed_forward", "ffn"),
            ),
        ),
    ),
    grid=zimage_grid,
    priced_by_running=True,
    latents="x",
    conditional_half=0,
    clock="rising fraction",
    time=Time(None, "t_embedder", scale=1000, argument="t"),
    prompt=Captions("cap_feats", through=("cap_embedder",)),
    heads="n_heads",
    width="dim",
    notes="main layers; refiners run dense; Omni is refused",
)


# -- Lumina 2: captions without their padding, so of a length for each sample ------------------------


def lumina2_grid(transformer: Any, call: Call) -> Layout:
    layout = Latents()(transformer, call)
    mask = call["encoder_attention_mask"]
    if mask.is_meta:
        return layout
    lengths = set(mask.sum(dim=1).tolist())
    if len(lengths) > 1:
        raise ValueError(
            f"Lumina 2 puts each image after its own caption, here of {min(lengths)} to {max(lengths)} tokens; "
            "draw prompts of different lengths one by one"
        )
    return Layout(layout.rows, layout.columns, text=int(lengths.pop()))


LUMINA2 = PatternBackbone(
    transformers=("Lumina2Transformer2DModel",),
    toward=-1,
    stacks=(
        Stack(
            "layers",
            per_token={"image_rotary_emb": SEQUENCE_ROPE, "attention_mask": SEQUENCE_MASK},
            text="leads",
            inner=(Inner("attn", "keys", keys="leads"), Inner("feed_forward", "ffn")),
        ),
    ),
    grid=lumina2_grid,
    layout_reads=("encoder_attention_mask",),
    priced_by_running=True,
    clock="rising fraction",
    time=Time("time_caption_embed.time_proj", "time_caption_embed.timestep_embedder"),
    prompt=Prompt(through=("time_caption_embed.caption_embedder",), mask="encoder_attention_mask"),
    width="hidden_size",
    notes="main layers; prompts of one batch must be of one length",
)


# -- HiDream: pictures that are not square are padded, and each block adds its own text --------------


def hidream_grid(transformer: Any, call: Call) -> Layout:
    if call["hidden_states"].ndim != 4:
        raise ValueError("HiDream is supported with latents (B, C, H, W), which it patches itself")
    layout = Latents(text="encoder_hidden_states_t5")(transformer, call)
    padding = 0 if layout.rows == layout.columns else transformer.max_seq - layout.tokens
    text = layout.text + 2 * call["encoder_hidden_states_llama3"].shape[2]
    return Layout(layout.rows, layout.columns, text=text, after=padding)


HIDREAM_SEQUENCE: PerTokens = {"image_rotary_emb": Rows(), "hidden_states_masks": Rows()}
HIDREAM = PatternBackbone(
    transformers=("HiDreamImageTransformer2DModel",),
    toward=-1,
    stacks=(
        Stack("double_stream_blocks", IMAGE_TEXT, HIDREAM_SEQUENCE),
        Stack("single_stream_blocks", per_token=HIDREAM_SEQUENCE, text="trails", single_stream=True),
    ),
    grid=hidream_grid,
    priced_by_running=True,
    lets_hold=False,
    clock="scheduler",
    time=Time("t_embedder.time_proj", "t_embedder.timestep_embedder", argument="timesteps"),
    prompt=Prompt("pooled_embeds", config="text_emb_dim"),
    notes="whole blocks; padding of pictures that are not square always runs",
)


# -- Krea 2: text of several layers, a time embedding of its own -------------------------------------


@dataclass(frozen=True)
class KreaTime(Time):
    def __call__(self, transformer: Any, call: Call, like: Tensor) -> Tensor:
        return transformer.time_embed(call[self.argument], like.dtype)[:, 0].expand(like.shape[0], -1)


KREA_SEQUENCE: PerTokens = {"image_rotary_emb": SharedRope(after_text=True), "attention_mask": SEQUENCE_MASK}
KREA2 = PatternBackbone(
    transformers=("Krea2Transformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            per_token=KREA_SEQUENCE,
            text="leads",
            inner=(Inner("attn", "attention", per_token=KREA_SEQUENCE, keys="leads"), Inner("ff", "ffn")),
        ),
    ),
    grid=PositionIds("position_ids", with_text=True),
    layout_reads=("position_ids",),
    clock="fraction",
    time=KreaTime(None, "time_embed"),
    prompt=Prompt(config="text_hidden_dim", mask="encoder_attention_mask"),
)


# -- Qwen-Image 2.1: text and references interleaved, the image always last --------------------------


def qwen21_grid(transformer: Any, call: Call) -> Layout:
    """Every slot of a picture among the text stands for four tokens; once cached, only the image's own remain."""
    frames, rows, columns = call["img_shapes"][0][-1]
    pictures = call["hidden_states"].shape[1]
    prefix = call["img_mask"].shape[1] + 3 * pictures // 4 - frames * rows * columns
    return Layout(rows, columns, frames, text=0 if call.get("kv_cache_mode") == "cached" else prefix)


def last_columns(mask: Tensor, chosen: Chosen) -> Tensor:
    """A mask that ends with the image's tokens, all alike there; pricing may ask for more than there are."""
    others = mask.shape[-1] - chosen.layout.tokens
    own = mask[..., -1:].expand(*mask.shape[:-1], chosen.positions.shape[1])
    return torch.cat([mask[..., :others], own], dim=-1)


def sequence_rope(rope: Tensor, chosen: Chosen) -> Any:
    """Complex rows (S, D/2) of text and image."""
    return shared_rows(rope, chosen.rows(rope.shape[0], after_text=True))


@dataclass(frozen=True, kw_only=True)
class Qwen21(PatternBackbone):
    def priced(self, call: Call) -> Call:
        """Its own cache of keys by sizes alone, as zeros that share one place."""
        if call.get("kv_cache") is None:
            return call
        cache = copy.copy(call["kv_cache"])
        cache.layer_caches = [copy.copy(layer) for layer in cache.layer_caches]
        for layer in cache.layer_caches:
            vars(layer).update(tree_map_only(Tensor, lambda kept: kept.new_zeros(()).expand_as(kept), vars(layer)))
        return {**call, "kv_cache": cache}


QWEN21 = Qwen21(
    transformers=("QwenImage21Transformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            per_token={
                "rotary_emb": sequence_rope,
                "target_token_mask": last_columns,
                "key_valid": last_columns,
                "attention_mask": last_columns,
            },
            text="leads",
        ),
    ),
    grid=qwen21_grid,
    layout_reads=("img_shapes",),
    priced_by_running=True,
    clock="fraction",
    time=Time("time_text_embed.time_proj", "time_text_embed.timestep_embedder", scale=1000),
    prompt=Prompt(through=("txt_in",), mask="encoder_hidden_states_mask"),
    notes="whole blocks; with its own KV cache too; not with the flex attention processor",
)

TABLE = (ZIMAGE, LUMINA2, HIDREAM, KREA2, QWEN21)
for backbone in TABLE:
    register(backbone)
