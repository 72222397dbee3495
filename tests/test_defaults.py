"""The library's defaults are what the committed results on the embedded model say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reproduce.claims import budget_on_model, router_context, router_estimators, router_sharing, temperatures
from reproduce.claims.common import KEPT, ordered
from reproduce.claims.embedded import KEEP, TEMPERATURES, Variant
from shiva.methods.shiva import Shiva
from shiva.training.sections import WEIGHTS, Temperatures


def rows_of(name: str, *inside: str) -> dict[str, Any]:
    details = json.loads((KEPT / f"{name}.json").read_text())["details"]
    for key in inside or ("rows",):
        details = details[key]
    return details


def lowest(name: str, variants: dict[str, Variant]) -> Variant:
    errors = {row: stats["mse/keep_0.6"]["mean"] for row, stats in rows_of(name).items() if row in variants}
    return variants[min(errors, key=lambda row: errors[row])]


def test_the_default_estimator_agrees_with_exact_marginals_on_the_trained_block_and_the_papers_does_not() -> None:
    rows = rows_of("trained_block", "one block")

    def errors_above_zero(name: str) -> float:
        row = rows[name]["fixed budget, raw"]
        return row["mean"] / (row["std"] / row["count"] ** 0.5)

    assert errors_above_zero(f"{Shiva().estimator}, {Shiva().guess}") > 2 > errors_above_zero("input (paper)")


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("router_estimators", router_estimators.VARIANTS),
        ("router_sharing", router_sharing.VARIANTS),
    ],
)
def test_the_default_router_has_the_lowest_error(name: str, variants: dict[str, Variant]) -> None:
    best = dict(lowest(name, variants).method)
    assert {option: getattr(Shiva(), option) for option in best} == best


def test_the_default_signals_are_no_worse_than_the_papers() -> None:
    rows = rows_of("router_context")
    unit, own = (rows[name]["mse/keep_0.6"]["values"] for name in (router_context.FULL, router_context.OWN))
    assert ordered(own, unit) == "reproduced"
    assert Shiva().signal_length == "unit"


def test_the_default_temperatures_have_the_lowest_error() -> None:
    best = {**TEMPERATURES, **lowest("temperatures", temperatures.VARIANTS).temperatures}
    assert {name: getattr(Temperatures(), name) for name in best} == best


def test_the_default_controller_comes_nearest_to_the_budget() -> None:
    off = {name: abs(row["mean keep"]["mean"] - KEEP) for name, row in rows_of("budget_on_model").items()}
    best = budget_on_model.VARIANTS[min(off, key=lambda name: off[name])]
    assert best.weights == {"budget": WEIGHTS["budget"]}
    assert {name: best.method.get(name, getattr(Shiva(), name)) for name in ("dual", "noise_free")} == {
        "dual": Shiva().dual,
        "noise_free": Shiva().noise_free,
    }
