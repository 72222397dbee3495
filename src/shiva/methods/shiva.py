"""Shiva-DiT: residual-based differentiable top-k selection (Zhang et al.; the paper this library implements)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Exploration, Place, Run, unify_guidance
from shiva.core.reduction import Reduction, Streams
from shiva.methods._select import SelectConfig, SelectMethod, full_precision, shared_indices
from shiva.modules.losses import BudgetController
from shiva.modules.policy import POLICIES
from shiva.modules.router import perturb
from shiva.modules.schedule import RatioSchedule
from shiva.modules.topk import Selection, hard_topk, input_gated, output_gated, select_tokens, token_count


@dataclass(frozen=True)
class Shiva(SelectConfig):
    """Learned token selection with a learned ratio per layer and timestep."""

    budget: float | None = None
    """Mean share of image tokens kept over reduced layers and steps; None leaves a trained table as it is."""
    flops: float | None = None
    """Instead of a budget: true FLOPs of the run as a share of dense."""
    bucket: int | None = None
    """Round token counts to this multiple, holding their mean; fewer distinct shapes to compile."""
    share_pairs: bool = False
    """One selection per pair of layers: router, sort, gather and scatter are paid once a pair."""
    policy: str = "additive"
    """Form of the ratio policy: additive, or film (for the ablation)."""
    estimator: str = "output"
    """Gradient estimator of training: output (gate what the block adds) or input (the paper's)."""
    guess: str = "teacher"
    """The output estimator's stand-in for a rejected token's update: zero, mean, ridge or teacher."""
    beta: float = 0.2
    """Training: weight of the newest batch in the moving average of the mean keep."""
    dual: float = 0.02
    """Training: rate of the integral term that removes the budget's offset; 0, as in the paper, has none."""
    noise_free: bool = True
    """Training: the budget follows the ratios without their exploration noise; the paper's follows the noisy ones."""

    presets: ClassVar = {
        "paper": {"estimator": "input", "signal_length": "own", "beta": 0.2, "dual": 0.0, "noise_free": False},
        "sweep": {"score": "sweep", "rejected": "cached", "attends": "all"},
    }
    fixed: ClassVar = SelectConfig.fixed | {"policy", "estimator", "guess", "beta", "dual", "noise_free"}
    knob: ClassVar = "budget"
    either: ClassVar = frozenset({"budget", "flops"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None:
            options.share("budget", self.budget)
        if self.flops is not None:
            options.share("flops", self.flops)
        if self.budget is not None and self.flops is not None:
            raise ValueError(f"budget={self.budget} and flops={self.flops} exclude each other; pass one")
        if self.bucket is not None and self.bucket < 1:
            raise ValueError(f"bucket={self.bucket} must be at least 1")
        if self.share_pairs and self.may_cache:
            raise ValueError(
                f"share_pairs and rejected={self.rejected!r} exclude each other: a cached update is one layer's"
            )
        options.choice("policy", self.policy, POLICIES)
        options.choice("estimator", self.estimator, ("input", "output"))
        options.choice("guess", self.guess, ("zero", "mean", "ridge", "teacher"))
        options.share("beta", self.beta)

    def build(self, spec: BackboneSpec) -> ShivaMethod:
        return ShivaMethod(self, spec)


@dataclass
class Carried:
    """Tokens that stay reduced between the two layers of a pair."""

    reduction: Reduction
    base: Tensor = field(repr=False)


class ShivaMethod(SelectMethod):
    """Router, ratio policy and its compiled table at work."""

    config: Shiva

    def __init__(self, config: Shiva, spec: BackboneSpec):
        super().__init__(config, spec)
        target = 0.6 if config.budget is None else config.budget
        self.policy = POLICIES[config.policy](spec.layers, target)
        self.schedule = RatioSchedule.flat(target, spec.layers, config.dense)
        self.controller = BudgetController(target, config.beta, config.dual)
        self.needs_updates |= config.estimator == "output" and config.guess == "teacher"
        self._tables: dict[Hashable, list[list[int]]] = {}
        self._logit_noise: Tensor | None = None
        self.eval()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {**super().groups(), "policy": list(self.policy.parameters())}

    def tables(self) -> dict[str, Tensor]:
        return self.schedule.state()

    def load_tables(self, tables: dict[str, Tensor]) -> None:
        self.set_schedule(replace(RatioSchedule.from_state(tables), dense=frozenset(self.config.dense)))

    def set_schedule(self, schedule: RatioSchedule) -> None:
        """Use another table, as a policy compiles to one."""
        if schedule.layers != self.spec.layers:
            raise ValueError(f"the schedule is for {schedule.layers} layers; {self.spec.name} has {self.spec.layers}")
        self.schedule = schedule
        self.config = options.replace(self.config, {"dense": sorted(schedule.dense)})
        self._tables.clear()

    def dense_layers(self) -> Collection[int]:
        return self.schedule.dense

    # -- how many ------------------------------------------------------------------------------------

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        if self.training:
            with full_precision(self.policy.anchor.device, self.training):
                ratios = self.training_ratios(ctx)
            ctx.memory["ratios"] = ratios
            return tuple(token_count(r, ctx.tokens) for r in ratios.tolist())
        key = (ctx.tokens, ctx.text_tokens, ctx.first, None if timesteps is None else tuple(timesteps))
        if key not in self._tables:
            self._tables[key] = self._table(ctx, timesteps)
        table = self._tables[key]
        if timesteps is None and self.dense_step(ctx.step, ctx):
            return (ctx.tokens,) * self.spec.layers
        return tuple(table[ctx.step if timesteps is not None else self.schedule.row(ctx.timestep)])

    def _table(self, ctx: StepContext, timesteps: Sequence[float] | None) -> list[list[int]]:
        """Counts for a run: the schedule at the run's own timesteps, brought to the budget there."""
        config, schedule, steps = self.config, self.schedule, range(0)
        if timesteps is not None:
            steps = range(ctx.first, len(timesteps))
            schedule = schedule.resample(timesteps[ctx.first :])
        dense = [step - ctx.first for step in steps if self.dense_step(step, ctx)]
        if config.budget is not None:
            schedule = schedule.shift(self._left(config.budget, len(steps), len(dense)))
        elif config.flops is not None:
            schedule = schedule.shift(flops=self._left(config.flops, len(steps), len(dense)), cost=ctx.cost())
        counts = schedule.bucket(config.bucket, ctx.tokens) if config.bucket else schedule.counts(ctx.tokens)
        whole = [ctx.tokens] * self.spec.layers
        for place in dense:
            counts[place] = whole
        counts = [whole] * ctx.first + counts
        return [self._pair_counts(row) for row in counts] if config.share_pairs else counts

    @staticmethod
    def _left(target: float, steps: int, dense: int) -> float:
        """The share that reduced steps may take so that a run with some dense steps still meets its target."""
        if dense in (0, steps):
            return target
        left = (target * steps - dense) / (steps - dense)
        if left <= 0:
            raise ValueError(
                f"a share of {target} cannot be met in {steps} steps of which {dense} are dense; "
                "pass a larger one, more steps, or rejected='identity'"
            )
        return left

    def _pair_counts(self, row: list[int]) -> list[int]:
        """Both layers of a pair run on the mean of their counts."""
        row = list(row)
        for first in range(0, len(row) - 1, 2):
            if self.paired(first):
                row[first] = row[first + 1] = (row[first] + row[first + 1]) // 2
        return row

    def paired(self, first: int) -> bool:
        """Whether `first` and the layer after it form a pair of reduced layers."""
        both = {first, first + 1}
        return first % 2 == 0 and first + 1 < self.spec.layers and not both & self.schedule.dense

    # -- training ------------------------------------------------------------------------------------

    def begin_batch(self, timesteps: Sequence[float]) -> None:
        """Draw the global batch's logit noise, and let the controller observe its mean keep.

        Ratios depend on the timestep alone, so every rank computes the same mean over the global batch.
        """
        how, device = self.exploration, self.policy.anchor.device
        if how.ratio is not None:
            return
        noise = how.logit_noise * torch.randn(len(timesteps), self.spec.layers)
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
        how = self.exploration
        device = self.policy.anchor.device
        if how.ratio is not None:
            ratios = torch.full((self.spec.layers,), how.ratio, device=device)
        else:
            logits = self.policy.logits(torch.tensor([ctx.timestep], device=device))[0]
            noisy = logits + self._noise(how, logits)
            ctx.memory["mean keep"] = self._mean_keep(logits if self.config.noise_free else noisy)
            ratios = torch.sigmoid(noisy)
        dense = torch.zeros_like(ratios, dtype=torch.bool)
        dense[sorted(self.schedule.dense)] = True
        return torch.where(dense, 1.0, ratios)

    def _noise(self, how: Exploration, logits: Tensor) -> Tensor:
        """This micro-batch's row of the noise that `begin_batch` drew; without a batch, fresh noise."""
        if self._logit_noise is not None:
            return self._logit_noise[how.index]
        return how.logit_noise * torch.randn_like(logits)

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        """The budget loss: its mean over a global batch's micro-batches is Eq. budget_loss of that batch."""
        mean = ctx.memory.get("mean keep")
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
            self.config = config
            self.set_schedule(schedule)

    def finish(self) -> None:
        """Compile the policy to the table."""
        self.set_schedule(RatioSchedule.compile(self.policy, dense=sorted(self.schedule.dense)))

    # -- which ---------------------------------------------------------------------------------------

    def select(self, x: Tensor, layer: int, ctx: StepContext) -> Selection:
        """The tokens a layer runs on in training, with the inclusion that carries the gradient."""
        how = self.exploration
        scores = perturb(self.scores(x, layer, ctx), how.score_noise)
        budget = ctx.memory["ratios"][layer] * ctx.tokens
        with ctx.phase("sort"):
            return select_tokens(scores, ctx.counts[layer], budget, how.tau_rank, how.tau_sel)

    def choose(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Indices (B, k) of the tokens a layer runs on at inference."""
        scores = unify_guidance(self.scores(x, layer, ctx), self.guidance, ctx)
        with ctx.phase("sort"):
            return hard_topk(self.waited(scores, x, layer, ctx), ctx.counts[layer])

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        layer = site.layer
        if not self.training:
            if self.runs_dense(x, layer, ctx):
                return None
            indices = shared_indices(layer, self.guidance, ctx, lambda: self.choose(x, layer, ctx))
            return self.fill(indices, x, layer, ctx)
        self.simulate_age(x, ctx.counts[layer] / x.shape[1], layer, ctx)
        selection = self.select(x, layer, ctx)
        received = self.received(selection.indices, x, layer, ctx)
        if self.config.estimator == "input":
            return input_gated(selection, x.shape[1], received)
        teacher = None if ctx.teacher is None else ctx.teacher.updates.get(layer)
        return output_gated(selection, x, self.config.guess, teacher, received)  # type: ignore[arg-type]

    # -- pairs ---------------------------------------------------------------------------------------

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if self.training or not self.config.share_pairs:
            return super().around(run, x, base, site, ctx)
        carried: Carried | None = ctx.memory.pop("carried", None)
        if carried is not None:
            out = run(x, carried.reduction)
            with ctx.phase("scatter"):
                return out._replace(image=carried.reduction.restore(out.image, carried.base))
        if not self.paired(site.layer) or not ctx.blocks_adjoin:
            return super().around(run, x, base, site, ctx)
        reduction = self.reduction(x, site, ctx)
        if reduction is None:
            return run(x, None)
        ctx.memory["carried"] = Carried(reduction, base)
        with ctx.phase("gather"):
            reduced = reduction.reduce(x)
        return run(reduced, reduction)
