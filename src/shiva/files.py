"""Files that others wrote: read from inside their folder only, and held against what they should contain.

Nothing is allocated by what a file says of itself: sizes count once they agree with the tensors that are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shiva.core.needs import need

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, refused where a link leads out of it; the hub's own cache links to its store of files."""
    path, root = folder / name, folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(path.resolve().is_relative_to(allowed) for allowed in roots):
        raise ValueError(f"{path} is a link that leaves {folder}; put a copy of the file in its place")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, or an error that says what to do about it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; is {path.parent} a Shiva checkpoint?")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); save or download the checkpoint again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a mapping; save or download it again")
    return found


def read_yaml(path: Path) -> Any:
    """What a YAML file says, or an error that says where it is not YAML."""
    try:
        return from_yaml(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}); write it again as UTF-8") from error


def from_yaml(text: str, owner: str) -> Any:
    yaml = need("yaml", "metrics")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{owner} is not YAML ({' '.join(str(error).split())}); mend that line") from error


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or an error that says what to do about it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; save the checkpoint again, or download it again")
    try:
        return load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); copy or download it again") from error


def finite(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, none of which holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and not tensor.float().isfinite().all():
            raise ValueError(f"{name} in {path} holds NaN or infinity; train or download it again")
    return tensors


def compare(owner: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, shapes: bool = True) -> None:
    """Refuse tensors that are not the expected ones by name, kind and shape; without `shapes`, number of dimensions.

    The expected ones may be on the meta device, where they take no memory.
    """
    for name in sorted(expected.keys() - found.keys()):
        raise ValueError(f"{owner} has no {name}; it is cut or for other options: save or download it again")
    for name, tensor in found.items():
        if name not in expected:
            raise ValueError(f"{owner} has a {name}, which has no place; it is for another method or options")
        wanted = expected[name]
        if tensor.dtype not in FLOATS if wanted.is_floating_point() else tensor.dtype != wanted.dtype:
            raise ValueError(f"{owner} has {name} in {tensor.dtype}; save it in {wanted.dtype}")
        if tensor.shape != wanted.shape if shapes else tensor.ndim != wanted.ndim:
            sizes = f"{tuple(tensor.shape)}, its options say {tuple(wanted.shape)}"
            raise ValueError(f"{owner} has {name} of shape {sizes} (size mismatch); save or download it again")
