"""Muon for the matrices, AdamW for everything else, behind one small interface."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
"""Of Muon."""


def orthogonalize(gradients: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each of (M, r, c), by the quintic Newton-Schulz iteration of Muon."""
    tall = gradients.shape[-2] > gradients.shape[-1]
    x = gradients.mT if tall else gradients
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    for _ in range(5):
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


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    """Linear weights except the output's. The modulations count: they carry the caption, and what belongs to one
    label only is a weak direction of their gradient, which Muon does not let the common ones drown."""
    return parameter.ndim == 2 and not name.startswith(("norm_out", "proj_out"))


class Optimizers:
    """Both optimizers, one learning-rate factor, and a state of tensors keyed by parameter names."""

    def __init__(self, model: nn.Module, rate: float, muon_rate: float, weight_decay: float) -> None:
        named = dict(model.named_parameters())
        matrices = [name for name, p in named.items() if muon_rate > 0 and is_inner_matrix(name, p)]
        self.names = {"adamw": [name for name in named if name not in set(matrices)], "muon": matrices}
        self.rates = {"adamw": rate, "muon": muon_rate}
        others = [named[name] for name in self.names["adamw"]]
        adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.parts: dict[str, torch.optim.Optimizer] = {"adamw": adam}
        if matrices:
            self.parts["muon"] = Muon([named[name] for name in matrices], muon_rate, MOMENTUM, weight_decay)

    def step(self, factor: float) -> None:
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = self.rates[name] * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Keys are "optimizer|parameter|entry"."""
        return {
            f"{part}|{self.names[part][index]}|{entry}": torch.as_tensor(value).clone()
            for part, optimizer in self.parts.items()
            for index, entries in optimizer.state_dict()["state"].items()
            for entry, value in entries.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """A parameter that has no entry starts afresh, so that one may move to the other optimizer on resuming."""
        for part, optimizer in self.parts.items():
            state = optimizer.state_dict()
            state["state"] = defaultdict(dict)
            for key, value in tensors.items():
                owner, name, entry = key.split("|")
                if owner == part and name in self.names[part]:
                    state["state"][self.names[part].index(name)][entry] = value
            optimizer.load_state_dict(state)
