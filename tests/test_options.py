"""A bad option of a method is named, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shiva
from baseline_tools import SPEC

from tiny import make_sd3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shiva.DiffCR(bins=(0.5,)), "fewer than two ratios"),
        (lambda: shiva.DiffCR(bins=(0.5, 0.5)), "fewer than two ratios"),
        (lambda: shiva.DiffCR(regions=0), "regions=0 is not at least 1"),
        (lambda: shiva.DiffCR(budget_weight=-1.0), r"budget_weight=-1\.0 is not at least 0"),
        (lambda: shiva.DyDiT(flops=0.0), r"flops=0\.0 is not above 0"),
        (lambda: shiva.DyDiT(warmup=0), "warmup=0"),
        (lambda: shiva.DyDiT(flops_weight=-1.0), r"flops_weight=-1\.0 is not at least 0"),
        (lambda: shiva.IBTM(merge_from=4), "merge_from=4 is above 1; pass a share"),
        (lambda: shiva.IBTM(layers=(5, 2)), "pass \\(first, last\\)"),
        (lambda: shiva.IBTM(pool=0.0), "pool=0.0 is not above 0"),
        (lambda: shiva.attach(make_sd3(), shiva.IBTM()), "layers=\\(7, 20\\) ends behind the last of the 4 layers"),
        (
            lambda: shiva.attach(make_sd3(), shiva.IBTM(layers=(1, 2)), cfg="none"),
            "compares the two predictions of guidance",
        ),
        (lambda: shiva.LapSum(alpha=-1.0), r"alpha=-1\.0 is not above 0"),
        (lambda: shiva.LapSum(dense=(9,)).build(SPEC), "names layer 9"),
        (lambda: shiva.NeuralSort(tau=0.0), r"tau=0\.0 is not above 0"),
        (lambda: shiva.NeuralSort(keep=1.4), r"keep=1\.4 is above 1"),
        (lambda: shiva.SDTM(switch=20), "switch=20 is above 1; pass a share"),
        (lambda: shiva.SDTM(deviation=0.4), "deviation=0.4 is above ratio=0.3"),
        (lambda: shiva.SDTM(ratio=0.7), "ratio \\+ deviation=0.[89].* is above 0.75"),
        (lambda: shiva.SDTM(protect_every=None), "pass protect_every, or cache_weight=1"),
        (lambda: shiva.SDTM(protect_every=0), "protect_every=0 is not at least 1"),
        (lambda: shiva.SoftTopK(solver="newton"), "solver='newton' is unknown"),
        (lambda: shiva.SoftTopK(iterations=0), "iterations=0 is not at least 1"),
        (lambda: shiva.SparseDiT(rates=(0.8, 0.5)), "must rise"),
        (lambda: shiva.SparseDiT(rates=(0.5,)), "rates="),
        (lambda: shiva.SparseDiT(split=(2, 1, 1, 1)), "must be"),
        (lambda: shiva.SparseDiT(split=(1, 3, 1)), "split="),
        (lambda: shiva.SparseDiT(bottom=-1), "bottom=-1 is not at least 0"),
        (lambda: shiva.ToFu(switch=2.0), "switch=2.0 is above 1"),
        (lambda: shiva.ToFu(rule="prune"), "rule='prune' is unknown"),
        (lambda: shiva.ToMA(scale=0.0), "scale=0.0 is not above 0"),
        (lambda: shiva.ToMA(site="ffn"), "site='ffn' is unknown"),
        (lambda: shiva.ToMA(skip=-1), "skip=-1 is not at least 0"),
        (lambda: shiva.ToMeSD(ratio=1.4), "ratio=1.4 is above 1"),
        (lambda: shiva.ToMeSD(ratio=0.8), "ratio=0.8 is above 0.75, all tokens but one of each 2x2 cell"),
        (lambda: shiva.ToMeSD(sites=("block",)), r"sites\[0\]='block' is unknown"),
        (lambda: shiva.ToMeSD(sites=()), "names no sub-layer"),
        (lambda: shiva.ToMeSD(sx=0), "sx=0 is not at least 1"),
        (lambda: shiva.ToMeSD(guidance="max"), "guidance='max' is unknown"),
        (lambda: shiva.attach(make_sd3(), shiva.ToMeSD(sites=("cross_attention",))), "widen its layers or sites"),
    ],
)
def test_a_bad_option_is_named_with_its_fix(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
