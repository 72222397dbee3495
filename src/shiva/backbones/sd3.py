"""Stable Diffusion 3 and 3.5 (MMDiT): joint attention over separate text and image streams."""

from __future__ import annotations

from typing import Any

from shiva.backbones.base import Backbone, Call, Signals, Site, key_sites, register
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec


class SD3(Backbone):
    transformers = ("SD3Transformer2DModel",)
    notes = "3 and 3.5"

    def sites(self, transformer: Any) -> list[Site]:
        sites = []
        for layer, block in enumerate(transformer.transformer_blocks):
            path = f"transformer_blocks.{layer}"
            whole = Site(path, "block", layer, block, outputs=("text", "image"), index=layer)
            attentions = [whole.inside("attn", "attention", outputs=("image", "text"))]
            if block.attn2 is not None:
                attentions.append(whole.inside("attn2", "attention"))
            sites.append(whole)
            for attention in attentions:
                sites += [attention, *key_sites(attention)]
            sites.append(whole.inside("ff", "ffn"))
        return sites

    def spec(self, transformer: Any) -> BackboneSpec:
        config = transformer.config
        width = transformer.inner_dim
        return BackboneSpec(
            name=type(transformer).__name__,
            layers=config.num_layers,
            width=width,
            time_width=width,
            prompt_width=config.pooled_projection_dim,
            heads=config.num_attention_heads,
            variant=f"{len(config.dual_attention_layers)} dual attentions, qk_norm {config.qk_norm}",
        )

    def layout(self, transformer: Any, call: Call) -> Layout:
        height, width = call["hidden_states"].shape[-2:]
        patch = transformer.config.patch_size
        return Layout(height // patch, width // patch, text=call["encoder_hidden_states"].shape[1])

    def signals(self, transformer: Any, call: Call) -> Signals:
        embed, pooled = transformer.time_text_embed, call["pooled_projections"]
        time = embed.timestep_embedder(embed.time_proj(call["timestep"]).to(pooled.dtype))
        return Signals(time.expand(pooled.shape[0], -1), pooled)

    def is_extra(self, call: Call) -> bool:
        """The call of skip-layer guidance."""
        return call.get("skip_layers") is not None


register(SD3())
