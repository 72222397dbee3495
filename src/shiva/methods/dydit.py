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
FFN of their own and stay dense. Beyond it: `rejected` gives a token that the FFN leaves out its own last FFN update
or that of the nearest token of its sample; at inference alone, because the teacher's pass keeps whole blocks' updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Place, Run, unify_guidance
from shiva.core.reduction import Reduction, Streams, flat_rows, gather, scatter, select
from shiva.methods._rejected import RejectedConfig, RejectedMethod
from shiva.methods._select import full_precision
from shiva.modules.rejected import distances, grid_places, nearest_masked


@dataclass(frozen=True)
class DyDiT(RejectedConfig):
    """Learned token masks on every FFN, with a count that follows the image."""

    flops: float = 0.8
    """lambda: the share of the blocks' dense FLOPs that training aims at."""
    flops_weight: float = 2.0
    """Weight of the loss (F - lambda)^2."""
    hold: int = 100
    """Steps at the start of training with lambda = 1."""
    warmup: int = 1000
    """Steps over which lambda then falls to `flops`."""
    tau: float = 5.0
    """Temperature of the Gumbel-sigmoid."""
    threshold: float = 0.5
    """Inference: probability above which a token is computed."""
    union: bool = False
    """Inference: compute a token for the whole batch if any sample wants it, as the Shiva paper describes."""
    guidance: GuidancePolicy = "per-sample"
    """How the two guidance halves agree on tokens; per sample, which an FFN can bear, in the release."""
    shrink: int = 16
    """The router's bottleneck is the model's width divided by this."""
    bias: float = 5.0
    """The router's initial logit: training starts with every token on."""

    presets: ClassVar = {"paper": {"flops": 0.8, "union": True}}
    fixed: ClassVar = frozenset({"flops", "flops_weight", "hold", "warmup", "tau", "shrink", "bias"})
    knob: ClassVar = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.share("flops", self.flops)
        options.share("threshold", self.threshold, zero=True)
        options.choice("guidance", self.guidance, ("shared", "per-sample", "max"))
        if not self.flops_weight >= 0:
            raise ValueError(f"flops_weight={self.flops_weight} is below 0; pass 0 to leave the FLOPs free")
        if not self.tau > 0:
            raise ValueError(f"tau={self.tau} is not above 0; pass a temperature such as 5")
        if self.shrink < 1:
            raise ValueError(f"shrink={self.shrink} is below 1; pass 16 as released")
        if self.hold < 0 or self.warmup < 1:
            raise ValueError(f"hold={self.hold}, warmup={self.warmup}: pass steps, at least 0 and 1")

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
        weights = sum(p.numel() for p in module.parameters() if p.ndim == 2)
        return cls(mask.mean(), mask.numel(), 2.0 * weights * mask.numel())


class DyDiTMethod(RejectedMethod):
    """A router per FFN."""

    sites = frozenset({"ffn"})
    static = False
    needs_signals = True
    config: DyDiT

    def __init__(self, config: DyDiT, spec: BackboneSpec):
        super().__init__(config, spec)
        self.guidance = config.guidance
        self.routers = nn.ModuleList(TokenRouter(spec, config.shrink, config.bias) for _ in range(spec.layers))
        self.needs_updates = self.needs_earlier = False
        self._block_flops: dict[tuple[int, int, int], float] = {}

    def logits(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Router logits (B, N) of the FFN's input x (B, N, D)."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            logits = self.routers[site.layer](x, ctx.time_embedding, ctx.prompt)
            return unify_guidance(logits, self.guidance, ctx)

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if not self.training:
            out = super().around(run, x, base, site, ctx)
            ctx.kept[site.name] = ctx.memory["kept", site.name]
            if ctx.memory["all on", site.name]:
                self.refresh(out.image, base, site.layer, ctx)
            return out
        if self.config.rejected != "identity":
            raise ValueError(
                f"DyDiT trains with rejected='identity', not {self.config.rejected!r}: the teacher's pass keeps whole "
                "blocks' updates, not the FFN's; train without it and pass it to shiva.attach"
            )
        mask = gumbel_mask(self.logits(x, site, ctx), self.config.tau)  # (B, N)
        ctx.memory.setdefault("ffn", {})[site.layer] = MaskedFFN.of(mask, site.module)
        out = run(x, None)
        ctx.kept[site.name] = round(float(mask.detach().sum()) / x.shape[0])  # what inference would compute
        return out._replace(image=out.image * mask[..., None].to(out.image.dtype))

    def mask(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Which tokens (B, N) of x (B, N, D) are let in; a second branch takes the first's unless `per-sample`."""
        key = ("mask", site.layer)
        if ctx.branch and self.guidance != "per-sample" and key in ctx.memory:
            return ctx.memory[key]
        mask = torch.sigmoid(self.logits(x, site, ctx)) > self.config.threshold
        if self.config.union:
            mask = mask.any(dim=0, keepdim=True).expand_as(mask)
        ctx.memory[key] = mask
        return mask

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        layer = site.layer
        mask = self.mask(x, site, ctx)
        if self.dense_step(ctx.step, ctx) or (self.caches(layer, ctx) and self.cache_of(x, layer, ctx) is None):
            mask = torch.ones_like(mask)
        kept = int(mask.sum())
        ctx.memory["kept", site.name] = round(kept / mask.shape[0])
        ctx.memory["all on", site.name] = kept == mask.numel()
        if kept == mask.numel():
            return None
        if self.config.union:
            chosen = mask[0].nonzero().squeeze(1)  # (K,)
            return self.settled(select(chosen.expand(x.shape[0], -1), x.shape[1]), mask, x, layer, ctx)
        return self.settled(flat_selection(mask), mask, x, layer, ctx)

    def settled(self, chosen: Reduction, mask: Tensor, x: Tensor, layer: int, ctx: StepContext) -> Reduction:
        """The chosen tokens' FFN updates, and for the others (not mask (B, N)) what the config says."""
        computed = mask[..., None]

        def cached(updates: Tensor) -> Tensor:
            cache = ctx.run[self.key("update", layer, ctx)]
            ctx.run[self.key("update", layer, ctx)] = torch.where(computed, updates.detach().to(cache.dtype), cache)
            return torch.where(computed, updates, cache.to(updates.dtype))

        def near(updates: Tensor) -> Tensor:
            if self.config.near == "similar":
                directions = F.normalize(x.float(), dim=-1)
                closeness = directions @ directions.transpose(1, 2)
            else:
                places = grid_places(ctx.grid, x.device)
                closeness = -distances(places, places)[None]
            rows = flat_rows(nearest_masked(closeness, mask), x.shape[1])
            return torch.where(computed, updates, gather(updates, rows))

        if self.caches(layer, ctx):
            return replace(chosen, restore=lambda values, base: cached(chosen.restore(values, base)))
        if self.rejected(ctx) == "near":
            return replace(chosen, restore=lambda values, base: near(chosen.restore(values, base)))
        return chosen

    # -- training ------------------------------------------------------------------------------------

    def target(self) -> float:
        """lambda_t: 1 at first, then linearly down to the target."""
        progress = (self.exploration.step - self.config.hold) / self.config.warmup
        return 1 - (1 - self.config.flops) * min(max(progress, 0.0), 1.0)

    def flops_share(self, ctx: StepContext) -> Tensor:
        """F: FLOPs of the blocks with each FFN at its mask's share of tokens, as a share of dense."""
        masked: dict[int, MaskedFFN] = ctx.memory["ffn"]
        tokens = next(iter(masked.values())).tokens
        key = (tokens, ctx.tokens, ctx.text_tokens)
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
        return {"flops": self.config.flops_weight * (self.flops_share(ctx) - self.target()).square()}
