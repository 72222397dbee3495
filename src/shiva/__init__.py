"""Shiva: faster Diffusion Transformers by computing only some of the image tokens of each block.

    session = shiva.attach(pipe, shiva.Sweep(budget=0.4))    # or a checkpoint, or any method of this module
    image = pipe("a fox in the rain").images[0]
    print(session.summary())
    session.detach()

The seam that methods and architectures are written against: a `Method` (built by its `MethodConfig`) returns a
`Reduction` at each `Site` that a `Backbone` names, knowing the call's `StepContext` and `Layout`. A `Pruner` is a
method composed of a count, a score and a fill; what only training needs is in `Trainable`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shiva.api import attach, detach, summary
    from shiva.backbones import Backbone, Site
    from shiva.backbones import register as register_backbone
    from shiva.checkpoint import ShivaCheckpoint
    from shiva.core import Layout, Method, MethodConfig, Reduction, StepContext, Trainable
    from shiva.methods import (
        IBTM,
        RAS,
        SDTM,
        CoReDiT,
        Dense,
        DiffCR,
        DiffSparse,
        DyDiT,
        JiT,
        LapSum,
        Lattice,
        NeuralSort,
        Pruner,
        Ranked,
        Refresh,
        Shiva,
        SoftTopK,
        SparseDiT,
        Sweep,
        ToCa,
        ToFu,
        ToMA,
        ToMeSD,
    )
    from shiva.ops.schedule import RatioSchedule
    from shiva.session import Session

__version__ = "0.1.0"

__all__ = [
    "IBTM",
    "RAS",
    "SDTM",
    "Backbone",
    "CoReDiT",
    "Dense",
    "DiffCR",
    "DiffSparse",
    "DyDiT",
    "JiT",
    "LapSum",
    "Lattice",
    "Layout",
    "Method",
    "MethodConfig",
    "NeuralSort",
    "Pruner",
    "Ranked",
    "RatioSchedule",
    "Reduction",
    "Refresh",
    "Session",
    "Shiva",
    "ShivaCheckpoint",
    "Site",
    "SoftTopK",
    "SparseDiT",
    "StepContext",
    "Sweep",
    "ToCa",
    "ToFu",
    "ToMA",
    "ToMeSD",
    "Trainable",
    "__version__",
    "attach",
    "detach",
    "register_backbone",
    "summary",
]

_PLACES = {
    "Backbone": "backbones",
    "RatioSchedule": "ops.schedule",
    "Session": "session",
    "ShivaCheckpoint": "checkpoint",
    "Site": "backbones",
    "register_backbone": "backbones:register",
    **dict.fromkeys(("attach", "detach", "summary"), "api"),
    **dict.fromkeys(("Layout", "Method", "MethodConfig", "Reduction", "StepContext", "Trainable"), "core"),
}
"""Where a name is defined, below this package; a method's is in `methods`."""


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first asked for: `shiva --help` needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'shiva' has no attribute {name!r}")
    module, _, attribute = _PLACES.get(name, "methods").partition(":")
    found = globals()[name] = getattr(importlib.import_module(f"shiva.{module}"), attribute or name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
