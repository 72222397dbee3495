"""Puts the checkout's models into the wheel: those that the demo and the server look up, and no others."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Models(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        checkout = Path(self.root).resolve().parents[1]
        root = checkout / "models"
        if not (root / "emoji").is_dir():
            raise FileNotFoundError(f"{root} has no models; build this package in a checkout of Shiva, as a wheel")
        known = runpy.run_path(str(checkout / "src" / "shiva" / "evaluate" / "checkout.py"))
        checkpoints = {folder for of in known["CHECKPOINTS"].values() for folder in of.values()}
        shown = sorted({*known["TURBO"], *checkpoints, "README.md"})
        build_data["force_include"] |= {str(root / name): f"shiva_dit_models/{name}" for name in shown}
