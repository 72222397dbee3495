"""One sitting of a long training run: its clock, its state on disk, its rate, its average; resumable at any moment.

The rate warms up and then stays constant, so a sitting may stop at any time; `--finish` ends the run with a linear
decay, and a later sitting without it returns to the constant rate. SIGTERM saves and stops. One atomic file holds
weights, EMA, optimizer, generator, clock and curve.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from recipes.emoji.common import write_json
from recipes.emoji.optim import Optimizers
from shiva.checkpoint import write_atomically

WARM_UP = 100
"""Steps over which the rate rises."""


@dataclass
class Clock:
    """Where the run is; saved with the weights."""

    step: int = 0
    seconds: float = 0.0
    """Training time over all sittings."""
    images: int = 0
    decay_start: float | None = None
    """`seconds` at which the final decay began."""
    fresh: int = 0
    """`step` at which the optimizer's moments began: the run's first, or that of a restored one."""
    curve: list[dict[str, Any]] = field(default_factory=list)


def rate_factor(clock: Clock, decay_seconds: float) -> float:
    warm = min(1.0, (clock.step - clock.fresh + 1) / WARM_UP)
    if clock.decay_start is None or decay_seconds <= 0:
        return warm
    return warm * max(0.0, 1 - (clock.seconds - clock.decay_start) / decay_seconds)


@torch.no_grad()
def update_ema(ema: SD3Transformer2DModel, model: SD3Transformer2DModel, decay: float) -> None:
    averages, values = list(ema.parameters()), [p.detach() for p in model.parameters()]
    torch._foreach_lerp_(averages, values, 1 - decay)


def save_state(
    path: Path,
    model: SD3Transformer2DModel,
    ema: SD3Transformer2DModel,
    optimizers: Optimizers,
    generator: torch.Generator,
    clock: Clock,
) -> None:
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    tensors |= {f"ema.{k}": v.contiguous() for k, v in ema.state_dict().items()}
    tensors |= {f"optimizer.{k}": v.contiguous() for k, v in optimizers.tensors().items()}
    tensors["generator"] = generator.get_state()
    metadata = {"clock": json.dumps(asdict(clock)), "config": json.dumps(dict(model.config))}
    write_atomically(path, save(tensors, metadata=metadata))


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def load_state(
    path: Path,
    model: SD3Transformer2DModel,
    ema: SD3Transformer2DModel,
    optimizers: Optimizers,
    generator: torch.Generator,
) -> Clock:
    with safe_open(path, "pt") as file:
        clock = Clock(**json.loads(file.metadata()["clock"]))
    tensors = load_file(path)
    model.load_state_dict(part_of(tensors, "model."))
    ema.load_state_dict(part_of(tensors, "ema."))
    optimizers.load(part_of(tensors, "optimizer."))
    generator.set_state(tensors["generator"])
    return clock


def add_arguments(parser: argparse.ArgumentParser, *, name: str, batch: int, rate: float, muon: float, ema: float):
    """The options of every sitting, with this run's own defaults."""
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--name", default=name, help="name of the run inside the state folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop this sitting after so long")
    parser.add_argument("--finish", type=float, default=0, help="decay the rate to zero over so many minutes, end")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--rate", type=float, default=rate, help="AdamW's learning rate")
    parser.add_argument("--muon-rate", type=float, default=muon, help="Muon's learning rate; 0: AdamW alone")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--ema", type=float, default=ema)
    parser.add_argument("--zero-tokens", type=float, default=0.05, help="share of steps with 256 zero tokens")
    parser.add_argument("--bf16", action="store_true", help="autocast; 1.4 times as fast with avx512_bf16")
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--probe-minutes", type=float, default=5)
    parser.add_argument("--grid-minutes", type=float, default=20)


def sit(
    options: argparse.Namespace,
    state: Path,
    model: SD3Transformer2DModel,
    ema: SD3Transformer2DModel,
    loss_of: Callable[[torch.Generator], tuple[Tensor, int]],
    probe: Callable[[], dict[str, float]],
    draw: Callable[[Path], None],
) -> None:
    """Train until stopped: `loss_of` draws a batch and gives its loss and how many images it has."""
    path, generator = state / f"{options.name}.safetensors", torch.Generator().manual_seed(0)
    optimizers = Optimizers(model, options.rate, options.muon_rate, options.weight_decay)
    clock = load_state(path, model, ema, optimizers, generator) if path.exists() else Clock()
    clock.decay_start = (clock.decay_start or clock.seconds) if options.finish else None
    print(f"at step {clock.step}, {clock.seconds / 60:.0f} minutes", flush=True)
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    began = saved = probed = drawn = clock.seconds
    recent, last, images = [], time.monotonic(), clock.images
    while not stopping:
        factor = rate_factor(clock, options.finish * 60)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            loss, count = loss_of(generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(factor)
        update_ema(ema, model, min(options.ema, (1 + clock.step) / (10 + clock.step)))
        recent.append(loss.item())
        clock.step += 1
        clock.images += count
        now = time.monotonic()
        clock.seconds, last = clock.seconds + now - last, now
        ending = stopping or clock.seconds - began > options.minutes * 60 or (options.finish > 0 and factor == 0)
        stopping = stopping or ending

        mean = sum(recent) / len(recent)
        if clock.step % 50 == 0 or ending:
            speed = (clock.images - images) / (clock.seconds - began)
            print(
                f"step {clock.step} {clock.seconds / 60:.1f} min loss {mean:.4f} {speed:.1f} img/s",
                flush=True,
            )
        if clock.seconds - probed > options.probe_minutes * 60 or ending:
            probed, recent = clock.seconds, []
            entry = {"step": clock.step, "minutes": round(clock.seconds / 60, 2), "images": clock.images, "loss": mean}
            clock.curve.append({**entry, **probe()})
            print(f"probe {clock.curve[-1]}", flush=True)
            write_json(state / f"{options.name}-curve.json", {"options": vars(options), "curve": clock.curve})
        if clock.seconds - drawn > options.grid_minutes * 60 or (ending and options.finish):
            drawn = clock.seconds
            draw(state / f"{options.name}-grids" / f"step-{clock.step:06d}.png")
        if clock.seconds - saved > options.save_minutes * 60 and not stopping:
            saved = clock.seconds
            save_state(path, model, ema, optimizers, generator, clock)
    save_state(path, model, ema, optimizers, generator, clock)
