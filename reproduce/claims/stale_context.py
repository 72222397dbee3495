"""Against stale context: what keys and values of tokens that do not run should be. dB to dense, at the same tokens.

    python -m reproduce.claims.stale_context                                    # 16 steps of the embedded model
    python -m reproduce.claims.stale_context --model models/emoji-128 --prompts 8 --output outputs/stale-context

`held`: as they last were (Refresh). `approximate`: made anew from what skipped tokens are believed to be. `mapped`: as
they last were, plus a small linear map, fitted on other prompts, of how far the first block's output moved since.
`tiles`: the tokens that run are whole tiles, so that most of their neighbours are fresh. `tilted`: as held, with more
tokens in early steps and fewer in late ones. `guidance held`: all tokens, but the half of the empty prompt runs in one
of so many steps only, and the difference of the halves is held in between.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import shiva
from reproduce.claims.common import LABELS, apart, progress
from shiva.bench.table import environment
from shiva.checkpoint import write_atomically
from shiva.core import BackboneSpec, Place, StepContext
from shiva.core.method import Method, RunSite
from shiva.core.reduction import Streams
from shiva.evaluate.drawing import draw, load_with_arguments
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.evaluate.prompts import read_prompts
from shiva.fitting import Watching
from shiva.methods.refresh import Refresh, RefreshMethod
from shiva.ops.probe import FEATURES, look

RIDGE = 1e-3


# -- mapped: stale keys, corrected -----------------------------------------------------------------------


class KeyWatcher(Method):
    """Runs all tokens; sums what the change of the first block's output tells of the change of keys and values."""

    sites = frozenset({"block", "keys"})
    leading = 1

    def __init__(self, spec: BackboneSpec):
        super().__init__(Watching(), spec)
        self.before: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.now = torch.empty(0)

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if site.kind == "block":
            if site.layer == self.leading:
                self.now = look(x)
            return run(x, None)
        made = run(x, None)
        if site.layer >= self.leading:
            self.note(site.name, made.image.float(), ctx.step == ctx.first)
        return made

    def note(self, name: str, values: Tensor, first: bool) -> None:
        if not first and name in self.before:
            seen, known = self.before[name]
            change, moved = (self.now - seen).flatten(0, 1), (values - known).flatten(0, 1)
            gram, cross = change.T @ change, change.T @ moved
            old = self.sums.get(name)
            self.sums[name] = (gram, cross) if old is None else (old[0] + gram, old[1] + cross)
        self.before[name] = (self.now, values)

    def maps(self) -> dict[str, Tensor]:
        """Of each projection (r, D): the change of its result by the change of the look."""
        eye = torch.eye(FEATURES)
        return {
            name: torch.linalg.solve(gram + RIDGE * gram.trace() / FEATURES * eye, cross)
            for name, (gram, cross) in self.sums.items()
        }


class MappedKeys(RefreshMethod):
    """Keys and values of skipped tokens follow how far the first block's output moved since the token last ran."""

    maps: dict[str, Tensor]
    moved: Tensor | None = None

    def scores(self, x: Tensor, ctx: StepContext) -> Tensor:
        scores = super().scores(x, ctx)
        self.moved = ctx.now.look - ctx.run.seen
        return scores

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        made = super().around(run, x, base, site, ctx)
        if ctx.now.indices is None or self.moved is None:
            return made
        waits = torch.ones(self.moved.shape[:2]).scatter(1, ctx.now.indices, 0.0)[..., None]
        return made._replace(image=made.image + (waits * self.moved) @ self.maps[site.name])


# -- tiles -----------------------------------------------------------------------------------------------


class Tiled(RefreshMethod):
    """Scores averaged over tiles of so many tokens a side."""

    side = 4

    def scores(self, x: Tensor, ctx: StepContext) -> Tensor:
        scores = super().scores(x, ctx)
        grid = scores.view(scores.shape[0], 1, *ctx.layout.grid)
        mean = F.avg_pool2d(grid, self.side, ceil_mode=True)
        return F.interpolate(mean, scale_factor=self.side, mode="nearest")[
            ..., : ctx.layout.grid[0], : ctx.layout.grid[1]
        ].flatten(1)


@dataclass(frozen=True)
class Point:
    """One attempt at one budget."""

    name: str
    budget: float
    flops: float
    psnr: float
    cached: int
    """Bytes carried from step to step."""


def attempts(budget: float, first: int, maps: dict[str, Tensor]) -> dict[str, Callable[[BackboneSpec], Any]]:
    """What builds each attempt, by name; all but `approximate` choose by the first block's change or by rows."""
    change = Refresh(budget=budget, first=first, tilt=0.0)
    band = dataclasses.replace(change, score="band")
    fresh = shiva.Sweep(budget=budget, dense_steps=tuple(range(first)), attends="fresh", tilt=0.0)
    free = dataclasses.replace(band, first=1)

    def mapped(spec: BackboneSpec) -> MappedKeys:
        method = MappedKeys(change, spec)
        method.maps = maps
        return method

    def tiled(side: int) -> Callable[[BackboneSpec], Tiled]:
        def build(spec: BackboneSpec) -> Tiled:
            method = Tiled(change, spec)
            method.side = side
            return method

        return build

    return {
        "held, rows": band.build,
        "held, by change": change.build,
        "approximate, rows": fresh.build,
        "mapped, by change": mapped,
        "tiles of 2, by change": tiled(2),
        "tiles of 4, by change": tiled(4),
        "held, rows, one dense step": free.build,
        **{f"tilted by {t}, rows, one dense step": dataclasses.replace(free, tilt=float(t)).build for t in (1, 2, 4)},
    }


@contextlib.contextmanager
def guidance_held(transformer: Any, every: int) -> Iterator[None]:
    """In all but one of `every` steps the conditional half runs alone, and the last difference gives the other."""
    forward, calls, difference = transformer.forward, itertools.count(), torch.empty(0)

    def held(hidden_states: Tensor, **call: Any) -> Any:
        nonlocal difference
        if next(calls) % every == 0:
            (both,) = forward(hidden_states, **call)
            difference = both.chunk(2)[1] - both.chunk(2)[0]
            return (both,)
        count = len(hidden_states) // 2
        half = {n: v[count:] if isinstance(v, Tensor) and len(v) == 2 * count else v for n, v in call.items()}
        (guided,) = forward(hidden_states[count:], **half)
        return (torch.cat([guided - difference, guided]),)

    transformer.forward = held
    try:
        yield
    finally:
        del transformer.forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--labels", type=Path, default=LABELS, help="file of prompts")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.35])
    parser.add_argument("--first", type=int, default=3, help="dense steps at the beginning of each run")
    parser.add_argument("--prompts", type=int, default=8, help="drawn and measured")
    parser.add_argument("--fit", type=int, default=8, help="other prompts, on which the maps are fitted")
    parser.add_argument("--output", type=Path, default=Path("outputs/stale-context"))
    options = parser.parse_args()
    pipe, arguments = load_with_arguments(options.model)
    texts = read_prompts(options.labels).limited(options.prompts + options.fit).texts
    drawn, others = apart(texts, options.prompts)

    def images(prompts: list[str], seed: int, **more: Any) -> list[Any]:
        return draw(pipe, prompts, seed, range(len(prompts)), options.steps, options.guidance, **arguments, **more)

    dense = images(drawn, 0)
    with shiva.attach(pipe, shiva.Sweep(budget=1.0)) as session:
        spec = session.spec
    watcher = KeyWatcher(spec)
    with shiva.attach(pipe, watcher), torch.no_grad():
        images(others, 1, output_type="latent")
    maps = watcher.maps()
    found = []
    for budget in options.budgets:
        for name, build in progress(list(attempts(budget, options.first, maps).items()), f"budget {budget:g}"):
            with shiva.attach(pipe, build(spec)) as session:
                psnr = statistics.fmean(map(image_psnr, images(drawn, 0), dense))
                summary = session.summary()
            found.append(Point(name, budget, summary.flops_share, psnr, summary.cached_bytes))
    for every in (2, 3):
        psnrs = []
        for place, text in enumerate(drawn):  # one by one, as a call's number is its step
            with guidance_held(pipe.transformer, every):
                (image,) = draw(pipe, [text], 0, [place], options.steps, options.guidance, **arguments)
            psnrs.append(image_psnr(image, dense[place]))
        share = (1 + len(range(0, options.steps, every)) / options.steps) / 2
        found.append(Point(f"guidance held, {every - 1} of {every}", 1.0, share, statistics.fmean(psnrs), 0))
    for count in sorted({round(point.flops * options.steps) for point in found}, reverse=True):
        fewer = draw(pipe, drawn, 0, range(len(drawn)), count, options.guidance, **arguments)
        psnr = statistics.fmean(map(image_psnr, fewer, dense))
        found.append(Point(f"{count} steps", 1.0, count / options.steps, psnr, 0))
    table = Table("attempt", "budget", "FLOPs", "dB to dense", "MiB kept", title=f"{options.steps} steps")
    for point in found:
        row = (f"{point.budget:g}", f"{point.flops:.0%}", f"{point.psnr:.2f}", f"{point.cached / 2**20:.1f}")
        table.add_row(point.name, *row)
    Console().print(table)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    del settings["output"], settings["labels"]
    record = {"settings": settings, "points": [dataclasses.asdict(p) for p in found], "environment": environment()}
    write_atomically(options.output / "stale-context.json", (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
