"""Training's own dependencies, imported when they are first used; the base install has none of them."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str) -> Any:
    """The module, or an error that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"training needs {module}: pip install 'shiva-dit[train]'") from error
