"""An adapter against stale context: trained on Sweep's own runs, each of whose steps it leads back to the dense run.

    python -m reproduce.claims.rollout_adapter --record         # 64 px, 16 steps; fewer steps get the same adapter

From one noise the dense model runs first. Then the reduced one does, without gradient from step to step; at each step
the adapter learns the prediction that would meet the dense run at the next noise level. A dense run of fewer steps
learns the same from as many steps. dB to the dense model's images, on prompts that the adapter has not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import shiva
from reproduce.claims.common import LABELS, apart, progress
from shiva.bench.table import environment
from shiva.checkpoint import write_atomically
from shiva.cli.terminal import folder_of
from shiva.evaluate.candidates import fingerprint
from shiva.evaluate.drawing import draw, load_with_arguments
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.evaluate.prompts import read_prompts

PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@dataclass(frozen=True)
class Point:
    """One way to spend less, with and without its adapter."""

    name: str
    steps: int
    flops: float
    before: list[float]
    """PSNR to dense of each image, with nothing trained."""
    after: list[float]
    optimizer_steps: int
    seconds: float


class Runs:
    """Guided runs of a pipeline's transformer from given noise, step by step."""

    def __init__(self, pipe: Any, arguments: dict[str, Any], guidance: float):
        self.pipe, self.arguments, self.guidance = pipe, arguments, guidance

    def levels(self, steps: int) -> Tensor:
        self.pipe.scheduler.set_timesteps(steps)
        return self.pipe.scheduler.sigmas.clone()

    @torch.no_grad()
    def text(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        how = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": True, **self.arguments}
        hidden, empty, pooled, empty_pooled = self.pipe.encode_prompt(list(prompts), **how)
        return {
            "encoder_hidden_states": torch.cat([empty, hidden]),
            "pooled_projections": torch.cat([empty_pooled, pooled]),
        }

    def velocity(self, here: Tensor, level: Tensor, text: dict[str, Tensor]) -> Tensor:
        timestep = (1000 * level).expand(2 * len(here))
        (both,) = self.pipe.transformer(torch.cat([here, here]), timestep=timestep, return_dict=False, **text)
        empty, conditional = both.chunk(2)
        return empty + self.guidance * (conditional - empty)

    @torch.no_grad()
    def path(self, noise: Tensor, text: dict[str, Tensor], levels: Tensor) -> list[Tensor]:
        """Where a run stands at each of its levels."""
        states = [noise]
        for now, following in itertools.pairwise(levels):
            states.append(states[-1] + (following - now) * self.velocity(states[-1], now, text))
        return states


def on_the_path(states: Sequence[Tensor], levels: Tensor, level: Tensor) -> Tensor:
    """Where a run stands at any noise level: its steps are straight."""
    for (now, then), (here, there) in zip(itertools.pairwise(levels), itertools.pairwise(states), strict=True):
        if level >= then:
            return torch.lerp(here, there, (now - level) / (now - then))
    return states[-1]


@contextlib.contextmanager
def as_it_was(pipe: Any, session: Any) -> Iterator[None]:
    """All tokens, no adapter."""
    pipe.transformer.disable_adapters()
    try:
        with contextlib.nullcontext() if session is None else session.disabled():
            yield
    finally:
        pipe.transformer.enable_adapters()


def train(runs: Runs, session: Any, steps: int, options: argparse.Namespace, prompts: Sequence[str]) -> int:
    """Lessons of one batch of prompts each; how many optimizer steps that were."""
    pipe, generator = runs.pipe, torch.Generator().manual_seed(options.seed + 1)
    weights = [p for p in pipe.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.rate, weight_decay=0.0)
    side = pipe.transformer.config.sample_size
    levels, dense_levels = runs.levels(steps), runs.levels(options.steps)
    total, taken = options.lessons * steps, 0
    for _ in progress(range(options.lessons), "lessons"):
        pick = torch.randperm(len(prompts), generator=generator)[: options.batch]
        text = runs.text([prompts[i] for i in pick])
        channels = pipe.transformer.config.in_channels
        noise = torch.randn(options.batch, channels, side, side, generator=generator)
        with as_it_was(pipe, session):
            states = runs.path(noise, text, dense_levels)
        runs.levels(steps)  # by which a session knows where in the run it is
        if session is not None:
            session.begin_run()
        here = noise
        for now, following in itertools.pairwise(levels):
            missing = on_the_path(states, dense_levels, following) - here
            made = runs.velocity(here, now, text)
            loss = F.mse_loss((following - now) * made, missing)  # of where it gets: the last step hardly moves
            (loss / levels.diff().square().mean()).backward()
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min(1.0, (taken + 1) / 30, 2 * (1 - taken / total))
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            here = here + (following - now) * made.detach()
    return taken


def measured(name: str, method: Any, steps: int, options: argparse.Namespace) -> Point:
    """Before and after training, on a pipeline of its own."""
    pipe, arguments = load_with_arguments(options.model)
    drawn, others = apart(read_prompts(options.labels).texts, options.prompts)

    def images(count: int) -> list[Any]:
        places = range(len(drawn))
        return draw(pipe, drawn, options.seed, places, count, options.guidance, **arguments)

    dense = images(options.steps)
    torch.manual_seed(options.seed)
    pipe.transformer.requires_grad_(False)
    pipe.transformer.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=PROJECTIONS))
    session = None if method is None else shiva.attach(pipe, method)
    before, began = list(map(image_psnr, images(steps), dense)), time.perf_counter()
    share = 1.0 if session is None else session.summary().flops_share
    taken = train(Runs(pipe, arguments, options.guidance), session, steps, options, others)
    seconds = time.perf_counter() - began
    after = list(map(image_psnr, images(steps), dense))
    return Point(name, steps, share * steps / options.steps, before, after, taken, round(seconds, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--labels", type=Path, default=LABELS, help="file of prompts")
    parser.add_argument("--name", default="rollout-adapter-64", help="of the file that is written")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--fewer", type=int, default=8, help="steps of the dense run that learns the same")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--budget", type=float, default=0.4)
    parser.add_argument(
        "--lessons", type=int, default=30, help="of the reduced run; fewer steps get more, to be level"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--prompts", type=int, default=16, help="drawn and measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of what is written; outputs/floor otherwise")
    parser.add_argument("--record", action="store_true", help="write to results/floor, which is committed")
    options = parser.parse_args()
    folder = folder_of(options.output, options.record, "floor")
    found = [measured(f"Sweep {options.budget:g}", shiva.Sweep(budget=options.budget), options.steps, options)]
    options.lessons = options.lessons * options.steps // options.fewer
    found.append(measured(f"{options.fewer} steps", None, options.fewer, options))
    table = Table("", "FLOPs", "dB before", "dB after", "optimizer steps", "seconds")
    for point in found:
        means = (f"{statistics.mean(values):.2f}" for values in (point.before, point.after))
        table.add_row(point.name, f"{point.flops:.0%}", *means, str(point.optimizer_steps), f"{point.seconds:.0f}")
    Console().print(table)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    del settings["output"], settings["record"], settings["labels"], settings["lessons"]
    record = {
        "settings": {**settings, "weights": fingerprint(options.model)},
        "points": [asdict(point) for point in found],
        "environment": environment(),
    }
    write_atomically(folder / f"{options.name}.json", (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
