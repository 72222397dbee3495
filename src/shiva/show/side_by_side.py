"""`shiva demo`: real images, dense beside reduced, on the embedded model; a page and a table."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shiva.bench.entries import shiva_entry
from shiva.bench.environment import environment
from shiva.bench.shapes import shape
from shiva.bench.step import measure_step, step_table
from shiva.checkpoint import write_atomically, write_image
from shiva.evaluate.candidates import DENSE, Candidate, read_candidates, slug
from shiva.evaluate.drawing import Outcome, draw, generate, load_with_arguments, quiet
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.show import figures
from shiva.show.glossary import meanings
from shiva.show.page import Page, drawing
from shiva.show.style import save

PROMPTS = ("pizza", "red apple", "birthday cake", "dog face", "a fox", "octopus", "sunflower", "rocket")
TURNS = 2
"""Parts that the prompts are drawn in, every method after the other in each, so that all meet the same machine."""
LOOKED_INTO = ("Shiva 80", "Shiva 60", "Sweep 40")
"""Whose chosen tokens are shown; the first two are of two checkpoints, whose scores are compared."""


@dataclass(frozen=True)
class Drawings:
    """What a candidate made of the prompts, in its turns."""

    name: str
    turns: Sequence[Outcome]

    @property
    def images(self) -> list[Any]:
        return [image for turn in self.turns for image in turn.images]

    @property
    def seconds(self) -> float:
        """Of an image."""
        return statistics.median(turn.median / len(turn.images) for turn in self.turns)

    @property
    def flops(self) -> float:
        """As a share of dense."""
        return statistics.fmean(1.0 if turn.summary is None else turn.summary.flops_share for turn in self.turns)

    def closeness(self, dense: Drawings) -> float:
        """Mean PSNR to the dense images."""
        return statistics.fmean(image_psnr(a, b) for a, b in zip(self.images, dense.images, strict=True))


def make_demo(model: Path, methods: str, output: Path, steps: int, guidance: float, seed: int) -> None:
    """Draw the prompts by every candidate, print a table and write a page."""
    console = Console()
    if not model.is_dir():
        console.print(f"[yellow]{model} is not here[/]; measuring a slice of SD3-Medium at its real width instead")
        chosen = shape("sd3-medium", height=512, width=512, batch=1).slice(4)
        entries = {f"shiva {budget:g}": shiva_entry(budget, flat=True) for budget in (0.8, 0.6)}
        results, skipped = measure_step(chosen, entries, rounds=3)
        console.print(step_table(chosen, results, skipped, "flat table, eager").rich())
        return
    quiet()
    pipe, arguments = load_with_arguments(model)
    candidates, left_out = main_table(methods)
    how: dict[str, Any] = {"steps": steps, "guidance": guidance, **arguments}
    draw(pipe, PROMPTS[:1], 0, [0], 3, guidance, **arguments)  # the first run of a process is slow, and dense is first
    turns: dict[str, list[Outcome]] = {name: [] for name in candidates}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=steps * len(candidates) * len(PROMPTS))
        for first in range(0, len(PROMPTS), len(PROMPTS) // TURNS):
            drawn = generate(
                pipe,
                PROMPTS[first : first + len(PROMPTS) // TURNS],
                candidates,
                seed=seed,
                first=first,
                batch=1,
                progress=lambda name, step: progress.update(task, advance=1, description=name),
                **how,
            )
            for name, outcome in drawn.items():
                turns[name].append(outcome)
    made = [Drawings(name, outcomes) for name, outcomes in turns.items()]
    rows = comparison(made)
    console.print(draw_table(rows, steps))
    page = draw_page(made, rows, steps, guidance)
    for reason in left_out:
        console.print(f"left out: {reason}", markup=False)
        page.note(f"Left out: {reason}")
    closer = {name: candidates[name] for name in LOOKED_INTO if name in candidates}
    page.heading("Which tokens")
    draw_choices(page, PROMPTS[0], generate(pipe, PROMPTS[:1], closer, seed=seed, trace=True, **how))
    page.heading("What the words mean")
    page.glossary(meanings(HEADINGS, candidates))
    sign(page)
    for entry in made:
        for prompt, image in zip(PROMPTS, entry.images, strict=True):
            write_image(output / slug(entry.name) / f"{slug(prompt)}.png", image)
    with drawing(page):
        save_grid(made, output / "grid.png")
    write_atomically(output / "index.html", str(page).encode())
    console.print(f"images and page: {(output / 'index.html').resolve().as_uri()}", soft_wrap=True)


def main_table(methods: str) -> tuple[dict[str, Candidate], list[str]]:
    """Dense first, then whoever of the main table has what it needs here; also why the others are left out."""
    read = read_candidates(methods)
    found, left_out = {DENSE: Candidate()}, []
    for name in read.of("main"):
        try:
            read.candidates[name].config()
            found[name] = read.candidates[name]
        except FileNotFoundError as error:
            left_out.append(f"{name}: {error}")
    return found, left_out


HEADINGS = ("method", "s an image", "speed-up", "FLOPs", "limit", "PSNR to dense")


def comparison(made: Sequence[Drawings]) -> list[tuple[str, ...]]:
    dense = made[0]
    return [
        (
            entry.name,
            f"{entry.seconds:.2f}",
            f"{dense.seconds / entry.seconds:.2f}x",
            f"{entry.flops:.1%}",
            f"{1 / entry.flops:.2f}x",
            "" if entry is dense else f"{entry.closeness(dense):.1f} dB",
        )
        for entry in made
    ]


def draw_table(rows: Sequence[tuple[str, ...]], steps: int) -> Table:
    table = Table(title=f"{len(PROMPTS)} images, {steps} steps, on the embedded emoji model")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def draw_page(made: Sequence[Drawings], rows: Sequence[tuple[str, ...]], steps: int, guidance: float) -> Page:
    page = Page("Shiva on the embedded emoji model")
    page.text(
        f"The same prompts and the same noise, {steps} steps at guidance {guidance:g}. Speed-ups are ratios within "
        "this run; the model has 256 image tokens, so overhead weighs more than at 1024 x 1024."
    )
    page.heading("Images")
    page.gallery(
        [captioned(entry) for entry in made],
        [(prompt, [entry.images[i] for entry in made]) for i, prompt in enumerate(PROMPTS)],
    )
    page.heading("Cost and closeness")
    page.table(HEADINGS, rows)
    dense, *reduced = made
    closeness = {entry.name: entry.closeness(dense) for entry in reduced}
    with drawing(page):
        for cost, prices in (
            ("FLOPs, % of dense", {entry.name: 100 * entry.flops for entry in reduced}),
            ("seconds an image", {entry.name: entry.seconds for entry in reduced}),
        ):
            points = [figures.Point(name, prices[name], close) for name, close in closeness.items()]
            drawn = figures.quality_cost(points, cost, "PSNR to dense, dB")
            page.figure(drawn, f"Closeness to the dense images against {cost}; the line joins what none beats.")
    return page


def captioned(entry: Drawings) -> str:
    saved = round(100 * (1 - entry.flops))
    return f"{entry.name}, −{saved} % FLOPs" if saved else entry.name


def save_grid(made: Sequence[Drawings], path: Path) -> None:
    """All images in one picture: a row for each method, a column for each prompt."""
    rows = [(captioned(entry).replace(", −", "\n−"), entry.images) for entry in made]
    save(figures.image_grid([textwrap.fill(prompt, 16) for prompt in PROMPTS], rows), path)


def draw_choices(page: Page, prompt: str, outcomes: dict[str, Outcome]) -> None:
    """The tables that runs used and the tokens they computed; how routers scored them."""
    traces = {name: outcome.trace for name, outcome in outcomes.items() if outcome.trace is not None}
    scored = {name: trace for name, trace in traces.items() if trace.scores}
    with drawing(page):
        for name, trace in traces.items():
            kept = figures.schedule_map(trace.keep(), list(trace.timesteps.values()))
            page.figure(kept, f"{name}: share of tokens that each layer ran on at each step.")
            masks = figures.token_masks(outcomes[name].images[0], trace)
            page.figure(masks, f"{name}, “{prompt}”: what was computed in colour, the rest veiled.", photo=True)
        if scored:
            drawn = figures.score_maps(scored)
            page.figure(drawn, f"How {' and '.join(scored)} scored the tokens of “{prompt}”.", photo=True)


def sign(page: Page) -> None:
    where = environment()
    page.footer(f"{where['date']}, {where['cpu']}, {where['threads']} threads, torch {where['packages']['torch']}")
