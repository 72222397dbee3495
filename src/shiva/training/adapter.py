"""The DoRA adapter of joint tuning, through PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shiva.adapters import ADAPTER_NAME, adapted_layers
from shiva.backbones.base import Backbone
from shiva.training.dora import fold_in_training
from shiva.training.needs import need


def adapter_targets(transformer: nn.Module, backbone: Backbone) -> list[str]:
    """Paths inside a block of all attention and FFN linears; modulation stays as it is.

    PEFT takes such a path wherever it is, so one that is also found outside the blocks is given whole.
    """
    inside = {
        module: name
        for block in backbone.blocks(transformer)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not any(part.startswith("norm") for part in name.split("."))
    }
    others = [f".{path}" for path, module in transformer.named_modules() if module not in inside]
    ambiguous = {name for name in inside.values() if any(path.endswith(f".{name}") for path in others)}
    paths = {path for path, module in transformer.named_modules() if inside.get(module) in ambiguous}
    return sorted(paths | (set(inside.values()) - ambiguous))


def adapter_config(transformer: nn.Module, backbone: Backbone, rank: int, alpha: int, dora: bool) -> dict[str, Any]:
    """Arguments of PEFT's LoraConfig, plain enough for JSON."""
    targets = adapter_targets(transformer, backbone)
    return {"r": rank, "lora_alpha": alpha, "use_dora": dora, "target_modules": targets}


def add_adapter(transformer: nn.Module, config: dict[str, Any], seed: int) -> None:
    """Inject a fresh adapter, float32 and trainable; it starts as the identity, from a seed of its own."""
    peft = need("peft")
    frozen = {name for name, p in transformer.named_parameters() if not p.requires_grad}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(peft.LoraConfig(**config), transformer, adapter_name=ADAPTER_NAME)
    for parameter in adapter_parameters(transformer):
        parameter.data = parameter.data.float()
    for layer in adapted_layers(transformer):
        fold_in_training(layer, ADAPTER_NAME)
    for name, parameter in transformer.named_parameters():
        if name.replace(".base_layer.", ".") in frozen:
            parameter.requires_grad_(False)


def adapter_parameters(transformer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in transformer.named_parameters() if f".{ADAPTER_NAME}." in name]


def adapter_state(transformer: nn.Module) -> dict[str, Tensor]:
    state = need("peft").get_peft_model_state_dict(transformer, adapter_name=ADAPTER_NAME)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def load_adapter_state(transformer: nn.Module, state: dict[str, Tensor]) -> None:
    need("peft").set_peft_model_state_dict(transformer, state, adapter_name=ADAPTER_NAME)


@contextlib.contextmanager
def adapters_off(transformer: nn.Module) -> Iterator[None]:
    """Run the base weights alone inside this context; which parameters train is left untouched."""
    if not hasattr(transformer, "peft_config"):
        yield
        return
    tuner = need("peft.tuners.tuners_utils").BaseTunerLayer
    layers = [module for module in transformer.modules() if isinstance(module, tuner)]
    trained = [p for p in transformer.parameters() if p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in transformer.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
