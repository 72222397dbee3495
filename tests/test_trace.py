"""Session.trace: what a run chose, as pictures need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from pipelines import PIPELINES

from method_table import METHODS
from tiny import BACKBONES


def test_masks_are_the_tokens_that_ran_and_scores_explain_them(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        plain = tiny.image(pipe)
        with session.trace() as trace:
            traced = tiny.image(pipe)
        steps = list(session.stats)
    assert torch.equal(plain, traced)
    assert list(trace.timesteps) == [0, 1, 2]
    masks = trace.masks()  # (S, L, rows, columns)
    for number, step in enumerate(steps):
        kept = [step.kept[name] for name in step.kept if name.startswith("transformer_blocks.")]
        assert masks[number].sum(dim=(-2, -1)).tolist() == kept
    chosen, scores = trace.mask(1, 1), trace.score_map(1, 1, row=0).maximum(trace.score_map(1, 1, row=1))
    assert scores[chosen].min() >= scores[~chosen].max()  # the guidance maximum decides
    assert trace.keep()[:, 0].eq(1).all()  # the first layer is dense
    with pytest.raises(ValueError, match="layer 0 scored no tokens"):
        trace.score_map(0, 0)


@pytest.mark.parametrize(("name", "own"), [("sd3", 3), ("dit", 1)])
def test_the_prompts_own_half_is_shown(name: str, own: int) -> None:
    """SD3 puts it second, DiT first."""
    tiny = BACKBONES[name]
    model, config = tiny.make(), shiva.Ranked(budget=0.5, score="norm", guidance="per-sample")
    with torch.no_grad(), shiva.attach(model, config, cfg="batched") as session, session.trace() as trace:
        model(**tiny.call(4, 6, 6))
    assert torch.equal(trace.masks(), trace.masks(row=own))
    assert not torch.equal(trace.masks(), trace.masks(row=own - 2))
    assert torch.equal(trace.score_map(0, 1), trace.score_map(0, 1, row=own))


def test_a_new_run_starts_the_trace_afresh_and_off_costs_nothing(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.ToMeSD(ratio=0.25)) as session:
        tiny.image(pipe)
        assert session.ctx is not None
        assert session.ctx.trace is None
        with session.trace() as trace:
            tiny.image(pipe, steps=3)
            tiny.image(pipe, steps=2)
    assert list(trace.timesteps) == [0, 1]
    assert {step for step, _ in trace.positions} == {0, 1}
    assert not trace.scores  # a merger has none


def test_a_traced_step_leaves_the_compiled_one_out(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:

        def compiled(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the compiled step ran")

        session._compiled = compiled
        with session.trace() as trace:
            tiny.image(pipe, steps=1)
    assert trace.positions


@pytest.mark.parametrize("name", METHODS)
def test_every_method_shows_each_sample_its_own_tokens(name: str) -> None:
    tiny = BACKBONES["sd3"]
    model = tiny.make()
    with torch.no_grad(), shiva.attach(model, METHODS[name].on) as session, session.trace() as trace:
        for step in range(METHODS[name].dense_calls):
            model(**tiny.call(2, 6, 10, timestep=900.0 - step))
        model(**tiny.call(2, 6, 10))
        record = session.stats[-1]
    assert trace.positions
    last = max(step for step, _ in trace.positions)
    for step, layer in (place for place in trace.positions if place[0] == last):
        shown = sum(int(trace.mask(step, layer, row).sum()) for row in range(2)) / 2
        sites = [kept for name, kept in record.kept.items() if name.startswith(f"transformer_blocks.{layer}")]
        assert round(shown) in sites
