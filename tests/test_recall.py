"""What a skipped token's estimate takes from the step before: what the regression missed of it, and what it became."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from shiva.core.context import Exploration
from shiva.ops.shortcut import Lin, Recalling, shortcut_fill
from shiva.training.call import call as training_call
from shiva.training.recipe import load_recipe

from tiny import call_sd3, fitted, make_sd3, run

RECIPES = Path(__file__).parents[1] / "recipes"


def two_steps() -> list[dict[str, Any]]:
    return [call_sd3(2, 6, 6, timestep=900.0), call_sd3(2, 6, 6, timestep=300.0)]


def test_what_is_missed_alike_in_two_steps_is_restored_exactly() -> None:
    """Whatever it is, and however far the neighbours: the regression and what is recalled are all of it."""
    torch.manual_seed(0)
    x, rough = torch.randn(2, 36, 16), torch.randn(2, 36, 16)
    lin = Lin(torch.randn(16, 4), torch.randn(4, 16), torch.randn(16))
    indices = torch.arange(0, 36, 3).expand(2, -1)
    exact = x + lin(x) + rough
    made = shortcut_fill(indices, x, Recalling(lin, rough), (1, 6, 6))
    torch.testing.assert_close(made.restore(made.reduce(exact), x), exact)
    without = shortcut_fill(indices, x, lin, (1, 6, 6))
    assert (without.restore(without.reduce(exact), x) - exact).abs().max() > 0.5


@pytest.mark.parametrize("span", [1, 4])
def test_a_dense_step_leaves_what_the_regression_missed(span: int) -> None:
    model, (first, second) = make_sd3(), two_steps()
    outputs = {}
    for recall in (0.0, 1.0):
        config = shiva.Lattice(budget=0.5, span=span, rank=4, recall=recall, dense_steps=(0,))
        with shiva.attach(model, config) as session:
            fitted(session.method)
            session.begin_run()
            with session.record() as dense:
                run(model, first)
            missed = dict(session.ctx.run.missed)
            outputs[recall] = run(model, second)
            spans = session.method.spans
            if not recall:
                assert missed == {}
                continue
            assert set(missed) == {(found.start, 0) for found in spans.values()}
            for (layer, _), found in missed.items():
                begun = dense.outputs[layer - 1]
                update = dense.update_over(spans[layer])
                lin = session.method.shortcut.at(layer, torch.tensor(0.9))
                torch.testing.assert_close(found, update - lin(begun))
            assert session.ctx.run.begun == {}
    assert not torch.equal(outputs[0.0], outputs[1.0])


def test_what_stays_as_it_was_is_restored_exactly() -> None:
    """If computed tokens become what they were a step before, the others do, whatever the regression says."""
    torch.manual_seed(0)
    x, ended = torch.randn(2, 36, 16), torch.randn(2, 36, 16)
    lin = Lin(torch.randn(16, 4), torch.randn(4, 16), torch.randn(16))
    indices = torch.arange(0, 36, 3).expand(2, -1)
    made = shortcut_fill(indices, x, Recalling(lin, ended=ended, steady=1.0), (1, 6, 6))
    torch.testing.assert_close(made.restore(made.reduce(ended), x), ended)
    half = shortcut_fill(indices, x, Recalling(lin, ended=ended, steady=0.5), (1, 6, 6))
    none = shortcut_fill(indices, x, lin, (1, 6, 6))
    mean = (none.restore(none.reduce(ended), x) + ended) / 2
    torch.testing.assert_close(half.restore(half.reduce(ended), x), mean)


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("dense_steps", [(0,), ()])
def test_every_step_leaves_what_its_last_span_made_of_tokens(span: int, dense_steps: tuple[int, ...]) -> None:
    model, calls = make_sd3(), two_steps()
    config = shiva.Lattice(budget=0.5, span=span, rank=4, recall=0.0, steady=1.0, dense_steps=dense_steps)
    with shiva.attach(model, config) as session:
        fitted(session.method)
        session.begin_run()
        for call in calls:
            seen = []
            watching = model.norm_out.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
            run(model, call)
            watching.remove()
            assert set(session.ctx.run.ended) == {0}
            assert torch.equal(session.ctx.run.ended[0], seen[0])
            assert session.ctx.run.missed == {}


@pytest.mark.parametrize("option", ["recall", "steady"])
def test_a_run_that_learns_recalls_as_one_that_draws(option: str) -> None:
    """A rollout's step leaves what it knows to the step that learns, which computes what inference would."""
    model, (first, second) = make_sd3().requires_grad_(False), two_steps()
    options = {"fill": "shortcut", "rank": 4, "guidance": "per-sample", "guess": "zero"}
    outputs = {}
    for share in (0.0, 0.7):
        torch.manual_seed(0)
        with shiva.attach(model, shiva.Shiva(budget=0.5, **{option: share}, **options)) as session:
            fitted(session.method)
            session.begin_run()
            run(model, first)
            drawn = run(model, second)
            session.method.train()
            session.begin_run()
            explore = Exploration(ratio=0.5)
            with torch.no_grad():
                training_call(session, first, explore=explore)
            learned, _ = training_call(session, second, explore=explore)
            assert learned.requires_grad
            torch.testing.assert_close(learned.detach(), drawn, rtol=1e-4, atol=1e-4)
            outputs[share] = drawn
    assert not torch.equal(outputs[0.0], outputs[0.7])


def test_a_recipe_that_recalls_goes_along_runs() -> None:
    assert load_recipe(RECIPES / "emoji-turbo.yaml").method["recall"] == 0.75
    shorter = ["sampling.rollout=0.5", "sampling.follow=null"]
    with pytest.raises(ValueError, match=r"method.recall=0.75 carries on.*rollout: 1"):
        load_recipe(RECIPES / "emoji-turbo.yaml", shorter)
    with pytest.raises(ValueError, match=r"method.steady=0.7 carries on.*rollout: 1"):
        load_recipe(RECIPES / "emoji-turbo.yaml", [*shorter, "method.recall=0"])
