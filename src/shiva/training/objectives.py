"""The losses of one micro-batch: a dense pass that teaches, a reduced pass that learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.context import Earlier, Tape
from shiva.core.method import Exploration
from shiva.core.options import unknown_key
from shiva.modules.losses import normalized_distance
from shiva.session import Session
from shiva.training.adapter import adapters_off
from shiva.training.encode import Family, Text
from shiva.training.recipe import WEIGHTS
from shiva.training.sampling import NoiseProcess


@dataclass(frozen=True)
class Before:
    """A moment of the same sampling run, some sampler steps earlier."""

    timestep: float
    steps: float


@dataclass(frozen=True)
class MicroBatch:
    """All that one forward pass needs; its samples share a timestep."""

    latents: Tensor  # (B, C, h, w), clean
    noise: Tensor  # (B, C, h, w)
    text: Text
    timestep: float
    seed: int
    """Of whatever the method draws for itself."""
    exploration: Exploration
    before: Before | None = None
    """Where the noisier pass lies that stands in for a cache."""

    def to(self, device: torch.device) -> MicroBatch:
        text = {name: value.to(device) for name, value in self.text.items()}
        return dataclasses.replace(self, latents=self.latents.to(device), noise=self.noise.to(device), text=text)

    def earlier(self) -> MicroBatch:
        """The same latents and noise, mixed at the noisier timestep: earlier on the same straight path."""
        assert self.before is not None
        return dataclasses.replace(self, timestep=self.before.timestep, before=None)

    def with_empty(self, dropped: Tensor, empty: Text) -> MicroBatch:
        """The same with the empty prompt where `dropped` (B) says."""
        text = {}
        for name, value in self.text.items():
            mask = dropped.view(-1, *[1] * (value.ndim - 1))
            text[name] = torch.where(mask, empty[name].to(value), value)
        return dataclasses.replace(self, text=text)


@dataclass(frozen=True)
class Teaching:
    """The dense pass of the same weights on the same micro-batch."""

    prediction: Tensor  # (B, C, h, w)
    tape: Tape


@dataclass
class Objectives:
    """Every loss by name; the recipe weighs them, the method adds its own."""

    session: Session
    family: Family
    process: NoiseProcess
    weights: dict[str, float]
    distill_every: int

    def distilled_layers(self) -> list[int]:
        if self.distill_every <= 0 or not self.weights["distill"]:
            return []
        return list(range(self.distill_every - 1, self.session.spec.layers, self.distill_every))

    @property
    def needs_teacher(self) -> bool:
        return bool(self.weights["output"] or self.distilled_layers() or self.session.method.needs_updates)

    def forward(self, batch: MicroBatch) -> Tensor:
        """The transformer's prediction (B, C, h, w)."""
        dtype: torch.dtype = self.family.transformer.dtype
        noisy = self.process.mix(batch.latents.float(), batch.noise.float(), batch.timestep)
        text = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.text.items()}
        output = self.session.transformer(**self.family.call(noisy.to(dtype), batch.timestep, text))
        return self.family.prediction(output[0], noisy).float()

    @torch.no_grad()
    def teach(self, batch: MicroBatch) -> Teaching:
        """Run dense with adapters off: the same weights, no second copy; only what is needed is recorded.

        A method that reuses updates costs one pass more, at the batch's earlier timestep.
        """
        session = self.session
        updates = self.reduced_layers() if session.method.needs_updates else []
        with session.disabled(), adapters_off(session.transformer):
            with session.record(outputs=self.distilled_layers(), updates=updates) as tape:
                prediction = self.forward(batch)
            if session.method.needs_earlier and batch.before is not None:
                with session.record(outputs=(), updates=updates) as cache:
                    self.forward(batch.earlier())
                tape.earlier = Earlier(cache.updates, batch.before.steps)
        return Teaching(prediction, tape)

    def reduced_layers(self) -> list[int]:
        method = self.session.method
        sites = self.session.backbone.sites(self.session.transformer)
        return sorted({site.layer for site in sites if method.selects(site)})

    def losses(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Each loss of the reduced pass, not yet weighed."""
        session = self.session
        teaching = self.teach(batch) if self.needs_teacher else None
        session.teacher = None if teaching is None else teaching.tape
        session.method.exploration = batch.exploration
        torch.manual_seed(batch.seed)
        with session.record(outputs=self.distilled_layers(), updates=()) as tape:
            prediction = self.forward(batch)
        losses = {"diffusion": self.diffusion(prediction, batch)}
        if teaching is not None:
            losses["output"] = F.mse_loss(prediction, teaching.prediction)
            for layer, taught in teaching.tape.outputs.items():
                distance = normalized_distance(tape.outputs[layer], taught)
                losses["distill"] = losses.get("distill", 0.0) + distance
        assert session.ctx is not None
        return {**losses, **session.method.losses(session.ctx)}

    def diffusion(self, prediction: Tensor, batch: MicroBatch) -> Tensor:
        target = self.process.target(batch.latents.float(), batch.noise.float(), batch.timestep)
        return F.mse_loss(prediction, target)

    def backward(self, batch: MicroBatch, share: float, backward: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """Accumulate the gradients of this micro-batch's `share` of the loss; the losses, detached."""
        losses = self.losses(batch)
        total = sum(self.weight(name) * loss for name, loss in losses.items())
        assert isinstance(total, Tensor)
        backward(total * share)
        self.session.teacher = None
        if self.weights["complete"]:
            # inside `disabled`, because gradient checkpointing runs the blocks once more in the backward pass
            with self.session.disabled():
                losses["complete"] = self.diffusion(self.forward(batch), batch)
                backward(self.weights["complete"] * losses["complete"] * share)
            total = total.detach() + self.weights["complete"] * losses["complete"].detach()
        return {"loss": total.detach(), **{name: loss.detach() for name, loss in losses.items()}}

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)

    def kept_share(self) -> float:
        """Share of tokens that the reduced sites ran on in the latest call."""
        ctx, method = self.session.ctx, self.session.method
        assert ctx is not None
        sites = self.session.backbone.sites(self.session.transformer)
        counts = [ctx.kept[site.name] for site in sites if method.selects(site) and site.name in ctx.kept]
        return sum(counts) / (len(counts) * ctx.tokens) if counts else 1.0

    def check_weights(self, seen: dict[str, Tensor]) -> None:
        """Refuse a weight for an objective that never occurs."""
        for name in self.weights:
            if name not in seen and name not in WEIGHTS:
                raise ValueError(unknown_key(name, seen, "weights"))
