"""What `shiva validate` runs: experiments by name, a table of verdicts, and what was counted."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console

from reproduce.claims import FROM_TABLES, ON_THE_MODEL, SYNTHETIC
from reproduce.claims.common import FIRST, VERDICTS, claims_table, folder_of, perform
from reproduce.claims.quality_tables import PROMPTS


def check(every: bool, only: list[str] | None, model: Path, output: Path | None, record: bool) -> None:
    """Run the chosen experiments and print their verdicts."""
    folder = folder_of(output, record, not every, model)
    torch.set_num_threads(min(2, torch.get_num_threads()))  # small tensors: more threads only wait
    console, results, began = Console(), [], time.perf_counter()
    for name in chosen(every, only):
        if why := left_out(name, model):
            console.print(f"[yellow]{name} is left out[/]: {why}")
            continue
        start = time.perf_counter()
        results.append(perform(name, not every, folder, **({"model": model} if takes(name, model) else {})))
        console.print(f"[dim]{name}: {time.perf_counter() - start:.0f} s[/]")
    console.print(claims_table(results))
    for verdict in VERDICTS:
        count = sum(claim.verdict == verdict for result in results for claim in result.claims)
        console.print(f"{count:3d} {verdict}")
    console.print(f"{len(results)} experiments in {(time.perf_counter() - began) / 60:.1f} min")
    console.print(f"JSON and figures: {folder}")


def chosen(every: bool, only: list[str] | None) -> list[str]:
    known = [*SYNTHETIC, *ON_THE_MODEL, *FROM_TABLES]
    for name in only or []:
        if name not in known:
            raise ValueError(f"there is no experiment {name!r}; pass one of {', '.join(known)}")
    return only or (known if every else [*SYNTHETIC, *FROM_TABLES])


def takes(name: str, model: Path) -> bool:
    """Whether what an experiment finds is of this model."""
    return name in ON_THE_MODEL or (name == "quality_tables" and model.name in PROMPTS)


def left_out(name: str, model: Path) -> str:
    """Why an experiment does not run; empty if it does."""
    if name in ON_THE_MODEL and not (model / "model_index.json").exists():
        return f"{model} is not here; pass --model"
    if model.name != FIRST.name and not takes(name, model):
        return f"it says nothing of {model}; pass --model models/{FIRST.name}"
    return ""
