"""The grid of what a rejected token gets: complete, and continued where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reproduce.claims import rejected_tokens
from reproduce.claims.common import Result
from reproduce.claims.rejected_grid import REJECTED, Runner


def tiny_grid(state: Path) -> Result:
    return rejected_tokens.run(
        keeps=(0.6,),
        prompts=1,
        seeds=1,
        steps=3,
        timed=(0.6,),
        rounds=1,
        parts=("selectors", "fewer-steps"),
        state=state,
    )


@pytest.mark.slow
def test_the_grid_is_complete_and_is_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny_grid(tmp_path)
    points = {point["name"]: point for point in first.details["points"]}
    for kind, gets in REJECTED.items():
        for ranking in ("random", "oldest", "sweep") if gets["fill"] == "cached" else ("random",):
            assert points[f"{kind}, {ranking}, 0.6"]["psnr"] > 0
    assert all(point["time_share"] > 0 for point in points.values())
    assert points["cached, attending to all, sweep, 0.6"]["psnr"] > points["identity, random, 0.6"]["psnr"]
    assert points["dense in 2 steps"]["flops_share"] == 2 / 3
    assert all(points[name]["flops_share"] <= 1 for name in first.details["front"])

    def no_run(*unused: Any) -> None:
        raise AssertionError("a finished candidate ran again")

    monkeypatch.setattr(Runner, "generate", no_run)
    again = tiny_grid(tmp_path)
    assert again.details == first.details
    printed = rejected_tokens.table(again.details)
    assert all(name in printed for name in points)
