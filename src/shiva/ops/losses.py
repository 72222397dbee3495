"""Training objectives of the method: the budget (Eqs. ema_avg, budget_loss) and feature distillation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BudgetController(nn.Module):
    """Steers the long-run mean keep to a target without forcing every batch to meet it.

    mu = beta * mean + (1 - beta) * mu, and the loss is mean * sg[2 (mu - R)]. That is proportional
    control, which settles beside R when the task pulls; `dual` > 0 adds the integral term
    nu += dual * (mu - R), which removes the offset.
    """

    mu: Tensor
    nu: Tensor

    def __init__(self, target: float, beta: float = 0.2, dual: float = 0.0):
        super().__init__()
        self.target, self.beta, self.dual = target, beta, dual
        self.register_buffer("mu", torch.tensor(float(target)))
        self.register_buffer("nu", torch.tensor(0.0))

    @torch.no_grad()
    def observe(self, mean: Tensor | float) -> None:
        """Take in the mean keep of a whole global batch, once a step."""
        self.mu.lerp_(torch.as_tensor(mean).to(self.mu), self.beta)  # Eq. ema_avg
        if self.dual > 0:
            self.nu.add_(self.dual * (self.mu - self.target))

    @property
    def pressure(self) -> Tensor:
        """What a unit of mean keep costs now; negative below the target."""
        return (2 * (self.mu - self.target) + self.nu).detach().clone()

    def forward(self, mean: Tensor) -> Tensor:
        """Observe a batch and give its loss."""
        if self.training:
            self.observe(mean.detach())
        return mean * self.pressure  # Eq. budget_loss


def normalized_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distance of layer-normalised features (B, N, D) (Eq. distill_cal, averaged)."""
    width = (student.shape[-1],)
    return F.mse_loss(F.layer_norm(student.float(), width), F.layer_norm(teacher.float(), width))
