"""Draw the figures of results/ again from their JSON files: python -m reproduce.redraw. Nothing is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reproduce.bench import figures
from reproduce.claims.common import KEPT, Claim, Result, draw_figure
from shiva.show.figures import draw_flops, draw_step

BENCHES = Path("results/bench")


def redraw_bench(path: Path) -> None:
    """A benchmark's figure, by the name that its file starts with; a table alone has none."""
    kind = path.stem.partition("-")[0]
    draw: Any = {"step": draw_step, "flops": draw_flops}.get(kind) or getattr(figures, f"draw_{kind}", None)
    if draw is not None:
        draw(json.loads(path.read_text()), path.with_suffix(".png"))


def redraw_claim(path: Path) -> None:
    found = json.loads(path.read_text())
    claims = tuple(Claim(**claim) for claim in found["claims"])
    draw_figure(Result(found["name"], found["title"], claims, found["details"]), path.parent)


def main() -> None:
    for path in sorted(BENCHES.glob("*.json")):
        redraw_bench(path)
    for path in sorted(KEPT.glob("*.json")):
        redraw_claim(path)


if __name__ == "__main__":
    main()
