"""A method added from outside, after RAS (Liu et al., 2025, arXiv 2502.10389; `shiva.RAS` has its keys too).

After the first step only the tokens whose prediction is busiest run through the model; the others keep the velocity
that they were last given. A token that has waited long is starved no further, and every few steps all run again.
Import this module, then `shiva.attach(pipe, HeldVelocity())` or `shiva.attach(pipe, "heldvelocity", keep=0.4)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import shiva
from shiva.core import BackboneSpec, Layout, Place, select


@dataclass(frozen=True)
class HeldVelocity(shiva.MethodConfig):
    """Refresh by change, with a starvation term; hold the velocity of the others."""

    keep: float = 0.5
    """Share of tokens that a reduced step runs."""
    reset: int = 4
    """Every so many steps all tokens run."""
    starvation: float = 0.25
    """How much each step of waiting raises a token's claim."""

    def build(self, spec: BackboneSpec) -> HeldVelocityMethod:
        return HeldVelocityMethod(self, spec)


@dataclass
class HeldVelocityRun:
    velocity: Tensor | None = None  # (B, C, H, W), the model's last word on every token
    claim: Tensor | None = None  # (1, N), how much a token's prediction varies
    waited: Tensor | None = None  # (1, N), steps


@dataclass
class HeldVelocityStep:
    chosen: Tensor | None = None  # (1, k), the tokens that run


def per_token(velocity: Tensor, layout: Layout) -> Tensor:
    """(B, C, H, W) as (B, N, features of a token's patch)."""
    batch, channels, height, width = velocity.shape
    patch = height // layout.rows
    cut = velocity.view(batch, channels, layout.rows, patch, layout.columns, width // layout.columns)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, layout.tokens, -1)


class HeldVelocityMethod(shiva.Method):
    sites = frozenset({"model"})
    new_run, new_step = HeldVelocityRun, HeldVelocityStep

    def reduction(self, x: Tensor, site: Place, ctx: shiva.StepContext) -> shiva.Reduction | None:
        run: HeldVelocityRun = ctx.run
        if run.claim is None or run.waited is None or (ctx.step - ctx.first) % self.config.reset == 0:
            return None
        score = run.claim * torch.exp(self.config.starvation * run.waited)
        chosen = score.topk(math.ceil(self.config.keep * ctx.tokens)).indices.sort().values
        ctx.now.chosen = chosen
        return select(chosen.expand(x.shape[0], -1), x.shape[1])

    def end_step(self, output: Tensor, ctx: shiva.StepContext) -> Tensor:
        run: HeldVelocityRun = ctx.run
        none = torch.zeros(1, ctx.tokens, device=output.device)
        chosen: Tensor | None = ctx.now.chosen
        run.waited = none if run.waited is None or chosen is None else run.waited + 1
        if chosen is not None and run.velocity is not None:
            run.waited.scatter_(1, chosen, 0.0)
            fresh = (run.waited == 0).view(1, 1, ctx.layout.rows, ctx.layout.columns).to(output.dtype)
            fresh = torch.nn.functional.interpolate(fresh, size=output.shape[-2:], mode="nearest")
            output = torch.where(fresh > 0, output, run.velocity)
        run.velocity, run.claim = output, per_token(output, ctx.layout).std(dim=-1).mean(dim=0, keepdim=True)
        return output
