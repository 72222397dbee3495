"""When a loss is not finite: find where it began."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from shiva.core.context import Tape
from shiva.training.adapter import adapters_off
from shiva.training.objectives import MicroBatch, Objectives


class NonFiniteError(RuntimeError):
    """Training met a NaN or infinity; the message says where, and what to go back to."""

    def __init__(self, where: str, step: int, newest: Path | None):
        last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        super().__init__(
            f"step {step}: {where}; {last}; nothing was updated. Lower the learning rate, or train in bf16 instead of "
            "fp16"
        )


@torch.no_grad()
def diagnose(objectives: Objectives, batch: MicroBatch) -> str | None:
    """Run a micro-batch again, dense and reduced, and name the first thing that is not finite."""
    session = objectives.session
    for name, value in {"latents": batch.latents, **{f"text {k}": v for k, v in batch.text.items()}}.items():
        if value.is_floating_point() and not value.isfinite().all():
            return f"the data's {name} are not finite"
    with session.disabled(), adapters_off(session.transformer), session.record(updates=()) as tape:
        objectives.forward(batch)
    layer = first_bad_layer(tape)
    if layer is not None:
        return f"the output of block {layer} is not finite already in the dense model"
    session.teacher = objectives.teach(batch).tape if objectives.needs_teacher else None
    session.method.exploration = batch.exploration
    torch.manual_seed(batch.seed)
    with session.record(updates=()) as tape, contextlib.suppress(ValueError):
        objectives.forward(batch)  # scores without an order raise, after the block that spoiled them
    session.teacher = None
    layer = first_bad_layer(tape)
    return None if layer is None else f"the output of block {layer} is not finite"


def not_finite_of(groups: Mapping[str, Sequence[nn.Parameter]]) -> str:
    """The groups of weights whose gradients are not finite; they may be too large together only."""
    bad = [n for n, g in groups.items() if any(p.grad is not None and not p.grad.isfinite().all() for p in g)]
    return " and ".join(bad) or "all weights together"


def first_bad_layer(tape: Tape) -> int | None:
    return next((layer for layer, out in sorted(tape.outputs.items()) if not out.isfinite().all()), None)
