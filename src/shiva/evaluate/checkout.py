"""What a checkout holds beside the package: the embedded models, and `reproduce/`. A wheel works without either.

The models also come as a package of their own, `shiva-dit-models`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[3]
"""The checkout, where the package is installed from one in place."""
MARK = Path("reproduce") / "paper.py"
MODELS, PACKAGE = "models", "shiva_dit_models"
BASE = ("emoji-128", "emoji")
"""The embedded text-to-image models; the first that is there is the one that the demo shows."""
TURBO = ("emoji-128-turbo", *BASE)
"""The same for few steps, which the server opens with."""
CHECKPOINTS = {
    "emoji": {"Shiva": "shiva/60", "Lattice": "lattice"},
    "emoji-128": {"Lattice": "lattice-128"},
    "emoji-128-turbo": {"Shiva": "turbo/shiva", "Lattice": "turbo/lattice"},
}
"""Of each embedded model, beside it: methods' checkpoints by folder."""


def reproduce(module: str, *folders: Path) -> ModuleType | None:
    """A module of `reproduce/` from the first folder that has it; None outside a checkout."""
    for folder in folders or (REPOSITORY, Path.cwd()):
        if (folder / MARK).is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return importlib.import_module(f"reproduce.{module}")
    return None


def models_folder() -> Path | None:
    """Where the embedded models are: in a checkout, or in their package."""
    package = importlib.util.find_spec(PACKAGE)
    inside = [] if package is None else [Path(str(place)) for place in package.submodule_search_locations or ()]
    places = (Path.cwd() / MODELS, REPOSITORY / MODELS, *inside)
    return next((place for place in places if (place / BASE[-1] / "model_index.json").is_file()), None)


def embedded(*names: str) -> Path:
    """The folder of the first of these embedded models that is there; an error says how to get them."""
    folder = models_folder()
    if folder is None:
        raise FileNotFoundError(
            "the embedded models are not here; install the package shiva-dit-models, which packages/models of a "
            "checkout of Shiva builds, or run this in a checkout"
        )
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    if found is None:
        raise FileNotFoundError(f"{folder / names[0]} is not here; {folder / 'README.md'} lists what is")
    return near(found)


def checkpoint_for(model: str | Path, method: str) -> Path | None:
    """Where the embedded checkpoint of a method for a model is, or would be; None where none is meant to be."""
    root, folder = models_folder(), CHECKPOINTS.get(Path(model).name, {}).get(method)
    if root is None or folder is None:
        return None
    return near(root / folder)


def near(path: Path) -> Path:
    """The path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def usual_run(model: str | Path) -> tuple[int, float]:
    """Steps and guidance that a model is meant for: the embedded ones' own, else common ones."""
    name = Path(model).name.lower()
    if name.endswith("-turbo"):
        return 4, 0.0
    return (16, 3.0) if name in BASE else (28, 4.5)
