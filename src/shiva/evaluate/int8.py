"""INT8 feed-forward layers in some blocks, for as long as a candidate runs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from shiva.backbones.base import backbone_of
from shiva.core.needs import need


@contextlib.contextmanager
def quantized(pipe: Any, blocks: int) -> Iterator[None]:
    """Weights and activations of the last `blocks` blocks' FFNs in INT8; a trained adapter is merged in first.

    Linear layers are replaced by quantized copies and put back afterwards, so nothing of it stays.
    """
    if blocks <= 0:
        yield
        return
    quantization, transformer = need("torchao.quantization", "quant"), pipe.transformer
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    layers = backbone_of(transformer).spec(transformer).layers
    if blocks > layers:
        raise ValueError(f"int8: {blocks} is more than the {layers} blocks of {type(transformer).__name__}")
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for site in backbone_of(transformer).sites(transformer):
            if site.kind == "ffn" and site.layer >= layers - blocks:
                for parent, name, linear in _linears(site.module):
                    parent._modules[name] = holder = nn.Sequential(_merged(linear))
                    replaced.append((parent, name, linear))
                    quantization.quantize_(holder, config)
        yield
    finally:
        for parent, name, linear in replaced:
            parent._modules[name] = linear


def _linears(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every linear layer inside, with or without an adapter around it: (parent, name, layer)."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) or hasattr(child, "base_layer"):
            found.append((module, name, child))
        else:
            found += _linears(child)
    return found


def _merged(layer: nn.Module) -> nn.Module:
    """A plain linear copy of a layer, its adapter folded in."""
    layer = copy.deepcopy(layer)
    if not hasattr(layer, "base_layer"):
        return layer
    adapted: Any = layer
    adapted.merge()
    return adapted.get_base_layer()
