"""DiT (class-conditional ImageNet): self-attention only, the class in the modulation."""

from __future__ import annotations

from typing import Any

from shiva.backbones.base import Backbone, Call, Signals, Site, Surroundings, key_sites, register
from shiva.core.method import BackboneSpec


class DiT(Backbone):
    transformers = ("DiTTransformer2DModel",)
    conditional_half = 0

    def sites(self, transformer: Any) -> list[Site]:
        mask = "attention_mask"
        sites = []
        for layer, block in enumerate(transformer.transformer_blocks):
            path = f"transformer_blocks.{layer}"
            sites.append(Site(path, "block", layer, block, mask=mask))
            sites.append(Site(f"{path}.attn1", "attention", layer, block.attn1, mask=mask))
            sites += key_sites(f"{path}.attn1", layer, block.attn1)
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
            prompt_width=width,
            heads=config.num_attention_heads,
        )

    def surroundings(self, transformer: Any, call: Call) -> Surroundings:
        height, width = call["hidden_states"].shape[-2:]
        patch = transformer.config.patch_size
        return Surroundings(grid=(height // patch, width // patch), timestep=call["timestep"], text_tokens=0)

    def signals(self, transformer: Any, call: Call) -> Signals:
        """The class table is read directly: in training mode the module itself would drop labels at random."""
        embed = transformer.transformer_blocks[0].norm1.emb
        time = embed.timestep_embedder(embed.time_proj(call["timestep"]).to(call["hidden_states"].dtype))
        prompt = embed.class_embedder.embedding_table(call["class_labels"])
        return Signals(time.expand(prompt.shape[0], -1), prompt)


register(DiT())
