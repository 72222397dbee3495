"""Figures of runs: quality against cost, schedules, chosen tokens, scores, grids, training curves.

Each takes plain data and returns a matplotlib figure, which `style.save` writes; benchmarks' write it themselves.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.core.context import Trace
from shiva.evaluate.frontier import pareto
from shiva.show.style import (
    FAMILIES,
    MAP,
    PALETTE,
    QUIET,
    Label,
    colour,
    family,
    legend_beside,
    plot,
    put_labels,
    save,
)
from shiva.training.log import read_records

SHOWN = 5
"""Steps and layers that a figure of masks or scores shows, spread evenly over a run."""
LOSSES = ("loss", "diffusion", "distill", "output")
"""Of a training log; the budget's own changes sign and has no place on a logarithmic axis."""


@dataclass(frozen=True)
class Point:
    """A method on a plane of cost and quality."""

    name: str
    cost: float
    quality: float


def quality_cost(points: Sequence[Point], cost: str, quality: str, higher_is_better: bool = True) -> Any:
    """Every method by what it costs and what it gives, with the front of those that nothing beats."""
    figure, (axis,) = plot(7.5, 4.4)
    sign = 1 if higher_is_better else -1
    front = pareto(points, lambda point: point.cost, lambda point: sign * point.quality)
    axis.step([p.cost for p in front], [p.quality for p in front], where="post", color=QUIET, zorder=1)
    for kind in FAMILIES:
        members = [p for p in points if family(p.name) == kind]
        places = [p.cost for p in members], [p.quality for p in members]
        axis.scatter(*places, color=kind.colour, marker=kind.marker, s=46 if kind.ours else 34, zorder=2)
    axis.margins(0.06, 0.12)
    kinds = {point: family(point.name) for point in points}
    put_labels(
        axis, [Label(p.name, p.cost, p.quality, k.colour if k.ours else "#555", k.ours) for p, k in kinds.items()]
    )
    axis.set(xlabel=cost, ylabel=f"{quality} ({'higher' if higher_is_better else 'lower'} is better)")
    axis.grid(alpha=0.25)
    return figure


def schedule_map(ratios: Tensor, timesteps: Sequence[float], title: str = "share of tokens kept") -> Any:
    """A table of keep ratios (steps, layers), layers upwards, steps from noise to image."""
    steps, layers = ratios.shape
    figure, (axis,) = plot(min(max(0.24 * steps + 2, 6), 11), min(max(0.22 * layers + 1.2, 2.6), 7))
    shown = axis.imshow(ratios.T, aspect="auto", origin="lower", cmap=MAP, vmin=0, vmax=1, interpolation="nearest")
    ticks = spread(range(steps), 5)
    axis.set_xticks(ticks, [f"{step}\nt={timesteps[step]:.0f}" for step in ticks])
    axis.set_yticks(spread(range(layers), 8))
    axis.set(xlabel="step, from noise to image", ylabel="layer", title=title)
    axis.spines[:].set_visible(False)
    figure.colorbar(shown, ax=axis, label="kept")
    return figure


def spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, first and last among them; of one, the first."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]


def overlay(image: Any, mask: Tensor, size: int = 384) -> Any:
    """A PIL image with the tokens that were not computed dimmed; mask (rows, columns) holds those that were."""
    from PIL import Image

    width, height = (round(size * side / max(image.size)) for side in image.size)
    picture = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    veil = Image.blend(picture.convert("L").convert("RGB"), Image.new("RGB", picture.size, "#1f2a44"), 0.72)
    stencil = Image.fromarray(mask.to(torch.uint8).mul(255).numpy()).resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(picture, veil, stencil)


def token_masks(image: Any, trace: Trace) -> Any:
    """The image under the masks of some layers (downwards) and steps (rightwards) of its run."""
    layers = spread(sorted({layer for _, layer in trace.positions}), SHOWN)
    steps = spread(sorted({step for step, _ in trace.positions}), SHOWN)
    if not layers:
        raise ValueError("the run kept every token at every step, so there is no mask to draw; pass a smaller budget")
    figure, axes = plot(1.35 * len(steps) + 0.5, 1.35 * len(layers) + 0.7, panels=len(steps), rows=len(layers))
    for axis, (layer, step) in zip(axes, [(a, b) for a in layers for b in steps], strict=True):
        mask = trace.mask(step, layer)
        axis.imshow(overlay(image, mask, 192))
        head = f"step {step}\n" if layer == layers[0] else ""
        axis.set_title(f"{head}{mask.float().mean():.0%}", fontsize=8)
        bare(axis)
        if step == steps[0]:
            axis.set_ylabel(f"layer {layer}", fontsize=8)
    figure.suptitle("tokens that were computed", fontsize=10)
    return figure


def bare(axis: Any) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def score_maps(traces: Mapping[str, Trace]) -> Any:
    """Scores of the middle layer under several checkpoints: heat maps at some steps, then their histogram.

    Names are checkpoints, such as one of stratified and one of fixed training.
    """
    scored = set.intersection(*(set(trace.scores) for trace in traces.values()))
    layers = sorted({found for _, found in scored})
    if not layers:
        raise ValueError("no token was scored in all of these runs; trace methods with a router below budget 1")
    layer = layers[len(layers) // 2]
    steps = spread(sorted(step for step, found in scored if found == layer), SHOWN - 1)
    figure, axes = plot(1.7 * (len(steps) + 1) + 0.6, 1.7 * len(traces) + 0.7, len(steps) + 1, rows=len(traces))
    cells = iter(axes)
    for name, trace in traces.items():
        every = []
        for step in steps:
            axis, scores = next(cells), trace.score_map(step, layer)
            every.append(scores.flatten())
            axis.imshow(scores, cmap=MAP, interpolation="nearest")
            bare(axis)
            axis.set_title(f"step {step}", fontsize=8)
            if step == steps[0]:
                axis.set_ylabel(name, fontsize=8)
        axis = next(cells)
        for index, (step, scores) in enumerate(zip(steps, every, strict=True)):
            axis.hist(scores.numpy(), bins=24, histtype="step", color=PALETTE[index], label=f"step {step}")
        axis.set_yticks([])
        axis.tick_params(labelsize=7)
        legend_beside(axis, 6)
    figure.suptitle(f"scores of layer {layer}", fontsize=10)
    return figure


def image_grid(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Any]]]) -> Any:
    """Images in labelled rows and columns, for a file; the page has its own."""
    figure, axes = plot(1.2 * len(columns) + 1, 1.2 * len(rows) + 0.4, panels=len(columns), rows=len(rows))
    cells = iter(axes)
    for number, (label, images) in enumerate(rows):
        for column, image in zip(columns, images, strict=True):
            axis = next(cells)
            axis.imshow(image)
            bare(axis)
            if number == 0:
                axis.set_title(column, fontsize=8)
            if column == columns[0]:
                axis.set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    return figure


def training_curves(run: Path) -> Any:
    """Losses, mean keep and validation error of a training run, from the logs in its folder."""
    metrics, validation = read_records(run / "metrics.jsonl"), read_records(run / "validation.jsonl")
    if not metrics:
        raise FileNotFoundError(f"{run / 'metrics.jsonl'} holds no records; pass the folder of a training run")
    figure, (losses, keep, error) = plot(14, 3.4, panels=3)
    draw_series(losses, metrics, [name for name in LOSSES if name in metrics[-1]])
    losses.set(xlabel="optimizer step", title="losses", yscale="log")
    draw_series(keep, metrics, [name for name in ("keep", "budget_ema") if name in metrics[-1]])
    keep.set(xlabel="optimizer step", title="share of tokens kept", ylim=(0, 1.02))
    measured = validation[-1] if validation else {}
    draw_series(error, validation, [name for name in measured if name.startswith("mse/")])
    error.set(xlabel="optimizer step", title="squared error to dense", yscale="log" if validation else "linear")
    for axis in (losses, keep, error):
        mark_stages(axis, metrics)
        legend_beside(axis, 7)
    return figure


def draw_series(axis: Any, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        held = [record for record in records if name in record]
        marker = "o" if len(held) < 12 else None
        axis.plot([r["step"] for r in held], [r[name] for r in held], label=name.removeprefix("mse/"), marker=marker)


def mark_stages(axis: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    """A line where one stage of training gives way to the next."""
    for before, after in itertools.pairwise(metrics):
        if before.get("stage") != after.get("stage"):
            axis.axvline(after["step"], color=QUIET, linestyle="--", zorder=0)


# -- benchmarks, from the documents that their JSON files hold ------------------------------------------


def title_of(document: dict[str, Any]) -> str:
    return textwrap.fill(document["tables"][0]["title"], 52)


def draw_step(document: dict[str, Any], path: Path) -> None:
    """Speed-up of each method over the limit that its FLOPs set."""
    rows = document["results"]["methods"]
    names = [row["name"] for row in rows]
    figure, (axis,) = plot(7, 0.35 * len(rows) + 1.2)
    axis.barh(names, [row["limit"] for row in rows], color=QUIET)
    axis.barh(names, [row["speedup"] for row in rows], color=[colour(name) for name in names], height=0.5)
    axis.invert_yaxis()
    axis.set(xlabel="speed-up over dense; the pale bar is what FLOPs allow", title=title_of(document))
    save(figure, path)


def draw_flops(document: dict[str, Any], path: Path) -> None:
    """TFLOPs of each method as the paper counts, ours as bars and the paper's as dots."""
    rows = document["results"]["methods"]
    names = [row["name"] for row in rows]
    figure, (axis,) = plot(7, 0.3 * len(rows) + 1.2)
    axis.barh(names, [row["convention"] for row in rows], color=[colour(name) for name in names], height=0.6)
    axis.plot([row["paper"] for row in rows], names, "o", color=QUIET, markeredgecolor="black")
    axis.invert_yaxis()
    axis.set(xlabel="TFLOPs a step, the paper's convention; the dot is the paper's figure")
    save(figure, path)
