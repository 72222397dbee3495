"""DiffCR (You et al., CVPR 2025, arXiv 2412.16822): a differentiable compression ratio per block and timestep.

A ratio rho is learned by running every block twice, at the two bins around rho, and mixing the results
linearly; so d out / d rho is the difference quotient of the two passes. Inside a pass the k = ceil(bin * N)
best tokens go through the block, the rest keep their value (or get what `rejected` says), and the FFN's update
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
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Place, Run, unify_guidance
from shiva.core.reduction import Streams
from shiva.methods._rejected import RejectedConfig, RejectedMethod, check_layers
from shiva.methods._select import full_precision, shared_indices
from shiva.modules.router import perturb
from shiva.modules.topk import hard_topk


@dataclass(frozen=True)
class DiffCR(RejectedConfig):
    """Learned token selection with a learned ratio per block and timestep region, by two passes a block."""

    keep: float = 0.8
    """Mean ratio that training aims at."""
    bins: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Ratios a block can run at."""
    regions: int = 4
    """Equal parts of the timesteps, each with its own ratios; 1 makes them depend on the layer alone."""
    dense: tuple[int, ...] = ()
    """Layers left as they are; none in the release."""
    gate: bool = True
    """Multiply the FFN's update by the router's sigmoid."""
    budget_weight: float = 50.0
    """alpha, weight of the loss (mean ratio - keep)^2."""
    initial: float = 1.0
    """The ratio before training: no compression."""
    guidance: GuidancePolicy = "max"
    """How the two guidance halves agree on tokens."""

    presets: ClassVar = {"paper": {"keep": 0.876, "dense": (0,)}}
    fixed: ClassVar = frozenset({"keep", "regions", "budget_weight", "initial"})

    def __post_init__(self) -> None:
        super().__post_init__()
        options.share("keep", self.keep)
        options.share("initial", self.initial)
        options.choice("guidance", self.guidance, ("shared", "per-sample", "max"))
        bins = tuple(sorted({options.share("bins", value) for value in self.bins}))
        if len(bins) < 2:
            raise ValueError(f"bins={self.bins} holds fewer than two ratios; pass at least two to mix")
        if not self.budget_weight >= 0:
            raise ValueError(f"budget_weight={self.budget_weight} is below 0; pass 0 to leave the budget free")
        if self.regions < 1:
            raise ValueError(f"regions={self.regions} is below 1; pass 4, or 1 for ratios by layer alone")
        object.__setattr__(self, "bins", bins)
        object.__setattr__(self, "dense", tuple(self.dense))

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


class DiffCRMethod(RejectedMethod):
    """A linear router per block and a table of ratios."""

    sites = frozenset({"block", "ffn"})
    config: DiffCR

    def __init__(self, config: DiffCR, spec: BackboneSpec):
        super().__init__(config, spec)
        check_layers("dense", config.dense, spec)
        self.guidance = config.guidance
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
        return min(int(timestep * self.config.regions / 1000), self.config.regions - 1)

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        if self.training:
            return ()
        bins, dense = self.config.bins, self.config.dense
        if self.dense_step(ctx.step, ctx):
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
        if self.exploration.ratio is not None:
            return {}
        reduced = [layer for layer in range(self.spec.layers) if layer not in self.config.dense]
        mean = self.ratios()[reduced].mean()
        return {"budget": self.config.budget_weight * (mean - self.config.keep).square()}

    # -- one block -----------------------------------------------------------------------------------

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if site.kind == "ffn":
            return self.gated_ffn(run, x, site, ctx)
        scores = self.scores(x, site.layer, ctx)
        if not self.training:
            k = x.shape[1] if self.runs_dense(x, site.layer, ctx) else ctx.counts[site.layer]
            out = self.single_pass(run, x, scores, k, site, ctx)
            if k == x.shape[1]:
                self.refresh(out.image, base, site.layer, ctx)
            return out
        rho = self.ratios()[site.layer, self.region(ctx.timestep)]
        explored = self.exploration.ratio
        self.simulate_age(x, float(rho.detach()) if explored is None else explored, site.layer, ctx)
        if explored is not None:
            return self.single_pass(run, x, scores, bin_count(explored, x.shape[1]), site, ctx)
        low, high = bracket(float(rho.detach()), self.config.bins)
        weight = (rho - low) / (high - low)
        lower = self.single_pass(run, x, scores, bin_count(low, x.shape[1]), site, ctx)
        upper = self.single_pass(run, x, scores, bin_count(high, x.shape[1]), site, ctx)
        ctx.kept[site.name] = round(float(rho.detach()) * x.shape[1])  # between the two passes
        mixed = Streams(torch.lerp(lower.image, upper.image, weight.to(lower.image.dtype)))
        if lower.text is None or upper.text is None:
            return mixed
        return mixed._replace(text=torch.lerp(lower.text, upper.text, weight.to(lower.text.dtype)))

    def scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Router scores (B, N), float32, of tokens x (B, N, D)."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            scores = self.routers[layer](x.float()).squeeze(-1)
            return perturb(scores, self.exploration.score_noise) if self.training else scores

    def single_pass(self, run: Run, x: Tensor, scores: Tensor, k: int, site: Place, ctx: StepContext) -> Streams:
        """The block on the k best tokens of x (B, N, D), its FFN gated by their scores (B, N)."""
        tokens = x.shape[1]
        reduction, inputs, gate = None, x, scores[..., None]
        if k < tokens:
            with ctx.phase("sort"):
                joint = unify_guidance(scores.detach(), self.guidance, ctx)
                indices = self.indices(joint, k, site.layer, ctx)
            fill = self.fill_trained if self.training else self.fill
            reduction = fill(indices, x, site.layer, ctx)
            inputs, gate = reduction.reduce(x), reduction.reduce(gate)  # (B, k, D), (B, k, 1)
        ctx.memory["gate"] = torch.sigmoid(gate).to(x.dtype)
        out = run(inputs, reduction)
        gate = ctx.memory.pop("gate", None)
        if gate is not None and self.config.gate:  # no FFN site inside this block took it
            out = out._replace(image=inputs + gate * (out.image - inputs))
        return out if reduction is None else out._replace(image=reduction.restore(out.image, x))

    def indices(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        if self.training:
            return hard_topk(scores, k)
        return shared_indices(layer, self.guidance, ctx, lambda: hard_topk(scores, k))

    def gated_ffn(self, run: Run, x: Tensor, site: Place, ctx: StepContext) -> Streams:
        """The FFN inside a pass: x (B, k, D) are the pass's tokens."""
        out, gate = run(x, None), ctx.memory.pop("gate")
        del ctx.kept[site.name]  # its block accounts for these tokens
        return out._replace(image=out.image * gate) if self.config.gate else out
