"""How every figure looks, one palette and one frame; and the planes of quality against cost. Needs matplotlib."""

from __future__ import annotations

import io
import re
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from shiva.checkpoint import write_atomically
from shiva.core.needs import install
from shiva.evaluate.frontier import pareto

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
"""Okabe and Ito's colours, which the colour-blind tell apart."""
OURS, OTHER, DENSE, QUIET = "#D55E00", "#8a8f98", "#000000", "#cbd5e1"
"""Our methods, the others, the dense model, and what is only there for reference."""
MAP = "cividis"
"""Of heat maps: even in lightness, and the same to the colour-blind."""


class Family(NamedTuple):
    """Methods of one kind, which figures and tables mark alike."""

    title: str
    colour: str
    marker: str
    prefixes: tuple[str, ...]
    """How the names of its members start, in lower case."""
    ours: bool = False


FAMILIES = (
    Family("ours", OURS, "o", ("shiva", "sweep", "lattice", "probe", "refresh"), ours=True),
    Family("dense", DENSE, "D", ("dense", "fine-tuned")),
    Family("others", OTHER, "s", ("",)),
)


def family(name: str) -> Family:
    """Of a method by its name."""
    return next(family for family in FAMILIES if name.lower().startswith(family.prefixes))


def colour(name: str) -> str:
    return family(name).colour


def plot(width: float = 7.0, height: float = 4.0, panels: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, row after row. No pyplot: a server draws in many threads."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need matplotlib: {install('report')}") from error

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, panels, squeeze=False).flatten()
    for axis in axes:
        axis.set_prop_cycle(color=PALETTE)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_beside(axis: Any, fontsize: float = 8) -> None:
    """What the axis has drawn, named to its right, never over the data."""
    drawn = axis.get_legend()
    named = axis.get_legend_handles_labels()
    if drawn is not None:  # one that was put together by hand
        named = drawn.legend_handles, [text.get_text() for text in drawn.get_texts()]
        fontsize = min(fontsize, drawn.get_texts()[0].get_fontsize())
    twin = len(axis.get_shared_x_axes().get_siblings(axis)) > 1  # whose ticks stand there
    if named[0]:
        place = {"loc": "center left", "bbox_to_anchor": (1.14 if twin else 1.01, 0.5)}
        axis.legend(*named, **place, frameon=False, fontsize=fontsize)


def encode(figure: Any, form: str = "png", dpi: int = 140) -> bytes:
    """The figure as a file's bytes, the same for the same data."""
    import matplotlib

    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "shiva"}):
        figure.savefig(data, format=form, dpi=dpi, metadata={"Date": None} if form == "svg" else {"Software": None})
    return data.getvalue()


def save(figure: Any, path: Path) -> None:
    write_atomically(path, encode(figure, path.suffix.removeprefix(".")))


LINES = {"fewer steps": ("#000000", "-"), "even steps": ("#475569", "--"), "multistep": ("#475569", ":")}
"""Colour and stroke of runs that only take fewer steps."""
GREY = "#94a3b8"
FIDELITY = {"to_dense": "PSNR to dense, dB", "to_converged": "PSNR to the converged run, dB"}
SAME = 60.0
"""dB from which a way is dense itself, such as a cache that never skips: it has no place in the picture."""


class Label(NamedTuple):
    text: str
    x: float
    y: float
    colour: str
    bold: bool


def draw_frontier(document: dict[str, Any], path: Path) -> None:
    """Fidelity over cost, as a benchmark's document holds them."""
    points = [point for point in document["results"]["points"] if point["kind"] != "dense"]
    points = [point for point in points if point["to_dense"] < SAME]
    for point in points:
        point["combined"] = re.search(r",| in | with ", point["name"]) is not None
    note = "band: the front; hollow: with fewer steps, another solver or a cache"
    draw_plane(points, FIDELITY, f"{document['tables'][0]['title']}\n{note}", path)


def draw_floor(document: dict[str, Any], path: Path) -> None:
    """The same of `shiva eval --protocol floor`, by what was measured of every point."""
    results, points = document["results"], []
    panels = {"psnr": "PSNR to dense, dB", "ssim": "SSIM to dense"}
    for name, quality in results["quality"].items():
        if not panels.keys() & quality.keys():
            continue  # dense itself
        cost, steps = results["cost"][name], re.fullmatch(r"(\d+) steps?", name)
        kind = "fewer steps" if steps else "tokens"
        point = {"name": name, "kind": kind, "steps": int(steps[1]) if steps else None, "flops": cost["share"]}
        point["combined"] = "," in name
        points.append({**point, "time": 1 / cost["speedup"] if cost["speedup"] else None, **quality})
    measured = {key: heading for key, heading in panels.items() if points and all(key in point for point in points)}
    if measured:
        draw_plane(points, measured, f"{document['settings']['steps']} steps; band: the front", path)


def draw_plane(points: list[dict[str, Any]], panels: dict[str, str], title: str, path: Path) -> None:
    """What is better the higher it is, by key and heading, over time or, where nothing was timed, over FLOPs."""
    timed = all(point["time"] is not None for point in points)
    for point in points:
        point["cost"] = 100 * point["time" if timed else "flops"]
    figure, axes = plot(12, 5.4, panels=len(panels))
    for axis, (key, heading) in zip(axes, panels.items(), strict=True):
        edge = pareto(points, itemgetter("cost"), itemgetter(key))
        axis.step([p["cost"] for p in edge], [p[key] for p in edge], where="post", color=QUIET, linewidth=7, zorder=0)
        labels = [draw_series(axis, name, members, key) for name, members in series(points).items()]
        labels += [Label(p["name"], p["cost"], p[key], OURS, True) for p in apart(edge)]
        axis.set(xlabel=f"{'time' if timed else 'true FLOPs'} of an image, % of dense", ylabel=heading)
        axis.axvline(50, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        axis.margins(0.06)
        put_labels(axis, [label for label in labels if label is not None])
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def apart(edge: list[dict[str, Any]], distance: float = 10.0) -> list[dict[str, Any]]:
    """Of the combinations on the front, some so far from each other that each can be named; the dearest first."""
    found: list[dict[str, Any]] = []
    for point in reversed([p for p in edge if p["combined"] and p["kind"] == "tokens"]):
        if not found or found[-1]["cost"] - point["cost"] > distance:
            found.append(point)
    return found


def series(points: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Points by what they have in common: a solver, a cache, a method, a method with fewer steps; cheapest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in sorted(points, key=lambda p: p["flops"]):
        name = point["kind"] if point["kind"] in LINES else re.sub(r" [\d.]+(?=,|$| in )", "", point["name"])
        found.setdefault(name, []).append(point)
    return found


def draw_series(axis: Any, name: str, members: list[dict[str, Any]], key: str) -> Label | None:
    """One line of alike points, or some that combine two ways; where its name belongs, if it is a line."""
    kind, combined = members[0]["kind"], members[0]["combined"]
    ours = family(name).ours and kind == "tokens"
    colour, stroke = LINES.get(kind, (OURS if ours else GREY, "none" if combined else "-"))
    across, up = [p["cost"] for p in members], [p[key] for p in members]
    marker = {"marker": "o", "markersize": 6 if ours else 4, "markerfacecolor": "white" if combined else colour}
    axis.plot(across, up, color=colour, linestyle=stroke, linewidth=2.2 if ours else 1.2, **marker)
    if kind == "fewer steps":
        for member, x, y in zip(members, across, up, strict=True):
            axis.annotate(str(member["steps"]), (x, y), (-4, 5), textcoords="offset points", fontsize=8, ha="right")
    return None if combined else Label(name, across[-1], up[-1], colour, ours)


LETTER, LINE = 0.018, 0.042
"""A letter's width and a line's height, as shares of the plane."""


def put_labels(axis: Any, labels: list[Label]) -> None:
    """Names to the right of their points, pushed up where they would lie on each other."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    right += 0.18 * (right - left)
    axis.set_xlim(left, right)
    letter, line = LETTER * (right - left), LINE * (top - bottom)
    placed: list[tuple[float, float, float]] = []
    for label in sorted(labels, key=lambda label: label.y):
        start, end, y = label.x, label.x + letter * len(label.text), label.y
        while any(start < b and a < end and abs(y - other) < line for a, b, other in placed):
            y += line / 4
        placed.append((start, end, y))
        look = {"fontsize": 8, "color": label.colour, "fontweight": "bold" if label.bold else "normal"}
        pointer = {"arrowstyle": "-", "color": QUIET, "shrinkA": 0, "shrinkB": 3} if y > label.y + line else None
        axis.annotate(label.text, (label.x, label.y), (start + letter, y), va="center", arrowprops=pointer, **look)
