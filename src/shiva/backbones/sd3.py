"""Stable Diffusion 3 and 3.5 (MMDiT): joint attention over separate text and image streams."""

from __future__ import annotations

from typing import Any

from shiva.backbones.base import Backbone, Call, Signals, Site, Surroundings, key_sites, register
from shiva.core.method import BackboneSpec


class SD3(Backbone):
    transformers = ("SD3Transformer2DModel",)

    def sites(self, transformer: Any) -> list[Site]:
        sites = []
        for layer, block in enumerate(transformer.transformer_blocks):
            path = f"transformer_blocks.{layer}"
            sites.append(Site(path, "block", layer, block, outputs=("text", "image")))
            sites.append(Site(f"{path}.attn", "attention", layer, block.attn, outputs=("image", "text")))
            sites += key_sites(f"{path}.attn", layer, block.attn)
            if block.attn2 is not None:
                sites.append(Site(f"{path}.attn2", "attention", layer, block.attn2))
                sites += key_sites(f"{path}.attn2", layer, block.attn2)
            sites.append(Site(f"{path}.ff", "ffn", layer, block.ff))
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

    def surroundings(self, transformer: Any, call: Call) -> Surroundings:
        height, width = call["hidden_states"].shape[-2:]
        patch = transformer.config.patch_size
        return Surroundings(
            grid=(height // patch, width // patch),
            timestep=call["timestep"],
            text_tokens=call["encoder_hidden_states"].shape[1],
        )

    def signals(self, transformer: Any, call: Call) -> Signals:
        embed, pooled = transformer.time_text_embed, call["pooled_projections"]
        time = embed.timestep_embedder(embed.time_proj(call["timestep"]).to(pooled.dtype))
        return Signals(time.expand(pooled.shape[0], -1), pooled)

    def is_extra(self, call: Call) -> bool:
        """The call of skip-layer guidance."""
        return call.get("skip_layers") is not None


register(SD3())
