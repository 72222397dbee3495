"""Flux.1: double-stream blocks, then single-stream blocks; rotary positions at every attention."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from shiva.backbones.base import Backbone, Call, Signals, Site, key_sites, register
from shiva.backbones.grids import PositionIds
from shiva.backbones.per_token import Ropes, shared_rope
from shiva.core.layout import Layout
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
    notes = "reference tokens (Kontext) always run; Fill and Control too"
    layout_reads = ("img_ids",)

    def sites(self, transformer: Any) -> list[Site]:
        rope = {"image_rotary_emb": partial(shared_rope, after_text=True)}
        streams = ("text", "image")
        sites = []
        for i, block in enumerate(transformer.transformer_blocks):
            path = f"transformer_blocks.{i}"
            whole = Site(path, "block", i, block, streams, per_token=rope, stack="double", index=i, rotary=True)
            attention = whole.inside("attn", "attention", outputs=("image", "text"), per_token=rope)
            sites += [whole, attention, *key_sites(attention), whole.inside("ff", "ffn")]
        single: dict[str, Any] = {"per_token": rope, "stack": "single", "rotary": True, "single_stream": True}
        for i, block in enumerate(transformer.single_transformer_blocks):
            layer = len(transformer.transformer_blocks) + i
            whole = Site(f"single_transformer_blocks.{i}", "block", layer, block, streams, index=i, **single)
            attention = whole.inside("attn", "attention", text="leads", per_token=rope)
            sites += [whole, attention, *key_sites(attention)]
        return sites

    @contextlib.contextmanager
    def whole_keys(self, transformer: Any, layers: Collection[int]) -> Iterator[None]:
        found = [site for site in self.sites(transformer) if site.kind == "attention" and site.layer in layers]
        attentions: list[Any] = [site.module for site in found]
        foreign = {type(attn.processor).__name__ for attn in attentions} - {"FluxAttnProcessor"}
        if foreign:
            raise ValueError(
                f"attends='all' replaces Flux's own attention processor, but finds {', '.join(sorted(foreign))}; "
                "detach what set it, or pass attends='selected'"
            )
        before = [attn.processor for attn in attentions]
        ours = [WholeKeys(processor) for processor in before]
        for attn, processor in zip(attentions, ours, strict=True):
            attn.processor = processor
        try:
            yield
        finally:
            for attn, mine, stock in zip(attentions, ours, before, strict=True):
                if attn.processor is mine:
                    attn.processor = stock

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

    def layout(self, transformer: Any, call: Call) -> Layout:
        """Rows and columns from the position ids; reference tokens (Kontext) are not the image's own."""
        return PositionIds()(transformer, call)

    def timestep(self, call: Call) -> Tensor:
        return call["timestep"] * 1000

    def signals(self, transformer: Any, call: Call) -> Signals:
        embed, pooled = transformer.time_text_embed, call["pooled_projections"]
        time = embed.timestep_embedder(embed.time_proj(call["timestep"] * 1000).to(pooled.dtype))
        return Signals(time.expand(pooled.shape[0], -1), pooled)


register(Flux())
