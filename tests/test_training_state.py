"""What stops a run says how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shiva.checkpoint import to_json, write_atomically
from shiva.training.diagnose import not_finite_of
from shiva.training.state import load_state


def test_a_state_of_another_format_says_how_to_go_on(tmp_path: Path) -> None:
    write_atomically(tmp_path / "state.json", to_json({"format": 9}))
    with pytest.raises(ValueError, match="has format 9, this version reads 1; continue with.*--fresh"):
        load_state(tmp_path)


@pytest.mark.parametrize(("value", "named"), [(torch.inf, "router"), (torch.nan, "router"), (1.0, "all weights")])
def test_gradients_that_are_not_finite_are_named(value: float, named: str) -> None:
    router, policy = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    router.grad, policy.grad = torch.tensor([value, 0.0]), torch.zeros(2)
    assert not_finite_of({"router": [router], "policy": [policy]}).startswith(named)
