"""What the experiments share: a result with a verdict per claim, how it is shown, and how it is kept."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from reproduce.claims import ON_THE_MODEL
from shiva.bench.table import environment
from shiva.checkpoint import write_atomically
from shiva.show.style import PALETTE, encode, legend_beside

Verdict = Literal["reproduced", "reproduced in direction", "not reproduced", "not in the paper"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
COLOURS = {"reproduced": "green", "reproduced in direction": "yellow", "not reproduced": "red"}

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "models" / "emoji"
"""The model of 256 tokens that claims are checked on first."""
LABELS = ROOT / "recipes" / "emoji" / "data" / "fluent-emoji-64.parquet"
"""Prompts of experiments on whole images."""
KEPT = ROOT / "results" / "validate"
"""Results at full size, which are committed: by `--record` alone. Those of another model have a folder in it."""
PASSING = ROOT / "outputs" / "validate"
"""All others, which are not."""

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, its figure and ours."""

    claim: str
    paper: str
    ours: str
    verdict: Verdict
    sentence: str
    """What differs and why, or what was assumed."""


@dataclass(frozen=True)
class Result:
    """What an experiment found."""

    name: str
    title: str
    claims: tuple[Claim, ...]
    details: dict[str, Any] = field(default_factory=dict)


def judge(exact: bool, direction: bool) -> Verdict:
    """Reproduced if the figure is met, in direction if only its sign or order is."""
    return "reproduced" if exact else "reproduced in direction" if direction else "not reproduced"


def ordered(better: Sequence[float], worse: Sequence[float]) -> Verdict:
    """Whether the one is above the other, by their differences seed by seed.

    Reproduced if three seeds or more agree and the mean is beyond two standard errors; in direction if the mean is
    beyond one, or, of a single seed, above 0.
    """
    gains = spread([b - w for b, w in zip(better, worse, strict=True)])
    error = gains["std"] / gains["count"] ** 0.5
    sure = gains["count"] >= 3 and gains["positive"] == 1 and gains["mean"] > 2 * error
    return judge(sure, gains["mean"] > error)


def weakest(*verdicts: Verdict) -> Verdict:
    return max(verdicts, key=VERDICTS.index)


def cosine(a: Tensor, b: Tensor, *, centred: bool = False) -> Tensor:
    """Cosine (...) of directions (..., N); `centred` ignores what all tokens share."""
    if centred:
        a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return torch.cosine_similarity(a.double(), b.double(), dim=-1)


def spread(values: Iterable[float] | Tensor) -> dict[str, float]:
    """Mean, deviation, least and share above zero of a sample."""
    sample = torch.as_tensor(list(values) if not isinstance(values, Tensor) else values, dtype=torch.float64)
    return {
        "mean": float(sample.mean()),
        "std": float(sample.std()) if sample.numel() > 1 else 0.0,
        "min": float(sample.min()),
        "positive": float((sample > 0).double().mean()),
        "count": sample.numel(),
    }


def shown(stats: dict[str, float]) -> str:
    """Mean and deviation; of a single trial there is none to show."""
    return f"{stats['mean']:.3f} ± {stats['std']:.3f}" if stats["count"] > 1 else f"{stats['mean']:.3f}"


def apart(texts: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """So many of the prompts, evenly spaced, to be drawn; and the others, to be learned from."""
    drawn = list(texts[:: len(texts) // count][:count])
    return drawn, [text for text in texts if text not in drawn]


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    return track(items, what, transient=True, disable=not sys.stdout.isatty(), console=Console(stderr=True))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def claims_table(results: Sequence[Result]) -> Table:
    table = Table(title="The paper's claims, measured here", show_lines=True)
    table.add_column("experiment", no_wrap=True)
    for heading in ("claim", "paper", "ours", "verdict"):
        table.add_column(heading)
    for result in results:
        for claim in result.claims:
            colour = COLOURS.get(claim.verdict, "default")
            table.add_row(result.name, claim.claim, claim.paper, claim.ours, f"[{colour}]{claim.verdict}[/]")
    return table


def keep(result: Result, folder: Path, seconds: float, quick: bool, command: str) -> None:
    """Write <name>.json, and <name>.png where the experiment draws one and matplotlib is here."""
    made = {"quick": quick, "command": command, "environment": environment()}
    if result.name not in ON_THE_MODEL:  # whose variants may have been trained long before
        made["seconds"] = round(seconds, 1)
    record = {**asdict(result), **made}
    write_atomically(folder / f"{result.name}.json", (json.dumps(record, indent=1) + "\n").encode())
    draw_figure(result, folder)


def draw_figure(result: Result, folder: Path) -> None:
    """<name>.png of a result that draws one; what is drawn is named beside the axes, never over the data."""
    draw = getattr(importlib.import_module(f"reproduce.claims.{result.name}"), "draw", None)
    try:
        import matplotlib
    except ImportError:
        return
    if draw is None:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"axes.prop_cycle": pyplot.cycler(color=PALETTE), "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(7.5, 3.4), layout="constrained")
        draw(result, axes)
        legend_beside(axes, 7)
        picture = encode(figure, dpi=110)
        pyplot.close(figure)
    write_atomically(folder / f"{result.name}.png", picture)


def folder_of(output: Path | None, record: bool, quick: bool, model: Path = FIRST) -> Path:
    """Where results go; a quick run is never recorded."""
    if record and quick:
        raise ValueError("--record does not go with a quick run; pass --all to shiva validate, or leave --quick out")
    if record and output is not None:
        raise ValueError(f"--record does not go with --output {output}; pass one of them")
    return output or (KEPT if record else PASSING) / ("" if model.name == FIRST.name else model.name)


def perform(name: str, quick: bool, folder: Path = PASSING, **options: Any) -> Result:
    """Run an experiment by name and keep what it found."""
    start = time.perf_counter()
    result: Result = importlib.import_module(f"reproduce.claims.{name}").run(quick=quick, **options)
    keep(result, folder, time.perf_counter() - start, quick, command(name, options))
    return result


def command(name: str, options: dict[str, Any]) -> str:
    """What runs it again: the options that shape the result, not where it lies."""
    shaping = {key: len(value) if isinstance(value, range) else value for key, value in options.items()}
    if isinstance(model := shaping.get("model"), Path) and model.name != FIRST.name:
        shaping["model"] = f"models/{model.name}"
    plain = {key: value for key, value in shaping.items() if key != "threads" and type(value) in (int, float, str)}
    return " ".join([f"python -m reproduce.claims.{name}", *(f"--{key} {value}" for key, value in plain.items())])


def main(name: str, arguments: argparse.ArgumentParser | None = None) -> None:
    """The command line of one experiment; further `arguments` go to its `run`."""
    parser = arguments or argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer seeds")
    parser.add_argument("--record", action="store_true", help="write to results/, which is committed")
    parser.add_argument("--output", type=Path, help="folder of the JSON and the figure")
    options = vars(parser.parse_args())
    quick = options.pop("quick")
    folder = folder_of(options.pop("output"), options.pop("record"), quick, options.get("model", FIRST))
    result = perform(name, quick, folder, **options)
    console = Console()
    console.print(claims_table([result]))
    for claim in result.claims:
        console.print(f"{claim.claim}: {claim.sentence}", highlight=False)
