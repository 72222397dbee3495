"""A checkpoint's adapter: folded into the weights, where it costs nothing, and taken out without a trace."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ADAPTER_NAME = "shiva"
KNOWN = ("lora_alpha", "r", "target_modules", "use_dora")
"""Arguments of PEFT's LoraConfig that a checkpoint may give; others change how weights are made or loaded."""


class AttachedAdapter:
    """A PEFT adapter put into a transformer.

    Run live, DoRA adds products and norms to every layer. So it is folded into the weights, and the originals wait in
    main memory for `remove()`. Where weights are not plain numbers in reach (quantized, offloaded), it stays live.
    """

    def __init__(self, transformer: nn.Module, config: Mapping[str, Any], weights: Mapping[str, Tensor]):
        self.transformer = transformer
        self._originals: list[tuple[nn.Linear, Tensor]] = []
        foreign = sorted(config.keys() - KNOWN)
        if foreign:
            raise ValueError(f"the adapter's config has {foreign[0]!r}; only {', '.join(KNOWN)} are known")
        need_peft()
        try:
            inject_adapter(transformer, config, weights)
            if all(map(can_fold, adapted_layers(transformer))):
                self._fold()
        except BaseException:
            remove_adapter(transformer, ADAPTER_NAME)
            self.remove()
            raise

    @property
    def folded(self) -> bool:
        return bool(self._originals)

    def _fold(self) -> None:
        for layer in adapted_layers(self.transformer):
            base: nn.Linear = layer.get_base_layer()
            self._originals.append((base, base.weight.data.cpu()))
            layer.merge(safe_merge=True, adapter_names=[ADAPTER_NAME])  # a new tensor: the original stays as it is
            layer.merged_adapters.remove(ADAPTER_NAME)  # or a user's own adapter on the layer would fall silent
        remove_adapter(self.transformer, ADAPTER_NAME)

    def remove(self) -> None:
        """Give every layer the weights it had, bit for bit."""
        if not self.folded:
            remove_adapter(self.transformer, ADAPTER_NAME)
        for base, original in self._originals:
            base.weight.data = original.to(base.weight.data)
        self._originals.clear()


def need_peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(
            "this checkpoint has an adapter, which needs PEFT: pip install 'shiva-dit[adapter]'"
        ) from error


def adapted_layers(transformer: nn.Module) -> list[Any]:
    """PEFT's layers that hold the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in transformer.modules() if isinstance(m, BaseTunerLayer)]
    return [layer for layer in layers if ADAPTER_NAME in layer._get_available_adapters()]


def can_fold(layer: Any) -> bool:
    base = layer.get_base_layer()
    if type(base) is not nn.Linear or layer.merged_adapters:
        return False
    weight = base.weight.data
    return type(weight) is Tensor and torch.is_floating_point(weight) and not weight.is_meta


def inject_adapter(transformer: nn.Module, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Add a PEFT adapter to any transformer, also those without diffusers' own adapter support."""
    peft = need_peft()
    trainable = {name for name, p in transformer.named_parameters() if p.requires_grad}
    peft.inject_adapter_in_model(peft.LoraConfig(**config), transformer, adapter_name=ADAPTER_NAME)
    result = peft.set_peft_model_state_dict(transformer, dict(weights), adapter_name=ADAPTER_NAME)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(name.replace(".base_layer.", ".") in trainable)
    unexpected = list(getattr(result, "unexpected_keys", None) or [])
    if unexpected:
        raise ValueError(f"the adapter's {unexpected[0]} has no place in {type(transformer).__name__}")


def remove_adapter(transformer: nn.Module, name: str) -> None:
    """Take an adapter out; a layer without any other adapter becomes the plain layer it was."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in list(transformer.named_modules()):
        if not isinstance(module, BaseTunerLayer):
            continue
        module.delete_adapter(name)
        if not module._get_available_adapters():
            parent, _, leaf = path.rpartition(".")
            setattr(transformer.get_submodule(parent), leaf, module.get_base_layer())
    known = getattr(transformer, "peft_config", None)
    if known is not None:
        known.pop(name, None)
        if not known:
            del transformer.peft_config
