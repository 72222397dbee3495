"""How every figure looks: one palette, one frame. Needs matplotlib, the extra `report`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

from shiva.checkpoint import write_atomically
from shiva.core.needs import install

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
"""Okabe and Ito's colours, which the colour-blind tell apart."""
SHIVA, UNTRAINED, OTHER, DENSE, QUIET = "#D55E00", "#E69F00", "#0072B2", "#000000", "#cbd5e1"
"""Shiva, Shiva without training, the other methods, the dense model, and what is only there for reference."""
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
    Family("Shiva", SHIVA, "o", ("shiva",), ours=True),
    Family("Shiva, untrained", UNTRAINED, "^", ("sweep", "lattice", "probe"), ours=True),
    Family("dense", DENSE, "D", ("dense", "fine-tuned")),
    Family("other methods", OTHER, "s", ("",)),
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


def encode(figure: Any, form: str = "png", dpi: int = 140) -> bytes:
    """The figure as a file's bytes, the same for the same data."""
    import matplotlib

    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "shiva"}):
        figure.savefig(data, format=form, dpi=dpi, metadata={"Date": None} if form == "svg" else {"Software": None})
    return data.getvalue()


def save(figure: Any, path: Path) -> None:
    write_atomically(path, encode(figure, path.suffix.removeprefix(".")))
