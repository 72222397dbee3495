"""Refresh: some tokens run through all blocks but the first; the others hold what all blocks together last added.

As every block has the same tokens, only the sum of a token's updates matters: one tensor (N, D) for the whole model in
place of one a layer, beside the keys and values that the others last had. This library's own; docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from shiva.core.context import NOISE, StepContext
from shiva.core.layout import to_tokens, token_mask
from shiva.core.method import BackboneSpec, Method, Place, RunSite, unify_guidance
from shiva.core.options import Count, NotNegative, Ratio, Whole
from shiva.core.reduction import Reduction, Streams, select
from shiva.methods.counts import CountOptions, Learned, Table
from shiva.methods.fills import CACHE_DTYPES, Key, check_layers, key_of, keys_of_all
from shiva.methods.scores import Band, with_bonus
from shiva.ops.fill import cached_updates, grow_older
from shiva.ops.probe import FEATURES, Probe, directions, look
from shiva.ops.topk import hard_topk


@dataclass(frozen=True)
class RefreshOptions(CountOptions):
    """Options of the methods that run the same tokens through all blocks, and hold a result of the others."""

    first: Count = 1
    """Steps at the beginning of a run that see all tokens."""
    reset: Count | None = None
    """Every so many steps all tokens run again; None never."""
    age: NotNegative = 0.0
    """Bonus of each step a token has waited, in deviations of the scores."""
    attends: Literal["selected", "all"] = "all"
    """What the tokens that run attend to: all, by the keys and values that the others last had, or one another."""
    guidance: Literal["max", "shared"] = "max"
    """How the two guidance halves agree on tokens: the elementwise maximum of their scores, or shared."""
    cache_dtype: Literal["same", "bfloat16", "float16"] = "same"
    """Precision of what is held."""


@dataclass
class RefreshRun:
    """What a run carries."""

    keys: dict[Key, Tensor] = field(default_factory=dict)  # (B, N, D) of each projection and branch
    totals: dict[int, Tensor] = field(default_factory=dict)  # (B, N, D) of each branch, what all blocks added
    ages: Tensor | None = None  # (B, N)
    seen: Tensor | None = None  # (B, N, r), what a token looked like when it last ran


@dataclass
class ChoiceStep:
    chosen: Tensor | None = None  # (B, k), by a step's first call for all of them
    indices: Tensor | None = None  # (B, k), of the call at work; None where all tokens run


class Refresher(Method):
    """One choice a step, for all blocks from `leading` on. A subclass ranks, and says what is held."""

    sites = frozenset({"model", "keys"})
    config: RefreshOptions
    new_run, new_step = RefreshRun, ChoiceStep

    def __init__(self, config: RefreshOptions, spec: BackboneSpec, leading: int = 0):
        super().__init__(config, spec)
        self.leading = leading
        self.count = Table(config, spec, range(leading))
        self.whole_keys = config.attends == "all"
        self.requires = frozenset({"keys"}) if self.whole_keys else frozenset()

    def selects(self, site: Place) -> bool:
        return site.kind == "keys" and self.whole_keys and site.layer >= self.leading

    def dense_step(self, step: int, ctx: StepContext) -> bool:
        since = step - ctx.first
        return since < self.config.first or (self.config.reset is not None and since % self.config.reset == 0)

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        return self.count(self.config, ctx, timesteps, self.dense_step)

    @property
    def idle(self) -> bool:
        """Whether no token is ever left out, so that nothing need be held."""
        return 1 in (self.config.budget, self.config.flops)

    # -- what a subclass says -------------------------------------------------------------------------

    def scores(self, x: Tensor, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D): higher runs."""
        raise NotImplementedError

    def ready(self, x: Tensor, ctx: StepContext) -> bool:
        """Whether there is what the others would hold."""
        raise NotImplementedError

    def hold(self, indices: Tensor, x: Tensor, ctx: StepContext) -> Reduction:
        """The tokens of x at indices (B, k) run, the others hold."""
        raise NotImplementedError

    def refresh(self, x: Tensor, ctx: StepContext) -> Reduction | None:
        """All tokens of x run; what they come to may be noted."""
        return None

    # -- one step -------------------------------------------------------------------------------------

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        run, now, k = ctx.run, ctx.now, ctx.counts[site.layer]
        if self.idle:
            return None
        if k >= x.shape[1] or not self.ready(x, ctx):
            now.indices = None
            if not ctx.branch:
                run.ages = x.new_zeros(x.shape[:2], dtype=torch.float32)
            return self.refresh(x, ctx)
        if now.chosen is None:
            with torch.no_grad():
                now.chosen = self.choose(x, k, ctx)
        now.indices = now.chosen
        return self.hold(now.chosen, x, ctx)

    def choose(self, x: Tensor, k: int, ctx: StepContext) -> Tensor:
        run = ctx.run
        with ctx.phase("router"):
            scores = unify_guidance(self.scores(x, ctx).float(), self.guidance, ctx)
        with ctx.phase("sort"):
            if self.config.age:
                scores = with_bonus(scores, run.ages, self.config.age)
            indices = hard_topk(scores, k)
            run.ages = grow_older(run.ages, indices)
        return indices

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        """A projection to keys or values: of those that run anew, of the others as they were."""
        made = run(x, None)
        if self.idle:
            return made
        dtype = CACHE_DTYPES[self.config.cache_dtype] or made.image.dtype
        known: dict[Key, Tensor] = ctx.run.keys
        image = keys_of_all(made.image, ctx.now.indices, known, key_of(site, ctx), ctx.tokens, dtype)
        return made._replace(image=image)


@dataclass(frozen=True)
class Refresh(RefreshOptions):
    """The tokens that changed most since they last ran; the others hold the sum of their last updates."""

    score: Literal["change", "probe", "band"] = "change"
    """Which run: change, by the first block's output; probe, by a fitted guess of how the prediction changes (`shiva
    fit --probe`); band, Sweep's rows."""
    dense: Count = 1
    """Blocks at the beginning that see all tokens, and whose output the choice is made by."""
    hidden: Whole = 64
    """Width of the probe."""
    tilt: float = 2.0

    fixed: ClassVar = frozenset({"dense", "hidden"})

    def build(self, spec: BackboneSpec) -> RefreshMethod:
        check_layers("dense", (self.dense,), spec)
        return RefreshMethod(self, spec)


@dataclass
class RefreshStep(ChoiceStep):
    """What a score needs is made before the blocks run: of a compiled graph nothing is drawn, and no number read."""

    band: Tensor | None = None  # (1, N)
    basis: Tensor | None = None  # (D, r)
    level: Tensor | None = None  # (), of noise
    look: Tensor | None = None  # (B, N, r), of the call at work


class RefreshMethod(Refresher, Learned):
    """Holds the sum of updates."""

    untrained = "ranks by an unfitted probe: run `shiva fit --probe`, and attach the folder it writes"
    config: Refresh
    new_step = RefreshStep

    def __init__(self, config: Refresh, spec: BackboneSpec):
        super().__init__(config, spec, config.dense)
        self.probe = Probe(config.hidden) if config.score == "probe" else None
        self.band = Band()
        self.eval()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {} if self.probe is None else {"router": list(self.probe.parameters())}

    def begin_step(self, ctx: StepContext) -> None:
        now: RefreshStep = ctx.now
        if self.config.score == "band":
            now.band = ctx.here(self.band.draw(ctx.layout, ctx.step, 1))
            return
        now.basis = ctx.here(directions(self.spec.width))
        if self.probe is not None:
            now.level = ctx.here(torch.tensor(ctx.timestep / NOISE, device="cpu"))

    def scores(self, x: Tensor, ctx: StepContext) -> Tensor:
        run, now = ctx.run, ctx.now
        if self.config.score == "band":
            return now.band.expand(x.shape[0], -1)
        now.look = look(x, now.basis)
        change = now.look - run.seen
        return change.norm(dim=-1) if self.probe is None else self.probe(now.look, change, run.ages, now.level)

    def choose(self, x: Tensor, k: int, ctx: StepContext) -> Tensor:
        indices = super().choose(x, k, ctx)
        run, now = ctx.run, ctx.now
        if now.look is not None:
            places = indices[..., None].expand(-1, -1, FEATURES)
            run.seen = run.seen.scatter(1, places, now.look.gather(1, places))
        return indices

    def ready(self, x: Tensor, ctx: StepContext) -> bool:
        total = ctx.run.totals.get(ctx.branch)
        return total is not None and total.shape == x.shape

    def hold(self, indices: Tensor, x: Tensor, ctx: StepContext) -> Reduction:
        return replace(cached_updates(indices, ctx.run.totals[ctx.branch]), whole_keys=self.whole_keys)

    def refresh(self, x: Tensor, ctx: StepContext) -> Reduction:
        run: RefreshRun = ctx.run
        if self.config.score != "band" and not ctx.branch:
            run.seen = look(x.detach(), ctx.now.basis)
        every = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        dtype = CACHE_DTYPES[self.config.cache_dtype] or x.dtype
        return Reduction(lambda tokens: tokens, noting(run.totals, ctx.branch, dtype), every, self.whole_keys)


def noting(totals: dict[int, Tensor], branch: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """A restore that leaves all results as they are, and keeps what was added to `base` (B, N, D)."""

    def restore(values: Tensor, base: Tensor) -> Tensor:
        totals[branch] = (values - base).detach().to(dtype)
        return values

    return restore


@dataclass(frozen=True)
class RAS(RefreshOptions):
    """RAS: Region-Adaptive Sampling for diffusion transformers (Liu et al., 2025; arXiv 2502.10389).

    Only the tokens whose prediction is busiest run; the others keep the prediction that they last had.
    """

    budget: Ratio | None = 0.5
    first: Count = 4
    reset: Count | None = 8
    """Every so many steps all tokens run again: the release has steps 12 and 20 of 28."""
    starvation: NotNegative = 0.1
    """How much each step of waiting raises a token's score, as a power of e."""
    guidance: Literal["max", "shared"] = "shared"

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
        return replace(select(indices, x.shape[1]), whole_keys=self.whole_keys)

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
