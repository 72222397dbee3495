"""Flux.1: double-stream blocks, then single-stream blocks; rotary positions at every attention."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from shiva.backbones.base import Backbone, Call, Ropes, Signals, Site, Surroundings, key_sites, register
from shiva.core.method import BackboneSpec


class WholeKeys:
    """Flux's attention where keys are more than queries, each with their own rotary rows; otherwise the stock one."""

    def __init__(self, stock: Any):
        self.stock = stock

    @property
    def _attention_backend(self) -> Any:
        """As diffusers' `set_attention_backend` reads and writes it."""
        return self.stock._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.stock._attention_backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        if not isinstance(image_rotary_emb, Ropes):
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

        def heads(projection: nn.Module, tokens: Tensor) -> Tensor:
            return projection(tokens).unflatten(-1, (-1, attn.head_dim))

        query = attn.norm_q(heads(attn.to_q, hidden_states))
        key = attn.norm_k(heads(attn.to_k, hidden_states))
        value = heads(attn.to_v, hidden_states)
        if encoder_hidden_states is not None:
            query = torch.cat([attn.norm_added_q(heads(attn.add_q_proj, encoder_hidden_states)), query], dim=1)
            key = torch.cat([attn.norm_added_k(heads(attn.add_k_proj, encoder_hidden_states)), key], dim=1)
            value = torch.cat([heads(attn.add_v_proj, encoder_hidden_states), value], dim=1)
        mixed = dispatch_attention_fn(
            apply_rotary_emb(query, image_rotary_emb.queries, sequence_dim=1),
            apply_rotary_emb(key, image_rotary_emb.keys, sequence_dim=1),
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
        )
        mixed = mixed.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return mixed
        text, image = mixed.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        for layer in attn.to_out:
            image = layer(image)
        return image, attn.to_add_out(text)


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
            sites += key_sites(f"{path}.attn", i, block.attn)
            sites.append(Site(f"{path}.ff", "ffn", i, block.ff))
        double = len(transformer.transformer_blocks)
        for i, block in enumerate(transformer.single_transformer_blocks):
            path, layer = f"single_transformer_blocks.{i}", double + i
            sites.append(Site(path, "block", layer, block, outputs=("text", "image"), rope=rope))
            sites.append(Site(f"{path}.attn", "attention", layer, block.attn, text_leads=True, rope=rope))
            sites += key_sites(f"{path}.attn", layer, block.attn, text_leads=True)
        return sites

    @contextlib.contextmanager
    def whole_keys(self, transformer: Any, layers: Collection[int]) -> Iterator[None]:
        attentions: list[Any] = [self.blocks(transformer)[layer].attn for layer in layers]
        foreign = {type(attn.processor).__name__ for attn in attentions} - {"FluxAttnProcessor"}
        if foreign:
            raise ValueError(
                f"attends='all' replaces Flux's own attention processor, but finds {', '.join(sorted(foreign))}; "
                "detach what set it, or pass attends='selected'"
            )
        before = [attn.processor for attn in attentions]
        for attn in attentions:
            attn.processor = WholeKeys(attn.processor)
        try:
            yield
        finally:
            for attn, processor in zip(attentions, before, strict=True):
                attn.processor = processor

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
