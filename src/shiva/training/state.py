"""What a run leaves for another to continue it: states that are whole or absent, under a lock on its folder."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from shiva.checkpoint import write_atomically
from shiva.core.options import Whole, build
from shiva.files import read_json, read_tensors, to_json

FORMAT = 1
MAY_CHANGE = ("checkpoints", "validation", "logging", "compute")
"""Sections of a recipe that a resumed run may change: they do not shape what is learned."""
HELD_OUT = ("validation.samples",)
"""But this decides which samples are trained on."""
TEMPORARY = re.compile(r"\.writing-.*|\..+\.(json|jsonl|safetensors|pt|png)\.\w{8}")
"""Names of what is being written."""


@dataclass
class State:
    """A run after `step` optimizer steps. Samples, timesteps and noise follow from the recipe's seed and the step."""

    step: int
    recipe: dict[str, Any]
    method: dict[str, Tensor]
    """Weights and buffers, the budget's moving average among them."""
    optimizer: dict[str, Any]
    adapter: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class About:
    """What `state.json` holds."""

    step: Whole
    recipe: dict[str, Any]
    files: list[str]
    """That it must have."""


class DamagedError(ValueError):
    """A file of a state is there and cannot be read."""


# -- the folder --------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder; the system lets go of it when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by a run of process {file.read() or '(unknown)'}; wait for its end, stop it, or "
                "pass another --output"
            ) from error
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def clean(output: Path, *, fresh: bool = False) -> None:
    """Remove what a killed run was writing; `fresh` also what it had learned and told."""
    for folder in (output, output / "states", output / "latents", output / "pictures"):
        for path in folder.glob(".*") if folder.is_dir() else ():
            if TEMPORARY.fullmatch(path.name):
                remove(path)
    told = ("metrics.json", "metrics.jsonl", "validation.jsonl")
    for name in ("states", "checkpoint", "pictures", *told) if fresh else ():
        remove(output / name)


def remove(path: Path) -> None:
    """A file, or a folder: first under a name that `clean` knows, so that a kill leaves no part of it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    going = path if TEMPORARY.fullmatch(path.name) else path.with_name(f".writing-gone-{path.name}")
    if going is not path:
        shutil.rmtree(going, ignore_errors=True)
        os.rename(path, going)
    shutil.rmtree(going, ignore_errors=True)


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder to write to, which then appears under its name at once, in place of what was there."""
    temporary = folder.parent / f".writing-{folder.name}"
    remove(temporary)
    temporary.mkdir(parents=True)
    yield temporary
    sync_folder(temporary)
    remove(folder)
    os.rename(temporary, folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- states ------------------------------------------------------------------------------------------


def state_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def save_state(root: Path, state: State, keep: int) -> Path:
    """Write a state's folder, and prune the others."""
    folder, buffer = state_folder(root, state.step), io.BytesIO()
    torch.save(state.optimizer, buffer)
    tensors = {"method": state.method, "adapter": state.adapter}
    files = {f"{name}.safetensors": save(part) for name, part in tensors.items() if part or name == "method"}
    files["optimizer.pt"] = buffer.getvalue()
    about = {"format": FORMAT, "step": state.step, "recipe": state.recipe}
    files["state.json"] = to_json({**about, "files": sorted(files)})
    with written_whole(folder) as temporary:
        for name, data in files.items():
            write_atomically(temporary / name, data)
    prune(folder, keep)
    return folder


def prune(folder: Path, keep: int) -> None:
    """Drop the oldest states beyond `keep` up to this one, and all later: the run goes on from here."""
    known = checkpoints(folder.parent)
    place = known.index(folder) + 1
    for other in (*known[: max(0, place - keep)], *known[place:]):
        remove(other)


def checkpoints(root: Path) -> list[Path]:
    """Folders of states, oldest first; what else lies there is somebody's own."""
    named = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def newest_state(run: Path, say: Callable[[str], None]) -> tuple[Path, State] | None:
    """The newest state of a run that can be read, and its folder; None where there is none at all."""
    damage = None
    for folder in reversed(checkpoints(run / "states")):
        try:
            state = load_state(folder)
        except DamagedError as error:
            damage = damage or error
            continue
        if damage is not None:
            say(f"{damage}; continuing from the older {folder}")
        return folder, state
    if damage is not None:
        raise ValueError(f"{damage}; there is no older state: pass --fresh to begin again") from damage
    return None


def load_state(folder: Path) -> State:
    """Read a state, refusing one that lacks a file; one that is cut short raises a `DamagedError`."""
    path = folder / "state.json"
    try:
        found = read_json(path)
    except ValueError as error:
        raise DamagedError(f"{folder} cannot be read ({error})") from error
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{folder} has format {found.get('format')!r}, this version reads {FORMAT}; continue with the "
            "version of Shiva that began the run, or pass --fresh to begin again"
        )
    try:
        about = build(About, found, others=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; pass --fresh to begin again") from error
    for name in about.files:
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"{folder / name} is missing, and the run would go on with something else; put it back, delete "
                f"{folder} to continue from the state before, or pass --fresh to begin again"
            )
    try:
        parts = {n: folder / f"{n}.safetensors" for n in ("method", "adapter")}
        tensors = {name: read_tensors(path) if path.exists() else {} for name, path in parts.items()}
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises what it likes for bytes that are none of its own
        raise DamagedError(f"{folder} cannot be read ({' '.join(str(error).split())[:200]})") from error
    return State(about.step, about.recipe, optimizer=optimizer, **tensors)


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by dotted path, tuples and lists alike; what has a name goes by it."""
    order = {}
    if isinstance(values, (list, tuple)):
        if values and all(isinstance(value, dict) and "name" in value for value in values):
            names = [value["name"] for value in values]
            order, values = {path: names}, dict(zip(names, values, strict=True))
        else:
            values = dict(enumerate(values))
    if not isinstance(values, dict):
        return {path: values}
    inside = (flatten(value, f"{path}.{key}".lstrip(".")) for key, value in values.items())
    return order | {key: leaf for leaves in inside for key, leaf in leaves.items()}


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
