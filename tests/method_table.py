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
    dense_calls: int = 0
    """Calls at the beginning of a run that see all tokens."""
    differentiable: bool = False
    """Its own parameters receive gradients in training."""
    everywhere: bool = False
    """Also runs on every class of the pattern table."""
    not_on: tuple[str, ...] = ()
    """Those of them that it refuses."""
    needs_attention: bool = False
    """Reduces the attention alone, which some classes of the pattern table do not offer."""


def half_but_first(kind: str, layer: int, tokens: int) -> int:
    return tokens if layer == 0 else tokens // 2


def half_at(*kinds: str, layers: range = range(100)) -> Callable[[str, int, int], int]:
    """Half of the tokens, rounded up, at some kinds of site."""
    return lambda kind, layer, tokens: tokens - tokens // 2 if kind in kinds and layer in layers else tokens


def whole_windows(kind: str, layer: int, tokens: int) -> int:
    """SDTM's first step at a share of one half: windows of four become one."""
    return tokens if kind == "block" else tokens - 3 * min(tokens // 2 // 3, 16)


def toma_tiles(kind: str, layer: int, tokens: int) -> int:
    """Tiles of 4x4 on 8x8, of 3x5 on 6x10 and of 7x3 on 7x9 lose half of their tokens, rounded down."""
    return {64: 4 * 8, 60: 4 * 8, 63: 3 * 11}[tokens]


def pooled_in_first_half(kind: str, layer: int, tokens: int) -> int:
    """SparseDiT on four layers: generate and sparse blocks see 4x4 of 8x8, 3x5 of 6x10 and 4x5 of 7x9."""
    return {64: 16, 60: 15, 63: 20}[tokens] if layer < 2 else tokens


METHODS: dict[str, Row] = {
    "diffcr": Row(
        on=shiva.DiffCR(initial=0.5),
        off=shiva.DiffCR(gate=False),
        kept=lambda kind, layer, tokens: -(-tokens // 2),
        differentiable=True,
    ),
    "dydit": Row(on=shiva.DyDiT(bias=0.0), off=shiva.DyDiT(), kept=None, differentiable=True),
    "lapsum": Row(on=shiva.LapSum(keep=0.5), off=shiva.LapSum(keep=1.0), kept=half_but_first, differentiable=True),
    "neuralsort": Row(
        on=shiva.NeuralSort(keep=0.5), off=shiva.NeuralSort(keep=1.0), kept=half_but_first, differentiable=True
    ),
    "soft-topk": Row(
        on=shiva.SoftTopK(keep=0.5), off=shiva.SoftTopK(keep=1.0), kept=half_but_first, differentiable=True
    ),
    "sparsedit": Row(
        on=shiva.SparseDiT(rates=(0.75, 0.75), split=(1, 1, 1, 1), bottom=0, top=0),
        off=shiva.SparseDiT(rates=(0.0, 0.0), split=(1, 1, 1, 1), bottom=0, top=0),
        kept=pooled_in_first_half,
        backbones=("sd3", "sd35", "pixart", "dit"),
        differentiable=True,
    ),
    "ibtm": Row(
        on=shiva.IBTM(layers=(1, 2)),
        off=shiva.IBTM(layers=(1, 2), ratio=0.0),
        kept=half_at("attention", "cross_attention", layers=range(1, 3)),
    ),
    "sdtm": Row(
        on=shiva.SDTM.preset("paper", ratio=0.3, round_to=1),
        off=shiva.SDTM(ratio=0.0, deviation=0.0),
        kept=whole_windows,
    ),
    "tofu": Row(on=shiva.ToFu(), off=shiva.ToFu(ratio=0.0), kept=half_at("attention")),
    "toma": Row(
        on=shiva.ToMA(skip=0, scale=20.0),
        off=shiva.ToMA(skip=0, ratio=0.0),
        kept=lambda kind, layer, tokens: toma_tiles(kind, layer, tokens) if kind == "attention" else tokens,
        backbones=("sd3", "sd35", "pixart", "dit"),
    ),
    "toma-block": Row(
        on=shiva.ToMA(skip=0, site="block", scale=20.0),
        off=shiva.ToMA(skip=0, site="block", ratio=0.0),
        kept=lambda kind, layer, tokens: toma_tiles(kind, layer, tokens) if kind == "block" else tokens,
    ),
    "tomesd": Row(
        on=shiva.ToMeSD(),
        off=shiva.ToMeSD(ratio=0.0),
        kept=half_at("attention"),
        everywhere=True,
        needs_attention=True,
    ),
    "tomesd-everywhere": Row(
        on=shiva.ToMeSD(sites=("attention", "cross_attention", "ffn"), metric="normed", random=False),
        off=shiva.ToMeSD(sites=("attention", "cross_attention", "ffn"), metric="normed", ratio=0.0),
        kept=half_at("attention", "cross_attention", "ffn"),
    ),
    "shiva": Row(
        on=shiva.Shiva(budget=0.5, guess="zero"),
        off=shiva.Shiva(budget=1.0),
        kept=half_but_first,
        differentiable=True,
        everywhere=True,
    ),
    "sweep": Row(
        on=shiva.Sweep(budget=0.5, fill="near", attends="selected"),
        off=shiva.Sweep(budget=1.0, fill="near", attends="selected"),
        kept=half_but_first,
        everywhere=True,
    ),
    "sweep-fresh": Row(
        on=shiva.Sweep(budget=0.5, attends="fresh"),
        off=shiva.Sweep(budget=1.0, attends="fresh"),
        kept=half_but_first,
        backbones=("sd3", "sd35", "pixart", "dit"),
        dense_calls=1,
    ),
    "shiva-input": Row(
        on=shiva.Shiva(budget=0.5, estimator="input"),
        off=shiva.Shiva(budget=1.0),
        kept=half_but_first,
        differentiable=True,
    ),
    "shiva-near": Row(
        on=shiva.Shiva(budget=0.5, fill="near"),
        off=shiva.Shiva(budget=1.0, fill="near"),
        kept=half_but_first,
    ),
    "refresh": Row(
        on=shiva.Refresh(budget=0.5),
        off=shiva.Refresh(budget=1.0),
        kept=half_but_first,
        dense_calls=1,
    ),
    "refresh-probe": Row(
        on=shiva.Refresh(budget=0.5, score="probe", attends="selected", age=0.3),
        off=shiva.Refresh(budget=1.0, score="probe", attends="selected"),
        kept=half_but_first,
        dense_calls=1,
        everywhere=True,
        not_on=("wan-vace", "hidream"),  # add to all tokens between blocks, or count them
    ),
    "ras": Row(
        on=shiva.RAS(budget=0.5, first=1),
        off=shiva.RAS(budget=1.0),
        kept=lambda kind, layer, tokens: tokens // 2,
        dense_calls=1,
    ),
    "coredit": Row(on=shiva.CoReDiT(), off=shiva.CoReDiT(ratio=0.0), kept=half_at("attention")),
    "toca": Row(
        on=shiva.ToCa(fresh=0.5, slope=0.0, attention=0.5),
        off=shiva.ToCa(fresh=1.0, slope=0.0, attention=1.0),
        kept=half_at("attention", "cross_attention", "ffn"),
        dense_calls=1,
    ),
    "diffsparse": Row(
        on=shiva.DiffSparse(budget=0.5),
        off=shiva.DiffSparse(budget=1.0),
        kept=half_but_first,
        dense_calls=1,
    ),
    "jit": Row(
        on=shiva.JiT(stages=((1.0, 0.5),)),
        off=shiva.JiT(stages=()),
        kept=lambda kind, layer, tokens: -(-tokens // 2),
    ),
    "lattice": Row(on=shiva.Lattice(budget=0.5), off=shiva.Lattice(budget=1.0), kept=half_but_first, everywhere=True),
    "lattice-all": Row(
        on=shiva.Lattice(budget=0.5, attends="all"),
        off=shiva.Lattice(budget=1.0, attends="all"),
        kept=half_but_first,
        backbones=("sd3", "sd35", "pixart", "dit"),
    ),
    "shiva-all": Row(
        on=shiva.Shiva(budget=0.5, fill="shortcut", attends="all", guess="zero"),
        off=shiva.Shiva(budget=1.0, fill="shortcut", attends="all"),
        kept=half_but_first,
        backbones=("sd3", "sd35", "pixart", "dit"),
        differentiable=True,
    ),
    "shiva-shortcut": Row(
        on=shiva.Shiva(budget=0.5, fill="shortcut", guess="zero"),
        off=shiva.Shiva(budget=1.0, fill="shortcut"),
        kept=half_but_first,
        differentiable=True,
    ),
    "shiva-recall": Row(
        on=shiva.Shiva(budget=0.5, fill="shortcut", recall=0.5, steady=0.5, guess="zero"),
        off=shiva.Shiva(budget=1.0, fill="shortcut", recall=0.5, steady=0.5),
        kept=half_but_first,
        differentiable=True,
    ),
    "shiva-cover": Row(
        on=shiva.Shiva(budget=0.5, cover=0.5, guess="zero"),
        off=shiva.Shiva(budget=1.0, cover=0.5),
        kept=half_but_first,
        differentiable=True,
    ),
    "shiva-span": Row(
        on=shiva.Shiva(budget=0.5, span=2, guess="zero"),
        off=shiva.Shiva(budget=1.0, span=2),
        kept=half_but_first,
        differentiable=True,
    ),
    "lattice-span": Row(
        on=shiva.Lattice(budget=0.5, span=3), off=shiva.Lattice(budget=1.0, span=3), kept=half_but_first
    ),
}
