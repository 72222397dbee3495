"""Shiva-DiT: residual-based differentiable top-k selection (Zhang et al.; the paper this library implements)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import Exploration, StepContext
from shiva.core.method import BackboneSpec, Place
from shiva.core.options import NotNegative, Ratio
from shiva.core.reduction import Reduction
from shiva.methods.counts import CountOptions, Learned, Table
from shiva.methods.pruner import PrunerStep
from shiva.methods.routed import RoutedOptions, RoutedPruner
from shiva.methods.scores import full_precision
from shiva.ops.networks import POLICIES, BudgetController, perturb
from shiva.ops.schedule import RatioSchedule
from shiva.ops.topk import hard_topk, input_gated, output_gated, select_tokens, token_count


@dataclass(frozen=True)
class Shiva(RoutedOptions, CountOptions):
    """Learned token selection with a learned ratio per layer and timestep.

    What you turn at inference, also under a trained checkpoint:
        how many: budget or flops, tilt, bucket, dense, dense_steps
        which: guidance, age, cover
        what the others get: fill, near, cache_dtype, cache_layers, spread, recall, steady, parts
        what the chosen see: attends, freeze_references
    What training settles, and a checkpoint fixes:
        the router: sharing, bottleneck, signals, signal_length
        the ratios: policy, beta, dual, noise_free
        the gradient: estimator, guess
        the fill "shortcut": rank, degree, span
    """

    policy: Literal["additive", "film"] = "additive"
    """Training: form of the ratio policy: additive, or film (for the ablation)."""
    estimator: Literal["output", "input"] = "output"
    """Training: gradient estimator: output (gate what the block adds) or input (the paper's)."""
    guess: Literal["zero", "mean", "ridge", "teacher"] = "teacher"
    """Training: the output estimator's stand-in for a skipped token's update: zero, mean, ridge or teacher."""
    beta: Ratio = 0.2
    """Training: weight of the newest batch in the moving average of the mean keep."""
    dual: NotNegative = 0.02
    """Training: rate of the integral term that removes the budget's offset; 0, as in the paper, has none."""
    noise_free: bool = True
    """Training: the budget follows the ratios without their exploration noise; the paper's follows the noisy ones."""

    presets: ClassVar = {
        "paper": {"estimator": "input", "signal_length": "own", "dual": 0.0, "noise_free": False},
    }
    fixed: ClassVar = RoutedOptions.fixed | {"policy", "estimator", "guess", "beta", "dual", "noise_free"}

    def build(self, spec: BackboneSpec) -> ShivaMethod:
        return ShivaMethod(self, spec)


@dataclass
class ShivaStep(PrunerStep):
    ratios: Tensor | None = None  # (L,), of training, with their gradient
    mean_keep: Tensor | None = None  # (), of the reduced layers, with its gradient


class ShivaMethod(RoutedPruner, Learned):
    """Router, ratio policy and its compiled table at work."""

    config: Shiva
    new_step = ShivaStep

    def __init__(self, config: Shiva, spec: BackboneSpec):
        super().__init__(config, spec)
        self.count = Table(config, spec, config.dense)
        self.policy = POLICIES[config.policy](spec.layers, config.target)
        self.controller = BudgetController(config.target, config.beta, config.dual)
        self.gates_inputs = config.estimator == "input"
        self.needs_updates |= config.estimator == "output" and config.guess == "teacher"
        self._logit_noise: Tensor | None = None
        self.eval()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {**super().groups(), "policy": list(self.policy.parameters())}

    # -- how many ------------------------------------------------------------------------------------

    @property
    def schedule(self) -> RatioSchedule:
        return self.count.schedule

    def set_schedule(self, schedule: RatioSchedule) -> None:
        """Use another table, as a policy compiles to one."""
        self.count.set(schedule)
        self.config = options.replace(self.config, {"dense": sorted(schedule.dense)})

    def dense_layers(self) -> Collection[int]:
        return self.schedule.dense

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        if self.training:
            with full_precision(self.policy.anchor.device, self.training):
                ctx.now.ratios = ratios = self.training_ratios(ctx)
            return self.even([token_count(r, ctx.tokens) for r in ratios.tolist()])
        return self.even(self.count(self.config, ctx, timesteps, self.fill.dense_step))

    # -- training ------------------------------------------------------------------------------------

    def begin_batch(self, timesteps: Sequence[float], explore: Exploration) -> None:
        """Draw the global batch's logit noise, and let the controller observe its mean keep.

        Ratios depend on the timestep alone, so every rank computes the same mean over the global batch.
        """
        device = self.policy.anchor.device
        if explore.ratio is not None:
            return
        noise = explore.logit_noise * torch.randn(len(timesteps), self.spec.layers)
        self._logit_noise = noise.to(device)
        with torch.no_grad():
            times = torch.tensor(list(timesteps), dtype=torch.float32, device=device)
            logits = self.policy.logits(times)  # (M, L)
            self.controller.observe(self._mean_keep(logits if self.config.noise_free else logits + self._logit_noise))

    def _mean_keep(self, logits: Tensor) -> Tensor:
        """Mean keep of the reduced layers, from logits (..., L)."""
        return torch.sigmoid(logits)[..., self.schedule.reduced].mean()

    def training_ratios(self, ctx: StepContext) -> Tensor:
        """Continuous keep ratios (L,) of this step, with the gradient to the policy."""
        explore, device = ctx.explore, self.policy.anchor.device
        if explore.ratio is not None:
            ratios = torch.full((self.spec.layers,), explore.ratio, device=device)
        else:
            logits = self.policy.logits(torch.tensor([ctx.timestep], device=device))[0]
            noisy = logits + self._noise(explore, logits)
            ctx.now.mean_keep = self._mean_keep(logits if self.config.noise_free else noisy)
            ratios = torch.sigmoid(noisy)
        dense = torch.zeros_like(ratios, dtype=torch.bool)
        dense[sorted(self.schedule.dense)] = True
        return torch.where(dense, 1.0, ratios)

    def _noise(self, explore: Exploration, logits: Tensor) -> Tensor:
        """This micro-batch's row of the noise that `begin_batch` drew; without a batch, fresh noise."""
        if self._logit_noise is not None:
            return self._logit_noise[explore.index]
        return explore.logit_noise * torch.randn_like(logits)

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        """The budget loss: its mean over a global batch's micro-batches is Eq. budget_loss of that batch."""
        mean: Tensor | None = ctx.now.mean_keep
        return {} if mean is None else {"budget": mean * self.controller.pressure}

    def readings(self) -> dict[str, float]:
        return {"budget_ema": float(self.controller.mu), "budget_dual": float(self.controller.nu)}

    @contextlib.contextmanager
    def at_keep(self, keep: float) -> Iterator[None]:
        config, schedule = self.config, self.schedule
        self.config = options.replace(config, {"budget": None, "flops": None})
        self.set_schedule(RatioSchedule.flat(keep, self.spec.layers, sorted(schedule.dense)))
        try:
            yield
        finally:
            self.set_schedule(schedule)
            self.config = config

    def finish(self) -> None:
        """Compile the policy to the table."""
        self.set_schedule(RatioSchedule.compile(self.policy, dense=sorted(self.schedule.dense)))

    def training_reduction(self, x: Tensor, age: Tensor, site: Place, ctx: StepContext) -> Reduction:
        explore, layer, now, span = ctx.explore, site.layer, ctx.now, ctx.now.spans[site.layer]
        scores = perturb(self.training_scores(x, age, site, ctx), explore.score_noise)
        if ctx.teacher is None and not torch.is_grad_enabled():  # a rollout, from which nothing learns
            return self.fill.trained(hard_topk(scores, ctx.counts[layer]), x, age, layer, ctx)
        with ctx.phase("sort"):
            budget = now.ratios[span.start : span.stop].mean() * ctx.tokens
            selection = select_tokens(scores, ctx.counts[layer], budget, explore.tau_rank, explore.tau_sel)
        fill = self.fill.from_selected(selection.indices, x, age, layer, ctx)
        if self.config.estimator == "input":
            return input_gated(selection, x.shape[1], fill)
        teacher = None if ctx.teacher is None else ctx.teacher.update_over(span)
        return output_gated(selection, x, self.config.guess, teacher, fill)
