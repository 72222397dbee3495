"""`shiva generate`: images from any pipeline, dense or under any method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiva.cli.terminal import Device, Dtype, Height, Width, check_folder, settings_from

if TYPE_CHECKING:
    from shiva.evaluate.candidates import Candidate


def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")],
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts; for DiT, classes by number or name")],
    checkpoint: Annotated[str | None, typer.Option(help="Folder or hub id of a trained or fitted checkpoint")] = None,
    method: Annotated[str | None, typer.Option(help="A method by its name, e.g. ToMeSD; see docs/methods.md")] = None,
    preset: Annotated[str, typer.Option(help="The method's preset: official, paper, or one of its own")] = "official",
    budget: Annotated[
        float | None, typer.Option(help="Mean share of tokens computed, of methods that have one")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any option of the method, for example --set ratio=0.5. May be repeated."),
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What the images should not show")] = None,
    height: Height = None,
    width: Width = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps")] = 28,
    guidance: Annotated[float, typer.Option(help="Guidance scale; for Flux, the one it was distilled with")] = 4.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise; each prompt's place gives it another")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for images and run.json")] = Path("outputs/generate"),
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Generate images, dense or with fewer tokens, and say what was spared."""
    import dataclasses
    import json

    from rich.console import Console
    from rich.progress import Progress

    from shiva.bench.table import environment
    from shiva.checkpoint import write_atomically, write_image
    from shiva.core.method import MethodConfig
    from shiva.evaluate import drawing
    from shiva.evaluate.candidates import slug

    candidate = choose(checkpoint, method, preset, budget, settings_from(override))
    drawing.check_device(device)
    check_folder(output)
    config, console = candidate.source(), Console()
    if isinstance(config, MethodConfig):
        console.print(repr(config), markup=False, soft_wrap=True)
    pipe, arguments = drawing.load_with_arguments(model, dtype, device)
    asked = {"height": height, "width": width, "negative_prompt": negative}
    arguments |= drawing.accepted(drawing.of_images(pipe), asked)
    if negative is not None:
        arguments["negative_prompt"] = [negative] * len(prompts)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=steps)
        outcome = drawing.generate(
            pipe,
            prompts,
            {"run": candidate},
            steps=steps,
            guidance=guidance,
            seed=seed,
            progress=lambda name, step: progress.update(task, advance=1),
            **arguments,
        )["run"]
    files = [output / f"{i:03d}-{slug(prompt)[:60]}.png" for i, prompt in enumerate(prompts)]
    for file, image in zip(files, outcome.images, strict=True):
        write_image(file, image)
        console.print(str(file), soft_wrap=True)
    if outcome.summary is not None:
        console.print(str(outcome.summary))
    settings: dict[str, Any] = {"model": model, "prompts": prompts, "checkpoint": checkpoint, "method": method}
    settings |= {"preset": preset, "options": dataclasses.asdict(config) if isinstance(config, MethodConfig) else None}  # type: ignore[call-overload]
    settings |= {"set": candidate.options, "steps": steps, "guidance": guidance, "seed": seed, "dtype": dtype, **asked}
    report: dict[str, Any] = {"environment": environment(), "settings": settings, "seconds": outcome.seconds}
    report["summary"] = None if outcome.summary is None else outcome.summary.to_dict()
    write_atomically(output / "run.json", json.dumps(report, indent=2, default=str).encode() + b"\n")


def choose(
    checkpoint: str | None, method: str | None, preset: str, budget: float | None, options: dict[str, Any]
) -> Candidate:
    """The candidate that the options describe; the dense pipeline if they name none."""
    from shiva.evaluate.candidates import Candidate

    if checkpoint is not None and method is not None:
        raise ValueError(f"--checkpoint {checkpoint} and --method {method} exclude each other; pass one")
    if preset != "official" and method is None:
        raise ValueError(f"--preset {preset} needs a method that it is of: pass --method too, or leave it out")
    options = {**options, **({} if budget is None else {"budget": budget})}
    if checkpoint is None and method is None and options:
        given = f"--budget {budget}" if budget is not None else f"--set {next(iter(options))}"
        raise ValueError(f"{given} needs something to keep it: --checkpoint FOLDER, or --method Sweep")
    return Candidate(method=method, checkpoint=checkpoint, preset=preset, options=options)
