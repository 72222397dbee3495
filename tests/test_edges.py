"""Where methods meet what is seldom together: signs, branches, given frames, short runs, and full caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiva
from neighbours import TINY
from pipelines import PIPELINES
from pipelines_reach import REACH
from shiva.backbones.base import backbone_of
from shiva.core.context import StepContext
from shiva.core.layout import Layout, to_prediction, to_tokens, token_mask
from shiva.core.method import BackboneSpec
from shiva.evaluate.rivals import magnitude_ratios
from shiva.methods import pruner
from shiva.methods.ibtm import guidance_difference
from shiva.methods.jit import JiTStep
from shiva.ops.schedule import RatioSchedule
from shiva.session import Session

from tiny import BACKBONES, run

pytestmark = pytest.mark.filterwarnings("ignore:.*was not fitted")

# -- noise levels and signs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_the_noise_level_is_the_timesteps(name: str) -> None:
    """Which a fit knows it by, on models too whose timesteps rise to the image."""
    model = TINY[name].make()
    with shiva.attach(model, shiva.Lattice(budget=0.5)) as session:
        run(model, TINY[name].call(1, 8, 8, timestep=300.0))
        assert session.ctx is not None
        assert session.ctx.sigma is not None
        assert float(session.ctx.sigma) == pytest.approx(session.ctx.timestep / 1000, abs=1e-3)


@pytest.mark.parametrize("toward", [1, -1])
def test_what_is_lifted_is_the_clean_picture_whichever_way_a_flow_points(toward: int) -> None:
    """A picture of one colour is known everywhere from a quarter of its tokens."""
    spec = BackboneSpec("made up", 2, 8, 8, 8)
    method, layout, sigma = shiva.JiT().build(spec), Layout(4, 4), 0.6
    noise, clean = torch.randn(1, 3, 4, 4), torch.full((1, 3, 4, 4), 0.7)
    anchors = torch.tensor([[0, 5, 10, 15]])
    noisy, truth = (1 - sigma) * clean + sigma * noise, toward * (noise - clean)
    ran = torch.zeros(16).index_fill(0, anchors[0], 1.0)[:, None]
    seen = to_prediction(to_tokens(truth, layout) * ran, truth, layout)
    ctx = StepContext(layout, 1000 * sigma, latents=noisy, toward=toward, now=JiTStep(anchors))
    torch.testing.assert_close(method.end_step(seen, ctx), truth)


@pytest.mark.parametrize(
    ("name", "toward"), [("sd3", 1), ("pixart", 0), ("lumina2", -1), ("zimage", -1), ("mochi", -1)]
)
def test_models_say_which_way_their_prediction_points(name: str, toward: int) -> None:
    assert backbone_of(TINY[name].make()).toward == toward


# -- guidance in two calls, and runs that change in the middle -----------------------------------------------


def test_a_second_call_that_begins_in_mid_run_runs_all_tokens() -> None:
    tiny = BACKBONES["sd3"]
    model = tiny.make()
    with shiva.attach(model, shiva.RAS(budget=0.5, first=1), cfg="sequential") as session:
        run(model, tiny.call(1, 8, 8, timestep=900.0))
        for _ in range(2):
            run(model, tiny.call(1, 8, 8, timestep=800.0))
        counts = [set(step.kept.values()) for step in session.stats]
    assert counts == [{64}, {32}, {64}]


@pytest.mark.parametrize("name", ["sd3", "sd35"])
def test_a_choice_that_guidance_shares_is_made_once_by_two_calls_too(name: str) -> None:
    tiny = BACKBONES[name]
    model, masks = tiny.make(), {}
    for guidance in ("shared", "per-sample"):
        with shiva.attach(model, shiva.CoReDiT(guidance=guidance), cfg="sequential") as session:
            first, second = (tiny.call(1, 8, 8) for _ in range(2))
            second["pooled_projections"] = 30 * second["pooled_projections"].flip(1)
            second["encoder_hidden_states"] = 30 * second["encoder_hidden_states"].flip(2)
            calls = [positions_of(model, session, call) for call in (first, second)]
            masks[guidance] = all(torch.equal(calls[0][site], calls[1][site]) for site in calls[0])
    assert masks == {"shared": True, "per-sample": False}


def positions_of(model: nn.Module, session: Session, call: dict[str, Any]) -> dict[str, Tensor]:
    """Which tokens each site runs on in a call."""
    positions: dict[str, Tensor] = {}
    method: Any = session.method
    reduction = type(method).reduction

    def noted(x: Tensor, site: Any, ctx: Any) -> Any:
        made = reduction(method, x, site, ctx)
        positions[site.name] = made.positions
        return made

    method.reduction = noted
    run(model, call)
    return positions


@pytest.mark.parametrize("method", [shiva.Refresh, shiva.RAS])
def test_what_holds_one_choice_for_all_blocks_has_none_a_sample(method: Any) -> None:
    with pytest.raises(ValueError, match="guidance"):
        method(guidance="per-sample")


# -- what is held -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [shiva.JiT(), shiva.Refresh(attends="selected"), shiva.RAS(attends="selected")])
def test_a_model_that_counts_its_tokens_between_blocks_refuses_what_holds_fewer(config: Any) -> None:
    model = TINY["hidream"].make()
    with pytest.raises(ValueError, match="counts all of them in between"):
        shiva.attach(model, config)


@pytest.mark.parametrize("name", ["sd3", "flux", "kontext", "qwen"])
def test_attention_that_is_cached_whole_gives_text_and_references_too(name: str) -> None:
    model = TINY[name].make()
    with shiva.attach(model, shiva.ToCa(interval=3)):
        for timestep in (900.0, 800.0):
            out = run(model, TINY[name].call(2, 6, 10, timestep=timestep))
    assert out.isfinite().all()


def test_choices_that_are_kept_stay_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = BACKBONES["sd3"].make(), BACKBONES["sd3"].call(2, 8, 8)
    monkeypatch.setattr(pruner, "KEPT_TOKENS", 6 * 2 * 64)
    with shiva.attach(model, shiva.Lattice(budget=0.5, tilt=0.0)) as session:
        run(model, call)
        method: Any = session.method
        assert len(method._settled) == 4, "one a layer, of six that there is room for"


def test_one_choice_for_all_layers_is_made_once_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = BACKBONES["sd3"].make(), BACKBONES["sd3"].call(1, 8, 8, timestep=900.0)
    monkeypatch.setattr(pruner, "KEPT_TOKENS", 2 * 64)
    with shiva.attach(model, shiva.Sweep(budget=0.5, tilt=0.0)) as session:
        run(model, call)
        run(model, BACKBONES["sd3"].call(1, 8, 8, timestep=800.0))
        assert session.ctx is not None
        assert session.ctx.now.settled is not None


@pytest.mark.parametrize("options", [{"fill": "near"}, {"cache_layers": (1,)}])
def test_a_rank_by_updates_that_are_not_kept_says_so(options: dict[str, Any]) -> None:
    tiny = BACKBONES["sd3"]
    model, (first, second) = tiny.make(), (tiny.call(1, 8, 8, timestep=timestep) for timestep in (900.0, 800.0))
    dense_steps = (0,)
    with shiva.attach(model, shiva.DiffSparse(budget=0.5, attends="selected", dense_steps=dense_steps, **options)):
        run(model, first)
        with pytest.raises(ValueError, match="ranks tokens by their last updates"):
            run(model, second)


def test_dense_layers_asked_for_at_attach_are_not_in_a_learned_tables_mean() -> None:
    spec = backbone_of(BACKBONES["sd3"].make()).spec(BACKBONES["sd3"].make())
    learned = RatioSchedule.flat(0.5, spec.layers, [0])
    method: Any = shiva.DiffSparse(budget=0.5, dense=(0, 1)).build(spec)
    method.load_tables(learned.state())
    assert method.count.schedule.dense == {0, 1}


# -- what is priced ---------------------------------------------------------------------------------------------


def test_a_run_too_short_for_caches_is_priced_by_the_keys_it_has(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    shares = []
    for config in (shiva.Sweep(fill="auto"), shiva.Sweep(fill="near", attends="selected")):
        with shiva.attach(pipe, config) as session:
            tiny.image(pipe, steps=2)
            shares.append(session.summary().flops_share)
    assert shares[0] == shares[1]


# -- clips whose first frames are given -----------------------------------------------------------------------


def test_given_frames_are_no_tokens_and_stay_as_they_are() -> None:
    clip, layout = torch.randn(2, 3, 7, 4, 4), Layout(2, 2, frames=3, before=4)
    clip = clip[:, :, :4]
    tokens = to_tokens(clip, layout)
    assert tokens.shape == (2, 12, 3 * 4)
    assert torch.equal(to_prediction(tokens, clip, layout), clip)
    changed = to_prediction(tokens + 1, clip, layout)
    assert torch.equal(changed[:, :, 0], clip[:, :, 0])
    torch.testing.assert_close(changed[:, :, 1:], clip[:, :, 1:] + 1)
    mask = torch.zeros(2, 12, dtype=torch.bool).index_fill(1, torch.tensor([0]), True)
    spread = token_mask(mask, clip, layout)
    assert spread[:, :, 0].all(), "given frames count as masked"
    assert int(spread[:, :, 1:].sum()) == 2 * 4
    other = clip.clone()
    other[:, :, 0] += 5
    other[:, :, 2, :2, :2] += 1
    found = guidance_difference(clip, other, layout, 3)
    assert found.argmax(dim=1).tolist() == [4, 4], "the first token of the second frame of its own"
    assert int((found > 0).sum()) == 2


# -- the rival's calibration ------------------------------------------------------------------------------------


def test_step_ratios_are_one_a_step_where_guidance_takes_two_calls(tmp_path: Path) -> None:
    for name in ("flux2", "qwen"):
        tiny = REACH[name]
        pipe = tiny.load(tmp_path / name)
        with magnitude_ratios(pipe.transformer) as ratios:
            tiny.draw(pipe, steps=4)
        assert len(ratios) == 4
        assert ratios[0] == 1.0
