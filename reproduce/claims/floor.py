"""What a skipped token gets x which are skipped x what is attended to: PSNR to the dense run of as many steps, over
true FLOPs, beside fewer steps.

    python -m reproduce.claims.floor --record                         # 4 and 8 steps of the embedded model
    python -m reproduce.claims.floor --steps 4 --budgets 0.6 0.4      # to outputs/floor
    python -m reproduce.claims.floor --model models/emoji-128-turbo --name emoji-128-turbo --steps 4 --guidance 0 \\
      --checkpoint models/turbo/shiva --record

A checkpoint of Shiva runs with its own router, and with a lattice and random tokens in the router's place. Lattice is
fitted on other prompts than those that are drawn, with nothing trained. FLOPs hold the fill's own. The oracle computes
all tokens to find those that its neighbours tell least of, and is shown at the FLOPs of a router that would know them:
a bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import shiva
from reproduce.claims.common import LABELS, apart, progress
from shiva.bench.table import environment
from shiva.checkpoint import write_atomically
from shiva.cli.terminal import folder_of
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Method, Place, RunSite
from shiva.core.reduction import Streams, flat_rows, gather, scatter
from shiva.evaluate.candidates import fingerprint
from shiva.evaluate.drawing import draw, load_with_arguments
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.evaluate.prompts import read_prompts
from shiva.fitting import Fitted, fit
from shiva.methods import scores
from shiva.methods.rules import LatticeMethod
from shiva.methods.scores import Score
from shiva.ops.topk import hard_topk
from shiva.show.style import PALETTE, encode

FEWER = "fewer steps"
BATCH = 8


Build = Callable[[BackboneSpec], Method]
THIN = 0.25
"""Share of the oracle's tokens that are a lattice, for cover."""


class Oracle(LatticeMethod):
    """Lattice attending to all, but of the tokens whose update the fill would miss most."""

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        count = ctx.counts[site.layer]
        if site.kind != "block" or count >= x.shape[1]:
            return run(x, None)
        out = run(x, None)
        updates = out.image - base
        drawn = self.scores(x, site, ctx)
        cover = hard_topk(drawn, max(1, int(THIN * count)))
        missed = (updates - self.told(updates, cover, x, site, ctx)).norm(dim=-1)
        indices = hard_topk(missed.scatter(1, cover, 1e9), count)
        rows = flat_rows(indices, x.shape[1])
        filled = base + self.told(updates, indices, x, site, ctx)
        return out._replace(image=scatter(gather(out.image, rows), filled, rows), ran=count)

    def told(self, updates: Tensor, indices: Tensor, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """What the fill makes of the updates (B, N, D) of tokens at indices (B, k), for every token."""
        fill = self.fill.from_selected(indices, x, x.new_zeros(x.shape[:2]), site.layer, ctx)
        assert fill is not None
        return fill(gather(updates, flat_rows(indices, x.shape[1])))


def series(budget: float) -> dict[str, Build]:
    """What is compared at a share of tokens, by name."""
    plain = functools.partial(shiva.Lattice, budget=budget, tilt=0.0, recall=0.0, steady=0.0)
    to_all = plain(attends="all")
    return {
        "Lattice, attending to all": to_all.build,
        "oracle, attending to all": functools.partial(Oracle, to_all),
        "Lattice": plain().build,
        "Lattice, recalling": plain(recall=0.75).build,
        "Lattice, recalling, steady": plain(recall=0.75, steady=0.7).build,
        "Lattice, not fitted": plain(parts="neighbours").build,
        "Lattice, regression alone": plain(parts="lin").build,
        "Lattice, mean update": plain(parts="mean").build,
        "lattice, identity": plain(parts="identity").build,
        "random, same fill": shiva.Ranked(budget=budget, fill="shortcut").build,
        "random, near": shiva.Ranked(budget=budget, fill="near").build,
        "random, identity": shiva.Ranked(budget=budget).build,
        "Sweep": shiva.Sweep(budget=budget, tilt=0.0).build,
    }


@dataclass(frozen=True)
class Point:
    """One method at one budget, or a dense run of fewer steps."""

    series: str
    steps: int
    """Of the dense run it is held against."""
    setting: float
    """Its budget, or its own number of steps."""
    flops: float
    """As a share of that run's."""
    psnr: list[float]
    """Of each image."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.psnr)


@dataclass(frozen=True)
class Stage:
    """A pipeline, and what it is asked to draw."""

    pipe: Any
    arguments: dict[str, Any]
    guidance: float
    seed: int
    drawn: list[str]
    others: list[str]
    """Prompts that the fit may see."""

    def images(self, steps: int) -> list[Any]:
        found: list[Any] = []
        for first in range(0, len(self.drawn), BATCH):
            called = self.drawn[first : first + BATCH]
            places = range(first, first + len(called))
            found += draw(self.pipe, called, self.seed, places, steps, self.guidance, **self.arguments)
        return found

    def fitted(self, steps: Sequence[int], rank: int) -> Fitted:
        how: dict[str, Any] = {"guidance": self.guidance, "rank": rank, "seed": self.seed + 1, "batch": BATCH}
        return fit(self.pipe, self.others, steps=steps, arguments=self.arguments, **how)

    def measured(self, build: Build, weights: Fitted, steps: int, dense: Sequence[Any]) -> Point:
        method: Any = build(weights.method.spec)
        if method.shortcut is not None:
            method.load_state_dict(weights.method.state_dict())
        with shiva.attach(self.pipe, method) as session:
            psnr = list(map(image_psnr, self.images(steps), dense))
            return Point("", steps, method.config.budget, session.summary().flops_share, psnr)


def points(stage: Stage, weights: Fitted, steps: int, budgets: Sequence[float]) -> list[Point]:
    dense = stage.images(steps)
    found = []
    for fewer in range(steps - 1, max(1, steps // 4), -1):
        psnr = list(map(image_psnr, stage.images(fewer), dense))
        found.append(Point(FEWER, steps, fewer, fewer / steps, psnr))
    for budget in progress(budgets, f"{steps} steps"):
        for name, build in series(budget).items():
            found.append(dataclasses.replace(stage.measured(build, weights, steps, dense), series=name))
    return found


RANKS, SPREADS = (8, 16, 32, 64), (0.35, 0.5, 0.7, 1.0)


def shapes_of_the_fill(stage: Stage, steps: int, budget: float) -> list[Point]:
    """Lattice by the rank of its regression, and by how wide its neighbours' weights are."""
    dense, found = stage.images(steps), []
    for rank in progress(RANKS, "rank"):
        weights = stage.fitted([steps], rank)
        build = shiva.Lattice(budget=budget, tilt=0.0, rank=rank).build
        point = stage.measured(build, weights, steps, dense)
        found.append(dataclasses.replace(point, series="rank", setting=rank))
    weights = stage.fitted([steps], RANKS[2])
    for spread in progress(SPREADS, "spread"):
        build = shiva.Lattice(budget=budget, tilt=0.0, spread=spread).build
        point = stage.measured(build, weights, steps, dense)
        found.append(dataclasses.replace(point, series="spread", setting=spread))
    return found


CHOOSERS: dict[str, Score | None] = {"its router": None, "a lattice": scores.Lattice(), "random": scores.Random()}


def who_chooses(stage: Stage, checkpoint: Path, steps: int, fewer: int, budgets: Sequence[float]) -> list[Point]:
    """A trained checkpoint in fewer steps, its tokens chosen by its router and by rules; all else is its own."""
    found = []
    budgets = [budget for budget in budgets if budget > 1 / fewer]  # the first step is dense
    for seed in progress(range(3), "who chooses"):
        drawn = dataclasses.replace(stage, seed=seed)
        dense = drawn.images(steps)
        for budget, (name, score) in itertools.product(budgets, CHOOSERS.items()):
            alone = {} if score is None else {"cover": 0.0}
            with shiva.attach(drawn.pipe, str(checkpoint), budget=budget, tilt=2.0, **alone) as session:
                if score is not None:
                    session.method.score = score
                psnr = list(map(image_psnr, drawn.images(fewer), dense))
                share = session.summary().flops_share * fewer / steps
            found.append(Point(f"{name}, seed {seed}", steps, budget, share, psnr))
    return found


def line_of_fewer_steps(found: Sequence[Point], steps: int, flops: float) -> float | None:
    """PSNR of a dense run of fewer steps at this share of FLOPs, between those that exist; None beyond them."""
    known = sorted((p.flops, p.mean) for p in found if p.series == FEWER and p.steps == steps)
    for (low, below), (high, above) in itertools.pairwise(known):
        if low <= flops <= high:
            return below + (above - below) * (flops - low) / (high - low)
    return None


def table_of(found: Sequence[Point], steps: int) -> Table:
    headings = ("method", "budget or steps", "FLOPs", "PSNR", "above the line")
    table = Table(*headings, title=f"dB to dense at {steps} steps")
    for point in (p for p in found if p.steps == steps):
        line = line_of_fewer_steps(found, steps, point.flops)
        above = "" if line is None or point.series == FEWER else f"{point.mean - line:+.1f}"
        table.add_row(point.series, f"{point.setting:g}", f"{point.flops:.0%}", f"{point.mean:.2f}", above)
    return table


def figure_of(found: Sequence[Point]) -> bytes | None:
    """PSNR over FLOPs, a panel for each number of steps; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({point.steps for point in found})
    names = list(dict.fromkeys(point.series for point in found))
    figure, panels = pyplot.subplots(1, len(counts), figsize=(4.4 * len(counts), 3.8), layout="constrained")
    for axes, steps in zip(panels if len(counts) > 1 else [panels], counts, strict=True):
        for number, name in enumerate(names):
            here = sorted((p.flops, p.mean) for p in found if p.series == name and p.steps == steps)
            style: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "marker": "o", "markersize": 3}
            if name == FEWER:
                style = {"color": "black", "linestyle": "--", "marker": "s", "markersize": 3}
            axes.plot([100 * flops for flops, _ in here], [psnr for _, psnr in here], label=name, linewidth=1, **style)
        axes.set(title=f"{steps} steps", xlabel="true FLOPs, % of dense", ylabel="PSNR to dense, dB")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7)
    picture = encode(figure, dpi=110)
    pyplot.close(figure)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--labels", type=Path, default=LABELS, help="file of prompts")
    parser.add_argument("--name", default="emoji-64", help="of the files that are written")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.6, 0.4, 0.25])
    parser.add_argument("--prompts", type=int, default=16, help="drawn and measured")
    parser.add_argument("--fit", type=int, default=48, help="other prompts, of whose dense runs Lattice is fitted")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=float, help="a budget, at which rank and spread are varied too")
    parser.add_argument("--checkpoint", type=Path, help="of Shiva, which runs in one step less")
    parser.add_argument("--output", type=Path, help="folder of what is written; outputs/floor otherwise")
    parser.add_argument("--record", action="store_true", help="write to results/floor, which is committed")
    options = parser.parse_args()
    folder = folder_of(options.output, options.record, "floor")
    start, console = time.perf_counter(), Console()
    pipe, arguments = load_with_arguments(options.model)
    texts = read_prompts(options.labels).limited(options.prompts + options.fit).texts
    drawn, others = apart(texts, options.prompts)
    stage = Stage(pipe, arguments, options.guidance, options.seed, drawn, others)
    found: list[Point] = []
    fits = {}
    for steps in options.steps:
        weights = stage.fitted([steps], options.rank)
        rows = [dataclasses.asdict(row) for row in weights.layers]
        fits[steps] = {"seconds": round(weights.seconds, 1), "tokens": weights.tokens, "r_squared": rows}
        found += points(stage, weights, steps, options.budgets)
        console.print(table_of(found, steps))
    shapes = shapes_of_the_fill(stage, options.steps[0], options.shapes) if options.shapes else []
    chosen = []
    if options.checkpoint:
        steps = options.steps[0]
        chosen = who_chooses(stage, options.checkpoint, steps, steps - 1, options.budgets)
    if shapes or chosen:
        console.print(table_of([*shapes, *chosen], options.steps[0]))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    del settings["output"], settings["record"], settings["labels"]
    if options.checkpoint:
        settings["checkpoint_weights"] = fingerprint(options.checkpoint)
    record = {
        "settings": {**settings, "drawn": drawn, "weights": fingerprint(options.model)},
        "fits": fits,
        **{
            name: [{**dataclasses.asdict(point), "mean": point.mean} for point in some]
            for name, some in (("points", found), ("shapes", shapes), ("who_chooses", chosen))
        },
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(),
    }
    write_atomically(folder / f"{options.name}.json", (json.dumps(record, indent=1) + "\n").encode())
    picture = figure_of(found)
    if picture is not None:
        write_atomically(folder / f"{options.name}.png", picture)


if __name__ == "__main__":
    main()
