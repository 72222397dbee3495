"""What a micro-batch is measured by: losses, from a dense pass that teaches and a reduced one that learns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.core.context import Earlier, Recording, normalized_distance
from shiva.session import Session
from shiva.training.call import Record, call, dense, first_not_finite, learner, reduced_layers
from shiva.training.data import Grid
from shiva.training.draws import MicroBatch
from shiva.training.family import Family
from shiva.training.noise import FlowMatching, NoiseProcess, noise_process
from shiva.training.sections import Sampling

SHORTEST = 0.02
"""Length of a step, in noise levels, below which it is not asked to mend what went before."""


@dataclass(frozen=True)
class Teaching:
    """The dense pass of the same weights on the same micro-batch."""

    prediction: Tensor  # (B, C, h, w)
    recording: Recording


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

    def needs_teacher_of(self, batch: MicroBatch) -> bool:
        taught = self.weights["output"] and batch.aim is None
        return bool(taught or self.distilled_layers() or learner(self.session).needs_updates)

    def call(self, batch: MicroBatch, **how: Any) -> tuple[Tensor, Record]:
        """The transformer's prediction (B, C, h, w), and the record of its call; `how` as in `call.call`."""
        dtype: torch.dtype = self.family.transformer.dtype
        noisy = batch.reached
        if noisy is None:
            noisy = self.process.mix(batch.latents.float(), batch.noise.float(), batch.timestep)
        text = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.text.items()}
        output, record = call(self.session, self.family.call(noisy.to(dtype), batch.timestep, text), **how)
        return self.family.prediction(output, noisy).float(), record

    @torch.no_grad()
    def rolled_out(self, batch: MicroBatch) -> MicroBatch:
        """The batch where the reduced model's own run from its noise brings it, if that is asked for."""
        if not batch.rolls_out or not isinstance(self.process, FlowMatching):
            return batch
        here = batch.noise.float()
        torch.manual_seed(batch.seed)
        self.session.begin_run()
        for now, following in self.process.way_to(batch.timestep):
            standing = replace(batch, timestep=now, reached=here)
            sees_all = self.process.sees_all(now)
            explore = replace(batch.exploration, ratio=1.0) if sees_all else batch.exploration
            prediction, _ = self.call(standing, explore=explore)
            here = self.process.advance(here, prediction, now, following)
        torch.clear_autocast_cache()  # of casts without a gradient, which the pass that learns would take over
        batch = replace(batch, reached=here)
        return replace(batch, aim=self.way_back(batch, self.process)) if self.process.followed else batch

    def way_back(self, batch: MicroBatch, process: FlowMatching) -> Tensor | None:
        """The prediction by which a rollout's next step would meet the dense run from the same noise; none of a step
        too short to get anywhere, such as the stock scheduler's last."""
        assert batch.reached is not None
        there, following = batch.noise.float(), process.after(batch.timestep)
        length = (following - batch.timestep) / process.steps
        if -length < SHORTEST:
            return None
        with dense(self.session):
            for now, then in process.way_along(following):
                prediction, _ = self.call(replace(batch, timestep=now, reached=there))
                there = process.advance(there, prediction, now, then)
        return (there - batch.reached) / length

    def forward(self, batch: MicroBatch) -> Tensor:
        return self.call(batch)[0]

    @torch.no_grad()
    def teach(self, batch: MicroBatch) -> Teaching:
        """Run dense with adapters off: the same weights, no second copy; only what is needed is recorded.

        A method that reuses updates costs one pass more, at the batch's earlier timestep.
        """
        method = learner(self.session)
        updates = reduced_layers(self.session) if method.needs_updates else []
        with dense(self.session):
            prediction, record = self.call(batch, outputs=self.distilled_layers(), updates=updates)
            if not method.needs_earlier or batch.before is None:
                return Teaching(prediction, record.recording)
            _, cache = self.call(batch.earlier(), updates=updates)
        earlier = Earlier(cache.recording.updates, batch.before.steps)
        return Teaching(prediction, replace(record.recording, earlier=earlier))

    def learn(self, batch: MicroBatch, teaching: Teaching | None) -> tuple[Tensor, Record]:
        """The reduced pass, under the batch's own exploration and seed."""
        teacher = None if teaching is None else teaching.recording
        torch.manual_seed(batch.seed)
        return self.call(batch, teacher=teacher, explore=batch.exploration, outputs=self.distilled_layers())

    def losses(self, batch: MicroBatch) -> tuple[dict[str, Tensor], float]:
        """Each loss of the reduced pass, not yet weighed; and the share of tokens it ran on."""
        batch = self.rolled_out(batch)
        teaching = self.teach(batch) if self.needs_teacher_of(batch) else None
        prediction, record = self.learn(batch, teaching)
        rolled = batch.reached is not None  # from where no target is known; all have the same names, as ranks add them
        losses = {"diffusion": prediction.new_zeros(()) if rolled else self.diffusion(prediction, batch)}
        if batch.aim is not None:
            losses["output"] = F.mse_loss(prediction, batch.aim)
        elif teaching is not None:
            losses["output"] = F.mse_loss(prediction, teaching.prediction)
        if teaching is not None:
            for layer, taught in teaching.recording.outputs.items():
                learned = record.recording.outputs[layer]
                if learned.shape != taught.shape:
                    raise ValueError(
                        f"distill.every={self.distill_every} compares the tokens after block {layer}, of which "
                        f"{learner(self.session)} has {learned.shape[1]} and the dense model {taught.shape[1]}; set "
                        "weights.distill=0, or another distill.every"
                    )
                losses["distill"] = losses.get("distill", 0.0) + normalized_distance(learned, taught)
        return {**losses, **record.losses}, record.keep

    def diffusion(self, prediction: Tensor, batch: MicroBatch) -> Tensor:
        target = self.process.target(batch.latents.float(), batch.noise.float(), batch.timestep)
        return F.mse_loss(prediction, target)

    def backward(
        self, batch: MicroBatch, share: float, backward: Callable[[Tensor], None]
    ) -> tuple[dict[str, Tensor], float]:
        """Accumulate the gradients of this micro-batch's `share` of the loss; the losses, detached, and the keep."""
        losses, keep = self.losses(batch)
        total = sum(self.weights.get(name, 1.0) * loss for name, loss in losses.items() if self.weights.get(name, 1.0))
        if not isinstance(total, Tensor) or not total.requires_grad:
            raise ValueError(
                f"of the losses {', '.join(losses)} none of a weight above 0 depends on what is trained; raise "
                "another of weights, such as weights.diffusion"
            )
        backward(total * share)
        if self.weights["complete"]:
            with dense(self.session, adapters=True):
                losses["complete"] = self.diffusion(self.forward(batch), batch)
                if losses["complete"].requires_grad:  # of a stage that trains no adapter it is a constant
                    backward(self.weights["complete"] * losses["complete"] * share)
            total = total.detach() + self.weights["complete"] * losses["complete"].detach()
        return {"loss": total.detach(), **{name: loss.detach() for name, loss in losses.items()}}, keep

    @torch.no_grad()
    def diagnose(self, batch: MicroBatch) -> str | None:
        """Run a micro-batch again, dense and reduced, and name the first thing that is not finite."""
        for name, value in {"latents": batch.latents, **{f"text {k}": v for k, v in batch.text.items()}}.items():
            if value.is_floating_point() and not value.isfinite().all():
                return f"the data's {name} are not finite"
        with dense(self.session):
            layer = first_not_finite(self.session, lambda: self.forward(replace(batch, reached=None)))
        if layer is not None:
            return f"the output of block {layer} is not finite already in the dense model"
        layer = first_not_finite(self.session, lambda: self.rolled_out(batch))
        if layer is not None:
            return f"the output of block {layer} is not finite on the way that the run takes from noise"
        batch = self.rolled_out(batch)
        teaching = self.teach(batch) if self.needs_teacher_of(batch) else None
        layer = first_not_finite(self.session, lambda: self.learn(batch, teaching))
        return None if layer is None else f"the output of block {layer} is not finite"


class NonFiniteError(RuntimeError):
    """Training met a NaN or infinity; the message says where, and what to go back to."""

    def __init__(self, where: str, step: int, newest: Path | None):
        last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        super().__init__(
            f"step {step}: {where}; {last}; nothing was updated. Lower the learning rate, or train in bf16 instead of "
            "fp16"
        )


def not_finite_of(groups: Mapping[str, Sequence[nn.Parameter]]) -> str:
    """The groups of weights whose gradients are not finite; they may be too large together only."""
    bad = [n for n, g in groups.items() if any(p.grad is not None and not p.grad.isfinite().all() for p in g)]
    return " and ".join(bad) or "all weights together"


# -- where a run of the pipeline stands -----------------------------------------------------------------


def process_of(family: Family, sampling: Sampling, grid: Grid, dense_steps: Sequence[int] = ()) -> NoiseProcess:
    """The noise process of a pipeline, at the levels of a run over latents of this grid where sampling follows one."""
    process = noise_process(family.pipe.scheduler, sampling.density)
    if not isinstance(process, FlowMatching):
        return process
    levels, followed = (
        () if steps is None else noise_levels(family, grid, steps) for steps in (sampling.steps, sampling.follow)
    )
    return replace(process, levels=levels, dense_steps=tuple(dense_steps), followed=followed)


def noise_levels(family: Family, grid: Grid, steps: int) -> tuple[float, ...]:
    """The noise levels at which the steps of the pipeline's own run begin, read off such a run."""
    family.keep_empty()
    with untouched_scheduler(family.pipe):
        family.draw_latents(family.empty, (grid[0] * family.factor, grid[1] * family.factor), steps, 0.0, [0])
        return tuple(family.pipe.scheduler.sigmas[:steps].tolist())


@contextlib.contextmanager
def untouched_scheduler(pipe: Any) -> Iterator[Any]:
    """A scheduler as it was loaded: one that has drawn pictures still holds their timesteps, to which a method would
    fit its schedule."""
    before = pipe.scheduler
    pipe.scheduler = type(before).from_config(before.config)
    try:
        yield pipe.scheduler
    finally:
        pipe.scheduler = before
