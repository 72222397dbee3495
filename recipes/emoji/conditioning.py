"""Prompts to the two tensors that the transformer takes, exactly as StableDiffusion3Pipeline makes them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from recipes.emoji.captions import captions_of, own_tags, paraphrases_of
from recipes.emoji.common import EmojiData
from recipes.emoji.towers import tokenize


@dataclass(frozen=True)
class Text:
    """Hidden states of both towers side by side, and both pooled embeddings."""

    hidden: Tensor  # (..., 16, 256)
    pooled: Tensor  # (..., 256)

    def __getitem__(self, index: object) -> Text:
        return Text(self.hidden[index], self.pooled[index])  # type: ignore[index]

    def with_zero_tokens(self, count: int = 256) -> Text:
        """What a plain stock call appends in place of T5."""
        zeros = self.hidden.new_zeros(len(self.hidden), count, self.hidden.shape[-1])
        return Text(torch.cat([self.hidden, zeros], dim=1), self.pooled)


class TextEncoder:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
        self.towers = [
            CLIPTextModelWithProjection.from_pretrained(folder / name).eval()
            for name in ("text_encoder", "text_encoder_2")
        ]

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> Text:
        ids = tokenize(self.tokenizer, prompts)
        outputs = [tower(ids, output_hidden_states=True) for tower in self.towers]
        return Text(
            torch.cat([output.hidden_states[-2] for output in outputs], dim=-1),
            torch.cat([output.text_embeds for output in outputs], dim=-1),
        )


def encode_captions(encoder: TextEncoder, data: EmojiData, rows: Tensor, variants: int, paraphrases: int = 0) -> Text:
    """Captions and paraphrases of each row, the bare label first: hidden (R, V, 16, 256), pooled (R, V, 256)."""
    rng = random.Random(1)
    captions = [captions_of(data.labels[row], data.tags[row], variants, rng) for row in rows.tolist()]
    core = [row for row in range(len(data.labels)) if data.core[row]]
    synonyms = dict(zip(core, own_tags([data.labels[r] for r in core], [data.tags[r] for r in core]), strict=True))
    for row, some in zip(rows.tolist(), captions, strict=True):
        some += paraphrases_of(data.labels[row], data.groups[row], synonyms[row], paraphrases, rng)
    encoded = [encoder(group) for group in captions]
    return Text(torch.stack([e.hidden for e in encoded]), torch.stack([e.pooled for e in encoded]))
