"""The methods as the paper ran them, and its figures for them: SD3-Medium, 1024 x 1024, 50 steps, RTX 4090."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reproduce.paper import BENCHED
from shiva.bench.entries import Entry
from shiva.bench.shapes import Shape
from shiva.core.method import Method, MethodConfig
from shiva.methods import IBTM, SDTM, Dense, DiffCR, DyDiT, NeuralSort, Shiva, SparseDiT, ToFu, ToMA, ToMeSD

SPEEDUPS = {name: row.speedup for name, row in BENCHED.items()}
"""Of an image."""
TFLOPS = {name: row.tflops for name, row in BENCHED.items()}
"""Of a step."""
DYDIT_FFN_KEEP = 0.36
"""The share of FFN tokens at which SD3-Medium takes the paper's 9.42 of 11.80 TFLOPs (its convention)."""


def speedups(shape: Shape) -> dict[str, float]:
    """The paper's, where the shape is its own."""
    return SPEEDUPS if (shape.name, shape.height, shape.width) == ("sd3-medium", 1024, 1024) else {}


def baseline_entries(layers: int = 24) -> dict[str, Entry]:
    """Every other method at its paper preset, as it would run once trained to that preset's budget.

    IBTM's first step of a run is dense and its later ones are not: a timed step stands for those. Of its blocks, which
    it numbers, a slice of so many `layers` has the first.
    """
    ibtm = IBTM.preset("paper", first_step="partition")
    first, last = ibtm.layers
    return {
        "tomesd": Entry(ToMeSD.preset("paper")),
        "tofu": Entry(ToFu.preset("paper")),
        "sdtm": Entry(SDTM.preset("paper")),
        "toma": Entry(ToMA.preset("paper")),
        "ibtm": Entry(dataclasses.replace(ibtm, layers=(first, max(first, min(last, layers - 1))))),
        "neuralsort": Entry(NeuralSort.preset("paper")),
        "diffcr": Entry(DiffCR.preset("paper", initial=0.876)),
        "dydit": Entry(DyDiT.preset("paper"), partial(set_masks, keep=DYDIT_FFN_KEEP)),
        "sparsedit": Entry(SparseDiT.preset("paper")),
    }


def flops_presets() -> dict[str, MethodConfig]:
    """All but DyDiT: how many tokens it runs on is known only from data."""
    presets = {name: entry.config for name, entry in baseline_entries().items() if name != "dydit"}
    presets["ibtm"] = IBTM.preset("paper")
    return {"dense": Dense(), **presets, **{f"shiva {keep:g}": Shiva(budget=keep) for keep in (0.9, 0.8, 0.7, 0.6)}}


def set_masks(method: Method, keep: float) -> None:
    """Shift each untrained DyDiT router, at its first call, so that it keeps this share of tokens (any sample's)."""

    def shift(router: nn.Module, args: Any, logits: Tensor) -> Tensor | None:
        if logits.is_meta or router in done:
            return None
        done.add(router)
        offset = torch.quantile(logits.amax(dim=0).float(), 1 - keep)
        head: Any = router.logit
        head.bias.data -= offset
        return logits - offset

    done: set[nn.Module] = set()
    for router in method.routers:  # type: ignore[union-attr]
        router.register_forward_hook(shift)
