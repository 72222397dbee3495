"""The process a run lives in: its signals, its precision, and the other ranks, on accelerate."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shiva.core.needs import need


class Interrupted(Exception):
    """A run was asked to stop, and saved itself."""

    def __init__(self, number: int, step: int, saved: Path | None):
        self.code = 128 + number
        """The exit code shells use for the signal: 143 for SIGTERM, 130 for SIGINT."""
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}, saved as {saved}; the same command continues it")


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT as they come, to end after the step in progress; a second one acts as it would have."""
    noted: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if main}

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def choose_precision(wanted: str) -> str:
    """`auto`: what `accelerate launch` was told, or else bf16 where the device has it."""
    if wanted != "auto":
        return wanted
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("bf16", "fp16"):
        return launched
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


def make_accelerator(precision: str, output: Path, wandb: str | None) -> Any:
    """Accumulation is the trainer's own: a global batch is the same for any number of ranks.

    Ranks wait for each other while data is encoded or one validates, longer than the default timeout.
    """
    accelerate = need("accelerate", "train")
    trackers = ["tensorboard", "wandb"] if wandb else ["tensorboard"]
    for tracker in trackers:
        need(tracker, "train")
    patience = accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(days=7))
    accelerator = accelerate.Accelerator(
        mixed_precision=precision, log_with=trackers, project_dir=str(output), kwargs_handlers=[patience]
    )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"):
        raise ValueError(
            f"accelerate is configured for {kind}; the base weights are frozen and the trained ones small, so plain "
            "data parallelism is used: run `accelerate config` and choose no FSDP, DeepSpeed or Megatron"
        )
    return accelerator


def any_rank(flag: bool, accelerator: Any) -> bool:
    """Whether the flag is set on any rank."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)


def sum_gradients(parameters: list[nn.Parameter], accelerator: Any) -> None:
    """Add the gradients of all ranks in one message; each rank's are already its share of the global mean.

    The trained weights are few, so there is nothing to overlap; and unlike DDP's hooks this does not mind which
    parameters a stage or a micro-batch leaves unused. The message begins with which gradients a rank has: what none
    has stays None, as it does in one process, where the optimizer then leaves the weight and its moments alone.
    """
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=parameters[0].device)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    message = accelerator.reduce(torch.cat([has, *(g.flatten() for g in gradients)]), "sum")
    has, *parts = message.split([len(parameters), *(g.numel() for g in gradients)])
    for parameter, gradient, part, ranks in zip(parameters, gradients, parts, has.tolist(), strict=True):
        parameter.grad = gradient.copy_(part.view_as(gradient)) if ranks else None
