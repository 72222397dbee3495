"""Shiva under cache-dit: enabled first, it caches over blocks that run on fewer tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from pipelines import PIPELINES

cache_dit = pytest.importorskip("cache_dit")
STEPS = 5


def enable(pipe: Any, threshold: float) -> None:
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=threshold
    )
    cache_dit.enable_cache(pipe, cache_config=config)


def test_a_cache_enabled_too_late_is_told(tmp_path: Path) -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.6)) as session:
        enable(pipe, -1.0)
        tiny.image(pipe, guidance=1.0, steps=2)
        with pytest.raises(RuntimeError, match="cache-dit was enabled after attach"):
            session.summary()
        cache_dit.disable_cache(pipe)
    enable(pipe, -1.0)
    with shiva.attach(pipe, shiva.Shiva(budget=0.6)) as session:
        tiny.image(pipe, guidance=1.0, steps=2)
        assert session.summary().flops_share < 1


@pytest.mark.parametrize(
    "config",
    [shiva.JiT(), shiva.Refresh(), shiva.Lattice(span=2), shiva.SparseDiT(split=(1, 1, 1, 1), bottom=0, top=0)],
    ids=lambda config: type(config).__name__,
)
def test_what_holds_fewer_tokens_from_block_to_block_is_refused(config: Any, tmp_path: Path) -> None:
    pipe = PIPELINES["sd3"].load(tmp_path)
    enable(pipe, -1.0)
    with pytest.raises(ValueError, match="where cache-dit adds what all tokens had"):
        shiva.attach(pipe, config)
    cache_dit.disable_cache(pipe)


@pytest.mark.parametrize("name", ["sd3", "flux", "pixart"])
def test_a_cache_that_never_hits_leaves_shiva_as_it_is_and_one_that_hits_skips_blocks(
    name: str, tmp_path: Path
) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.load(tmp_path)

    def image() -> torch.Tensor:
        return tiny.image(pipe, guidance=1.0 if name == "flux" else 3.0, steps=STEPS)

    def draw() -> tuple[torch.Tensor, Any]:
        torch.manual_seed(0)  # the untrained router's weights
        with shiva.attach(pipe, shiva.Shiva(budget=0.6)) as session:
            return image(), session.summary()

    dense = image()
    alone, without = draw()
    for threshold in (-1.0, 10.0):
        enable(pipe, threshold)
        cached = image()
        both, summary = draw()
        assert torch.equal(image(), cached), "the cache outlives the session"
        cache_dit.disable_cache(pipe)
        assert torch.equal(image(), dense), "both are gone"
        if threshold < 0:
            assert torch.equal(both, alone)
            assert summary.flops == without.flops
        else:
            assert not torch.equal(both, alone)
            assert summary.flops.true < without.flops.true
            assert summary.dense == without.dense, "priced without the cache"
