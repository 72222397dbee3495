"""`shiva demo`: real images, dense beside reduced, on the embedded model; a page and a table."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shiva.bench.environment import environment
from shiva.checkpoint import write_atomically, write_image
from shiva.evaluate.candidates import slug
from shiva.evaluate.drawing import Outcome, draw, generate, load_with_arguments, quiet
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.show import figures
from shiva.show.glossary import meanings
from shiva.show.page import Page, drawing
from shiva.show.rows import Row, chosen_rows
from shiva.show.style import save

PROMPTS = ("pizza", "red apple", "birthday cake", "dog face", "a fox", "octopus", "sunflower", "cactus")
TURNS = 4
"""Parts that the prompts are drawn in, every method after the other in each, so that all meet the same machine."""
LOOKED_INTO = ("Shiva 80", "Shiva 60", "Sweep 40")
"""Whose chosen tokens are shown; the first two are of two checkpoints, whose scores are compared."""


@dataclass(frozen=True)
class Drawings:
    """What a row made of the prompts, in its turns."""

    row: Row
    turns: Sequence[Outcome]

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def images(self) -> list[Any]:
        return [image for turn in self.turns for image in turn.images]

    @property
    def seconds(self) -> float:
        """Of an image."""
        return statistics.median(turn.median / len(turn.images) for turn in self.turns)

    def flops(self, dense: Drawings) -> float:
        """As a share of the dense run."""
        share = statistics.fmean(1.0 if turn.summary is None else turn.summary.flops_share for turn in self.turns)
        return share * self.row.passes / dense.row.passes

    def closeness(self, dense: Drawings) -> float | None:
        """Mean PSNR to the dense images; another model's have nothing to be near to."""
        if self is dense or self.row.model != dense.row.model:
            return None
        return statistics.fmean(image_psnr(a, b) for a, b in zip(self.images, dense.images, strict=True))


def make_demo(methods: str | None, every: bool, output: Path, steps: int | None, seed: int, count: int) -> None:
    """Draw the prompts by every row, print a table and write a page."""
    console, prompts = Console(), PROMPTS[:count]
    base, rows, left_out = chosen_rows(methods, every, steps)
    quiet()
    loaded = {str(row.model): load_with_arguments(str(row.model)) for row in rows}
    for pipe, arguments in loaded.values():  # the first run of a process is slow, and dense is first
        draw(pipe, prompts[:1], 0, [0], 2, rows[0].guidance, **arguments)
    turn = -(-len(prompts) // TURNS)
    turns: dict[str, list[Outcome]] = {row.name: [] for row in rows}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=len(prompts) * sum(row.steps for row in rows))
        for first in range(0, len(prompts), turn):
            part = prompts[first : first + turn]
            for row in rows:
                turns[row.name].append(
                    drawn_by(
                        row,
                        loaded,
                        part,
                        seed=seed,
                        first=first,
                        batch=1,
                        progress=lambda name, step: progress.update(task, advance=1, description=name),
                    )
                )
    made = [Drawings(row, turns[row.name]) for row in rows]
    table = comparison(made)
    console.print(draw_table(table, base, rows[0], len(prompts)))
    page = draw_page(made, table, base, prompts)
    for reason in left_out:
        console.print(f"left out: {reason}", markup=False)
        page.note(f"Left out: {reason}")
    closer = {
        row.name: drawn_by(row, loaded, prompts[:1], seed=seed, trace=True) for row in rows if row.name in LOOKED_INTO
    }
    page.heading("Which tokens")
    draw_choices(page, prompts[0], closer)
    page.heading("What the words mean")
    page.glossary(meanings(HEADINGS, [row.name for row in rows]))
    sign(page)
    for entry in made:
        for prompt, image in zip(prompts, entry.images, strict=True):
            write_image(output / slug(entry.name) / f"{slug(prompt)}.png", image)
    with drawing(page):
        save_grid(made, prompts, output / "grid.png")
    write_atomically(output / "index.html", str(page).encode())
    console.print(f"images and page: {(output / 'index.html').resolve().as_uri()}", soft_wrap=True)


def drawn_by(row: Row, loaded: Mapping[str, Any], prompts: Sequence[str], **how: Any) -> Outcome:
    pipe, arguments = loaded[str(row.model)]
    how |= {"steps": row.steps, "guidance": row.guidance, **arguments}
    return generate(pipe, prompts, {row.name: row.candidate}, **how)[row.name]


HEADINGS = ("method", "steps", "FLOPs", "limit", "speed-up", "s an image", "PSNR to dense")


def comparison(made: Sequence[Drawings]) -> list[tuple[str, ...]]:
    dense = made[0]
    rows: list[tuple[str, ...]] = []
    for entry in made:
        share, near = entry.flops(dense), entry.closeness(dense)
        time, speed = f"{entry.seconds:.2f}", f"{dense.seconds / entry.seconds:.2f}x"
        close = "" if near is None else f"{near:.1f} dB"
        rows.append((entry.name, str(entry.row.steps), f"{share:.0%}", f"{1 / share:.2f}x", speed, time, close))
    return rows


def draw_table(rows: Sequence[tuple[str, ...]], base: Path, dense: Row, count: int) -> Table:
    title = f"{count} images of {base.name}, {dense.steps} steps at guidance {dense.guidance:g} where dense"
    table = Table(title=title)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def draw_page(made: Sequence[Drawings], rows: Sequence[tuple[str, ...]], base: Path, prompts: Sequence[str]) -> Page:
    page, dense = Page(f"Shiva on the embedded model {base.name}"), made[0]
    page.text(
        f"The same prompts and the same noise, dense in {dense.row.steps} steps at guidance {dense.row.guidance:g}. "
        "Times are of this machine, all methods in turns; fewer tokens pay more the more of them an image has."
    )
    page.heading("Images")
    page.gallery(
        [captioned(entry, dense) for entry in made],
        [(prompt, [entry.images[i] for entry in made]) for i, prompt in enumerate(prompts)],
    )
    page.heading("Cost and closeness")
    page.table(HEADINGS, rows)
    near = {entry.name: close for entry in made if (close := entry.closeness(dense)) is not None}
    with drawing(page):
        for cost, price in (
            ("FLOPs, % of dense", lambda entry: 100 * entry.flops(dense)),
            ("seconds an image", lambda entry: entry.seconds),
        ):
            points = [
                figures.Point(entry.name, price(entry), near[entry.name]) for entry in made if entry.name in near
            ]
            drawn = figures.quality_cost(points, cost, "PSNR to dense, dB")
            page.figure(drawn, f"Closeness to the dense images against {cost}; the line joins what none beats.")
    return page


def captioned(entry: Drawings, dense: Drawings) -> str:
    saved = round(100 * (1 - entry.flops(dense)))
    return f"{entry.name}, −{saved} % FLOPs" if saved else entry.name


def save_grid(made: Sequence[Drawings], prompts: Sequence[str], path: Path) -> None:
    """All images in one picture: a row for each method, a column for each prompt."""
    rows = [
        (f"{captioned(entry, made[0])}, {entry.seconds:.2f} s".replace(", ", "\n"), entry.images) for entry in made
    ]
    save(figures.image_grid([textwrap.fill(prompt, 16) for prompt in prompts], rows), path)


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
