"""`shiva frontier`: for a share of the time, what to do to a model."""

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
    numbers,
    progress_line,
    some,
)

if TYPE_CHECKING:
    from shiva.evaluate.candidates import Candidate
    from shiva.evaluate.prompts import PromptSet

FITTED = "Lattice"


def frontier(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a diffusers pipeline")],
    prompts: Annotated[
        str, typer.Option(help="A prompt set (txt, csv, tsv, json, parquet), or how many of our own")
    ] = "8",
    limit: Annotated[int, typer.Option(min=1, help="Prompts taken of a file, evenly spaced over it")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Denoising steps, as the model is used now")] = 28,
    guidance: Annotated[float, typer.Option(help="Guidance scale; 1 for none")] = 4.5,
    solver: Annotated[
        str, typer.Option(help="Of the dense run: own; even, its steps evenly spaced; multistep, of second order")
    ] = "own",
    methods: Annotated[
        str, typer.Option(help="What drops tokens: methods' names and checkpoints' folders, separated by commas")
    ] = "Sweep,Lattice",
    budgets: Annotated[str, typer.Option(help="Shares of tokens that each of them keeps")] = "0.6,0.4,0.25",
    fewer: Annotated[str | None, typer.Option(help="Fewer steps, such as 12,8; else 3/4, 1/2, 3/8 and 1/4")] = None,
    caches: Annotated[
        str, typer.Option(help="Step caches to compare with; empty for none")
    ] = "MagCache,FirstBlockCache,TaylorSeer,DBCache",
    fit: Annotated[
        int, typer.Option(min=0, help="Prompts that Lattice is fitted on first; 0 leaves it unfitted")
    ] = 24,
    output: Output = None,
    record: Record = False,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas")] = "0",
    height: Height = None,
    width: Width = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics by name, separated by commas; else all but distances to dense")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Turns of the time measurement; 0 compares FLOPs alone")] = 3,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """For half the time, what do I do to my model? Fewer steps, a better solver, a step cache, or fewer tokens.

    Draws the prompts in each of these ways, and measures true FLOPs, time (all in turns), peak memory, and how near
    the images are to the dense run and to a converged one. Ends with a table, a figure, and a sentence each for 50 %
    and for 35 % of the time. A run that was killed goes on where it was: give the same command again.
    """
    from dataclasses import asdict

    from shiva.bench.table import printed, publish
    from shiva.evaluate import frontier as measuring
    from shiva.evaluate.candidates import Candidates
    from shiva.evaluate.drawing import accepted, of_images, quiet
    from shiva.evaluate.evaluation import Evaluation, prepare
    from shiva.evaluate.metrics import chosen
    from shiva.evaluate.rivals import CacheName, Solver, solving
    from shiva.show.style import draw_frontier

    folder = folder_of(output, record, f"frontier/{Path(model).name}-{steps}")
    shares, fewer_steps = numbers("--budgets", budgets), numbers("--fewer", fewer or "", int) or measuring.fewer(steps)
    wrong = [n for n in fewer_steps if not 0 < n < steps]
    if wrong:
        raise ValueError(f"--fewer {wrong[0]} is not fewer than --steps {steps}; pass numbers from 1 to {steps - 1}")
    wanted_caches, base = known("--caches", caches, CacheName), known("--solver", solver, Solver)[0]
    pruned = measuring.pruning([method for method in methods.split(",") if method], shares)
    chosen_seeds = some("--seeds", seeds)
    quiet()
    size: Any = {"height": height, "width": width}
    shared = prepare(model, device, dtype, steps=steps, guidance=guidance, **size)
    pipe, settings, tools = shared["pipe"], shared["settings"], shared["tools"]
    drawn, others = prompt_sets(pipe, prompts, limit, fit)
    with progress_line() as progress:
        if fit and any(way.method == FITTED for way in pruned.values()):
            given = accepted(of_images(pipe()), {**size, **settings.arguments})
            with solving(pipe(), base):
                pruned = with_fit(pruned, folder, pipe(), settings, base, others, given, progress)
        evaluation = Evaluation(
            **shared,
            candidates=Candidates(measuring.make_grid(steps, fewer_steps, pruned, wanted_caches, base)),
            folder=folder,
            prompts=drawn,
            held_out=None,
            metrics=[m for m in chosen(metrics and metrics.split(","), tools) if metrics or m.needs != "dense"],
            seeds=chosen_seeds,
            rounds=rounds,
            progress=progress,
        )
        points, absent = measuring.measure(evaluation)
    told = measuring.advice(points)
    table = measuring.table_of(evaluation, points, absent)
    about = {**asdict(settings), "seeds": list(evaluation.seeds), "prompts": drawn.texts, "fit": fit, "solver": base}
    results = measuring.document(points, told, absent)
    publish("frontier", folder, [table], results, about, draw_frontier)
    for sentence in told:
        printed().print(f"[bold]{sentence}[/]", highlight=False)


def known(option: str, text: str, kind: Any) -> list[Any]:
    """Names between commas, each one of a Literal's."""
    from typing import get_args

    from shiva.core.options import choice

    return [choice(option, name, get_args(kind)) for name in filter(None, text.split(","))]


def prompt_sets(pipe: Any, prompts: str, limit: int, fit: int) -> tuple[PromptSet, list[str]]:
    """What is drawn, and other prompts, which a fit may see."""
    from shiva.cli.fit import texts_of
    from shiva.evaluate.prompts import Prompt, PromptSet, read_prompts

    if prompts.isdecimal():
        count = int(prompts)
        if count < 1:
            raise ValueError(f"--prompts {prompts} draws nothing; pass at least 1, or a file of prompts")
        texts = texts_of(pipe(), str(count + max(fit, 2)), 0)
        drawn = PromptSet("everyday prompts", tuple(Prompt(text) for text in texts[:count]))
    else:
        known = read_prompts(Path(prompts))
        drawn = known.limited(limit)
        texts = known.limited(len(drawn) + fit).texts
    others = [text for text in texts if text not in drawn.texts][:fit]
    return drawn, others if len(others) >= min(fit, 2) else texts_of(pipe(), str(max(fit, 2)), 0)


def with_fit(
    pruned: dict[str, Candidate],
    folder: Path,
    pipe: Any,
    settings: Any,
    solver: str,
    others: list[str],
    arguments: dict[str, Any],
    progress: Any,
) -> dict[str, Candidate]:
    """Lattice from a fit on other prompts, which is kept in the folder, and as one that attends to all."""
    import dataclasses

    from shiva.evaluate.costs import read_cache, write_cache
    from shiva.fitting import fit as fit_pipeline

    target, key = folder / "fitted", repr((dataclasses.asdict(settings), solver, others))
    if read_cache(target / "key.json", key) is None:
        how: dict[str, Any] = {"steps": (settings.steps,), "guidance": settings.guidance, "seed": 1}
        fitted = fit_pipeline(pipe, others, progress=progress, arguments=arguments, **how)
        fitted.checkpoint(settings.model).save_pretrained(target)
        write_cache(target / "key.json", key, True)
    found = {}
    for name, way in pruned.items():
        if way.method != FITTED:
            found[name] = way
            continue
        found[name] = dataclasses.replace(way, method=None, checkpoint=str(target))
        both = {**way.options, "attends": "all"}
        found[name.replace(FITTED, f"{FITTED} all")] = dataclasses.replace(found[name], options=both)
    return found
