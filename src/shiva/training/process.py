"""The process a run lives in: its signals, its precision, and the other ranks, on accelerate."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shiva.core.needs import need
from shiva.training.recipe import Recipe


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
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or transformers loads no text encoder on other ranks
    patience = accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(days=7))
    accelerator = accelerate.Accelerator(
        mixed_precision=precision,
        log_with=trackers,
        project_dir=str(output),
        kwargs_handlers=[patience],
        cpu=torch.backends.mps.is_available(),  # which has no float64, as soft ranks need it
    )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "FSDP", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"):
        raise ValueError(
            f"accelerate is configured for {kind}; the base weights are frozen and the trained ones small: run "
            "`accelerate config` and choose plain data parallelism, or FSDP 2 where the base is too large for a device"
        )
    return accelerator


@dataclass(frozen=True)
class Sharding:
    """FSDP 2: each rank holds its share of the frozen weights, and gathers a block's as it runs.

    Trained weights are few and stay whole on every rank, so gradients, optimizer and states are those of plain data
    parallelism. What is sharded is called by all ranks together, or they wait for each other for ever.
    """

    ranks: int
    device: torch.device
    reshard_after_forward: bool

    def shard(self, transformer: nn.Module, blocks: Iterable[nn.Module], whole: Iterable[nn.Parameter]) -> None:
        """Move a frozen transformer to the device in shares, block by block, and the weights that stay `whole`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kept = set(whole)
        for parameter in kept:
            parameter.data = parameter.data.to(self.device)
        how: Any = {"mesh": init_device_mesh(self.device.type, (self.ranks,)), "ignored_params": kept}
        for block in blocks:
            fully_shard(block, **how, reshard_after_forward=self.reshard_after_forward)
        fully_shard(transformer, **how)


def sharding_of(accelerator: Any, recipe: Recipe) -> Sharding | None:
    """What `accelerate launch --use_fsdp` asks for; accelerate itself leaves it out on CPUs."""
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not wanted or accelerator.num_processes == 1:
        return None
    plugin = need("accelerate", "train").FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise ValueError("accelerate is configured for FSDP 1; set fsdp_version: 2 (--fsdp_version 2)")
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise ValueError("fsdp_offload_params=true is not supported: weights are gathered on the device; set it false")
    if plugin.activation_checkpointing:
        raise ValueError("fsdp_activation_checkpointing=true: set it false and compute.gradient_checkpointing=true")
    if recipe.sampling.rollout:
        raise ValueError(
            f"sampling.rollout={recipe.sampling.rollout} runs as many steps on a rank as its timestep asks for, and "
            "all ranks of FSDP must run the same; set it to 0"
        )
    if recipe.data.kind == "prompts":
        raise ValueError(
            "data.kind=prompts draws with the whole transformer, of which FSDP leaves a rank a share; make the "
            "latents in one process first, then set data.kind=latents"
        )
    return Sharding(accelerator.num_processes, accelerator.device, plugin.reshard_after_forward)


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
