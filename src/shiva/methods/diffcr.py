"""DiffCR (You et al., CVPR 2025, arXiv 2412.16822): a differentiable compression ratio per block and timestep.

A ratio rho is learned by running every block twice, at the two bins around rho, and mixing the results
linearly; so d out / d rho is the difference quotient of the two passes. Inside a pass the k = ceil(bin * N)
best tokens go through the block, the rest keep their value (or get what `fill` says), and the FFN's update
is multiplied by the router's sigmoid: the only gradient the router gets. Inference runs once, at the nearest bin.

A ratio of 1 is therefore not dense: the gate still scales the FFN. `gate=False` takes it out.

Differs from the official pseudocode: the text stream of joint attention is mixed like the image; the clamp of
rho to the bins lets a gradient pass that leads back inside, where the original's dies with the budget's own;
a batch shares one timestep region, that of its first sample (train with one timestep a micro-batch); the
budget is on the mean over blocks and all regions; the fused single blocks of Flux, which have no FFN of their
own, have their whole update gated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shiva.core.context import NOISE, StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Place, RunSite, Trainable, unify_guidance
from shiva.core.options import NotNegative, Ratio, Size, Whole
from shiva.core.reduction import Streams
from shiva.methods.fills import FillOptions, FillRun, check_layers
from shiva.methods.pruner import choose_once
from shiva.methods.scores import full_precision
from shiva.ops.networks import perturb
from shiva.ops.topk import hard_topk


@dataclass(frozen=True)
class DiffCR(FillOptions):
    """Learned token selection with a learned ratio per block and timestep region, by two passes a block."""

    keep: Ratio = 0.8
    """Mean ratio that training aims at."""
    bins: tuple[Ratio, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Ratios a block can run at."""
    regions: Size = 4
    """Equal parts of the timesteps, each with its own ratios; 1 makes them depend on the layer alone."""
    dense: tuple[Whole, ...] = ()
    """Layers left as they are; none in the release."""
    gate: bool = True
    """Multiply the FFN's update by the router's sigmoid."""
    budget_weight: NotNegative = 50.0
    """alpha, weight of the loss (mean ratio - keep)^2."""
    initial: Ratio = 1.0
    """The ratio before training: no compression."""
    guidance: GuidancePolicy = "max"
    """How the two guidance halves agree on tokens."""

    presets: ClassVar = {"paper": {"keep": 0.876, "dense": (0,)}}
    fixed: ClassVar = frozenset({"keep", "regions", "budget_weight", "initial"})

    def __post_init__(self) -> None:
        super().__post_init__()
        bins = tuple(sorted(set(self.bins)))
        if len(bins) < 2:
            raise ValueError(f"bins={self.bins} holds fewer than two ratios; pass at least two to mix")
        object.__setattr__(self, "bins", bins)

    def build(self, spec: BackboneSpec) -> DiffCRMethod:
        return DiffCRMethod(self, spec)


class _InwardClamp(torch.autograd.Function):
    """clamp(value, low, high) that drops a gradient only where descent along it would lead further out."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(value <= low, value >= high)
        return value.clamp(low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        at_low, at_high = ctx.saved_tensors
        return grad.masked_fill((at_low & (grad > 0)) | (at_high & (grad < 0)), 0.0), None, None


def bracket(ratio: float, bins: tuple[float, ...]) -> tuple[float, float]:
    """The neighbouring bins around a ratio; a ratio on a bin is the upper one, except the lowest of all."""
    upper = next((i for i, value in enumerate(bins) if value >= ratio - 1e-6), len(bins) - 1)
    upper = max(upper, 1)
    return bins[upper - 1], bins[upper]


def nearest_bin(ratio: float, bins: tuple[float, ...]) -> float:
    """The bin nearest to a ratio; of two equally near the larger."""
    return min(bins, key=lambda value: (round(abs(value - ratio), 6), -value))


def bin_count(ratio: float, tokens: int) -> int:
    """k = min(N, ceil(ratio * N)), blind to rounding errors of the product."""
    return min(tokens, math.ceil(ratio * tokens - 1e-6))


@dataclass
class DiffCRStep:
    gate: Tensor | None = None  # (B, k, 1), what the FFN inside the current pass is multiplied by
    indices: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, k)


class DiffCRMethod(Trainable):
    """A linear router per block and a table of ratios."""

    sites = frozenset({"block", "ffn"})
    config: DiffCR
    new_run = FillRun
    new_step = DiffCRStep

    def __init__(self, config: DiffCR, spec: BackboneSpec):
        super().__init__(config, spec)
        check_layers("dense", config.dense, spec)
        self.fill = config.make_fill(spec)
        self.needs_updates = self.needs_earlier = self.fill.caches
        self.routers = nn.ModuleList(nn.Linear(spec.width, 1, bias=False) for _ in range(spec.layers))
        self.rho = nn.Parameter(torch.full((spec.layers, config.regions), config.initial))

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"router": list(self.routers.parameters()), "policy": [self.rho]}

    def selects(self, site: Place) -> bool:
        return site.kind in self.sites and site.layer not in self.config.dense

    # -- how many ------------------------------------------------------------------------------------

    def ratios(self) -> Tensor:
        """The table of ratios (L, regions), within the bins."""
        ratios: Tensor = _InwardClamp.apply(self.rho, self.config.bins[0], self.config.bins[-1])
        return ratios

    def region(self, timestep: float) -> int:
        """Which part of the timesteps: the first is the cleanest; also where the timestep is not known."""
        if timestep != timestep:
            return 0
        return min(int(timestep * self.config.regions / NOISE), self.config.regions - 1)

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        if self.training:
            return ()
        bins, dense = self.config.bins, self.config.dense
        if self.fill.dense_step(ctx.step, ctx):
            return (ctx.tokens,) * self.spec.layers
        return tuple(
            ctx.tokens if layer in dense else bin_count(nearest_bin(ratio, bins), ctx.tokens)
            for layer, ratio in enumerate(self.learned(self.region(ctx.timestep)))
        )

    @torch.no_grad()
    def learned(self, region: int) -> list[float]:
        """Ratio of each layer in a region; on the meta device, where nothing is learned, the initial one."""
        if self.rho.is_meta:
            return [self.config.initial] * self.spec.layers
        return self.ratios()[:, region].tolist()

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        if ctx.explore.ratio is not None:
            return {}
        reduced = [layer for layer in range(self.spec.layers) if layer not in self.config.dense]
        mean = self.ratios()[reduced].mean()
        return {"budget": self.config.budget_weight * (mean - self.config.keep).square()}

    # -- one block -----------------------------------------------------------------------------------

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if site.kind == "ffn":
            return self.gated_ffn(run, x, site, ctx)
        scores = self.scores(x, site.layer, ctx)
        if not self.training:
            k = ctx.counts[site.layer] if self.fill.ready(x, site, ctx) else x.shape[1]
            out = self.single_pass(run, x, scores, None, k, site, ctx)
            if k == x.shape[1]:
                self.fill.refresh(out.image, base, site, ctx)
            return out
        explored = ctx.explore.ratio
        if explored is not None:
            age = self.fill.simulated_age(x, explored, ctx)
            return self.single_pass(run, x, scores, age, bin_count(explored, x.shape[1]), site, ctx)
        rho = self.ratios()[site.layer, self.region(ctx.timestep)]
        ratio = float(rho.detach())
        age = self.fill.simulated_age(x, ratio, ctx)
        low, high = bracket(ratio, self.config.bins)
        weight = (rho - low) / (high - low)
        lower = self.single_pass(run, x, scores, age, bin_count(low, x.shape[1]), site, ctx)
        upper = self.single_pass(run, x, scores, age, bin_count(high, x.shape[1]), site, ctx)

        def mix(low: Tensor | None, high: Tensor | None) -> Tensor | None:
            return None if low is None or high is None else torch.lerp(low, high, weight.to(low.dtype))

        image = torch.lerp(lower.image, upper.image, weight.to(lower.image.dtype))
        between = round(ratio * x.shape[1])
        return Streams(image, mix(lower.text, upper.text), mix(lower.rest, upper.rest), ran=between)

    def scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Router scores (B, N), float32, of tokens x (B, N, D)."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            scores = self.routers[layer](x.float()).squeeze(-1)
            return perturb(scores, ctx.explore.score_noise) if self.training else scores

    def single_pass(
        self, run: RunSite, x: Tensor, scores: Tensor, age: Tensor | None, k: int, site: Place, ctx: StepContext
    ) -> Streams:
        """The block on the k best tokens of x (B, N, D), its FFN gated by their scores (B, N).

        `age` (B, N) is how long tokens waited, in training.
        """
        tokens = x.shape[1]
        reduction, inputs, gate = None, x, scores[..., None]
        if k < tokens:
            with ctx.phase("sort"):
                joint = unify_guidance(scores.detach(), self.guidance, ctx)
                indices = self.indices(joint, k, site, ctx)
            if age is None:
                reduction = self.fill(indices, x, site, ctx)
            else:
                reduction = self.fill.trained(indices, x, age, site.layer, ctx)
            inputs, gate = reduction.reduce(x), reduction.reduce(gate)  # (B, k, D), (B, k, 1)
        ctx.now.gate = torch.sigmoid(gate).to(x.dtype)
        out = run(inputs, reduction)
        gate, ctx.now.gate = ctx.now.gate, None
        if gate is not None and self.config.gate:  # no FFN site inside this block took it
            out = out._replace(image=inputs + gate * (out.image - inputs))
        return out if reduction is None else out._replace(image=reduction.restore(out.image, x))

    def indices(self, scores: Tensor, k: int, site: Place, ctx: StepContext) -> Tensor:
        if self.training:
            return hard_topk(scores, k)
        known: dict[int, Tensor] = ctx.now.indices
        chosen = choose_once(known, site, self.guidance, ctx)
        known[site.layer] = hard_topk(scores, k) if chosen is None else chosen
        return known[site.layer]

    def gated_ffn(self, run: RunSite, x: Tensor, site: Place, ctx: StepContext) -> Streams:
        """The FFN inside a pass: x (B, k, D) are the pass's tokens."""
        out, gate = run(x, None), ctx.now.gate
        ctx.now.gate = None
        return out._replace(image=out.image * gate) if self.config.gate else out
