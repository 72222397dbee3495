"""Every method computes what it did when tests/same_bits.json was written."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest

from same_bits import BY_A_HAIR, CASES, Bits, measure, on_tiny, recorded, rows

ROWS, RECORDED = rows(), recorded()
STEADY, SHAKY = 1e-4, 1.0
"""How far numbers may be off, in deviations of the row: processors differ by a tenth of it, other tokens by more."""


def assert_near(found: Bits, known: Bits, tolerance: float) -> None:
    assert found.numbers == pytest.approx(known.numbers, rel=1e-6, abs=tolerance * known.numbers[1])
    assert found.flops == known.flops


def test_the_record_holds_every_row_and_no_other() -> None:
    assert set(RECORDED) == set(ROWS), "record what changed: python tests/same_bits.py --write --only NAME"


@pytest.mark.parametrize("name", ROWS)
def test_what_is_computed_is_what_was(name: str) -> None:
    shaky = any(fnmatch(name, pattern) for pattern in BY_A_HAIR)
    assert_near(measure(ROWS[name]), RECORDED[name], SHAKY if shaky else STEADY)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("shiva", {"budget": 0.52}),  # one token more of 64
        ("shiva-near", {"near": "spatial"}),
        ("sweep", {"attends": "selected"}),
        ("neuralsort-cached", {"age": 0.1}),
        ("lapsum", {"keep": 0.52}),
        ("dydit", {"threshold": 0.49}),
        ("diffcr-cached", {"fill": "near"}),
        ("tomesd", {"seed": 1}),
        ("sdtm-release", {"switch": 0.75}),
        ("ibtm-merges", {"pool": 1.1}),
    ],
)
def test_another_choice_of_tokens_is_noticed(name: str, changes: dict[str, Any]) -> None:
    case = replace(CASES[name], config=CASES[name].config.changed(changes))
    with pytest.raises(AssertionError):
        assert_near(measure(lambda: on_tiny(case, "sd3")), RECORDED[f"tiny/{name}/sd3"], STEADY)
