"""RAS: Region-Adaptive Sampling for diffusion transformers (Liu et al., 2025; arXiv 2502.10389)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy
from shiva.core.options import Count, NotNegative, Ratio
from shiva.core.reduction import Reduction, select
from shiva.methods.refresh import Refresher, RefreshOptions, RefreshRun
from shiva.ops.prediction import to_tokens, token_mask


@dataclass(frozen=True)
class RAS(RefreshOptions):
    """Only the tokens whose prediction is busiest run; the others keep the prediction that they last had."""

    budget: Ratio | None = 0.5
    first: Count = 4
    reset: Count | None = 8
    """Every so many steps all tokens run again: the release has steps 12 and 20 of 28."""
    starvation: NotNegative = 0.1
    """How much each step of waiting raises a token's score, as a power of e."""
    guidance: GuidancePolicy = "shared"

    presets: ClassVar = {"paper": {}}

    def build(self, spec: BackboneSpec) -> RASMethod:
        return RASMethod(self, spec)


@dataclass
class RASRun(RefreshRun):
    predictions: dict[int, Tensor] = field(default_factory=dict)  # of each branch, the last word on every token
    busy: Tensor | None = None  # (B, N), deviation of a token's prediction


class RASMethod(Refresher):
    """Holds the prediction."""

    config: RAS
    new_run = RASRun

    def ready(self, x: Tensor, ctx: StepContext) -> bool:
        run: RASRun = ctx.run
        return ctx.branch in run.predictions and run.busy is not None and run.busy.shape == x.shape[:2]

    def scores(self, x: Tensor, ctx: StepContext) -> Tensor:
        run: RASRun = ctx.run
        assert run.busy is not None
        assert run.ages is not None
        return run.busy * torch.exp(self.config.starvation * run.ages)

    def hold(self, indices: Tensor, x: Tensor, ctx: StepContext) -> Reduction:
        chosen = select(indices, x.shape[1])
        return Reduction(chosen.reduce, chosen.restore, indices, self.whole_keys)

    def end_step(self, output: Tensor, ctx: StepContext) -> Tensor | None:
        run: RASRun = ctx.run
        if self.idle:
            return None
        if ctx.now.indices is not None:
            ran = torch.zeros(output.shape[0], ctx.tokens, dtype=torch.bool, device=output.device)
            ran.scatter_(1, ctx.now.indices, True)
            output = torch.where(token_mask(ran, output, ctx.layout), output, run.predictions[ctx.branch])
        run.predictions[ctx.branch] = output.detach()
        if not ctx.branch:
            run.busy = to_tokens(output.detach(), ctx.layout).float().std(dim=-1)
        return output
