"""The command `shiva eval`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shiva.core.options import unknown_key
from shiva.measure.evaluation.evaluation import Evaluation
from shiva.measure.evaluation.lineup import Lineup, fingerprint, read_lineup
from shiva.measure.evaluation.protocols import PROTOCOLS
from shiva.measure.evaluation.run import OtherImages, Settings
from shiva.measure.evaluation.workers import Workers
from shiva.measure.generate import load_pipeline, quiet
from shiva.measure.prompts import PromptSet, read_prompts
from shiva.measure.quality import Tools, chosen
from shiva.measure.sheet import publish


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")],
    methods: Annotated[str, typer.Option(help="A YAML file of contenders, or names: ToMeSD,ToMA:official")],
    prompts: Annotated[Path | None, typer.Option(help="A .json, .csv, .tsv, .txt or .parquet prompt set")] = None,
    protocol: Annotated[list[str] | None, typer.Option(help="main, points, …, or all; may be repeated")] = None,
    output: Annotated[Path, typer.Option(help="Folder of images, scores and tables; the same one resumes")] = Path(
        "outputs/eval"
    ),
    split: Annotated[str | None, typer.Option(help="Of the emoji set: train, validation or all")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts, evenly spaced over the set")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas")] = "0",
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale")] = None,
    height: Annotated[int | None, typer.Option(help="Image height in pixels; the model's own otherwise")] = None,
    width: Annotated[int | None, typer.Option(help="Image width in pixels")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts a call; some methods share choices over a batch")] = 1,
    held_out: Annotated[Path | None, typer.Option(help="Prompts that were not trained on")] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics by name, separated by commas")] = None,
    clip: Annotated[str | None, typer.Option(help="Folder or hub id of a CLIPModel, for clip and clip_iqa")] = None,
    inception: Annotated[Path | None, typer.Option(help="File of Inception weights, for fid")] = None,
    reward: Annotated[str, typer.Option(help="Weights of ImageReward")] = "ImageReward-v1.0",
    flops: Annotated[
        float | None, typer.Option(min=0, max=1, help="matched: the share of dense FLOPs to match")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Turns of the latency measurement; 0 for none")] = 5,
    probes: Annotated[int, typer.Option(min=1, help="Prompts on which FLOPs and one-step errors are measured")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice otherwise")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """What is lost and what is won: images of every method on the same prompts and noise, measured and compared.

    Images that are in the output folder already are not made again, so a run that was killed goes on where it was.
    """
    lineup, chosen_seeds = read_lineup(methods), read_seeds(seeds)
    protocols = list(PROTOCOLS) if protocol == ["all"] else (protocol or ["main"])
    for name in protocols:
        if name not in PROTOCOLS:
            raise ValueError(unknown_key(name, [*PROTOCOLS, "all"], "--protocol"))
    if threads is not None:
        torch.set_num_threads(threads)
    quiet()
    workers = Workers(device)
    pipe = functools.cache(lambda: load(model, dtype, lineup, workers.device))
    source = prompts or (Path(lineup.prompts) if lineup.prompts else None)
    if source is None:
        raise ValueError(f"{methods} names no prompts; pass --prompts FILE")
    tools = Tools(
        pipe=pipe,
        score=Path(model) / "score",
        clip=clip,
        inception=None if inception is None else str(inception),
        reward=reward,
        device=workers.device,
    )
    settings = Settings(
        model=model,
        weights=fingerprint(Path(model)),
        steps=lineup.steps if steps is None else steps,
        guidance=lineup.guidance if guidance is None else guidance,
        height=height,
        width=width,
        batch=batch,
        dtype=dtype,
        without=tuple(lineup.without),
        arguments=lineup.arguments,
    )
    console = Console(width=None if Console().is_terminal else 200)
    with progress_line(workers.main) as progress:
        evaluation = Evaluation(
            lineup=lineup,
            folder=output,
            settings=settings,
            prompts=read_prompts(source, split or lineup.split).limited(limit),
            held_out=held_out_prompts(source, held_out, limit),
            metrics=chosen(None if metrics is None else metrics.split(","), tools),
            tools=tools,
            workers=workers,
            pipe=pipe,
            seeds=chosen_seeds,
            rounds=rounds,
            probes=probes,
            target=flops,
            progress=progress,
        )
        failed = [name for name in protocols if not perform(evaluation, name, console, alone=len(protocols) == 1)]
    workers.close()
    if failed and workers.main:
        console.print(f"[yellow]not done[/]: {', '.join(failed)}; the lines above say why")
    if failed:
        raise typer.Exit(1)


def perform(evaluation: Evaluation, name: str, console: Console, alone: bool) -> bool:
    """Run one protocol and publish its tables; among several, one that cannot run here says so and is left out."""
    try:
        found = PROTOCOLS[name](evaluation)
    except OtherImages:
        raise
    except ValueError as error:
        if alone:
            raise
        console.print(f"[yellow]{name}[/]: {escape(str(error))}")
        return False
    if found is not None:
        settings = {**dataclasses.asdict(evaluation.settings), "seeds": list(evaluation.seeds)}
        settings |= {"prompts": evaluation.prompts.name, "count": len(evaluation.prompts)}
        file = f"{name}-{found.detail}" if found.detail else name
        publish(file, evaluation.folder / "tables", found.sheets, found.figures, settings, console=console)
    return True


def load(model: str, dtype: str, lineup: Lineup, device: str) -> Any:
    return load_pipeline(model, dtype, **dict.fromkeys(lineup.without)).to(device)


def read_seeds(given: str) -> tuple[int, ...]:
    """Whole numbers between commas, each once."""
    try:
        return tuple(dict.fromkeys(int(seed) for seed in given.split(",")))
    except ValueError as error:
        raise ValueError(f"--seeds {given} holds what is no whole number; pass such as --seeds 0,1,2") from error


def held_out_prompts(source: Path, given: Path | None, limit: int | None) -> PromptSet | None:
    """The set passed for it; of the emoji set, its own held-out labels."""
    if given is not None:
        return read_prompts(given, "validation").limited(limit)
    return read_prompts(source, "validation").limited(limit) if source.suffix == ".parquet" else None


@contextlib.contextmanager
def progress_line(shown: bool) -> Iterator[Callable[[str], None]]:
    """What is being done, and since when; without a terminal, a line every ten seconds."""
    console = Console(stderr=True)
    if not shown:
        yield lambda text: None
        return
    if not console.is_terminal:
        last = [0.0]

        def say(text: str) -> None:
            if time.monotonic() - last[0] > 10:
                last[0] = time.monotonic()
                console.print(text, highlight=False)

        yield say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, console=console) as progress:
        task = progress.add_task("preparing", total=None)
        yield lambda text: progress.update(task, description=text)
