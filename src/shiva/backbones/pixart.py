"""PixArt-alpha and -Sigma: self-attention over image tokens, cross-attention to the caption."""

from __future__ import annotations

from typing import Any

from shiva.backbones.base import Backbone, Call, Signals, Site, key_sites, register
from shiva.backbones.per_token import key_columns
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec


class PixArt(Backbone):
    transformers = ("PixArtTransformer2DModel",)
    notes = "alpha and Sigma; its cross-attention too"

    def sites(self, transformer: Any) -> list[Site]:
        masked = {"attention_mask": key_columns}
        sites = []
        for layer, block in enumerate(transformer.transformer_blocks):
            whole = Site(f"transformer_blocks.{layer}", "block", layer, block, per_token=masked, index=layer)
            attention = whole.inside("attn1", "attention", per_token=masked)
            sites += [whole, attention, *key_sites(attention)]
            sites += [whole.inside("attn2", "cross_attention"), whole.inside("ff", "ffn")]
        return sites

    def spec(self, transformer: Any) -> BackboneSpec:
        config = transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        return BackboneSpec(
            name=type(transformer).__name__,
            layers=config.num_layers,
            width=width,
            time_width=width,
            prompt_width=width,
            heads=config.num_attention_heads,
        )

    def layout(self, transformer: Any, call: Call) -> Layout:
        height, width = call["hidden_states"].shape[-2:]
        patch = transformer.config.patch_size
        return Layout(height // patch, width // patch, text=call["encoder_hidden_states"].shape[1])

    def signals(self, transformer: Any, call: Call) -> Signals:
        """The prompt signal is the mean of the projected caption over its real tokens."""
        embed = transformer.adaln_single.emb
        text = call["encoder_hidden_states"]
        time = embed.timestep_embedder(embed.time_proj(call["timestep"]).to(text.dtype))
        if transformer.caption_projection is not None:
            text = transformer.caption_projection(text)
        mask = call.get("encoder_attention_mask")
        if mask is None or mask.ndim != 2:
            prompt = text.mean(dim=1)
        else:
            weights = mask.to(text.dtype)[..., None]  # (B, T, 1)
            prompt = (text * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return Signals(time.expand(text.shape[0], -1), prompt)


register(PixArt())
