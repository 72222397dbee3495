"""`shiva demo`: real images, dense beside reduced, on the embedded model; a page and a table."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shiva.checkpoint import write_atomically
from shiva.measure.contenders import shiva_entry
from shiva.measure.environment import environment
from shiva.measure.generate import Contender, Outcome, generate, load_with_arguments, psnr, quiet
from shiva.measure.shapes import shape
from shiva.measure.step import measure_step, step_sheet
from shiva.measure.style import save
from shiva.methods import Shiva, ToMeSD
from shiva.report import figures
from shiva.report.page import Page, drawing

PROMPTS = (
    "pizza",
    "red apple",
    "strawberry",
    "birthday cake",
    "dog face",
    "a fox",
    "octopus",
    "sunflower",
    "rocket",
    "castle",
    "guitar",
    "smiling face with sunglasses",
)
BUDGETS = (0.9, 0.8, 0.7, 0.6)
SWEEPS = (0.6, 0.4)
DENSE = "dense"


def demo(
    model: Annotated[Path, typer.Option(help="Folder of the embedded pipeline")] = Path("models/emoji"),
    checkpoints: Annotated[Path, typer.Option(help="Folder of Shiva checkpoints for it")] = Path("models/shiva"),
    output: Annotated[Path, typer.Option(help="Where images and page go")] = Path("outputs/demo"),
    steps: Annotated[int, typer.Option(help="Denoising steps", min=3)] = 20,
    guidance: Annotated[float, typer.Option(help="Guidance scale")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt's noise")] = 0,
    rounds: Annotated[int, typer.Option(help="Turns that every method is timed in", min=1)] = 2,
) -> None:
    """Generate a grid of prompts dense and reduced, and show images, time and FLOPs side by side."""
    console = Console()
    if not model.is_dir():
        console.print(f"[yellow]{model} is not here[/]; measuring a slice of SD3-Medium at its real width instead")
        chosen = shape("sd3-medium", height=512, width=512, batch=1).slice(4)
        entries = {f"shiva {budget:g}": shiva_entry(budget, flat=True) for budget in (0.8, 0.6)}
        results, skipped = measure_step(chosen, entries, rounds=3)
        console.print(step_sheet(chosen, results, skipped, "flat table, eager").rich())
        return
    quiet()
    pipe, arguments = load_with_arguments(model)
    contenders = operating_points(checkpoints)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=rounds * steps * len(contenders))
        outcomes = generate(
            pipe,
            PROMPTS,
            contenders,
            steps=steps,
            guidance=guidance,
            seed=seed,
            rounds=rounds,
            progress=lambda name, step: progress.update(task, advance=1, description=name),
            **arguments,
        )
    rows = comparison(outcomes)
    console.print(draw_table(rows, steps))
    page = draw_page(outcomes, rows, steps, guidance)
    lowest = [point("Shiva", BUDGETS[-1]), point("Sweep", SWEEPS[-1])]
    closer = {name: contenders[name] for name in lowest if name in contenders}
    seen = generate(pipe, PROMPTS[:1], closer, steps=steps, guidance=guidance, seed=seed, trace=True, **arguments)
    page.heading("Which tokens")
    for name, outcome in seen.items():
        draw_choices(page, name, PROMPTS[0], outcome)
    sign(page)
    for name, outcome in outcomes.items():
        folder = output / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for prompt, image in zip(PROMPTS, outcome.images, strict=True):
            image.save(folder / f"{prompt.replace(' ', '-')}.png")
    with drawing(page):
        save_grid(outcomes, output / "grid.png")
    write_atomically(output / "index.html", str(page).encode())
    console.print(f"images and page: {output / 'index.html'}")


def operating_points(folder: Path) -> dict[str, Contender]:
    """Dense, Shiva's four budgets from the nearest trained checkpoint, and the moving band, which needs none."""
    found = {float(path.name) / 100: path for path in folder.glob("*") if path.name.isdigit()}
    points = {DENSE: Contender(None)}
    if not found:
        points["ToMeSD 25 % merged"] = Contender(ToMeSD.preset("paper"))
    for budget in BUDGETS if found else ():
        trained = min(found, key=lambda at: (abs(at - budget), at))
        points[point("Shiva", budget)] = Contender(found[trained], {"budget": budget})
    return points | {point("Sweep", budget): Contender(Shiva.preset("sweep", budget=budget)) for budget in SWEEPS}


def point(method: str, budget: float) -> str:
    return f"{method} {budget:.0%}"


HEADINGS = ("method", "speed-up", "FLOPs", "FLOPs limit", "PSNR to dense")


def flops_share(outcome: Outcome) -> float:
    return 1.0 if outcome.summary is None else outcome.summary.flops_share


def closeness(outcome: Outcome, dense: Outcome) -> float:
    """Mean PSNR to the dense images."""
    return statistics.fmean(psnr(a, b) for a, b in zip(outcome.images, dense.images, strict=True))


def comparison(outcomes: dict[str, Outcome]) -> list[tuple[str, ...]]:
    dense = outcomes[DENSE]
    rows: list[tuple[str, ...]] = []
    for name, outcome in outcomes.items():
        share = flops_share(outcome)
        rows.append(
            (
                name,
                f"{dense.median / outcome.median:.2f}x",
                f"{share:.1%}",
                f"{1 / share:.2f}x",
                "" if outcome is dense else f"{closeness(outcome, dense):.1f} dB",
            )
        )
    return rows


def draw_table(rows: list[tuple[str, ...]], steps: int) -> Table:
    table = Table(title=f"{len(PROMPTS)} images, {steps} steps, on the embedded emoji model")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def draw_page(outcomes: dict[str, Outcome], rows: list[tuple[str, ...]], steps: int, guidance: float) -> Page:
    page = Page("Shiva on the embedded emoji model")
    page.text(
        f"The same prompts and the same noise, {steps} steps at guidance {guidance:g}. Speed-ups are ratios within "
        "this run; the model has 256 image tokens, so overhead weighs more than at 1024 x 1024."
    )
    page.heading("Images")
    names = list(outcomes)
    page.gallery(names, [(prompt, [outcomes[name].images[i] for name in names]) for i, prompt in enumerate(PROMPTS)])
    page.heading("Cost and closeness")
    page.table(HEADINGS, rows)
    dense = outcomes[DENSE]
    points = [
        figures.Point(name, 100 * flops_share(outcome), closeness(outcome, dense))
        for name, outcome in outcomes.items()
        if outcome is not dense
    ]
    with drawing(page):
        drawn = figures.quality_cost(points, "FLOPs, % of dense", "PSNR to dense, dB")
        page.figure(drawn, "Closeness to the dense images against true FLOPs. The dense model is at 100 %.")
    return page


def save_grid(outcomes: dict[str, Outcome], path: Path) -> None:
    """All images in one picture: a row for each method, a column for each prompt."""
    rows = [
        (f"{name}\n{flops_share(outcome):.0%} of FLOPs" if outcome.summary else name, outcome.images)
        for name, outcome in outcomes.items()
    ]
    save(figures.image_grid([textwrap.fill(prompt, 16) for prompt in PROMPTS], rows), path)


def draw_choices(page: Page, name: str, prompt: str, outcome: Outcome) -> None:
    """The table a run used and the tokens it computed."""
    trace = outcome.trace
    if trace is None or not trace.positions:
        return
    with drawing(page):
        kept = figures.schedule_map(trace.keep(), list(trace.timesteps.values()))
        page.figure(kept, f"{name}: share of tokens that each layer ran on at each step.")
        masks = figures.token_masks(outcome.images[0], trace)
        page.figure(masks, f"{name}, “{prompt}”: what was computed in colour, the rest veiled.", photo=True)


def sign(page: Page) -> None:
    where = environment()
    page.footer(f"{where['date']}, {where['cpu']}, {where['threads']} threads, torch {where['packages']['torch']}")
