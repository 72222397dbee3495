"""What holds for all methods of the comparison, trained or not; each has a file of its own besides."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shiva
from baseline_tools import SPEC, output, pair
from pipelines import PIPELINES
from shiva.bench import shapes
from shiva.core.context import Exploration
from shiva.core.method import BackboneSpec, MethodConfig

from method_table import METHODS
from tiny import BACKBONES, call_sd3, make_sd3

TRAINED = ("diffcr", "dydit", "lapsum", "neuralsort", "soft-topk", "sparsedit")


@pytest.mark.parametrize("name", TRAINED)
def test_every_group_and_loss_reaches_its_parameters_also_through_gradient_checkpointing(name: str) -> None:
    gradients: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        model, call = make_sd3().requires_grad_(False), BACKBONES["sd3"].call(2, 8, 8)
        if checkpointing:
            model.enable_gradient_checkpointing()
        torch.manual_seed(0)
        with shiva.attach(model, METHODS[name].on, cfg="none") as session:
            method = session.method.train()
            call["hidden_states"].requires_grad_(True)
            out, ctx = session.call(call, explore=Exploration(step=10_000))
            (out[0].square().mean() + sum(method.losses(ctx).values())).backward()
            gradients.append({n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None})
            for group, parameters in method.groups().items():
                assert any(p.grad is not None and p.grad.abs().max() > 0 for p in parameters), group
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_brings_the_method_back(name: str, tmp_path: Path) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, METHODS[name].on) as session:
        with torch.no_grad():
            for parameter in session.method.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        expected = output(model, call)
        shiva.ShivaCheckpoint.of(session.method).save_pretrained(tmp_path)
    with shiva.attach(model, str(tmp_path)) as session:
        assert type(session.method.config) is type(METHODS[name].on)
        assert session.method.config == METHODS[name].on
        assert torch.equal(output(model, call), expected)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (shiva.DiffCR(), {"keep": 0.8}, "keep is fixed by training; train again to change it$"),
        (shiva.DyDiT(), {"flops": 0.5}, "flops is fixed by training; train again to change it, or set threshold"),
        (shiva.LapSum(), {"alpha": 0.5}, "alpha is fixed by training; train again to change it, or set keep"),
        (shiva.NeuralSort(), {"tau": 0.5}, "tau is fixed by training; train again to change it, or set keep"),
        (shiva.SoftTopK(), {"epsilon": 0.5}, "epsilon is fixed by training; train again to change it, or set keep"),
        (shiva.Shiva(), {"estimator": "input"}, "estimator is fixed by training.*or set budget"),
    ],
)
def test_a_trained_checkpoint_refuses_what_would_change_nothing(
    config: MethodConfig, changes: dict[str, Any], message: str
) -> None:
    checkpoint = shiva.ShivaCheckpoint.of(config.build(SPEC))
    with pytest.raises(ValueError, match=message):
        checkpoint.method(**changes)
    if config.knob is not None:
        checkpoint.method(**{config.knob: 0.7})


@pytest.mark.parametrize("name", TRAINED)
def test_presets_and_guidance_are_declared(name: str) -> None:
    config = type(METHODS[name].on)
    assert config.preset("official") == config()
    assert isinstance(config.preset("paper"), config)
    assert config().build(BackboneSpec("toy", 24, 8, 8, 8)).guidance in ("shared", "per-sample", "max")


@pytest.mark.parametrize(
    ("config", "tera"),
    [
        (shiva.NeuralSort.preset("paper"), 9.47),
        (shiva.LapSum(keep=0.843), 9.47),
        (shiva.SparseDiT.preset("paper", rates=(0.39, 0.39)), 9.02),
        (shiva.SparseDiT.preset("paper", rates=(0.42, 0.42)), 8.86),
        (shiva.DiffCR.preset("paper", initial=0.8), 8.87),
    ],
)
def test_price_at_the_real_shape_of_sd3(config: MethodConfig, tera: float) -> None:
    """The paper's column says 9.47 for NeuralSort and 8.95 for SparseDiT, between its preset's two rates."""
    shape = shapes.shape("sd3-medium")
    model = shape.build("meta")
    with shiva.attach(model, config) as session:
        output(model, shape.call("meta"))
        assert session.summary().flops.paper / 1e12 == pytest.approx(tera, abs=0.03)


CONFIGS = (shiva.ToMeSD, shiva.ToFu, shiva.SDTM, shiva.ToMA, shiva.IBTM)


@pytest.mark.parametrize("config", CONFIGS)
def test_presets_build_for_a_backbone(config: type[MethodConfig]) -> None:
    spec = replace(SPEC, layers=24)
    for name in ("official", *config.presets):
        assert config.preset(name).build(spec).guidance in ("shared", "per-sample", "max")


CHANGING: dict[str, MethodConfig] = {
    "sdtm": shiva.SDTM(round_to=1, switch=0.02, protect_every=5),
    "toma": shiva.ToMA(skip=1, every=1, select_every=3, assign_every=3),
    "toma-per-sample": shiva.ToMA(skip=1, every=1, select_every=3, assign_every=3, guidance="per-sample"),
}


@pytest.mark.parametrize("method", CHANGING)
def test_guidance_may_end_and_the_image_grow_within_falling_timesteps(method: str) -> None:
    model = make_sd3()
    with shiva.attach(model, CHANGING[method]) as session:
        output(model, pair(call_sd3(2, 8, 8, 900.0)))
        output(model, pair(call_sd3(2, 8, 8, 800.0)))
        output(model, call_sd3(1, 8, 8, 700.0))
        assert len(session.stats) == 3, "the same run, without its second half"
        grown = output(model, call_sd3(1, 8, 6, 600.0))
        assert len(session.stats) == 1, "another size is another run"
        session.begin_run()
        assert torch.equal(output(model, call_sd3(1, 8, 6, 600.0)), grown)


AT_WORK: dict[str, MethodConfig] = {
    "tomesd": shiva.ToMeSD(sites=("attention", "cross_attention", "ffn")),
    "tofu": shiva.ToFu(),
    "sdtm": shiva.SDTM(round_to=1, switch=0.25, protect_every=2),
    "toma": shiva.ToMA(skip=1, tile=3, select_every=2),
    "ibtm": shiva.IBTM(layers=(0, 3), merge_from=0.5),
    **{name: METHODS[name].on for name in TRAINED},
}
IN_PIPELINES = [at for at in itertools.product(AT_WORK, PIPELINES) if at != ("sparsedit", "flux")]


@pytest.mark.parametrize(("method", "backbone"), IN_PIPELINES)
def test_a_guided_pipeline_runs_and_runs_again_alike(method: str, backbone: str) -> None:
    tiny = PIPELINES[backbone]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    dense = tiny.image(pipe, steps=4)
    with shiva.attach(pipe, AT_WORK[method]):
        first, second = tiny.image(pipe, steps=4), tiny.image(pipe, steps=4)
    assert torch.equal(first, second), "a run must not remember the one before it"
    assert not torch.equal(first, dense)
    assert torch.equal(tiny.image(pipe, steps=4), dense)


COMPILED: dict[str, tuple[MethodConfig, int]] = {
    "tomesd": (AT_WORK["tomesd"], 1),
    "tofu": (AT_WORK["tofu"], 1),
    "sdtm": (shiva.SDTM.preset("paper", deviation=0.0, round_to=1), 2),  # its counter begins, and goes on
    "toma": (shiva.ToMA(skip=1, every=1, select_every=2), 2),  # destinations are made, or reused
    "ibtm": (shiva.IBTM(layers=(0, 1), merge_from=0.5, steps=4), 3),  # partition, prune, merge
    "neuralsort": (shiva.NeuralSort(keep=0.5), 1),
    "diffcr": (shiva.DiffCR(initial=0.5), 1),
    "sparsedit": (shiva.SparseDiT(rates=(0.5, 0.5), split=(1, 0, 1, 0), bottom=0, top=0), 1),
    "refresh": (shiva.Refresh(budget=0.5), 2),  # a dense step, and the others
    "refresh-probe": (shiva.Refresh(budget=0.5, score="probe", age=0.3), 2),
    "refresh-band": (shiva.Refresh(budget=0.5, score="band", tilt=0.0), 2),
    "ras": (shiva.RAS(budget=0.5, first=1), 2),
    "coredit": (shiva.CoReDiT(), 1),
    "toca": (shiva.ToCa(fresh=0.5, interval=2), 3),  # the first step, some tokens, and all of them again
    "jit": (shiva.JiT(stages=((1.0, 0.5),)), 1),
}
"""Methods, and how many graphs a run of theirs may need."""


@pytest.mark.slow
@pytest.mark.parametrize("method", COMPILED)
def test_a_run_compiles_to_one_graph_per_kind_of_step(method: str, graphs: Any) -> None:
    model, (config, expected) = make_sd3(layers=2), COMPILED[method]
    calls = [pair(call_sd3(2, 8, 8, timestep)) for timestep in (900.0, 800.0, 700.0, 600.0)]

    with shiva.attach(model, config) as session:
        eager = [output(model, call) for call in calls]
        session.compile(backend=graphs)
        compiled = [output(model, call) for call in calls]
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(graphs.seen) == expected
