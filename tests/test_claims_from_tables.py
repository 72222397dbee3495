"""Verdicts that are read from committed tables: each follows its figures, and the committed ones are these tables'."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from reproduce.claims import FROM_TABLES, cost_tables, quality_tables, speed_tables
from reproduce.claims.common import KEPT, Result
from reproduce.claims.tables import Reading, Tables, beyond, near, rows

YES, PARTLY, NO = "reproduced", "reproduced in direction", "not reproduced"


@pytest.fixture(scope="module", params=FROM_TABLES)
def module(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"reproduce.claims.{request.param}")


def test_committed_claims_are_those_of_the_committed_tables(module: Any) -> None:
    result: Result = module.run()
    record = json.loads((KEPT / f"{result.name}.json").read_text())
    assert record["claims"] == [asdict(claim) for claim in result.claims]
    assert record["quick"] is False


def test_committed_claims_on_1024_tokens_are_those_of_its_tables() -> None:
    result = quality_tables.run(model=Path("models/emoji-128"))
    record = json.loads((KEPT / "emoji-128" / "quality_tables.json").read_text())
    assert record["claims"] == [asdict(claim) for claim in result.claims]
    assert record["quick"] is False


def changed(tables: Tables, path: str, value: Any) -> Tables:
    """The tables with one value replaced; a part of the path that names a row of a list finds it."""
    tables = copy.deepcopy(tables)
    *way, last = path.split("/")

    def step(at: Any, part: str) -> Any:
        if isinstance(at, list):
            return next(row for row in at if part in (row.get("name"), f"{row.get('name')}@{row.get('tokens')}"))
        return at[part]

    at = reduce(step, way, tables)
    if isinstance(at, list):
        at[int(last)] = value
    else:
        assert last in at, f"{path} is not in the tables"
        at[last] = value
    return tables


EACH = "seeds/paired/Shiva {}/{}/each"
QUALITY = [
    (quality_tables.pareto, {"main/quality/DyDiT/frechet": 999.0}, YES),
    (quality_tables.pareto, {"main/quality/DyDiT/frechet": 180.0}, PARTLY),
    (quality_tables.below_vanilla, {"main/quality/dense/frechet": 999.0}, PARTLY),
    (quality_tables.seeds_90, {EACH.format(90, "frechet"): [-1.0] * 5, EACH.format(90, "text_image"): [0.1] * 5}, YES),
    (quality_tables.seeds_60, {EACH.format(60, "text_image"): [0.2, 0.1, 0.1, 0.2, -0.01]}, PARTLY),
    (quality_tables.seeds_80, {EACH.format(80, "frechet"): [-1.0] * 5}, NO),
    (quality_tables.transfer, {"transfer/paired/Shiva 60 shifted to 80/text_image/mean": 0.1}, YES),
    (quality_tables.transfer, {"transfer/paired/Shiva 60 shifted to 80/text_image/mean": 0.01}, PARTLY),
    (quality_tables.adaptive_ratio, {"ratio/quality/Shiva 60 fixed/frechet": 1.0}, NO),
    (quality_tables.other_sizes, {f"heldout/{s}/Shiva 80/frechet": 1.0 for s in ("48 x 48", "64 x 48")}, PARTLY),
    (quality_tables.other_prompts, {"heldout/held-out prompts/DyDiT/text_image": 1.0}, NO),
    (quality_tables.over_all, {"categories/paired/Shiva 60/all categories/text_image/mean": 0.1}, YES),
    (quality_tables.worst_category, {"categories/paired/Shiva 60/symbols/text_image/mean": -0.1}, PARTLY),
    (quality_tables.worst_category, {"categories/paired/Shiva 60/symbols/text_image/mean": -0.9}, YES),
    (quality_tables.int8_cost, {"int8/paired/Shiva 80 INT8 in 7 blocks/frechet/mean": 99.0}, NO),
    (
        quality_tables.int8_scope,
        {f"int8/paired/Shiva 80 INT8 in {n} blocks/frechet/mean": float(n) for n in (4, 7)},
        PARTLY,
    ),
]
EXPORT = {"step": 0, "tokens": 0, "operators": 0, "refused": ""}
SPEED = [
    (speed_tables.speedups, {"step/methods/shiva 0.6/speedup": 1.2}, PARTLY),
    (speed_tables.speedups, {"step/methods/shiva 0.6/speedup": 0.9}, NO),
    (speed_tables.architectures, {"step-pixart/methods/shiva 0.6/speedup": 1.01}, PARTLY),
    (
        speed_tables.attention_and_ffn,
        {
            "anatomy/configurations/dense/stages/attention": 100.0,
            "anatomy/configurations/shiva 0.6/stages/attention": 61.5,
        },
        YES,
    ),
    (speed_tables.attention_and_ffn, {"anatomy/configurations/shiva 0.6/stages/ffn": 1e9}, NO),
    (speed_tables.overhead, {f"anatomy/configurations/shiva {b}/path": 100.0 for b in speed_tables.BUDGETS}, YES),
    (
        speed_tables.scatter,
        {f"anatomy/configurations/shiva {b}/stages/scatter": 100 - b for b in speed_tables.BUDGETS},
        PARTLY,
    ),
    (speed_tables.compiled, {"compile/methods/shiva 0.6/compiled": 23.0}, PARTLY),
    (speed_tables.compiled, {"compile/methods/shiva 0.6/compiled": 25.0}, NO),
    (speed_tables.shapes, {"compile/export/dydit": [EXPORT]}, PARTLY),
    (speed_tables.shapes, {"compile/export/shiva 0.6": [{**EXPORT, "refused": "why"}]}, NO),
    (speed_tables.int8_time, {"compose-sd3/mixes/int8 + shiva/seconds": 1.0}, YES),
    (speed_tables.int8_weights, {"compose-sd3/mixes/int8 + shiva/weights": 771e6}, YES),
    (speed_tables.int8_weights, {"compose-sd3/mixes/int8 + shiva/weights": 999e6}, NO),
]
SOFT, OURS = (f"selector/operators/{name}@{{}}/{{}}_on_tokens" for name in ("SOFT top-k", "Shiva"))
COST = [
    (
        cost_tables.flops,
        {f"flops/methods/{n}/paper": p for n, p in (("diffcr", 10.29), ("shiva 0.7", 7.55), ("shiva 0.6", 6.32))},
        YES,
    ),
    (cost_tables.flops, {"flops/methods/tomesd/convention": 1.0}, NO),
    (cost_tables.forward, {SOFT.format(4096, "forward"): 9.0}, YES),
    (cost_tables.forward, {OURS.format(n, "forward"): 9.0 for n in cost_tables.TOKENS}, NO),
    (cost_tables.backward, {SOFT.format(n, "backward"): 9.0 for n in (1024, 2048)}, YES),
    (cost_tables.backward, {SOFT.format(2048, "backward"): 9.0}, PARTLY),
    (cost_tables.memory, {"selector/operators/Shiva@4096/saved_on_tokens": 1e8}, PARTLY),
    (cost_tables.soft_is_flat, {SOFT.format(n, "forward"): 0.01 for n in cost_tables.TOKENS}, YES),
    (cost_tables.soft_is_flat, {SOFT.format(4096, "forward"): 9.0}, NO),
    (cost_tables.training, {"train/methods/shiva 0.6/seconds": 12.0}, PARTLY),
    (cost_tables.training, {"train/methods/shiva 0.6/peak": 2e9}, NO),
    (cost_tables.other_training, {"train/methods/diffcr/seconds": 9.0}, NO),
    (cost_tables.training_memory, {"train/methods/dydit/peak": 2e9}, NO),
]


@pytest.mark.parametrize(("module", "cases"), [(quality_tables, QUALITY), (speed_tables, SPEED), (cost_tables, COST)])
def test_a_verdict_follows_its_figures(module: Any, cases: list[tuple[Reading, dict[str, Any], str]]) -> None:
    tables = module.tables()
    for reading, changes, verdict in cases:
        other = reduce(lambda found, change: changed(found, *change), changes.items(), tables)
        assert reading(other).verdict == verdict, f"{reading.__name__}, {changes}"
        assert reading(tables).verdict != verdict, f"{reading.__name__} has that verdict unchanged"
    assert {reading for reading, _, _ in cases} | {speed_tables.batching} >= set(module.READINGS)


def test_two_images_together_are_judged_by_the_spread() -> None:
    tables = speed_tables.tables()
    assert speed_tables.batching(tables).verdict == NO
    for row in tables["scale"]["growth"]:
        row["dense"]["spread"] = row["shiva"]["spread"] = 0.001
    assert speed_tables.batching(tables).verdict == PARTLY


def test_training_is_held_against_the_adapter_it_uses() -> None:
    tables = cost_tables.tables()
    before = cost_tables.training(tables).ours
    rows(tables["train"])["plain DoRA"]["seconds"] *= 2
    assert cost_tables.training(tables).ours == before


def test_near_is_within_a_tenth_and_beyond_counts_errors() -> None:
    assert [near(ours, 1.0) for ours in (1.09, 0.91, 1.11)] == [True, True, False]
    assert [beyond({"mean": mean, "error": 1.0}) for mean in (2.1, 1.1, 0.9, -3.0)] == [YES, PARTLY, NO, NO]
