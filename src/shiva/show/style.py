"""How every figure looks: one palette, one frame. Needs matplotlib, the extra `report`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

from shiva.checkpoint import write_atomically
from shiva.core.needs import install

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
