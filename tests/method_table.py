"""Every method, switched on and switched off: one row here puts it through tests/test_methods.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import shiva
from shiva.core.method import MethodConfig


@dataclass(frozen=True)
class Row:
    """One method of the table."""

    on: MethodConfig
    """Reduces tokens."""
    off: MethodConfig
    """The same method keeping all tokens: must be bit-equal to dense."""
    kept: Callable[[str, int, int], int] | None
    """(kind of site, layer, N) -> tokens it must run on; None where the count depends on the data."""
    backbones: tuple[str, ...] = ("sd3", "sd35", "flux", "pixart", "dit")
    """Backbones the method is defined on."""
    differentiable: bool = False
    """Its own parameters receive gradients in training."""


def half_but_first(kind: str, layer: int, tokens: int) -> int:
    return tokens if layer == 0 else tokens // 2


METHODS: dict[str, Row] = {
    "shiva": Row(
        on=shiva.Shiva(budget=0.5, guess="zero"),
        off=shiva.Shiva(budget=1.0),
        kept=half_but_first,
        differentiable=True,
    ),
    "shiva-input": Row(
        on=shiva.Shiva(budget=0.5, estimator="input"),
        off=shiva.Shiva(budget=1.0),
        kept=half_but_first,
        differentiable=True,
    ),
    "shiva-pairs": Row(
        on=shiva.Shiva(budget=0.5, share_pairs=True),
        off=shiva.Shiva(budget=1.0, share_pairs=True),
        kept=half_but_first,
    ),
}
