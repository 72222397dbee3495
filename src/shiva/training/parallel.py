"""Ranks and precision, on accelerate."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shiva.training.needs import need


def choose_precision(wanted: str) -> str:
    """`auto`: what `accelerate launch` was told, or else bf16 where the device has it."""
    if wanted != "auto":
        return wanted
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if told in ("bf16", "fp16"):
        return told
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


def make_accelerator(precision: str, output: Path, wandb: str | None) -> Any:
    """Accumulation is the trainer's own: a global batch is the same for any number of ranks.

    Ranks wait for each other while data is encoded or one validates, longer than the default timeout.
    """
    accelerate = need("accelerate")
    need("tensorboard")
    trackers = ["tensorboard", "wandb"] if wandb else ["tensorboard"]
    if wandb:
        need("wandb")
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


def sum_gradients(parameters: list[nn.Parameter], accelerator: Any) -> None:
    """Add the gradients of all ranks in one message; each rank's are already its share of the global mean.

    The trained weights are few, so there is nothing to overlap; and unlike DDP's hooks this does not mind which
    parameters a stage or a micro-batch leaves unused.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = accelerator.reduce(torch.cat([g.flatten() for g in gradients]), "sum")
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
