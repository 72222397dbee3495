"""`shiva generate`: images from any pipeline, dense or under any method."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shiva.checkpoint import write_atomically, write_image
from shiva.core.method import MethodConfig
from shiva.core.options import unknown_key
from shiva.measure.environment import environment
from shiva.measure.generate import Contender, load_with_arguments
from shiva.measure.generate import generate as run


def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")],
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts; for DiT, classes by number or name")],
    checkpoint: Annotated[str | None, typer.Option(help="Folder or hub id of a trained checkpoint")] = None,
    method: Annotated[str | None, typer.Option(help="A method by its name, e.g. ToMeSD; see docs/methods.md")] = None,
    preset: Annotated[
        str, typer.Option(help="The method's preset: official, paper, or one of its own, as Shiva's sweep")
    ] = "official",
    budget: Annotated[float | None, typer.Option(help="Mean share of tokens that Shiva keeps")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps")] = 28,
    guidance: Annotated[float, typer.Option(help="Guidance scale; for Flux, the one it was distilled with")] = 4.5,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt's noise; the next prompts count on")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for images and run.json")] = Path("outputs/generate"),
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Generate images, dense or with fewer tokens, and say what was spared."""
    contender = choose(checkpoint, method, preset, budget)
    console = Console()
    settled = contender.settled()
    if settled is not None:
        console.print(str(settled), markup=False, soft_wrap=True)
    pipe, arguments = load_with_arguments(model, dtype)
    pipe.to(device)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=steps)
        outcome = run(
            pipe,
            prompts,
            {"run": contender},
            steps=steps,
            guidance=guidance,
            seed=seed,
            progress=lambda name, step: progress.update(task, advance=1),
            **arguments,
        )["run"]
    files = [output / f"{i:03d}-{slug(prompt)}.png" for i, prompt in enumerate(prompts)]
    for file, image in zip(files, outcome.images, strict=True):
        write_image(file, image)
        console.print(str(file))
    if outcome.summary is not None:
        console.print(str(outcome.summary))
    settings: dict[str, Any] = {
        "model": model,
        "prompts": prompts,
        "checkpoint": checkpoint,
        "method": method,
        "preset": preset,
    }
    settings["options"] = None if settled is None else dataclasses.asdict(settled)  # type: ignore[call-overload]
    settings |= {"budget": budget, "steps": steps, "guidance": guidance, "seed": seed, "dtype": dtype}
    report: dict[str, Any] = {"environment": environment(), "settings": settings, "seconds": outcome.median}
    report["summary"] = None if outcome.summary is None else outcome.summary.to_dict()
    write_atomically(output / "run.json", json.dumps(report, indent=2).encode() + b"\n")


def choose(checkpoint: str | None, method: str | None, preset: str, budget: float | None) -> Contender:
    """The contender that the options describe; the dense pipeline if they name none."""
    if checkpoint is not None and method is not None:
        raise ValueError(f"--checkpoint {checkpoint} and --method {method} exclude each other; pass one")
    changes = {} if budget is None else {"budget": budget}
    if checkpoint is not None:
        return Contender(checkpoint, changes)
    if method is None:
        if changes:
            raise ValueError(f"--budget {budget} needs something to keep it: --checkpoint, or --method Shiva")
        return Contender(None)
    if method not in MethodConfig.known:
        raise ValueError(unknown_key(method, MethodConfig.known, "shiva"))
    return Contender(MethodConfig.known[method].preset(preset), changes)


def slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "image"
