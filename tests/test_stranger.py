"""A stranger's first ten minutes: natural calls do what they say, or raise one line with the right call in it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Img2ImgPipeline

import shiva
from pipelines import PIPELINES

TINY = PIPELINES["sd3"]


@pytest.fixture(scope="module")
def shared() -> Any:
    pipe = TINY.make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(shared: Any) -> Any:
    yield shared
    shiva.detach(shared)


def image(pipe: Any, steps: int = 4, **extra: Any) -> torch.Tensor:
    return TINY.image(pipe, steps=steps, **extra)


# -- what works ------------------------------------------------------------------------------------------


def test_attach_alone_takes_a_default_and_says_which(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    session = shiva.attach(pipe)
    image(pipe)
    assert "taking Sweep(budget=0.6, fill='auto'), which needs no training" in caplog.text
    assert session.summary().flops_share < 0.8


def test_the_default_fits_a_transformer_whose_keys_have_no_projection(caplog: pytest.LogCaptureFixture) -> None:
    pipe = TINY.make()
    pipe.transformer.fuse_qkv_projections()
    pipe.set_progress_bar_config(disable=True)
    session = shiva.attach(pipe)
    image(pipe)
    assert "attends='selected'" in caplog.text
    assert session.summary().keep < 0.8


METHODS = {
    "by name and budget": (("sweep",), {"budget": 0.4}, "Sweep(budget=0.4)"),
    "by name in the paper's letters": (("ToMeSD",), {}, "ToMeSD()"),
    "by name with a dash": (("soft-top-k",), {"keep": 0.5}, "SoftTopK(keep=0.5)"),
    "by class": ((shiva.ToMeSD,), {}, "ToMeSD()"),
    "by class with an option": ((shiva.ToMeSD,), {"ratio": 0.25}, "ToMeSD(ratio=0.25)"),
    "by config": ((shiva.Sweep(0.4),), {}, "Sweep(budget=0.4)"),
    "by budget alone": ((), {"budget": 0.5}, "Sweep(budget=0.5, fill='auto')"),
    "by FLOPs alone": ((), {"flops": 0.8}, "Sweep(flops=0.8, fill='auto')"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("given", "options", "expected"), METHODS.values(), ids=METHODS)
def test_a_method_is_named_in_any_way(pipe: Any, given: Any, options: Any, expected: str) -> None:
    session = shiva.attach(pipe, *given, **options)
    assert str(session.method.config) == expected
    image(pipe)
    assert session.summary().flops_share < 1


def test_no_handle_is_needed(pipe: Any) -> None:
    dense = image(pipe)
    shiva.attach(pipe, "sweep", budget=0.5)
    assert not torch.equal(image(pipe), dense)
    assert shiva.summary(pipe).flops_share < 1
    shiva.detach(pipe)
    shiva.detach(pipe)
    assert torch.equal(image(pipe), dense)


def test_a_bare_transformer_and_a_with_block_do_too(pipe: Any) -> None:
    dense = image(pipe)
    with shiva.attach(pipe.transformer, shiva.Sweep(budget=0.5)) as session:
        image(pipe)
        assert session.summary().flops_share < 1
    assert torch.equal(image(pipe), dense)


def test_attaching_again_replaces_and_says_so_once(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    shiva.attach(pipe, "sweep", budget=0.8)
    second = shiva.attach(pipe, "sweep", budget=0.4)
    assert caplog.text.count("is replaced by") == 1
    assert "Sweep(budget=0.8) is replaced by Sweep(budget=0.4)" in caplog.text
    image(pipe)
    assert second.summary().keep == shiva.summary(pipe).keep == pytest.approx(0.4, abs=0.05)


def test_a_budget_is_turned_in_place(pipe: Any) -> None:
    session = shiva.attach(pipe, "sweep", budget=0.9)
    image(pipe)
    before = session.summary().keep
    session.set_budget(0.5)
    image(pipe)
    assert session.summary().keep < before
    session.set_budget(flops=0.8)
    image(pipe)
    assert session.summary().flops_share == pytest.approx(0.8, abs=0.02)


def test_a_session_says_what_it_is_and_what_it_did(pipe: Any) -> None:
    session = shiva.attach(pipe, "sweep", budget=0.5)
    assert repr(session) == "<Sweep(budget=0.5) at work in SD3Transformer2DModel; nothing has run yet>"
    assert "nothing has run yet" in str(session.summary())
    image(pipe)
    assert "; 4 calls ran 49% of the tokens of the layers it reduces>" in repr(session)
    session.set_budget(0.7)
    assert "Sweep(budget=0.7)" in repr(session)
    session.detach()
    assert "detached" in repr(session)


SHORT = {
    "one step": (1, {}),
    "two steps": (2, {}),
    "one step left": (10, {"strength": 0.1}),
    "two steps left": (10, {"strength": 0.2}),
}


@pytest.mark.parametrize(("steps", "start"), SHORT.values(), ids=SHORT)
@pytest.mark.parametrize("config", [shiva.Sweep(budget=0.4), shiva.Sweep(flops=0.55), shiva.Sweep(flops=0.9)], ids=str)
def test_short_runs_end_near_their_budget_and_warn_once(pipe: Any, config: Any, steps: int, start: Any) -> None:
    if start:
        pipe = StableDiffusion3Img2ImgPipeline(**pipe.components)
        pipe.set_progress_bar_config(disable=True)
        start = {**start, "image": torch.rand(1, 3, 32, 24)}
    with shiva.attach(pipe, config) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert image(pipe, steps, **start).isfinite().all()
        image(pipe, steps, **start)
        left = len(session.stats)
        met = left == 2 and config.flops == 0.9
        assert session.summary().flops_share == (pytest.approx(0.9, abs=0.02) if met else pytest.approx(1, abs=0.35))
    about = [str(warning.message) for warning in told if "step" in str(warning.message)]
    assert len(about) == (0 if met else 1), about
    assert met or ("take more steps" if left == 1 else "cannot be met in 2 steps") in about[0]


# -- what is refused -------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a method misspelt": (lambda pipe: shiva.attach(pipe, "swep"), ValueError, "did you mean 'Sweep'"),
    "a method unheard of": (lambda pipe: shiva.attach(pipe, "faster"), ValueError, "methods are .*Sweep"),
    "a folder that is not there": (lambda pipe: shiva.attach(pipe, "/no/such"), FileNotFoundError, "check the path"),
    "an option misspelt": (lambda pipe: shiva.attach(pipe, "sweep", budgt=0.5), ValueError, "did you mean 'budget'"),
    "an option of another": (lambda pipe: shiva.attach(pipe, "tomesd", budget=0.5), ValueError, "known keys: .*ratio"),
    "a budget in per cent": (lambda pipe: shiva.attach(pipe, budget=60), ValueError, "share above 0 and at most 1"),
    "a budget in place of a method": (lambda pipe: shiva.attach(pipe, 0.5), ValueError, r"attach\(pipe, budget=0.5\)"),
    "two budgets": (lambda pipe: shiva.Sweep(budget=0.5, flops=0.5), ValueError, "exclude each other; pass one"),
    "no pipeline": (lambda pipe: shiva.attach("sweep"), ValueError, r"shiva\.attach\(pipe\)"),
    "a summary of nothing": (lambda pipe: shiva.summary(pipe), ValueError, "call shiva.attach first"),
    "guidance unknown": (lambda pipe: shiva.attach(pipe, "sweep", cfg="on"), ValueError, "pass one of 'auto'"),
    "a budget assigned": (
        lambda pipe: setattr(shiva.attach(pipe, "sweep"), "budget", 0.7),
        AttributeError,
        r"session\.set_budget\(0\.7\)",
    ),
    "a budget where none is": (
        lambda pipe: shiva.attach(pipe, "tomesd").set_budget(0.5),
        ValueError,
        "ToMeSD has no budget to turn; attach it again",
    ),
    "a cost before a run": (lambda pipe: shiva.attach(pipe, "sweep").cost_model(), RuntimeError, "run the pipeline"),
    "a copy": (
        lambda pipe: (shiva.attach(pipe, "sweep"), copy.deepcopy(pipe.transformer)),
        RuntimeError,
        r"detach\(\), copy, attach again",
    ),
    "a pickle": (
        lambda pipe: (shiva.attach(pipe, "sweep"), pickle.dumps(pipe.transformer)),
        RuntimeError,
        r"detach\(\) first",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_says_the_right_call_in_a_line(
    pipe: Any, call: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as refused:
        call(pipe)
    assert "\n" not in str(refused.value)


def test_a_trace_shows_only_what_was_run(pipe: Any) -> None:
    with shiva.attach(pipe, "sweep", budget=0.5) as session, session.trace() as trace:
        with pytest.raises(ValueError, match="nothing was run; call the pipeline inside `with session.trace"):
            trace.mask(0, 0)
        image(pipe)
    assert trace.mask(2, 1).float().mean() < 1
    for step, layer in ((4, 1), (-1, 1), (1, 4), (1, -1)):
        with pytest.raises(ValueError, match=r"steps are \[0, 1, 2, 3\], layers 0 to 3"):
            trace.mask(step, layer)


def test_the_options_of_shiva_are_grouped_by_when_they_act() -> None:
    inference, training = (shiva.Shiva.__doc__ or "").split("What training settles")
    for field in dataclasses.fields(shiva.Shiva):
        assert field.name in (training if field.name in shiva.Shiva.fixed else inference), field.name


def test_only_warnings_are_said(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "shiva"), shiva.attach(pipe, "sweep", budget=0.5):
        image(pipe)
    assert caplog.text == ""
