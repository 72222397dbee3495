"""DyDiT (Zhao et al., ICLR 2025, arXiv 2410.03456): token masks on the FFN, after its text-to-image form DyFLUX.

Attention always sees all tokens; a router decides for each token whether the FFN runs on it.

- Training computes densely: the FFN's update is multiplied by a mask that is hard in the forward pass and a
  Gumbel-sigmoid of temperature 5 in the backward.
- Inference thresholds the router and runs the FFN on the tokens of the whole batch that passed, as one list:
  an FFN is token-wise, so every sample may have its own count. That count depends on the data.

The official objective is the diffusion loss of the masked model, plus that of the complete (all-on) model,
plus `losses()` here. The complete model's loss is the trainer's: its model is the session switched off.

Differs from the release: no width masks (heads and channel groups); the router reads the backbone's pooled
prompt for the mean text token and is modulated in its bottleneck; the fused single blocks of Flux have no
FFN of their own and stay dense. Beyond it: `fill` gives a token that the FFN leaves out its own last FFN update
or that of the nearest token of its sample; at inference alone, because the teacher's pass keeps whole blocks' updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Place, RunSite, Trainable, run_reduced, unify_guidance
from shiva.core.options import Count, NotNegative, Positive, Ratio, Share, Whole
from shiva.core.reduction import Reduction, Streams, flat_rows, gather, scatter, select
from shiva.methods.fills import FillOptions, FillRun, Near, key_of
from shiva.methods.scores import full_precision
from shiva.ops.fill import distances, nearest_masked


@dataclass(frozen=True)
class DyDiT(FillOptions):
    """Learned token masks on every FFN, with a count that follows the image."""

    flops: Ratio = 0.8
    """lambda: the share of the blocks' dense FLOPs that training aims at."""
    flops_weight: NotNegative = 2.0
    """Weight of the loss (F - lambda)^2."""
    hold: Whole = 100
    """Steps at the start of training with lambda = 1."""
    warmup: Count = 1000
    """Steps over which lambda then falls to `flops`."""
    tau: Positive = 5.0
    """Temperature of the Gumbel-sigmoid."""
    threshold: Share = 0.5
    """Inference: probability above which a token is computed."""
    union: bool = False
    """Inference: compute a token for the whole batch if any sample wants it, as the Shiva paper describes."""
    guidance: GuidancePolicy = "per-sample"
    """How the two guidance halves agree on tokens; per sample, which an FFN can bear, in the release."""
    shrink: Count = 16
    """The router's bottleneck is the model's width divided by this."""
    bias: float = 5.0
    """The router's initial logit: training starts with every token on."""

    presets: ClassVar = {"paper": {"union": True}}
    fixed: ClassVar = frozenset({"flops", "flops_weight", "hold", "warmup", "tau", "shrink", "bias"})
    knob: ClassVar = "threshold"

    def turned(self, at: float) -> dict[str, Any]:
        return {"threshold": min(max(at, 1e-4), 1 - 1e-4)}

    def build(self, spec: BackboneSpec) -> DyDiTMethod:
        return DyDiTMethod(self, spec)


class TokenRouter(nn.Module):
    """One logit a token, from its normed features and the prompt, both modulated by time."""

    def __init__(self, spec: BackboneSpec, shrink: int, bias: float):
        super().__init__()
        width = max(8, spec.width // shrink)
        self.token = nn.Linear(spec.width, width)
        self.prompt = nn.Linear(spec.prompt_width, width)
        self.time = nn.Linear(spec.time_width, 4 * width)
        self.logit = nn.Linear(width, 1)
        nn.init.zeros_(self.time.weight)
        nn.init.zeros_(self.time.bias)
        nn.init.constant_(self.logit.bias, bias)

    def forward(self, x: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        """Logits (B, N), float32, of tokens x (B, N, D)."""
        scale, shift, prompt_scale, prompt_shift = self.time(F.silu(time.float())).chunk(4, dim=-1)  # (B, width)
        context = self.prompt(prompt.float()) * (1 + prompt_scale) + prompt_shift
        token = self.token(F.layer_norm(x.float(), x.shape[-1:]))  # (B, N, width)
        hidden = F.relu(token * (1 + scale[:, None]) + (shift + context)[:, None])
        return self.logit(hidden).squeeze(-1)


def gumbel_mask(logits: Tensor, tau: float) -> Tensor:
    """sigma((logit + g1 - g2) / tau) > 0.5 in value, with the gradient of the left side; g1 - g2 is logistic."""
    uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    soft = torch.sigmoid((logits + torch.logit(uniform)) / tau)
    return (soft > 0.5).to(soft.dtype) + soft - soft.detach()


def flat_selection(mask: Tensor) -> Reduction:
    """The tokens of the whole batch at which mask (B, N) holds, as one sample of sum(mask) tokens."""
    rows = mask.flatten().nonzero().squeeze(1)  # (M,)
    return Reduction(
        reduce=lambda x: x.flatten(0, 1).index_select(0, rows)[None],
        restore=lambda values, base: scatter(values, base, rows),
        positions=rows[None],
    )


class MaskedFFN(NamedTuple):
    """What a masked FFN adds to the FLOPs of a training call."""

    share: Tensor  # (), share of tokens on
    tokens: int  # of the whole batch
    flops: float  # at all of them

    @classmethod
    def of(cls, mask: Tensor, module: nn.Module) -> MaskedFFN:
        weights = sum(p.numel() for name, p in module.named_parameters() if p.ndim == 2 and "lora_" not in name)
        return cls(mask.mean(), mask.numel(), 2.0 * weights * mask.numel())


@dataclass
class DyDiTStep:
    masks: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, N)
    ffns: dict[int, MaskedFFN] = field(default_factory=dict)
    """Of the layers, in training."""


class DyDiTMethod(Trainable):
    """A router per FFN."""

    sites = frozenset({"ffn"})
    static = False
    needs_signals = True
    config: DyDiT
    new_run = FillRun
    new_step = DyDiTStep

    def __init__(self, config: DyDiT, spec: BackboneSpec):
        super().__init__(config, spec)
        self.routers = nn.ModuleList(TokenRouter(spec, config.shrink, config.bias) for _ in range(spec.layers))
        self.fill = config.make_fill(spec)
        self._block_flops: dict[tuple[int, int, int], float] = {}

    def logits(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Router logits (B, N) of the FFN's input x (B, N, D)."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            logits = self.routers[site.layer](x, ctx.time_embedding, ctx.prompt)
            return unify_guidance(logits, self.guidance, ctx)

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if not self.training:
            reduction = self.reduction(x, site, ctx)
            if reduction is not None:
                out = run_reduced(run, reduction, x, base, ctx)
                return out._replace(ran=round(reduction.positions.numel() / x.shape[0]))
            out = run(x, None)
            self.fill.refresh(out.image, base, site, ctx)
            return out
        if self.config.fill != "identity":
            raise ValueError(
                f"DyDiT trains with fill='identity', not {self.config.fill!r}: the teacher's pass keeps whole "
                "blocks' updates, not the FFN's; train without it and pass it to shiva.attach"
            )
        mask = gumbel_mask(self.logits(x, site, ctx), self.config.tau)  # (B, N)
        ctx.now.ffns[site.layer] = MaskedFFN.of(mask, site.module)
        out = run(x, None)
        computed = round(float(mask.detach().sum()) / x.shape[0])  # as inference would
        return out._replace(image=out.image * mask[..., None].to(out.image.dtype), ran=computed)

    def mask(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Which tokens (B, N) of x (B, N, D) are let in; a second branch takes the first's unless `per-sample`."""
        known: Tensor | None = ctx.now.masks.get(site.layer)
        if ctx.branch and self.guidance != "per-sample" and known is not None:
            return known
        mask = torch.sigmoid(self.logits(x, site, ctx)) > self.config.threshold
        if self.config.union:
            mask = mask.any(dim=0, keepdim=True).expand_as(mask)
        ctx.now.masks[site.layer] = mask
        return mask

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        mask = self.mask(x, site, ctx)
        if self.fill.dense_step(ctx.step, ctx) or not self.fill.ready(x, site, ctx):
            return None
        if self.config.union:
            chosen = select(mask[0].nonzero().squeeze(1).expand(x.shape[0], -1), x.shape[1])
        else:
            chosen = flat_selection(mask)
        if chosen.positions.numel() == mask.numel():
            return None
        return self.filled(chosen, mask, x, site, ctx)

    def filled(self, chosen: Reduction, mask: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Reduction:
        """The chosen tokens' FFN updates, and for the others (not mask (B, N)) what the config says."""
        computed, fill, run = mask[..., None], self.fill.in_this(ctx), ctx.run

        def cached(updates: Tensor) -> Tensor:
            cache = run.updates[key_of(site, ctx)]
            run.updates[key_of(site, ctx)] = torch.where(computed, updates.detach().to(cache.dtype), cache)
            return torch.where(computed, updates, cache.to(updates.dtype))

        def near(updates: Tensor) -> Tensor:
            if self.config.near == "similar":
                directions = F.normalize(x.float(), dim=-1)
                closeness = directions @ directions.transpose(1, 2)
            else:
                places = ctx.layout.places(x.device)
                closeness = -distances(places, places)[None]
            rows = flat_rows(nearest_masked(closeness, mask), x.shape[1])
            return torch.where(computed, updates, gather(updates, rows))

        if fill.caches_layer(site.layer):
            return replace(chosen, restore=lambda values, base: cached(chosen.restore(values, base)))
        if isinstance(fill, Near):
            return replace(chosen, restore=lambda values, base: near(chosen.restore(values, base)))
        return chosen

    # -- training ------------------------------------------------------------------------------------

    def target(self, ctx: StepContext) -> float:
        """lambda_t: 1 at first, then linearly down to the target."""
        progress = (ctx.explore.step - self.config.hold) / self.config.warmup
        return 1 - (1 - self.config.flops) * min(max(progress, 0.0), 1.0)

    def flops_share(self, ctx: StepContext) -> Tensor:
        """F: FLOPs of the blocks with each FFN at its mask's share of tokens, as a share of dense."""
        masked: dict[int, MaskedFFN] = ctx.now.ffns
        tokens = next(iter(masked.values())).tokens
        key = (tokens, ctx.tokens, ctx.layout.text)
        if key not in self._block_flops:
            cost = ctx.cost()
            self._block_flops[key] = sum(layer(cost.tokens).true for layer in cost.layers)
        dense = self._block_flops[key]
        floor = 1 - sum(ffn.flops for ffn in masked.values()) / dense
        if self.config.flops <= floor:
            raise ValueError(
                f"flops={self.config.flops} cannot be reached: with every masked FFN of {self.spec.name} empty "
                f"{floor:.3f} of the blocks' FLOPs remain; pass more"
            )
        saved = [(1 - ffn.share) * (ffn.flops / dense) for ffn in masked.values()]
        return 1 - torch.stack(saved).sum()

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        return {"flops": self.config.flops_weight * (self.flops_share(ctx) - self.target(ctx)).square()}
