"""DiT (class-conditional ImageNet): self-attention only, the class in the modulation."""

from __future__ import annotations

from typing import Any

from shiva.backbones.base import Backbone, Call, Signals, Site, key_sites, register
from shiva.backbones.per_token import key_columns
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec


class DiT(Backbone):
    transformers = ("DiTTransformer2DModel",)
    conditional_half = 0

    def sites(self, transformer: Any) -> list[Site]:
        masked = {"attention_mask": key_columns}
        sites = []
        for layer, block in enumerate(transformer.transformer_blocks):
            whole = Site(f"transformer_blocks.{layer}", "block", layer, block, per_token=masked, index=layer)
            attention = whole.inside("attn1", "attention", per_token=masked)
            sites += [whole, attention, *key_sites(attention), whole.inside("ff", "ffn")]
        return sites

    def spec(self, transformer: Any) -> BackboneSpec:
        config = transformer.config
        width = transformer.inner_dim
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
        return Layout(height // patch, width // patch)

    def signals(self, transformer: Any, call: Call) -> Signals:
        """The class table is read directly: in training mode the module itself would drop labels at random."""
        embed = transformer.transformer_blocks[0].norm1.emb
        time = embed.timestep_embedder(embed.time_proj(call["timestep"]).to(call["hidden_states"].dtype))
        prompt = embed.class_embedder.embedding_table(call["class_labels"])
        return Signals(time.expand(prompt.shape[0], -1), prompt)


register(DiT())
