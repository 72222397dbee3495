"""Learn a table on whole runs: how many tokens each step and layer runs, for the image at the end.

Around a flat table each cell, some steps of some layers, is once run with few tokens and once with all. What that does
to the final latents is its sensitivity; dynamic programming shares the budget out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiva.api import attach
from shiva.backbones.base import backbone_of
from shiva.compat import transformer_of
from shiva.core.method import Method, MethodConfig
from shiva.evaluate.drawing import draw
from shiva.fitting import Fit
from shiva.methods.counts import CountOptions, Learned
from shiva.ops.schedule import Cell, RatioSchedule, allocate

RATIOS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WHOLE = 1 - 1e-9
"""A ratio that keeps all tokens and has a logit."""
AS_TABLED = {"budget": None, "flops": None, "tilt": 0.0}
"""Options under which a table's ratios are kept as they are."""


@dataclass(frozen=True)
class Tabled(Fit):
    """A method with its learned table."""

    ratios: Tensor  # (cells of steps, cells of layers)
    flat: float
    """Mean squared error of final latents to dense, with the same ratio everywhere."""
    learned: float
    """The same with the table, on prompts it was not learned on."""


def fit_table(
    pipe: Any,
    config: MethodConfig,
    prompts: Sequence[str],
    *,
    budget: float,
    steps: int = 16,
    guidance: float = 4.5,
    step_cells: int | None = None,
    layer_cells: int = 1,
    seed: int = 0,
    batch: int = 4,
    progress: Callable[[str], None] = lambda text: None,
    arguments: Mapping[str, Any] | None = None,
) -> Tabled:
    """Learn a table on the first half of the prompts, and judge it on the others."""
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompt cannot be both learned on and held out; pass at least 2")
    start, transformer = time.perf_counter(), transformer_of(pipe)
    spec = backbone_of(transformer).spec(transformer)
    method: Any = config.changed(AS_TABLED).build(spec) if isinstance(config, CountOptions) else None
    if not isinstance(method, Learned):
        raise ValueError(f"{type(config).__name__} has no table to learn; pass Refresh or DiffSparse")
    count = method.count
    half = (len(prompts) + 1) // 2

    def latents(places: Sequence[int]) -> Tensor:
        calls = [places[first : first + batch] for first in range(0, len(places), batch)]
        how = {"output_type": "latent", **(arguments or {})}
        made = [draw(pipe, [prompts[p] for p in call], seed, call, steps, guidance, **how) for call in calls]
        return torch.cat([torch.as_tensor(latents).float() for latents in made])

    def error(schedule: RatioSchedule, places: Sequence[int], dense: Tensor) -> float:
        count.set(schedule)
        with attach(pipe, method):
            return float((latents(places) - dense).square().mean())

    learned_on, judged_on = list(range(half)), list(range(half, len(prompts)))
    with torch.no_grad():
        dense, other = latents(learned_on), latents(judged_on)
        timesteps = tuple(float(t) for t in pipe.scheduler.timesteps)
        rows = reduced_rows(method, pipe, latents, learned_on[:1], steps)
        if not rows:
            raise ValueError(f"each of the {steps} steps of this run sees all tokens; pass more --steps")
        reduced = [layer for layer in range(spec.layers) if layer not in count.schedule.dense]
        blank = RatioSchedule(timesteps, torch.zeros(steps, spec.layers).double(), dense=count.schedule.dense)
        share = (budget * steps - (steps - len(rows))) / len(rows)
        if share <= min(RATIOS):
            raise ValueError(f"budget={budget} leaves {share:.0%} for steps that are not dense; pass more")
        flat = with_ratios(blank, [(rows, reduced, share)])
        parts = [(r, l) for r in split(rows, step_cells or len(rows)) for l in split(reduced, layer_cells)]
        at_flat, cells, low = error(flat, learned_on, dense), [], max(min(RATIOS), share / 2)
        for number, (some, layers) in enumerate(parts):
            progress(f"part {number + 1} of {len(parts)}: steps {some[0]} to {some[-1]}")
            ends = [(r, error(with_ratios(flat, [(some, layers, r)]), learned_on, dense)) for r in (low, 1.0)]
            weight = len(some) * len(layers) / (len(rows) * len(reduced))
            cells.append(Cell(weight, (ends[0], (share, at_flat), ends[1])))
        progress("sharing out, and how far to go")
        aim = allocate(cells, share, [ratio for ratio in RATIOS if ratio >= low])
        found, table = best_blend(aim, parts, flat, share, lambda schedule: error(schedule, learned_on, dense))
        before, after = (error(schedule, judged_on, other) for schedule in (flat, table))
    count.set(table)
    method.trained = True
    shape = (-1, len(split(reduced, layer_cells)))
    return Tabled(method, time.perf_counter() - start, torch.tensor(found).view(shape), before, after)


def best_blend(
    aim: Sequence[float],
    parts: Sequence[tuple[Sequence[int], Sequence[int]]],
    flat: RatioSchedule,
    share: float,
    error: Callable[[RatioSchedule], float],
) -> tuple[list[float], RatioSchedule]:
    """How far to go from the flat table to the aim: errors do not add up exactly, so whole runs decide."""
    tried = []
    for blend in (0.0, 0.25, 0.5, 0.75, 1.0):
        ratios = [share + blend * (ratio - share) for ratio in aim]
        table = with_ratios(flat, [(*part, ratio) for part, ratio in zip(parts, ratios, strict=True)])
        tried.append((error(table), ratios, table))
    _, ratios, table = min(tried, key=lambda found: found[0])
    return ratios, table


def reduced_rows(
    method: Method, pipe: Any, latents: Callable[[Sequence[int]], Tensor], places: Sequence[int], steps: int
) -> list[int]:
    """Steps of a run at which the method leaves tokens out."""
    with attach(pipe, method) as session:
        latents(places)
        each = session.stats[:: len(session.stats) // steps]
        return [step for step, call in enumerate(each) if min(call.kept.values()) < call.tokens]


def split(values: Sequence[int], parts: int) -> list[list[int]]:
    """So many runs of neighbours, as even as can be."""
    count = min(parts, len(values))
    ends = [round(place * len(values) / count) for place in range(count + 1)]
    return [list(values[a:b]) for a, b in itertools.pairwise(ends)]


def with_ratios(schedule: RatioSchedule, parts: Sequence[tuple[Sequence[int], Sequence[int], float]]) -> RatioSchedule:
    """A schedule with some steps and layers at other ratios."""
    logits = schedule.logits.clone()
    for rows, layers, ratio in parts:
        kept = min(ratio, WHOLE)
        for row in rows:
            logits[row, list(layers)] = math.log(kept / (1 - kept))
    return RatioSchedule(schedule.timesteps, logits, dense=schedule.dense)
