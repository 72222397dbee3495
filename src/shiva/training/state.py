"""Training checkpoints: everything a killed run needs, in directories that are whole or absent."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from shiva.checkpoint import read_json, read_tensors, to_json, write_atomically

FORMAT = 1
MAY_CHANGE = ("checkpoints", "validation", "logging", "compute")
"""Sections of a recipe that a resumed run may change: they do not shape what is learned."""
HELD_OUT = ("validation.samples",)
"""But this decides which samples are trained on."""


@dataclass
class State:
    """A run after `step` optimizer steps. Samples, timesteps and noise follow from the recipe's seed and the step."""

    step: int
    stage: str
    """The stage of the last step taken; the optimizer belongs to it."""
    recipe: dict[str, Any]
    method: dict[str, Tensor]
    """Weights and buffers, the budget's moving average among them."""
    tables: dict[str, Tensor]
    optimizer: dict[str, Any]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    loss: float = float("nan")


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_into_place(temporary: Path, folder: Path) -> None:
    """Make a finished directory appear under its name at once."""
    sync_folder(temporary)
    os.rename(temporary, folder)
    sync_folder(folder.parent)


def save_state(root: Path, state: State, keep: int) -> Path:
    """Write a checkpoint directory and drop the oldest beyond `keep`."""
    folder = root / f"step-{state.step:08d}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".writing-{state.step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write_atomically(temporary / "method.safetensors", save(state.method))
    if state.tables:
        write_atomically(temporary / "tables.safetensors", save(state.tables))
    if state.adapter:
        write_atomically(temporary / "adapter.safetensors", save(state.adapter))
    buffer = io.BytesIO()
    torch.save(state.optimizer, buffer)
    write_atomically(temporary / "optimizer.pt", buffer.getvalue())
    about = {"format": FORMAT, "step": state.step, "stage": state.stage, "recipe": state.recipe, "loss": state.loss}
    write_atomically(temporary / "state.json", to_json(about))
    rename_into_place(temporary, folder)
    for old in checkpoints(root)[:-keep] if keep > 0 else []:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(root.glob("step-*")) if root.is_dir() else []


def newest_of(run: Path) -> Path:
    """The newest checkpoint of a run's folder."""
    found = checkpoints(run / "states")
    if not found:
        raise FileNotFoundError(f"start: {run} holds no states/step-*; give the output folder of a `shiva train` run")
    return found[-1]


def load_state(folder: Path) -> State:
    about = read_json(folder / "state.json")
    if about["format"] != FORMAT:
        raise ValueError(
            f"{folder} has format {about['format']}, this version reads {FORMAT}; continue with the "
            "version of Shiva that began the run, or pass --fresh to begin again"
        )
    optional = {name: folder / f"{name}.safetensors" for name in ("tables", "adapter")}
    found = {name: read_tensors(path) if path.exists() else {} for name, path in optional.items()}
    return State(
        step=about["step"],
        stage=about["stage"],
        recipe=about["recipe"],
        method=read_tensors(folder / "method.safetensors"),
        optimizer=torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True),
        loss=about["loss"],
        **found,
    )


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by dotted path, tuples and lists alike."""
    if isinstance(values, dict):
        pairs = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, (list, tuple)):
        pairs = [(str(index), value) for index, value in enumerate(values)]
    else:
        return {path: values}
    return {k: v for key, value in pairs for k, v in flatten(value, f"{path}.{key}".lstrip(".")).items()}


def check_recipe(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue a run under another recipe, naming the first difference."""
    old, new = flatten(before), flatten(now)
    for key in sorted(old.keys() | new.keys()):
        may_change = key.partition(".")[0] in MAY_CHANGE and key not in HELD_OUT
        if not may_change and old.get(key) != new.get(key):
            raise ValueError(
                f"{folder} was trained with {key}={old.get(key)!r}, the recipe now has {new.get(key)!r}; restore it, "
                "pass another --output, or --fresh to begin again"
            )
