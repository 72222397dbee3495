"""DoRA's layer as one product in training.

PEFT runs the frozen layer, the low-rank path and four elementwise passes over the tokens. But the adapted layer is one
linear map, and folding it costs as much as running it on `rank` tokens more. Here it is folded, run once, and folded
again in the backward pass, so that nothing of its size is kept; the gradients of the low-rank factors stay low-rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
