"""`shiva demo`: real images, dense beside reduced, on the embedded model; a page and a table."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from shiva.bench.table import Table, environment
from shiva.checkpoint import write_atomically, write_image
from shiva.evaluate.candidates import DENSE, Candidate, Candidates, read_candidates, slug
from shiva.evaluate.checkout import BASE, TURBO, checkpoint_for, embedded, usual_run
from shiva.evaluate.drawing import Outcome, draw, generate, load_with_arguments, quiet
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.show import figures
from shiva.show.page import Page, drawing, meanings
from shiva.show.style import save

STEPS, GUIDANCE = usual_run(BASE[0])


@dataclass(frozen=True)
class Row:
    """Draws the prompts by a candidate, on a model, in so many steps."""

    name: str
    candidate: Candidate = Candidate()  # noqa: RUF009  (frozen)
    model: Path | None = None
    """The base model's where none is named."""
    steps: int = STEPS
    guidance: float = GUIDANCE
    file: Candidates | None = None
    """Where it is from a file, which may say how the model is loaded and called."""

    @property
    def passes(self) -> int:
        """Passes of the transformer over one image."""
        return self.steps * (2 if self.guidance > 1 else 1)


def demo_rows(base: str) -> list[Row]:
    """At most eight: the dense model, ours beside it, their rivals; then the same of the turbo, where it is there."""
    rows = [
        Row(DENSE),
        Row("Sweep 40", Candidate(method="Sweep", options={"budget": 0.4})),
        Row("ToMeSD", Candidate(method="ToMeSD", preset="paper")),
        Row("fewer steps", steps=10),
    ]
    turbo = embedded(base).parent / TURBO[0]
    if base != BASE[0] or not turbo.is_dir():
        return rows
    steps, guidance = usual_run(turbo)
    trained = str(checkpoint_for(turbo, "Shiva"))
    few = [
        (f"turbo in {steps} steps", Candidate(), steps),
        (f"turbo in {steps - 1} steps", Candidate(), steps - 1),
        ("turbo, Shiva 66", Candidate(checkpoint=trained, options={"budget": 0.66, "tilt": 2.0}), steps - 1),
        ("turbo, Shiva 50", Candidate(checkpoint=trained, options={"budget": 0.5, "tilt": 2.0}), steps - 1),
    ]
    return rows + [Row(name, made, turbo, count, guidance) for name, made, count in few]


def chosen_rows(methods: str | None, every: bool, steps: int | None) -> tuple[Path, list[Row], list[str]]:
    """The model, its rows that have what they need here, and why the others are left out.

    Those of the demo's list, or those of the main table of a file of candidates, dense first.
    """
    base = embedded(*BASE)
    if every and methods is None:
        methods = f"recipes/eval/{base.name}.yaml"
        if not Path(methods).is_file():
            raise FileNotFoundError(f"{methods} is not here; run shiva demo --all in a checkout, or pass --methods")
    rows = demo_rows(base.name)
    if methods is not None:
        read = read_candidates(methods)
        base = base if read.model is None else Path(read.model)
        named = {DENSE: Candidate(), **{name: read.candidates[name] for name in read.of("main")}}
        rows = [
            Row(name, replace(candidate, steps=None), None, candidate.steps or read.steps, read.guidance, read)
            for name, candidate in named.items()
        ]
    found, left_out = [], []
    for row in rows:
        try:
            row.candidate.config()
        except FileNotFoundError as error:
            left_out.append(f"{row.name}: {error}")
        else:
            if row.candidate.cache is not None:
                left_out.append(f"{row.name}: step caches are drawn by shiva eval and shiva frontier")
                continue
            if row.model is None and steps is not None:
                row = replace(row, steps=max(2, round(row.steps * steps / rows[0].steps)))
            found.append(replace(row, model=row.model or base))
    return base, found, left_out


PROMPTS = ("watermelon", "delivery truck", "pizza", "pear", "hatching chick", "tulip", "goat", "alien")
"""What the models draw well; `recipes.emoji.score` says how often they do."""
TURNS = 2
"""Batches that the prompts are drawn in, every method after the other in each, so that all meet the same machine."""
LOOKED_INTO = ("Shiva 80", "Shiva 60", "Sweep 40", "turbo, Shiva 66")
"""Whose chosen tokens are shown, and whose routers' scores."""


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
        return statistics.median(turn.seconds / len(turn.images) for turn in self.turns)

    def flops(self, dense: Drawings) -> float:
        """As a share of the dense run."""
        share = statistics.fmean(1.0 if turn.summary is None else turn.summary.flops_share for turn in self.turns)
        return share * self.row.passes / dense.row.passes

    def closeness(self, made: Sequence[Drawings]) -> float | None:
        """Mean PSNR to the dense images of the same model, which come first; they themselves have none."""
        dense = next(other for other in made if other.row.model == self.row.model)
        if self is dense:
            return None
        return statistics.fmean(image_psnr(a, b) for a, b in zip(self.images, dense.images, strict=True))


def make_demo(methods: str | None, every: bool, output: Path, steps: int | None, seed: int, count: int) -> None:
    """Draw the prompts by every row, print a table and write a page."""
    console, prompts = Console(), PROMPTS[:count]
    base, rows, left_out = chosen_rows(methods, every, steps)
    quiet()
    loaded = {str(row.model): load_with_arguments(str(row.model), candidates=row.file) for row in rows}
    for pipe, arguments in loaded.values():  # the first run of a process is slow, and dense is first
        draw(pipe, prompts[:1], 0, [0], 2, rows[0].guidance, **arguments)
    turn = -(-len(prompts) // TURNS)
    turns: dict[str, list[Outcome]] = {row.name: [] for row in rows}
    with Progress(console=console, transient=True) as progress:
        starts = range(0, len(prompts), turn)
        task = progress.add_task("generating", total=len(starts) * sum(row.steps for row in rows))
        for first in starts:
            part = prompts[first : first + turn]
            for row in rows:
                turns[row.name].append(
                    drawn_by(
                        row,
                        loaded,
                        part,
                        seed=seed,
                        first=first,
                        progress=lambda name, step: progress.update(task, advance=1, description=name),
                    )
                )
    made = [Drawings(row, turns[row.name]) for row in rows]
    table, dense = comparison(made), rows[0]
    drawn = f"{len(prompts)} images of {base.name}, {turn} at a time"
    title = f"{drawn}, {dense.steps} steps at guidance {dense.guidance:g} where dense"
    Table(title, HEADINGS, table).show(console)
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
        share, near = entry.flops(dense), entry.closeness(made)
        time, speed = f"{entry.seconds:.2f}", f"{dense.seconds / entry.seconds:.2f}x"
        close = "" if near is None else f"{near:.1f} dB"
        rows.append((entry.name, str(entry.row.steps), f"{share:.0%}", f"{1 / share:.2f}x", speed, time, close))
    return rows


def draw_page(made: Sequence[Drawings], rows: Sequence[tuple[str, ...]], base: Path, prompts: Sequence[str]) -> Page:
    page, dense = Page(f"Shiva on the embedded model {base.name}"), made[0]
    page.text(
        f"The same prompts and the same noise, dense in {dense.row.steps} steps at guidance {dense.row.guidance:g}. "
        f"Times are of this machine, all methods in turns, {len(dense.turns[0].images)} images at a time; fewer "
        "tokens pay more the more of them are computed at once. The turbo's rows are held against its own images, "
        "cost and speed of all against the first row."
    )
    page.heading("Images")
    page.gallery(
        [captioned(entry, dense) for entry in made],
        [(prompt, [entry.images[i] for entry in made]) for i, prompt in enumerate(prompts)],
    )
    page.heading("Cost and closeness")
    page.table(HEADINGS, rows)
    with drawing(page):
        for model in dict.fromkeys(entry.row.model for entry in made):
            draw_costs(page, [entry for entry in made if entry.row.model == model], dense)
    return page


def draw_costs(page: Page, made: Sequence[Drawings], dense: Drawings) -> None:
    """How near one model's rows are to its dense one, over what they cost beside the demo's."""
    near = {entry.name: close for entry in made if (close := entry.closeness(made)) is not None}
    for cost, price in (
        ("FLOPs, % of dense", lambda entry: 100 * entry.flops(dense)),
        ("seconds an image", lambda entry: entry.seconds),
    ):
        points = [figures.Point(entry.name, price(entry), near[entry.name]) for entry in made if entry.name in near]
        drawn = figures.quality_cost(points, cost, f"PSNR to {made[0].name}, dB")
        page.figure(drawn, f"Closeness to {made[0].name} against {cost}; the line joins what none beats.")


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
