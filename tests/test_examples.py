"""What examples/ adds from outside works like what is inside."""

from __future__ import annotations

from pathlib import Path

import torch

import shiva
from examples.method_from_outside import HeldVelocity
from pipelines import PIPELINES

from tiny import BACKBONES


def test_a_method_from_outside_holds_the_velocity_of_what_it_skips(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    dense = tiny.image(pipe, steps=6)
    with shiva.attach(pipe, HeldVelocity(keep=1.0)):
        torch.testing.assert_close(tiny.image(pipe, steps=6), dense)
    with shiva.attach(pipe, HeldVelocity(keep=0.5, reset=3)) as session:
        image = tiny.image(pipe, steps=6)
        kept = [set(step.kept.values()) for step in session.stats]
        assert kept == [{48}, {24}, {24}] * 2, "all blocks run on the same tokens, and all tokens every third step"
        assert 0.5 < session.summary().flops_share < 0.8
    assert not torch.equal(image, dense)
    assert torch.equal(tiny.image(pipe, steps=6), dense)


def test_its_step_is_a_program() -> None:
    model, tiny = BACKBONES["sd3"].make(), BACKBONES["sd3"]
    call = tiny.call(1, 6, 6)
    with shiva.attach(model, HeldVelocity(keep=0.25)) as session, torch.no_grad():
        assert torch.equal(session.program(**call)(**call)[0], model(**call)[0])


def test_a_model_site_replaces_the_prediction_of_skipped_tokens_only() -> None:
    model, tiny = BACKBONES["sd3"].make(), BACKBONES["sd3"]
    with shiva.attach(model, HeldVelocity(keep=0.25)) as session, torch.no_grad():
        first = model(**tiny.call(2, 6, 6, timestep=900.0))[0]
        second = model(**tiny.call(2, 6, 6, timestep=800.0), return_dict=False)[0]
        held = (second == first).all(dim=1).view(2, 6, 2, 6, 2).all(dim=4).all(dim=2)
        assert held.sum(dim=(1, 2)).tolist() == [27, 27]
        assert session.stats[1].kept["transformer_blocks.3"] == 9
