"""Spans: layers in a row on one choice of tokens, at inference, in fitting and in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import shiva
from shiva.core.context import Exploration, StepContext
from shiva.fitting import Watcher
from shiva.methods.spans import check_whole, spans_of
from shiva.ops.shortcut import fill_updates
from shiva.training.call import call as training_call
from shiva.training.start import read_start
from tiny_images import IMAGES

from tiny import call_sd3, fitted, make_sd3, run


@pytest.mark.parametrize(
    ("layers", "dense", "span", "expected"),
    [
        (8, {0}, 1, [[1], [2], [3], [4], [5], [6], [7]]),
        (8, {0}, 2, [[1], [2, 3], [4, 5], [6, 7]]),
        (8, {0}, 4, [[1, 2, 3], [4, 5, 6, 7]]),
        (8, {0}, 99, [[1, 2, 3, 4, 5, 6, 7]]),
        (7, {0, 4}, 3, [[1, 2], [3], [5], [6]]),
        (5, set(), 2, [[0, 1], [2, 3], [4]]),
        (3, {0, 1, 2}, 2, []),
    ],
)
def test_spans_begin_at_multiples_of_their_length(
    layers: int, dense: set[int], span: int, expected: list[list[int]]
) -> None:
    spans = spans_of(layers, frozenset(dense), span)
    assert set(spans) == set(range(layers)) - dense
    assert [list(found) for found in dict.fromkeys(spans.values())] == expected
    assert all(layer in found for layer, found in spans.items())


def test_a_dense_layer_may_begin_a_span_but_not_cut_one() -> None:
    check_whole(spans_of(8, frozenset({0, 1, 4}), 4), 8, 4)
    with pytest.raises(ValueError, match="dense layer 6 cuts a span of 4 in two.*such as 4"):
        check_whole(spans_of(8, frozenset({0, 6}), 4), 8, 4)


def test_the_layers_of_a_span_run_on_the_same_tokens_and_are_filled_once() -> None:
    model, call = make_sd3(), call_sd3(2, 6, 6)
    config = shiva.Lattice(budget=0.5, span=4, rank=4, recall=0.0, steady=0.0)
    with shiva.attach(model, config) as session, session.trace() as trace:
        fitted(session.method)
        inputs: dict[int, Tensor] = {}
        hooks = [
            block.register_forward_pre_hook(
                lambda _, __, given, layer=layer: inputs.update({layer: given["hidden_states"].detach()}),
                with_kwargs=True,
            )
            for layer, block in enumerate(model.transformer_blocks)
        ]
        after: list[Tensor] = []
        hooks.append(model.norm_out.register_forward_pre_hook(lambda _, given: after.append(given[0].detach())))
        run(model, call)
        for hook in hooks:
            hook.remove()
        masks = [trace.mask(step=0, layer=layer) for layer in (1, 2, 3)]
        assert all(torch.equal(mask, masks[0]) for mask in masks)
        assert [inputs[layer].shape[1] for layer in range(4)] == [36, 36, 18, 18]
        method = session.method
        indices = masks[0].flatten().nonzero().view(1, -1).expand(2, -1)  # a lattice is the same in all samples
        chosen = indices[..., None].expand(-1, -1, 32)
        updates = after[0].gather(1, chosen) - inputs[1].gather(1, chosen)
        lin = method.shortcut.at(1, torch.tensor(float(call["timestep"][0]) / 1000))
        wanted = inputs[1] + fill_updates(updates, inputs[1], indices, lin, session.layout.shape)
        wanted.scatter_(1, chosen, after[0].gather(1, chosen))
        torch.testing.assert_close(after[0], wanted)


def test_one_span_costs_one_fill() -> None:
    model, call = make_sd3(), call_sd3(1, 6, 6)
    costs = {}
    for span in (1, 4):
        with shiva.attach(model, shiva.Lattice(budget=0.5, tilt=0.0, span=span, rank=4)) as session:
            run(model, call)
            step = StepContext(layout=session.layout, timestep=0.0)
            costs[span] = session.method.own_flops(step, [36, 18, 18, 18])
    assert costs[1] == 3 * costs[4] > 0


def test_a_fit_sums_what_a_layer_and_those_after_it_in_its_span_add() -> None:
    model, call = make_sd3(), call_sd3(2, 6, 6)
    with shiva.attach(model, shiva.Dense()) as session, session.record() as dense:
        run(model, call)
    spec = session.spec
    watcher = Watcher(spec, range(4), degree=1, stride=1, device=torch.device("cpu"), span=2)
    with shiva.attach(model, watcher):
        run(model, call)
    power = {layer: float(sums.power) for layer, sums in watcher.fit.items()}
    for layer, layers in {0: (0, 1), 1: (1,), 2: (2, 3), 3: (3,)}.items():
        update = sum(dense.updates[i].double() for i in layers)
        assert power[layer] == pytest.approx(float(update.square().sum()), rel=1e-4)
    assert watcher.waiting == {}


def test_a_span_learns_from_the_sum_of_the_teachers_updates() -> None:
    """What the scores of a span's first layer learn is the difference that skipping all of its layers makes."""
    model, call = make_sd3(), call_sd3(2, 6, 6)
    model.requires_grad_(False)
    gradients = {}
    for span in (1, 4):
        torch.manual_seed(0)
        with shiva.attach(model, shiva.Shiva(budget=0.5, span=span, sharing="independent")) as session:
            method = session.method.train()
            with session.disabled(), session.record() as teacher:
                run(model, call)
            explore = Exploration(ratio=0.5)
            output, _ = training_call(session, call, teacher=teacher, explore=explore)
            output.square().mean().backward()
            gradients[span] = [
                sum(float(p.grad.abs().sum()) for p in router.parameters() if p.grad is not None)
                for router in method.routers.routers
            ]
    assert [value > 0 for value in gradients[1]] == [False, True, True, True]
    assert [value > 0 for value in gradients[4]] == [False, True, False, False]


def test_what_a_span_held_is_let_go_and_a_controlnet_opens_it() -> None:
    model, call = make_sd3(), call_sd3(2, 6, 6)
    with shiva.attach(model, shiva.Shiva(budget=0.5, span=4)) as session, session.trace() as trace:
        run(model, call)
        assert session.ctx is None or session.ctx.now.held == {}
        call["block_controlnet_hidden_states"] = [torch.randn(2, 36, 32), torch.randn(2, 36, 32)]
        run(model, call)
        masks = [trace.mask(step=0, layer=layer) for layer in (1, 2, 3)]
        assert all(torch.equal(mask, masks[0]) for mask in masks), "one choice, though each layer fills"
        assert masks[0].sum() == 18
    with shiva.attach(model, shiva.Lattice(budget=0.5, span=4)), pytest.raises(ValueError, match="ControlNet.*span=4"):
        run(model, call)


def test_a_span_runs_on_counts_of_the_bucket() -> None:
    model, call = make_sd3(layers=8), call_sd3(1, 8, 8)
    with shiva.attach(model, shiva.Lattice(budget=0.4, tilt=0.0, bucket=16, span=4)) as session:
        run(model, call)
        kept = set(session.stats[0].kept.values())
    assert kept <= {16, 32, 48, 64}
    odd = shiva.Lattice(bucket=16, span=4).build(session.spec)
    assert odd.even([36] * 8) == (36,) * 8, "a step that sees all tokens still does"


def test_a_checkpoint_of_spans_keeps_its_dense_layers(tmp_path: Path) -> None:
    model = make_sd3(layers=8)
    with shiva.attach(model, shiva.Lattice(budget=0.5, span=4)) as session:
        method = session.method
        shiva.ShivaCheckpoint.of(method).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"dense=\(0, 1\) would begin other spans of 4"):
        shiva.attach(model, tmp_path, dense=(0, 1))
    with pytest.raises(ValueError, match="span is fixed by training"):
        shiva.attach(model, tmp_path, span=2)


def test_a_run_starts_from_a_fit_of_its_own_spans(tmp_path: Path) -> None:
    with shiva.attach(make_sd3(), shiva.Lattice(span=4)) as session:
        shiva.ShivaCheckpoint.of(session.method).save_pretrained(tmp_path)
    wanted = {span: shiva.Shiva(fill="shortcut", span=span).build(session.spec) for span in (1, 4)}
    start = read_start(str(tmp_path), print)
    assert "shortcut.up" in start.weights_for(wanted[4])
    with pytest.raises(ValueError, match="was made for spans of 4, and method.span is 1.*--span 1"):
        start.weights_for(wanted[1])


def test_spans_are_refused_where_tokens_are_counted_between_blocks() -> None:
    with pytest.raises(ValueError, match="counts all of them in between; pass span=1"):
        shiva.attach(IMAGES["hidream"].make(), shiva.Shiva(budget=0.5, span=2))
