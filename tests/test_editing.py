"""Editing models and given frames: references always run, or are frozen; tokens go where the picture departs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shiva
from pipelines_reach import REACH
from shiva.core.cost import count
from tiny_images import IMAGES, fibo, grid_ids, with_ids
from tiny_videos import VIDEOS

from tiny import Tiny, noise


def longcat_edit(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = with_ids(batch, rows, columns, timestep)
    call["img_ids"] = torch.cat([call["img_ids"], grid_ids(2, 3, first=1)])
    return {**call, "hidden_states": torch.cat([call["hidden_states"], noise(batch, 6, 4, seed=5)], dim=1)}


def fibo_edit(batch: int, rows: int, columns: int, timestep: float = 500.0) -> dict[str, Any]:
    call = fibo(batch, rows, columns, timestep)
    mask = torch.nn.functional.pad(call["joint_attention_kwargs"]["attention_mask"], (0, 6))
    edit = {key: value for key, value in longcat_edit(batch, rows, columns).items() if key != "timestep"}
    return {**call, **edit, "joint_attention_kwargs": {"attention_mask": mask}}


EDITING: dict[str, Tiny] = {
    **{name: IMAGES[name] for name in ("kontext", "qwen", "qwen-zero-t")},
    "longcat": Tiny(IMAGES["longcat"].make, longcat_edit),
    "fibo": Tiny(IMAGES["fibo"].make, fibo_edit),
    "wan-per-token": VIDEOS["wan-per-token"],
    "ltx-per-token": VIDEOS["ltx-per-token"],
}
FROZEN = {"freeze_references": 1}


@torch.no_grad()
def steps(model: Any, tiny: Tiny, apart: float = 2e-6) -> list[Tensor]:
    """Two steps that differ by next to nothing, or by more."""
    call = tiny.call(2, 4, 6)
    time = call["timestep"].float()
    calls = [{**call, "timestep": time * (1 + apart)}, {**call, "hidden_states": call["hidden_states"].clone()}]
    return [own(model(**arguments)[0]) for arguments in calls]


def own(output: Tensor) -> Tensor:
    """Of packed tokens those of the image, which come first; of a clip those after the frame that is given."""
    if output.ndim == 5:
        return output[:, :, 1:]
    return output[:, 24:] if output.shape[1] == 48 else output[:, :24]


@pytest.mark.parametrize("name", [*EDITING, "flux2"])
def test_reference_tokens_run_in_every_block(name: str) -> None:
    tiny = {**EDITING, "flux2": IMAGES["flux2"]}[name]
    model, seen = tiny.make(), []
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        blocks = [site for site in session.backbone.sites(model) if site.kind == "block"]
        handles = [
            site.module.norm1.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
            for site in blocks
            if hasattr(site.module, "norm1")
        ]
        with torch.no_grad():
            model(**tiny.call(1, 4, 6))
        for handle in handles:
            handle.remove()
        assert session.layout is not None
        references = session.layout.reference
        assert references > 0
        assert set(seen) <= {24 + references, 12 + references}


@pytest.mark.parametrize("name", EDITING)
@pytest.mark.parametrize(
    "config",
    [
        shiva.Sweep(budget=0.5, **FROZEN),
        shiva.Shiva(budget=1.0, **FROZEN),
        shiva.Ranked(budget=0.5, fill="cached", **FROZEN),
    ],
    ids=["sweep", "all tokens", "selected keys"],
)
def test_where_nothing_changes_frozen_references_are_as_if_they_ran(name: str, config: Any) -> None:
    tiny = EDITING[name]
    model = tiny.make()
    expected = steps(model, tiny)
    if isinstance(config, shiva.Ranked):
        with shiva.attach(model, config.changed({"freeze_references": None})):
            expected = steps(model, tiny)
    with shiva.attach(model, config) as session:
        found = steps(model, tiny)
        assert [record.frozen for record in session.stats] == [False, True]
        spent = session.summary().step_flops()
        assert spent[1].true < spent[0].true
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)
    with shiva.attach(model, config):
        found = steps(model, tiny, apart=0.5)
    assert (found[1] - expected[1]).abs().max() > 1e-5, "and else they are those of the step before"


@pytest.mark.parametrize("name", EDITING)
@pytest.mark.parametrize("attends", ["selected", "all"])
def test_frozen_references_are_priced_as_they_run(name: str, attends: str) -> None:
    tiny = EDITING[name]
    model = tiny.make()
    with shiva.attach(model, shiva.Sweep(budget=0.5, attends=attends, **FROZEN)) as session, torch.no_grad():
        model(**tiny.call(2, 4, 6, timestep=900.0))
        ran = count(lambda: model(**tiny.call(2, 4, 6, timestep=600.0)))
        _, frozen = session.summary().step_flops()
    assert frozen.attention == pytest.approx(ran.attention)
    assert frozen.linear == pytest.approx(ran.linear, rel=0.01)


@pytest.mark.parametrize("name", ["kontext", "klein edit"])
def test_a_pipeline_edits_with_frozen_references(name: str, tmp_path: Path) -> None:
    tiny = REACH[name]
    pipe = tiny.load(tmp_path)
    config = shiva.Sweep(budget=0.6, attends="all" if tiny.keys else "selected", **FROZEN)
    if not tiny.keys:
        with pytest.raises(ValueError, match="without freeze_references"):
            shiva.attach(pipe, config)
        return
    with shiva.attach(pipe, config.changed({"freeze_references": None})) as session:
        whole = tiny.draw(pipe)
        share = session.summary().flops_share
    with shiva.attach(pipe, config) as session:
        frozen = tiny.draw(pipe)
        assert [record.frozen for record in session.stats] == [False, False, True, True, True, True]
        assert session.summary().flops_share < share
    assert 0 < (frozen - whole).abs().max() < whole.abs().max()


# -- where the picture departs from its reference --------------------------------------------------------

DEPARTURE = shiva.Ranked(score="departure", fill="cached", budget=0.25, dense=())


def edited(timestep: float, batch: int = 1) -> dict[str, Any]:
    """Latents that are the reference but for a square of 3x3 tokens."""
    call = with_ids(batch, 6, 6, timestep)
    reference = call["hidden_states"]
    latents = reference.clone().view(batch, 6, 6, 4)
    latents[:, 2:5, 1:4] += 5
    call["hidden_states"] = torch.cat([latents.view(batch, 36, 4), reference], dim=1)
    call["img_ids"] = torch.cat([call["img_ids"], grid_ids(6, 6, first=1)])
    return {**call, "pooled_projections": noise(batch, 20, seed=3)}


def test_tokens_are_spent_where_the_picture_departs_from_the_reference() -> None:
    model = IMAGES["kontext"].make()
    square = [row * 6 + column for row in range(2, 5) for column in range(1, 4)]
    with shiva.attach(model, DEPARTURE) as session, torch.no_grad():
        model(**edited(20.0))
        model(**edited(10.0))
        assert session.ctx is not None
        for chosen in session.ctx.now.indices.values():
            assert chosen[0].tolist() == square
        assert {*session.stats[1].kept.values()} == {9}, "counts are static"


def test_a_reference_that_is_seen_once_is_remembered(tmp_path: Path) -> None:
    """Klein KV gives it at the first step only; bucketed counts as everywhere."""
    tiny = REACH["klein kv"]
    pipe = tiny.load(tmp_path)
    config = DEPARTURE.changed({"bucket": 4, "budget": 0.6, "dense": (0,)})
    with shiva.attach(pipe, config) as session:
        with pytest.raises(ValueError, match="draw at the size of the reference"):
            tiny.draw(pipe)
        square = {"image": None, "height": 64, "width": 64}
        picture = tiny.call(1, 1.0)["image"].resize((64, 64))
        drawn = pipe(**{**tiny.call(1, 1.0), **square, "image": picture}, num_inference_steps=3, output_type="latent")
        assert drawn.images.isfinite().all()
        assert len(session.stats) == 3
        assert all(kept % 4 == 0 for record in session.stats for kept in record.kept.values())


def test_what_departure_cannot_do_without() -> None:
    with pytest.raises(ValueError, match="pass fill='cached' too"):
        shiva.Ranked(score="departure")
    model = IMAGES["ovis"].make()
    with shiva.attach(model, DEPARTURE), torch.no_grad(), pytest.raises(ValueError, match="this call has none"):
        model(**with_ids(1, 4, 6))
