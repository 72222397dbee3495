"""Puts the checkout's models into the wheel: those of the demo and the server, not the other methods' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODELS = Path("..", "..", "models")
SHOWN = ("emoji*", "shiva*", "lattice*", "turbo", "README.md")


class Models(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = (Path(self.root) / MODELS).resolve()
        if not (root / "emoji").is_dir():
            raise FileNotFoundError(f"{root} has no models; build this package in a checkout of Shiva, as a wheel")
        found = [path for pattern in SHOWN for path in sorted(root.glob(pattern))]
        build_data["force_include"] |= {str(path): f"shiva_dit_models/{path.name}" for path in found}
