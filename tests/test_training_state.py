"""What stops a run says how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shiva.checkpoint import read_json, to_json, write_atomically
from shiva.training.cache import LatentCache
from shiva.training.diagnose import not_finite_of
from shiva.training.state import load_state


def test_a_state_of_another_format_says_how_to_go_on(tmp_path: Path) -> None:
    write_atomically(tmp_path / "state.json", to_json({"format": 9}))
    with pytest.raises(ValueError, match="has format 9, this version reads 1; continue with.*--fresh"):
        load_state(tmp_path)


@pytest.mark.parametrize("change", [{"format": 9}, {"shard": 9}])
def test_latents_of_another_layout_are_refused(change: dict[str, int], tmp_path: Path) -> None:
    LatentCache.open(tmp_path, {}, 3)
    assert len(LatentCache.open(tmp_path, {}, 3)) == 3
    manifest = read_json(tmp_path / "manifest.json")
    write_atomically(tmp_path / "manifest.json", to_json({**manifest, **change}))
    with pytest.raises(ValueError, match="this version reads 1 and 64; delete the folder"):
        LatentCache.open(tmp_path, {}, 3)


@pytest.mark.parametrize(("value", "named"), [(torch.inf, "router"), (torch.nan, "router"), (1.0, "all weights")])
def test_gradients_that_are_not_finite_are_named(value: float, named: str) -> None:
    router, policy = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    router.grad, policy.grad = torch.tensor([value, 0.0]), torch.zeros(2)
    assert not_finite_of({"router": [router], "policy": [policy]}).startswith(named)
