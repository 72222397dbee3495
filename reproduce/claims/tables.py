"""What the claims that are read from committed tables share.

A figure is met within a tenth of the paper's, or where ours is the better. A difference over prompts is reproduced
beyond two standard errors and in direction beyond one; a single Fréchet distance has no such error, and its order is
reproduced in direction at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduce.claims.common import ROOT, Claim, Verdict, judge

RESULTS = ROOT / "results"

Tables = dict[str, Any]
"""By name, what a table's JSON has under `results`."""
Reading = Callable[[Tables], Claim]


def load(folder: Path, names: Sequence[str]) -> Tables:
    return {Path(name).name: json.loads((folder / f"{name}.json").read_text())["results"] for name in names}


def rows(table: Mapping[str, Any], kind: str = "methods") -> dict[str, Any]:
    """The rows of a benchmark by name."""
    return {row["name"]: row for row in table[kind]}


def near(ours: float, paper: float) -> bool:
    return abs(ours / paper - 1) <= 0.1


def beyond(gain: Mapping[str, float]) -> Verdict:
    """Whether a mean over prompts is above 0, by its standard error."""
    return judge(gain["mean"] > 2 * gain["error"], gain["mean"] > gain["error"])


def listed(values: Sequence[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)
