"""Flux.1: double-stream blocks, then single-stream blocks; rotary positions at every attention."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from shiva.backbones.base import Backbone, Call, Signals, Site, Surroundings, register
from shiva.core.method import BackboneSpec


class Flux(Backbone):
    transformers = ("FluxTransformer2DModel",)

    def __init__(self) -> None:
        self._known_ids: weakref.ref[Tensor] | None = None
        self._known_grid = (0, 0)

    def blocks(self, transformer: Any) -> list[nn.Module]:
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    def sites(self, transformer: Any) -> list[Site]:
        rope = "image_rotary_emb"
        sites = []
        for i, block in enumerate(transformer.transformer_blocks):
            path = f"transformer_blocks.{i}"
            sites.append(Site(path, "block", i, block, outputs=("text", "image"), rope=rope))
            sites.append(Site(f"{path}.attn", "attention", i, block.attn, outputs=("image", "text"), rope=rope))
            sites.append(Site(f"{path}.ff", "ffn", i, block.ff))
        double = len(transformer.transformer_blocks)
        for i, block in enumerate(transformer.single_transformer_blocks):
            path, layer = f"single_transformer_blocks.{i}", double + i
            sites.append(Site(path, "block", layer, block, outputs=("text", "image"), rope=rope))
            sites.append(Site(f"{path}.attn", "attention", layer, block.attn, text_leads=True, rope=rope))
        return sites

    def spec(self, transformer: Any) -> BackboneSpec:
        config = transformer.config
        width = transformer.inner_dim
        return BackboneSpec(
            name=type(transformer).__name__,
            layers=config.num_layers + config.num_single_layers,
            width=width,
            time_width=width,
            prompt_width=config.pooled_projection_dim,
            heads=config.num_attention_heads,
        )

    def surroundings(self, transformer: Any, call: Call) -> Surroundings:
        return Surroundings(
            grid=self._grid(call["img_ids"], call["hidden_states"].shape[1]),
            timestep=call["timestep"] * 1000,
            text_tokens=call["encoder_hidden_states"].shape[1],
        )

    def _grid(self, ids: Tensor, tokens: int) -> tuple[int, int]:
        """Rows and columns from the position ids, read once per ids tensor: the pipeline keeps one a run.

        Meta ids have no values; any grid of that many tokens prices alike.
        """
        if self._known_ids is not None and self._known_ids() is ids:
            return self._known_grid
        if ids.is_meta:
            rows = next(r for r in range(int(tokens**0.5), 0, -1) if tokens % r == 0)
            return rows, tokens // rows
        *_, last_row, last_column = ids.reshape(-1, ids.shape[-1]).amax(dim=0).tolist()
        grid = (int(last_row) + 1, int(last_column) + 1)
        if grid[0] * grid[1] != tokens:
            raise ValueError(
                f"img_ids describe a {grid[0]}x{grid[1]} grid but the latents hold {tokens} tokens; "
                "reference-image tokens (Kontext) are not supported"
            )
        self._known_ids, self._known_grid = weakref.ref(ids), grid
        return grid

    def signals(self, transformer: Any, call: Call) -> Signals:
        embed, pooled = transformer.time_text_embed, call["pooled_projections"]
        time = embed.timestep_embedder(embed.time_proj(call["timestep"] * 1000).to(pooled.dtype))
        return Signals(time.expand(pooled.shape[0], -1), pooled)


register(Flux())
