"""Whole sampling runs of the real pipelines of the pattern table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from pipelines_reach import REACH
from shiva.core.cost import ZERO, Flops, count

STEPS = 3


METHODS = (shiva.Shiva(budget=0.5), shiva.Sweep(budget=0.6), shiva.Lattice(budget=0.5), shiva.ToMeSD())


def counting(session: shiva.Session) -> list[Flops]:
    """What every call of the transformer really spends, from now on."""
    seen: list[Flops] = []
    step = session._step

    def counted(*args: Any) -> Any:
        made: list[Any] = []
        seen.append(count(lambda: made.append(step(*args))))
        return made[0]

    session._step = counted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", REACH)
@pytest.mark.filterwarnings("ignore:.*was not fitted")
def test_a_run_is_reduced_by_every_kind_of_method(name: str, tmp_path: Path) -> None:
    tiny = REACH[name]
    pipe = tiny.load(tmp_path)
    dense = tiny.draw(pipe)
    with shiva.attach(pipe, shiva.Shiva(budget=1.0)):
        assert torch.equal(tiny.draw(pipe), dense)
    for config in METHODS:
        with shiva.attach(pipe, config) as session:
            spent = counting(session)
            assert tiny.draw(pipe).isfinite().all()
            assert_tracked(session, tiny)
            summary = session.summary()
            if isinstance(config, shiva.Sweep):
                assert session.method.whole_keys == tiny.keys, "all tokens are attended to where they can be"
            if isinstance(config, shiva.Sweep) and name != "klein kv":  # whose calls are not of one length
                ran = sum(spent, ZERO)
                assert summary.flops.attention == pytest.approx(ran.attention)
                assert summary.flops.linear == pytest.approx(ran.linear, rel=0.01)
            if name != "wan" or not getattr(config, "tilt", 0.0):  # whose two transformers share a run out
                assert summary.keep == pytest.approx(getattr(config, "budget", 0.5), abs=0.02)
                assert 0.3 < summary.flops_share < (0.99 if tiny.references else 0.95)
    assert torch.equal(tiny.draw(pipe), dense)


def assert_tracked(session: shiva.Session, tiny: Any) -> None:
    """Steps, guidance and references of the run were told apart."""
    assert session.ctx is not None
    assert session.layout is not None
    calls = 2 if tiny.guidance == "sequential" else 1
    steps = 1 if session.spec.name == "WanTransformer3DModel" else STEPS
    assert len(session.stats) == calls * steps
    assert session.ctx.branch == calls - 1
    assert session.ctx.step == steps - 1
    assert session.ctx.guidance_pairs == (tiny.guidance == "batched")
    cached = type(session.pipeline).__name__ == "Flux2KleinKVPipeline"
    assert (session.layout.reference > 0) == (tiny.references and not cached)


@pytest.mark.parametrize("name", ["klein", "qwen", "wan", "hunyuan-video"])
def test_announced_guidance_shares_the_first_calls_tokens(name: str, tmp_path: Path) -> None:
    tiny = REACH[name]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        routed = []
        route = session.method.scores
        session.method.scores = lambda *args: routed.append(args[1].layer) or route(*args)  # type: ignore[method-assign]
        tiny.draw(pipe)
        assert session._tracker.run.announced == ["cond", "uncond"]
        assert len(routed) == len(session.stats) // 2 * (session.spec.layers - 1)
        tiny.draw(pipe, guidance=1.0)
        assert session.ctx is not None
        assert session.ctx.branch == 0


def test_references_of_the_first_step_may_be_cached_in_the_next(tmp_path: Path) -> None:
    tiny = REACH["klein kv"]
    pipe = tiny.load(tmp_path)
    seen = []
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        read = session.backbone.layout

        class Noting(type(session.backbone)):  # type: ignore[misc]
            def layout(self, transformer: Any, call: Any) -> Any:
                seen.append(read(transformer, call))
                return seen[-1]

        session.backbone = Noting(**{**vars(session.backbone)})
        tiny.draw(pipe)
        assert [layout.before > 0 for layout in seen[:2]] == [True, False]
        assert len(session.stats) == STEPS, "one run"


def test_two_experts_are_attached_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = REACH["wan"]
    pipe = tiny.load(tmp_path)
    dense = tiny.draw(pipe)
    with caplog.at_level(logging.WARNING, "shiva"):
        first = shiva.attach(pipe, shiva.Shiva(budget=0.5))
        assert "pipe.transformer_2" in caplog.text
    second = shiva.attach(pipe.transformer_2, shiva.Shiva(budget=0.5))
    assert not torch.equal(tiny.draw(pipe), dense)
    assert [len(session.stats) for session in (first, second)] == [2, 4]
    assert [session.summary().keep for session in (first, second)] == [pytest.approx(0.5)] * 2
    first.detach()
    second.detach()
    assert torch.equal(tiny.draw(pipe), dense)
