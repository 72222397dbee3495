"""The checkout's `reproduce/`: what fills the paper's tables. A wheel has none of it and works without."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[3]
"""The checkout, where the package is installed from one in place."""
MARK = Path("reproduce") / "paper.py"


def reproduce(module: str, *folders: Path) -> ModuleType | None:
    """A module of `reproduce/` from the first folder that has it; None outside a checkout."""
    for folder in folders or (REPOSITORY, Path.cwd()):
        if (folder / MARK).is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return importlib.import_module(f"reproduce.{module}")
    return None
