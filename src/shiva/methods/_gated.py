"""Hard top-k forward with a soft gate behind it: what NeuralSort, SOFT and LapSum have in common.

All three share Shiva's router and run whole blocks on the k best tokens. They differ in the operator that
relaxes top-k: its gates g multiply the selected inputs by 1 + g - stopgrad(g), which changes no value and
lets the scores learn. The objective is the trainer's (diffusion loss and distillation), as for Shiva, so
that a comparison of the four compares estimators alone.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Method, MethodConfig, Place, unify_guidance
from shiva.core.reduction import Reduction, flat_rows, gather, scatter, select
from shiva.modules.router import RouterBank, perturb
from shiva.modules.topk import hard_topk, straight_through, token_count


def check_layers(name: str, layers: tuple[int, ...], spec: BackboneSpec) -> None:
    """Refuse a layer that the backbone does not have."""
    outside = [layer for layer in layers if not 0 <= layer < spec.layers]
    if outside:
        raise ValueError(f"{name}={layers} names layer {outside[0]}, but {spec.name} has {spec.layers}; count from 0")


def full_precision(x: Tensor, training: bool) -> contextlib.AbstractContextManager[object]:
    """Training under autocast still scores in float32: an order needs the digits."""
    return torch.autocast(x.device.type, enabled=False) if training else contextlib.nullcontext()


def shared_indices(layer: int, policy: GuidancePolicy, ctx: StepContext, choose: Callable[[], Tensor]) -> Tensor:
    """A layer's tokens (B, k); under sequential guidance the second call of a step takes the first's."""
    key = ("indices", layer)
    if ctx.branch and policy != "per-sample" and key in ctx.memory:
        return ctx.memory[key]
    ctx.memory[key] = choose()
    return ctx.memory[key]


@dataclass(frozen=True)
class GatedTopKConfig(MethodConfig):
    """What the gated selectors have in common."""

    keep: float = 0.8
    """Share of image tokens each reduced block runs on."""
    dense: tuple[int, ...] = (0,)
    """Layers that always see all tokens."""
    guidance: GuidancePolicy = "max"
    """How the two guidance halves agree on tokens: the elementwise maximum of scores in the paper."""
    sharing: str = "pairwise"
    """Which layers share a router: pairwise, global, independent, or groups-n."""
    bottleneck: int = 64
    """Width of the router."""
    signals: tuple[str, ...] = ("time", "prompt", "layer")
    """Context the router reads beside the token itself."""

    fixed: ClassVar = frozenset({"sharing", "bottleneck", "signals"})

    def __post_init__(self) -> None:
        options.share("keep", self.keep)
        options.choice("guidance", self.guidance, ("shared", "per-sample", "max"))
        object.__setattr__(self, "dense", tuple(self.dense))
        object.__setattr__(self, "signals", tuple(self.signals))


def input_gates(indices: Tensor, gates: Tensor) -> Reduction:
    """Keep the tokens at indices (B, k), entering the block as x * (1 + g - stopgrad(g)), g of gates (B, N)."""
    rows = flat_rows(indices, gates.shape[1])
    gate = gather(straight_through(gates), rows)  # (B, k, 1), zero in value

    return Reduction(
        reduce=lambda x: gather(x, rows) * (1 + gate.to(x.dtype)),
        restore=lambda values, base: scatter(values, base, rows),
        positions=indices,
    )


class GatedTopK(Method):
    """Router scores, hard top-k, and in training the gates of a subclass."""

    needs_signals = True
    config: GatedTopKConfig

    def __init__(self, config: GatedTopKConfig, spec: BackboneSpec):
        super().__init__(config, spec)
        check_layers("dense", config.dense, spec)
        self.guidance = config.guidance
        self.routers = RouterBank(
            spec.width,
            spec.time_width,
            spec.prompt_width,
            spec.layers,
            config.sharing,
            config.bottleneck,
            config.signals,
        )

    @abstractmethod
    def gates(self, scores: Tensor, k: int, layer: int, ctx: StepContext) -> Tensor:
        """Relaxed inclusion (B, N) of scores (B, N) among the k best, differentiable."""

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"router": list(self.routers.parameters())}

    def selects(self, site: Place) -> bool:
        return site.kind == "block" and site.layer not in self.config.dense

    def ratios(self) -> list[float]:
        """Keep ratio of every layer; dense layers are ignored."""
        return [self.config.keep] * self.spec.layers

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        explored = self.exploration.ratio if self.training else None
        ratios = self.ratios() if explored is None else [explored] * self.spec.layers
        return tuple(
            ctx.tokens if layer in self.config.dense else token_count(ratio, ctx.tokens)
            for layer, ratio in enumerate(ratios)
        )

    def scores(self, x: Tensor, layer: int, ctx: StepContext) -> Tensor:
        """Router scores (B, N) of tokens x (B, N, D), the guidance halves brought together."""
        with ctx.phase("router"), full_precision(x, self.training):
            scores = self.routers(x, ctx.time_embedding, ctx.prompt, layer)
            return unify_guidance(scores, self.guidance, ctx)

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        tokens, layer = x.shape[1], site.layer
        k = ctx.counts[layer]
        if self.training:
            scores = perturb(self.scores(x, layer, ctx), self.exploration.score_noise)
            return input_gates(hard_topk(scores.detach(), k), self.gates(scores, k, layer, ctx))
        if k >= tokens:
            return None
        indices = shared_indices(layer, self.guidance, ctx, lambda: hard_topk(self.scores(x, layer, ctx), k))
        return select(indices, tokens)
