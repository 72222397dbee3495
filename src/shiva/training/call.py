"""All that training says to a session and its method: what goes in is an argument, what comes out is returned.

No other file of training calls the transformer; of the method they read plain answers (`groups`, `readings`, what it
needs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shiva.core.context import Exploration, Recording
from shiva.core.cost import CostModel
from shiva.core.method import Trainable
from shiva.core.options import unknown_key
from shiva.session import Session
from shiva.training.adapter import adapters_off
from shiva.training.sections import Stage


@dataclass(frozen=True)
class Record:
    """What a call leaves besides its output."""

    recording: Recording
    """Outputs and updates of the layers that were asked for."""
    losses: dict[str, Tensor]
    """The method's own, in training."""
    keep: float
    """Share of tokens that the reduced sites ran on."""


def call(
    session: Session,
    arguments: dict[str, Any],
    *,
    teacher: Recording | None = None,
    explore: Exploration | None = None,
    begins: bool = False,
    outputs: Collection[int] = (),
    updates: Collection[int] = (),
) -> tuple[Tensor, Record]:
    """The transformer's output, and what was recorded on the way; `begins` a sampling run of its own.

    Inside `dense` nothing is reduced, and the method neither acts nor has losses.
    """
    if begins:
        session.begin_run(first=0)
    with session.record(outputs=outputs, updates=updates) as recording:
        if not session.enabled:
            return session.transformer(**arguments)[0], Record(recording, {}, 1.0)
        output, ctx = session.call(arguments, teacher=teacher, explore=explore)
    method = learner(session)
    ctx.cost = partial(priced_without_adapters, session)
    losses = method.losses(ctx) if method.training else {}
    counts = [ctx.kept[site.name] for site in session.hooks.reduced() if site.name in ctx.kept]
    keep = sum(counts) / (len(counts) * ctx.tokens) if counts else 1.0
    return output[0], Record(recording, losses, keep)


def priced_without_adapters(session: Session) -> CostModel:
    """What the model costs when it is used, with its adapter folded into the weights."""
    with adapters_off(session.transformer):
        return session.cost_model()


def learner(session: Session) -> Trainable:
    """The session's method, which must be one that learns."""
    if not isinstance(session.method, Trainable):
        raise ValueError(f"{session.method} has nothing to train; attach it as it is")
    return session.method


GROUPS = ("router", "policy", "fill", "merge", "adapter")
"""What a recipe may give a rate, though its method has none: one recipe extends another's."""


def check_groups(method: Trainable, stages: Iterable[Stage], rates: Collection[str]) -> None:
    """Refuse a stage that trains what the method does not have, and a rate of what nobody has."""
    known = {*method.groups(), "adapter"}
    for stage in stages:
        for name in set(stage.trains) - known:
            raise ValueError(unknown_key(name, known, f"stage {stage.name!r} of {method}"))
    for name in set(rates) - known.union(GROUPS):
        raise ValueError(unknown_key(name, known, "optimizer.rates"))


@contextlib.contextmanager
def dense(session: Session, adapters: bool = False) -> Iterator[None]:
    """Nothing is reduced inside this context; the base weights alone, or with their `adapters`.

    A backward pass belongs inside it too, because gradient checkpointing runs the blocks once more.
    """
    with session.disabled(), contextlib.nullcontext() if adapters else adapters_off(session.transformer):
        yield


def begin_batch(session: Session, explore: Exploration, timesteps: Sequence[float], seed: int) -> None:
    """Announce a global batch, before the first of its micro-batches runs; `seed` is of what the method draws."""
    torch.manual_seed(seed)
    learner(session).begin_batch(timesteps, explore)


def reduced_layers(session: Session) -> list[int]:
    return sorted({site.layer for site in session.hooks.reduced()})


def blocks_of(session: Session) -> dict[int, nn.Module]:
    """The transformer's blocks by layer."""
    return {s.layer: s.module for s in session.backbone.sites(session.transformer) if s.kind == "block"}


def finish(session: Session) -> None:
    """Make the method run as it does after training, with what it has learned so far."""
    session.method.eval()
    learner(session).finish()


@contextlib.contextmanager
def as_trained(session: Session) -> Iterator[None]:
    """The same inside this context only."""
    training = session.method.training
    finish(session)
    try:
        yield
    finally:
        session.method.train(training)


def at_keep(session: Session, keep: float | None) -> contextlib.AbstractContextManager[None] | None:
    """A context with a uniform keep, or the method's own schedule; None where it has no such knob."""
    return contextlib.nullcontext() if keep is None else learner(session).at_keep(keep)


def first_not_finite(session: Session, run: Callable[[], object]) -> int | None:
    """The first layer whose output is not finite in `run`, which may fail at what that spoils."""
    found: list[int] = []

    def watch(layer: int, module: nn.Module, arguments: Any, output: Any) -> None:
        if not all(leaf.isfinite().all() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            found.append(layer)

    blocks = blocks_of(session)
    handles = [block.register_forward_hook(partial(watch, layer)) for layer, block in blocks.items()]
    try:
        with contextlib.suppress(ValueError):  # scores without an order raise, after the block that spoiled them
            run()
    finally:
        for handle in handles:
            handle.remove()
    return min(found, default=None)
