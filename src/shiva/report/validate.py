"""`shiva validate`: the paper's claims, checked by the experiments of a checkout."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

MARK = Path("experiments") / "common.py"
REPOSITORY = Path(__file__).parents[3]
"""The checkout, where the package is installed from one in place."""


def experiments_of(*folders: Path) -> ModuleType:
    """The package `experiments` of the first folder that is a checkout."""
    for folder in folders:
        if (folder / MARK).is_file():
            sys.path.insert(0, str(folder))
            return importlib.import_module("experiments")
    raise FileNotFoundError(f"{MARK} is not in {folders[0]}; run from a checkout of the repository")


def validate(
    every: Annotated[bool, typer.Option("--all", help="All experiments at full size, the model's too")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Just this experiment; may be repeated")] = None,
    model: Annotated[Path, typer.Option(help="Folder of the embedded pipeline")] = Path("models/emoji"),
    output: Annotated[
        Path | None, typer.Option(help="Folder of JSON and figures. Default: outputs/validate; with --all, results/")
    ] = None,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Run nothing; write docs/paper-claims.md from results/validate")
    ] = False,
) -> None:
    """Check the paper's claims: a verdict for each, with the paper's figure and ours."""
    package = experiments_of(Path.cwd(), REPOSITORY)
    common = importlib.import_module("experiments.common")
    if write_docs:
        page = importlib.import_module("experiments.claims_page")
        typer.echo(f"wrote {page.write()}")
        return
    torch.set_num_threads(min(2, torch.get_num_threads()))  # small tensors: more threads only wait
    console, results, began = Console(), [], time.perf_counter()
    for name in chosen(package, every, only):
        options: dict[str, Any] = {"model": model} if name in package.ON_THE_MODEL else {}
        if options and not (model / "model_index.json").exists():
            console.print(f"[yellow]{name} is left out[/]: {model} is not here; pass --model")
            continue
        start = time.perf_counter()
        result = common.perform(name, not every, output, **options)
        console.print(f"[dim]{name}: {time.perf_counter() - start:.0f} s[/]")
        results.append(result)
    console.print(common.claims_table(results))
    for verdict in common.VERDICTS:
        count = sum(claim.verdict == verdict for result in results for claim in result.claims)
        console.print(f"{count:3d} {verdict}")
    console.print(f"{len(results)} experiments in {(time.perf_counter() - began) / 60:.1f} min")
    console.print(f"JSON and figures: {output or (common.KEPT if every else common.PASSING)}")


def chosen(package: ModuleType, every: bool, only: list[str] | None) -> list[str]:
    quick = [*package.SYNTHETIC, *package.FROM_TABLES]
    known = [*package.SYNTHETIC, *package.ON_THE_MODEL, *package.FROM_TABLES]
    for name in only or []:
        if name not in known:
            raise ValueError(f"there is no experiment {name!r}; pass one of {', '.join(known)}")
    return only or (known if every else quick)
