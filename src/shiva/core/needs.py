"""Optional dependencies, imported when they are first used; the base install has none of them."""

from __future__ import annotations

import importlib
from typing import Any


def install(extra: str) -> str:
    """The command, in a checkout of Shiva, that brings an extra."""
    return f"pip install -e '.[{extra}]' in a checkout of Shiva"


def need(module: str, extra: str) -> Any:
    """The module, or an error that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not here: {install(extra)}") from error
