"""fill="shortcut", Lattice and fresh keys: what they compute, cost, save, compile and train."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from shiva.compiled import GraphRunner
from shiva.core.context import StepContext
from shiva.core.cost import count
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec
from shiva.methods.pruner import PrunerStep
from shiva.methods.scores import lattice_scores
from shiva.methods.shortcut import ShortcutFill
from shiva.ops.shortcut import shortcut_flops
from shiva.ops.topk import hard_topk

from tiny import BACKBONES, call_flux, call_sd3, fitted, make_flux, make_sd3, noise, run

WHOLE = ("sd3", "sd35", "pixart", "dit")
"""Those whose blocks keep attention and feed-forward apart."""


class AnySite:
    """Stands for a block, where only its place matters."""

    name, kind, layer, stack, index, single_stream, rotary = "block", "block", 1, "", 1, False, False
    module: Any = None


# -- what it computes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(6, 5), Layout(4, 5, frames=3)], ids=["image", "video"])
def test_an_update_that_is_linear_but_for_a_constant_is_restored_exactly(layout: Layout) -> None:
    spec = BackboneSpec("Any", layers=2, width=16, time_width=4, prompt_width=4)
    fill = shiva.Lattice(rank=4, recall=0.0, steady=0.0).make_fill(spec)
    assert isinstance(fill, ShortcutFill)
    torch.manual_seed(0)
    for parameter in fill.weights.parameters():
        torch.nn.init.normal_(parameter)
    ctx = StepContext(layout=layout, timestep=500.0, sigma=torch.tensor(0.5), now=PrunerStep())
    x, constant = torch.randn(2, layout.tokens, 16), torch.randn(16)
    updates = fill.weights.at(1, 0.5)(x) + constant
    indices = hard_topk(lattice_scores(layout.shape, 0, 1).expand(2, -1), layout.tokens // 2)
    with torch.no_grad():
        reduction = fill(indices, x, AnySite(), ctx)
        restored = reduction.restore(reduction.reduce(x + updates), x)
    torch.testing.assert_close(restored, x + updates, rtol=1e-4, atol=1e-4)


def test_frames_are_neighbours_too() -> None:
    """A token with no computed one in its frame is told by those of the frames beside it."""
    layout, spec = Layout(2, 2, frames=3), BackboneSpec("Any", layers=2, width=8, time_width=4, prompt_width=4)
    fill = shiva.Lattice(parts="neighbours").make_fill(spec)
    ctx = StepContext(layout=layout, timestep=500.0, sigma=torch.tensor(0.5), now=PrunerStep())
    x = torch.zeros(1, 12, 8)
    indices = torch.tensor([[0, 1, 2, 3, 8, 9, 10, 11]])  # the first frame and the last
    reduction = fill(indices, x, AnySite(), ctx)
    values = torch.cat([torch.ones(1, 4, 8), 3 * torch.ones(1, 4, 8)], dim=1)
    torch.testing.assert_close(reduction.restore(values, x)[:, 4:8], torch.full((1, 4, 8), 2.0))


@pytest.mark.parametrize("backbone", WHOLE)
def test_with_fresh_keys_the_chosen_of_the_first_reduced_layer_get_what_dense_gives_them(backbone: str) -> None:
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 6, 6)
    errors = {}
    for attends in ("selected", "all"):
        with shiva.attach(model, shiva.Lattice(budget=0.5, attends=attends)) as session:
            with session.disabled(), session.record() as dense:
                run(model, call)
            with session.record() as reduced, session.trace() as trace:
                run(model, call)
            chosen = trace.masks()[0, 1].flatten()
            errors[attends] = (reduced.updates[1] - dense.updates[1])[:, chosen].abs().max()
    assert chosen.sum() == 18
    assert errors["all"] < 1e-5 < 1e-3 < errors["selected"]


def test_fresh_keys_are_refused_where_blocks_are_fused() -> None:
    model = BACKBONES["flux"].make()
    with pytest.raises(ValueError, match="FluxTransformer2DModel.*single blocks fuse.*attends='selected'"):
        shiva.attach(model, shiva.Lattice(attends="all"))
    with shiva.attach(model, shiva.Lattice(budget=0.5, attends="all", dense=(0, 2, 3))) as session:
        run(model, BACKBONES["flux"].call(2, 6, 6))
        assert session.stats[-1].kept["transformer_blocks.1"] == 18


def test_cover_spreads_what_a_router_would_crowd() -> None:
    model, call = make_sd3(), call_sd3(1, 8, 8)

    def farthest(cover: float) -> float:
        with shiva.attach(model, shiva.Shiva(budget=0.25, cover=cover)) as session, session.trace() as trace:
            method: Any = session.method
            method.score = lambda x, site, ctx: torch.arange(64.0).expand(x.shape[0], -1)  # the last rows first
            method.score.drawn = method.score.observes = False
            method.score.observe = lambda prediction, ctx: None
            run(model, call)
        places = Layout(8, 8).places(torch.device("cpu"))
        return float(torch.cdist(places, places[trace.masks()[0, 1].flatten()]).amin(dim=1).max())

    assert farthest(0.0) == 6
    assert farthest(20.0) <= math.sqrt(2)


def test_choices_that_look_at_no_token_are_kept_until_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    with shiva.attach(model, shiva.Lattice(budget=0.5)) as session:
        method: Any = fitted(session.method)
        with session.trace():  # chooses anew
            expected = run(model, call)
        assert not method._settled
        session.begin_run()
        first = run(model, call)
        session.begin_run()
        kept = dict(method._settled)
        assert torch.equal(run(model, call), first)
        assert torch.equal(first, expected)
        assert [id(indices) for indices in method._settled.values()] == [id(indices) for indices in kept.values()]
        assert len(method.fill._places) == 3, "its reduced layers"
        with torch.inference_mode():  # a wider batch, whose choices then serve training too
            wide = model(**call_sd3(3, 8, 8))[0]
        assert wide.is_inference()
        assert not any(indices.is_inference() for indices in method._settled.values())
        monkeypatch.setattr("shiva.methods.pruner.KEPT_TOKENS", 4 * 64)
        run(model, call_sd3(1, 8, 8))
        assert len(method._settled) == 4
        monkeypatch.setattr("shiva.methods.pruner.KEPT_TOKENS", 4 * 64 - 1)
        assert torch.equal(run(model, call), expected), "too many to keep"
    assert not method._settled
    del kept
    session.ctx = None
    assert not len(method.fill._places)


# -- what it costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", WHOLE)
@pytest.mark.parametrize("attends", ["selected", "all"])
def test_it_is_priced_as_it_runs(backbone: str, attends: str) -> None:
    tiny = BACKBONES[backbone]
    model = tiny.make()
    with shiva.attach(model, shiva.Lattice(budget=0.5, attends=attends, rank=4)) as session, torch.no_grad():
        run(model, tiny.call(2, 4, 6, timestep=900.0))
        ran = count(lambda: model(**tiny.call(2, 4, 6, timestep=600.0)))
        priced = session.summary().step_flops()[1]
        own = session.stats[-1].own.true
        assert own == 2 * 3 * shortcut_flops(24, 12, 32, 4)
        means = 2 * 3 * (shortcut_flops(24, 12, 32, 4) - shortcut_flops(24, 12, 32, 4, neighbours=0))
        assert priced.attention == pytest.approx(ran.attention)
        assert priced.linear - means == pytest.approx(ran.linear), "torch counts products, not the weighted means"
        assert session.cost_model().step(session.ctx.counts).true == pytest.approx(priced.true)  # type: ignore[union-attr]


@pytest.mark.parametrize("attends", ["selected", "all"])
def test_a_share_of_flops_is_met_with_its_own_counted(attends: str) -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Lattice(flops=0.7, attends=attends, rank=4)) as session:
        run(model, call_sd3(2, 8, 8))
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.02)


# -- saved, compiled, recorded ---------------------------------------------------------------------------


def test_a_checkpoint_draws_the_same_and_takes_another_budget(tmp_path: Path) -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    with shiva.attach(model, shiva.Lattice(budget=0.5, rank=4)) as session:
        method = fitted(session.method)
        expected = run(model, call)
        shiva.ShivaCheckpoint.of(method).save_pretrained(tmp_path)
    with shiva.attach(model, tmp_path) as session:
        assert torch.equal(run(model, call), expected)
        assert isinstance(session.method.config, shiva.Lattice)
    with shiva.attach(model, tmp_path, budget=0.25) as session:
        run(model, call)
        assert session.stats[-1].kept["transformer_blocks.1"] == 16
    with pytest.raises(ValueError, match="rank is fixed by training"):
        shiva.attach(model, tmp_path, rank=8)


def test_weights_load_under_another_fill() -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    spec = BackboneSpec("SD3Transformer2DModel", 4, 32, 32, 20, 4, "0 dual attentions, qk_norm None")
    with_shortcut = shiva.ShivaCheckpoint.of(shiva.Shiva(budget=0.5, fill="shortcut").build(spec))
    without = shiva.ShivaCheckpoint.of(shiva.Shiva(budget=0.5).build(spec))
    assert not any(name.startswith("shortcut.") for name in without.weights)
    for checkpoint, fill in ((with_shortcut, "identity"), (without, "shortcut")):
        with shiva.attach(model, checkpoint, fill=fill):
            assert run(model, call).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["sd3", "flux", "pixart"])
@pytest.mark.parametrize(
    "config",
    [
        shiva.Lattice(budget=0.5),
        shiva.Lattice(budget=0.5, attends="all", recall=0.0, steady=0.0),
        shiva.Shiva(budget=0.5, fill="shortcut", cover=0.3),
        shiva.Shiva(budget=0.5, fill="shortcut", cover=0.3, span=4),
    ],
    ids=["lattice", "fresh keys", "router and cover", "span"],
)
def test_one_graph_serves_all_steps(backbone: str, config: Any, graphs: Any) -> None:
    if backbone == "flux" and config.attends == "all":
        config = config.changed({"dense": (0, 2, 3)})
    tiny = BACKBONES[backbone]
    model = tiny.make()

    calls = [tiny.call(2, 6, 6, timestep=t) for t in (900.0, 600.0, 300.0, 100.0)]
    with shiva.attach(model, config) as session:
        fitted(session.method)
        eager = [run(model, call) for call in calls]
        session.compile(backend=graphs, fullgraph=True)
        compiled = [run(model, call) for call in calls]
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(graphs.seen) == (2 if config.recall or config.steady else 1), "a first step has nothing to recall"


class Again:
    """Repeats a call on the memory it was recorded with, as a CUDA graph does."""

    def record(self, run: Any) -> tuple[Any, Any]:
        output = run()
        return (lambda: [old.copy_(new) for old, new in zip(output, run(), strict=True)]), output


def test_a_recorded_step_reads_the_noise_level_of_each_step() -> None:
    model = make_sd3()
    calls = [call_sd3(2, 6, 6, timestep=t) for t in (900.0, 300.0)]
    with shiva.attach(model, shiva.Shiva(budget=0.5, fill="shortcut")) as session:
        fitted(session.method)
        assert session.method.recordable
        eager = [run(model, call) for call in calls]
        session.runner = GraphRunner(session, Again())
        recorded = [run(model, call) for call in calls]
        assert len(session.runner.recordings) == 1
    for a, b in zip(eager, recorded, strict=True):
        torch.testing.assert_close(a, b)


def two_grids() -> list[dict[str, Any]]:
    """Of as many tokens, so that packed they have one shape."""
    return [call_flux(1, *grid) for grid in ((4, 9), (6, 6))]


def two_prompts() -> list[dict[str, Any]]:
    """Two runs under sequential guidance: prompts of two lengths, each before the same empty one."""
    calls = []
    for tokens in (5, 7):
        call = call_sd3(1, 6, 6)
        call["hidden_states"] = noise(1, 4, 12, 12, seed=tokens)
        calls += [{**call, "encoder_hidden_states": noise(1, tokens, 24, seed=4)}, call]
    return calls


@pytest.mark.parametrize(
    ("config", "make", "calls"),
    [
        (shiva.Shiva(budget=0.5, fill="shortcut"), make_flux, two_grids()),
        (shiva.Shiva(budget=0.5, guidance="shared"), make_sd3, two_prompts()),
    ],
    ids=["another grid", "guidance of another prompt"],
)
def test_a_recorded_step_is_replayed_only_where_it_is_the_same(config: Any, make: Any, calls: list[Any]) -> None:
    model, found = make(), {}
    with shiva.attach(model, config) as session:
        fitted(session.method) if config.fill == "shortcut" else None
        for runner in (None, GraphRunner(session, Again())):
            session.runner = runner
            session.begin_run()
            found[runner] = [run(model, call) for call in calls]
        assert session.runner.recordings
    assert not session.runner.recordings, "detached, it holds no memory"
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b)


# -- training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attends", ["selected", "all"])
def test_gradients_reach_the_shortcut_and_the_scores(attends: str) -> None:
    model = make_sd3().requires_grad_(False)
    config = shiva.Shiva(budget=0.5, fill="shortcut", attends=attends, cover=0.3)
    with shiva.attach(model, config, cfg="none") as session:
        method: Any = fitted(session.method)
        method.train()
        call = call_sd3(2, 6, 6)
        with session.disabled(), session.record() as teacher, torch.no_grad():
            target = model(**call)[0]
        output, _ = session.call(call, teacher=teacher)
        (output[0] - target).square().mean().backward()
        groups = method.groups()
        assert set(groups) == {"router", "fill", "policy"}
        for name in ("router", "fill"):
            assert any(p.grad is not None and p.grad.abs().max() > 0 for p in groups[name]), name


def test_a_shortcut_learns_to_stand_in() -> None:
    """Trained alone, it brings a reduced model nearer to the dense one."""
    model, call = make_sd3().requires_grad_(False), call_sd3(2, 6, 6)
    target = run(model, call)
    with shiva.attach(model, shiva.Lattice(budget=0.5, rank=8), cfg="none") as session:
        method: Any = session.method
        method.train()
        optimizer = torch.optim.Adam(method.groups()["fill"], lr=3e-3)
        losses = []
        for _ in range(30):
            loss = (model(**call)[0] - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 0}, "rank=0 is not at least 1"),
        ({"spread": 0.0}, "spread=0.0 is not above 0"),
        ({"parts": "all"}, "parts='all' is unknown"),
        ({"degree": -1}, "degree=-1 is not at least 0"),
    ],
)
def test_refusals(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shiva.Lattice(**wrong)


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="span=2 and fill='cached' exclude each other"):
        shiva.Shiva(span=2, fill="cached")
    with pytest.raises(ValueError, match="span=2 and attends='all' exclude each other"):
        shiva.Lattice(span=2, attends="all")
    with pytest.raises(ValueError, match="dense layer 2 cuts a span of 4 in two"):
        shiva.attach(make_sd3(layers=4), shiva.Lattice(span=4, dense=(0, 2)))
    with pytest.raises(ValueError, match="fill='shortcut' is not for"):
        shiva.DyDiT(fill="shortcut")
    model = make_sd3()
    with shiva.attach(model, shiva.Shiva(attends="all", estimator="input")) as session:
        session.method.train()
        with pytest.raises(ValueError, match="attends='all' is for inference"):
            model(**call_sd3(1, 4, 4))


def test_a_budget_turned_in_place_reaches_the_lattice() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Lattice(budget=0.5)) as session, torch.no_grad():
        model(**call_sd3(1, 6, 6, timestep=900.0))
        session.set_budget(0.25)
        session.begin_run()
        model(**call_sd3(1, 6, 6, timestep=900.0))
        assert session.stats[-1].kept["transformer_blocks.1"] == 9


def test_the_oracle_counts_as_lattice_does_and_computes_what_the_fill_misses() -> None:
    from reproduce.claims.floor import Oracle

    tiny = BACKBONES["sd3"]
    call, shares = tiny.call(2, 6, 6), []
    model = tiny.make()
    dense = model(**call)[0]
    half, spec = shiva.Lattice(budget=0.5, attends="all"), shiva.attach(model, "Lattice").spec
    shiva.detach(model)
    for method in (half.build(spec), Oracle(half, spec)):
        with shiva.attach(model, method, cfg="none") as session, torch.no_grad():
            output = model(**call)[0]
            shares.append(session.summary().flops_share)
            assert not torch.equal(output, dense)
    assert shares[0] == pytest.approx(shares[1])
    with shiva.attach(model, Oracle(half.changed({"budget": 1.0}), spec), cfg="none"), torch.no_grad():
        assert torch.equal(model(**call)[0], dense)
