"""The DoRA adapter of joint tuning, through PEFT, with each adapted layer run as one product.

PEFT runs the frozen layer, the low-rank path and four elementwise passes over the tokens. But the adapted layer is one
linear map, and folding it costs as much as running it on `rank` tokens more. Here it is folded, run once, and folded
again in the backward pass, so that nothing of its size is kept; the gradients of the low-rank factors stay low-rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiva.adapter import ADAPTER_NAME, adapted_layers, load_adapter
from shiva.backbones.base import Backbone
from shiva.core.needs import need
from shiva.session import Session
from shiva.training.sections import Adapter


def adapter_targets(transformer: nn.Module, backbone: Backbone) -> list[str]:
    """Paths inside a block of all attention and FFN linears; modulation stays as it is.

    PEFT takes such a path wherever it is, so one that is also found outside the blocks is given whole.
    """
    inside = {
        module: name
        for site in backbone.sites(transformer)
        if site.kind == "block"
        for name, module in site.module.named_modules()
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
    peft = need("peft", "train")
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
    state = need("peft", "train").get_peft_model_state_dict(transformer, adapter_name=ADAPTER_NAME)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


class RunAdapter:
    """The adapter of a run: put in once, and off until a stage trains it or a state brings it."""

    def __init__(self, session: Session, options: Adapter, seed: int):
        self.session, self.options, self.seed = session, options, seed
        self.config: dict[str, Any] = {}
        self.on = False

    def put_in(self) -> None:
        if not self.config:
            transformer, options = self.session.transformer, self.options
            shape = (options.rank, options.alpha, options.dora)
            self.config = adapter_config(transformer, self.session.backbone, *shape)
            add_adapter(transformer, self.config, self.seed)
            self._enable(False)
            self.session.rehook()

    def switch_on(self) -> None:
        if not self.on:
            self.put_in()
            self._enable(True)
            self.on = True

    def load(self, weights: Mapping[str, Tensor]) -> None:
        if weights:
            self.switch_on()
            load_adapter(self.session.transformer, weights)

    def parameters(self) -> list[nn.Parameter]:
        return adapter_parameters(self.session.transformer)

    def weights(self) -> dict[str, Tensor]:
        return adapter_state(self.session.transformer) if self.on else {}

    def _enable(self, on: bool) -> None:
        for layer in adapted_layers(self.session.transformer):
            layer.enable_adapters(on)


@contextlib.contextmanager
def adapters_off(transformer: nn.Module) -> Iterator[None]:
    """Run the base weights alone inside this context; which parameters train is left untouched."""
    if not hasattr(transformer, "peft_config"):
        yield
        return
    tuner = need("peft.tuners.tuners_utils", "train").BaseTunerLayer
    layers = [m for m in transformer.modules() if isinstance(m, tuner) and not m.disable_adapters]
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


# -- one product -------------------------------------------------------------------------------------


def fold(weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """The adapted weight, and what multiplies each of its rows. As in DoRA's sec. 4.3 the norm is a constant."""
    direction = torch.addmm(weight.to(up.dtype), up, down, alpha=scaling)
    scale = magnitude / torch.linalg.vector_norm(direction, dim=1)
    return direction.mul_(scale[:, None]), scale


class FoldedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
        folded, _ = fold(weight, *adapter)
        y = F.linear(x, folded.to(x.dtype), None if bias is None else bias.to(x.dtype))
        *tensors, ctx.scaling = adapter
        ctx.save_for_backward(x, y, weight, bias, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, down, up, magnitude = ctx.saved_tensors
        folded, scale = fold(weight, down, up, magnitude, ctx.scaling)
        grad_x = grad @ folded.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad, x, y = grad.flatten(0, -2), x.flatten(0, -2), y.flatten(0, -2)
        row_scale = scale[:, None] * ctx.scaling
        grad_down = (grad @ (row_scale * up).to(grad.dtype)).T @ x
        grad_up = row_scale * (grad.T @ (x @ down.T.to(x.dtype)))
        grad_magnitude = (grad * y).sum(0, dtype=magnitude.dtype)
        if bias is not None:
            grad_magnitude -= grad.sum(0, dtype=magnitude.dtype) * bias
        return grad_x, None, None, grad_down.to(down), grad_up.to(up), grad_magnitude / magnitude, None


def fold_in_training(layer: Any, name: str) -> None:
    """Run a PEFT layer of one DoRA adapter as one product; a layer of another kind keeps PEFT's forward."""
    plain = type(layer.get_base_layer()) is nn.Linear and isinstance(layer.lora_dropout[name], nn.Identity)
    if plain and name in layer.lora_magnitude_vector:
        layer.forward = functools.partial(folded_forward, layer, name)


def folded_forward(layer: Any, name: str, x: Tensor) -> Tensor:
    base = layer.get_base_layer()
    if layer.disable_adapters:
        return base(x)
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return folded_forward(layer, name, x.to(torch.get_autocast_dtype(device)))
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    magnitude, scaling = layer.lora_magnitude_vector[name].weight, layer.scaling[name]
    return FoldedLinear.apply(x, base.weight, base.bias, down, up, magnitude, scaling)
