"""Muon for the matrices of the blocks, AdamW for everything else, behind one small interface."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(gradients: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix of each of (M, r, c), by the quintic Newton-Schulz iteration of Muon."""
    tall = gradients.shape[-2] > gradients.shape[-1]
    x = gradients.mT if tall else gradients
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (kellerjordan.github.io/posts/muon) in float32, matrices of one shape in one batch.

    torch.optim.Muon iterates in bfloat16, matrix by matrix: slow on a CPU without bfloat16 arithmetic. The step's
    size follows torch's "match_rms_adamw", so one learning rate suits Muon and AdamW alike.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, members in shapes.items():
                directions = []
                for parameter in members:
                    buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])
                    directions.append(torch.lerp(parameter.grad, buffer, group["momentum"]))
                updates = orthogonalize(torch.stack(directions))
                size = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(members, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)


class Optimizers:
    """Both optimizers, one learning-rate factor, and a state made of tensors alone."""

    def __init__(
        self, model: nn.Module, rate: float, muon_rate: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        named = list(model.named_parameters())
        is_matrix = {
            name: p.ndim == 2 and name.startswith("transformer_blocks") and ".norm1" not in name for name, p in named
        }
        matrices = [p for name, p in named if is_matrix[name] and muon_rate > 0]
        others = [p for name, p in named if not (is_matrix[name] and muon_rate > 0)]
        adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.parts: dict[str, torch.optim.Optimizer] = {"adamw": adam}
        if matrices:
            self.parts["muon"] = Muon(matrices, muon_rate, momentum, weight_decay)
        self.rates = {"adamw": rate, "muon": muon_rate}

    def step(self, factor: float) -> None:
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = self.rates[name] * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        flat = {}
        for name, part in self.parts.items():
            for index, entries in part.state_dict()["state"].items():
                for key, value in entries.items():
                    flat[f"{name}.{index}.{key}"] = torch.as_tensor(value).clone()
        return flat

    def load(self, flat: dict[str, Tensor]) -> None:
        for name, part in self.parts.items():
            state = part.state_dict()
            state["state"] = defaultdict(dict)
            for key, value in flat.items():
                owner, index, entry = key.split(".")
                if owner == name:
                    state["state"][int(index)][entry] = value
            part.load_state_dict(state)
