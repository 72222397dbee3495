"""Figures of the benchmarks, each drawn from the document that its JSON file holds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from reproduce.bench.anatomy import STAGES
from shiva.show.figures import title_of
from shiva.show.style import OTHER, OURS, QUIET, colour, legend_beside, plot, save


def draw_anatomy(document: dict[str, Any], path: Path) -> None:
    """The stages of the pruning path, as shares of the dense step."""
    dense, *rows = document["results"]["configurations"]
    figure, (axis,) = plot(9, 0.5 * len(rows) + 1.6)
    left = [0.0] * len(rows)
    for stage, label in STAGES.items():
        widths = [100 * row["stages"].get(stage, 0.0) / dense["step"] for row in rows]
        axis.barh([row["name"] for row in rows], widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="% of the dense step", title=title_of(document))
    legend_beside(axis)
    save(figure, path)


def draw_selector(document: dict[str, Any], path: Path) -> None:
    """Backward time and kept memory by N, both axes logarithmic."""
    series: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in document["results"]["operators"]:
        if not row["skipped"]:
            series[row["name"]].append(row)
    figure, (time, memory) = plot(12, 4, panels=2)
    for name, rows in series.items():
        tokens = [row["tokens"] for row in rows]
        strong = {"linewidth": 2.5} if name == "Shiva" else {}
        time.loglog(tokens, [1e3 * row["backward"] for row in rows], marker="o", label=name, **strong)
        memory.loglog(tokens, [row["saved"] / 1e6 for row in rows], marker="o", label=name, **strong)
    time.set(xlabel="N", ylabel="backward, ms", title="time of the backward pass")
    memory.set(xlabel="N", ylabel="MB", title="kept for the backward pass")
    legend_beside(memory)
    save(figure, path)


def draw_bars(document: dict[str, Any], path: Path, key: str, value: str, label: str) -> None:
    rows = [row for row in document["results"][key] if row[value] == row[value]]
    names = [row["name"] for row in rows]
    figure, (axis,) = plot(7, 0.35 * len(rows) + 1.2)
    axis.barh(names, [row[value] for row in rows], color=[colour(name) for name in names])
    axis.invert_yaxis()
    axis.set(xlabel=label, title=title_of(document))
    save(figure, path)


def draw_train(document: dict[str, Any], path: Path) -> None:
    draw_bars(document, path, "methods", "seconds", "seconds an optimizer step")


def draw_compile(document: dict[str, Any], path: Path) -> None:
    """Eager and compiled side by side."""
    rows = document["results"]["methods"]
    figure, (axis,) = plot(7, 0.5 * len(rows) + 1.2)
    places = range(len(rows))
    axis.barh([p - 0.2 for p in places], [row["eager"] for row in rows], height=0.38, color=QUIET, label="eager")
    axis.barh([p + 0.2 for p in places], [row["compiled"] for row in rows], height=0.38, color=OTHER, label="compiled")
    axis.set_yticks(list(places), [row["name"] for row in rows])
    axis.invert_yaxis()
    axis.set(xlabel="seconds a step", title=title_of(document))
    legend_beside(axis)
    save(figure, path)


def draw_compose(document: dict[str, Any], path: Path) -> None:
    draw_bars(document, path, "mixes", "seconds", "seconds a step")


def draw_scale(document: dict[str, Any], path: Path) -> None:
    """The pruning path by N beside a line of slope one, and the roofline's images."""
    rows = [row for row in document["results"]["path"] if not row["skipped"]]
    figure, (axis, roof) = plot(13, 4, panels=2)
    tokens = [row["tokens"] for row in rows]
    axis.loglog(tokens, [1e3 * row["seconds"] for row in rows], marker="o", color=OURS, label="measured")
    linear = [1e3 * rows[0]["seconds"] * n / tokens[0] for n in tokens]
    axis.loglog(tokens, linear, color=QUIET, linestyle="--", label="linear")
    axis.set(xlabel="N", ylabel="ms a layer", title="the pruning path")
    legend_beside(axis)
    images = document["results"]["roofline"]
    names = [f"{row['device']}, {row['name']}" for row in images]
    roof.barh(names, [row["expected_ms"] / 1e3 for row in images], color=QUIET)
    roof.barh(names, [row["limit_ms"] / 1e3 for row in images], color=OTHER, height=0.5)
    marks = [(i, row["paper_ms"] / 1e3) for i, row in enumerate(images) if row["paper_ms"]]
    roof.plot([x for _, x in marks], [i for i, _ in marks], "|", color=OURS, markersize=12)
    roof.invert_yaxis()
    roof.tick_params(labelsize=7)
    roof.set(xlabel="seconds an image: roofline (dark), expected (pale), the paper's (mark)", title="counted for GPUs")
    save(figure, path)
