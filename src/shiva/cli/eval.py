"""`shiva eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiva.cli.terminal import (
    Device,
    Dtype,
    Height,
    Output,
    Record,
    Threads,
    Width,
    folder_of,
    progress_line,
    some,
)

if TYPE_CHECKING:
    from shiva.evaluate.evaluation import Evaluation
    from shiva.evaluate.protocols import Protocol


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")],
    methods: Annotated[
        str,
        typer.Option(help="A YAML file of candidates, or names and checkpoints: ToMeSD,ToMA:paper,FOLDER"),
    ],
    prompts: Annotated[Path | None, typer.Option(help="A .json, .csv, .tsv, .txt or .parquet prompt set")] = None,
    protocol: Annotated[list[str] | None, typer.Option(help="main, matched, floor, …, or all; repeatable")] = None,
    output: Output = None,
    record: Record = False,
    split: Annotated[str | None, typer.Option(help="Of the emoji set: train, validation or all")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts, evenly spaced over the set")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas")] = "0",
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale")] = None,
    height: Height = None,
    width: Width = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts a call; some methods share choices over a batch")] = 1,
    held_out: Annotated[Path | None, typer.Option(help="Prompts that were not trained on")] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics by name, separated by commas")] = None,
    clip: Annotated[str | None, typer.Option(help="Folder or hub id of a CLIPModel, for clip and clip_iqa")] = None,
    inception: Annotated[Path | None, typer.Option(help="File of Inception weights, for fid")] = None,
    reward: Annotated[str | None, typer.Option(help="Weights of ImageReward, for image_reward")] = None,
    flops: Annotated[
        float | None, typer.Option(min=0, max=1, help="matched: the share of dense FLOPs to match")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Turns of the latency measurement; 0 for none")] = 5,
    probes: Annotated[int, typer.Option(min=1, help="Prompts on which FLOPs and one-step errors are measured")] = 4,
    rivals: Annotated[
        bool, typer.Option(help="main: also fewer steps at the methods' FLOPs, and the step caches of others")
    ] = True,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """What is lost and what is won: images of every method on the same prompts and noise, measured and compared.

    Images that are in the output folder already are not made again, so a run that was killed goes on where it was.
    """
    from shiva.bench.table import printed
    from shiva.evaluate.candidates import read_candidates
    from shiva.evaluate.checkout import reproduce
    from shiva.evaluate.drawing import quiet
    from shiva.evaluate.evaluation import Evaluation, prepare
    from shiva.evaluate.metrics import chosen
    from shiva.evaluate.prompts import held_out_prompts, read_prompts
    from shiva.evaluate.protocols import protocols

    name = Path(model).name if limit is None else f"{Path(model).name}-{limit}"
    name = name if batch == 1 else f"{name}-by-{batch}"
    folder, candidates = folder_of(output, record, f"eval/{name}"), read_candidates(methods)
    known, chosen_seeds = protocols(), some("--seeds", seeds)
    wanted = select(known, protocol)
    source = prompts or (Path(candidates.prompts) if candidates.prompts else None)
    if source is None:
        raise ValueError(f"{methods} names no prompts; pass --prompts FILE")
    quiet()
    weights = {"clip": clip, "inception": None if inception is None else str(inception), "reward": reward}
    steps = candidates.steps if steps is None else steps
    guidance = candidates.guidance if guidance is None else guidance
    run = {"steps": steps, "guidance": guidance, "height": height, "width": width, "batch": batch}
    shared = prepare(model, device, dtype, candidates, weights, **run)
    workers, tools = shared["workers"], shared["tools"]
    paper = reproduce("paper")
    console = printed()
    with progress_line(workers.main) as progress:
        evaluation = Evaluation(
            **shared,
            candidates=candidates,
            folder=folder,
            prompts=read_prompts(source, split or candidates.split).limited(limit),
            held_out=held_out_prompts(source, held_out, limit),
            metrics=chosen(None if metrics is None else metrics.split(","), tools),
            seeds=chosen_seeds,
            rounds=rounds,
            probes=probes,
            target=flops,
            rivals=rivals,
            paper={} if paper is None else paper.MAIN,
            progress=progress,
        )
        failed = [name for name in wanted if not perform(evaluation, name, known[name], console, len(wanted) == 1)]
    workers.close()
    if failed and workers.main:
        console.print(f"[yellow]not done[/]: {', '.join(failed)}; the lines above say why")
    if failed:
        raise typer.Exit(1)


def select(known: dict[str, Protocol], names: list[str] | None) -> list[str]:
    """The protocols asked for, each once: `main` where none is, every one for `all`."""
    from shiva.core.options import unknown_key

    groups = {name: [name] for name in known} | {"all": list(known)}
    for name in names or []:
        if name not in groups:
            raise ValueError(unknown_key(name, groups, "--protocol"))
    return list(dict.fromkeys(part for name in names or ["main"] for part in groups[name]))


def perform(evaluation: Evaluation, name: str, protocol: Protocol, console: Any, alone: bool) -> bool:
    """Run one protocol and publish its tables; among several, one that cannot run here says so and is left out."""
    from dataclasses import asdict

    from rich.markup import escape

    from shiva.bench.table import publish
    from shiva.evaluate.images import OtherImages
    from shiva.show.style import draw_floor

    try:
        found = protocol(evaluation)
    except OtherImages:
        raise
    except ValueError as error:
        if alone:
            raise
        console.print(f"[yellow]{name}[/]: {escape(str(error))}")
        return False
    if found is not None:
        settings = {**asdict(evaluation.settings), "seeds": list(evaluation.seeds)}
        settings |= {"prompts": evaluation.prompts.name, "count": len(evaluation.prompts)}
        file = f"{name}-{found.detail}" if found.detail else name
        figure = {"draw": draw_floor} if name == "floor" else {}
        publish(file, evaluation.folder / "tables", found.tables, found.figures, settings, **figure)
    return True
