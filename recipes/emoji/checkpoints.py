"""Train every method of the comparison on the model of 1024 tokens, each on as many images: half an hour of a core.

    python -m recipes.emoji.checkpoints                           # all of them, one after another
    python -m recipes.emoji.checkpoints shiva-60 dense            # some
    python -m recipes.emoji.checkpoints --list                    # the commands

A router starts from the one of 256 tokens, whose shape is the same; ratios start anew, as does an adapter, whose DoRA
belongs to its own base. A run that was stopped goes on where it was; a finished one is copied into models/128.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from shiva.checkpoint import ShivaCheckpoint

COMMON = {
    "model.path": "models/emoji-128",
    "data.path": "recipes/emoji/data/fluent-emoji-128.parquet",
    "data.resolution": 128,
    "sampling.batch": 8,
    "compute.precision": "bf16",
    "validation.every": 600,
    "validation.samples": 16,
    "validation.images": 4,
}
STAGES = {"warmup.steps": 100, "policy.steps": 100, "joint.steps": 400}
TWO_STAGES = {"router.steps": 200, "joint.steps": 400}
QUICK = {"optimizer.rates.policy": 2e-3}  # ratios start anew, and have half as many steps to arrive
SHIVA = {**STAGES, "warmup.warmup": 20}
RUNS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "shiva-60": ("recipes/emoji.yaml", {"start": "models/shiva/60"}, SHIVA),
    "shiva-80": ("recipes/emoji.yaml", {"start": "models/shiva/80", "method.budget": 0.8}, SHIVA),
    "shiva-60-fixed": (
        "recipes/emoji.yaml",
        {"start": "models/shiva/60-fixed"},
        {
            "warmup.steps": 200,
            "warmup.warmup": 20,
            "policy.steps": 0,
            "joint.steps": 400,
            "joint.trains": "[router, adapter]",
        },
    ),
    "dense": ("recipes/baselines/dense.yaml", {}, {"joint.steps": 600}),
    "neuralsort": ("recipes/baselines/neuralsort.yaml", {"start": "models/neuralsort"}, TWO_STAGES),
    "soft-topk": ("recipes/baselines/soft-topk.yaml", {"start": "models/soft-topk"}, TWO_STAGES),
    "lapsum": ("recipes/baselines/lapsum.yaml", {"start": "models/lapsum", **QUICK}, STAGES),
    "dydit": (
        "recipes/baselines/dydit.yaml",
        {"start": "models/dydit", "method.warmup": 100, "method.flops": 0.75},  # no FFN at all leaves .72 here
        {"all.steps": 600},
    ),
    "diffcr": ("recipes/baselines/diffcr.yaml", {"start": "models/diffcr", **QUICK}, {"all.steps": 600}),
    "sparsedit": ("recipes/baselines/sparsedit.yaml", {"start": "models/sparsedit"}, {"all.steps": 600}),
}
"""Recipe, changes to it, and changes to its stages: 600 steps of 8 images for each."""


def start_of(name: str, runs: Path) -> dict[str, str]:
    """The `start` of a run, if its row names a checkpoint."""
    return {"start": str(runs / "starts" / name)} if "start" in RUNS[name][1] else {}


def write_start(name: str, folder: str) -> None:
    """The routers of the checkpoint that a run's row names, and nothing else of it."""
    found = ShivaCheckpoint.from_pretrained(str(RUNS[name][1]["start"]))
    method = found.method()
    ratios = {id(weight) for weight in method.groups().get("policy", [])}
    weights = {key: weight.detach() for key, weight in method.named_parameters() if id(weight) not in ratios}
    ShivaCheckpoint(found.method_config, weights, found.tables, found.origin).save_pretrained(folder)


def command(name: str, runs: Path) -> list[str]:
    recipe, changes, stages = RUNS[name]
    values = {**COMMON, **changes, **start_of(name, runs), **{f"stages.{key}": value for key, value in stages.items()}}
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "shiva", "train", recipe, "--output", str(runs / name), *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; all if none is given")
    parser.add_argument("--runs", type=Path, default=Path("outputs/emoji-128"), help="folder of the runs' states")
    parser.add_argument("--models", type=Path, default=Path("models/128"), help="folder of the finished checkpoints")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(RUNS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such run; choose of {', '.join(RUNS)}")
    for name in options.names or RUNS:
        line = command(name, options.runs)
        print(shlex.join(["shiva", *line[3:]]), flush=True)
        if options.list:
            continue
        for folder in start_of(name, options.runs).values():
            write_start(name, folder)
        subprocess.run(line, check=True)
        shutil.rmtree(options.models / name, ignore_errors=True)
        shutil.copytree(options.runs / name / "checkpoint", options.models / name)


if __name__ == "__main__":
    main()
