"""DyDiT holds what its paper, or its release, says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shiva
from baseline_tools import SPEC, output, sampled
from shiva.core.context import Exploration, StepContext
from shiva.core.layout import Layout
from shiva.methods.dydit import gumbel_mask
from shiva.training.adapter import adapter_config, add_adapter
from shiva.training.call import call
from shiva.training.draws import exploration, moment
from shiva.training.sections import Stage, Temperatures

from tiny import BACKBONES, make_sd3, noise


def test_dydit_mask_is_a_draw_of_the_routers_probability_with_a_softer_gradient() -> None:
    logits = torch.full((20000,), 0.8, requires_grad=True)
    torch.manual_seed(1)
    mask = gumbel_mask(logits, 5.0)
    mask.sum().backward()
    torch.manual_seed(1)
    drawn = logits.detach() + torch.logit(torch.rand(20000).clamp(1e-6, 1 - 1e-6))
    torch.testing.assert_close(mask.detach(), (drawn > 0).float())
    assert mask.mean().item() == pytest.approx(torch.sigmoid(torch.tensor(0.8)).item(), abs=0.01)
    soft = torch.sigmoid(drawn / 5)
    torch.testing.assert_close(logits.grad, soft * (1 - soft) / 5)


class Waits(TorchDispatchMode):
    """Counts what the host waits for a device to tell."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("union", [False, True])
def test_dydit_waits_for_the_device_once_an_ffn(union: bool) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 6, 6)
    with shiva.attach(model, shiva.DyDiT(bias=0.0, union=union), cfg="none"):
        output(model, call)
        with Waits() as waits:
            output(model, call)
    assert waits.count == 4 + 1, "and once a step for its timestep"


@pytest.mark.parametrize("backbone", BACKBONES)
def test_dydit_gather_path_equals_its_mask_path(backbone: str) -> None:
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 6, 6)
    with shiva.attach(model, shiva.DyDiT(bias=0.0), cfg="none") as session:
        gathered = output(model, call)
        method = session.method

        def masked(run: Any, x: Tensor, base: Tensor, site: Any, ctx: StepContext) -> Any:
            mask = torch.sigmoid(method.logits(x, site, ctx)) > 0.5
            out = run(x, None)
            return out._replace(image=out.image * mask[..., None])

        method.around = masked
        torch.testing.assert_close(gathered, output(model, call))


def test_dydit_starts_dense_and_its_count_follows_the_data() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    call = tiny.call(1, 8, 8)
    other = {**call, "hidden_states": noise(1, 4, 16, 16, seed=11) * 2}
    dense = output(model, call)
    with shiva.attach(model, shiva.DyDiT()):
        assert torch.equal(output(model, call), dense)
    with shiva.attach(model, shiva.DyDiT(bias=0.0)) as session:
        counts = []
        for sample in (call, other):
            output(model, sample)
            counts.append([n for name, n in session.stats[-1].kept.items() if name.endswith(".ff")])
        assert counts[0] != counts[1]
        assert 0 < sum(counts[0]) < 4 * 64


def test_dydit_union_computes_a_token_for_all_if_any_sample_wants_it() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    kept = {}
    for union in (False, True):
        torch.manual_seed(0)
        with shiva.attach(model, shiva.DyDiT(bias=0.0, union=union), cfg="none") as session:
            output(model, call)
            kept[union] = session.stats[-1].kept["transformer_blocks.0.ff"]
    assert kept[False] < kept[True] <= 2 * kept[False] + 1


def test_dydit_has_no_whole_graph() -> None:
    with (
        shiva.attach(make_sd3(), shiva.DyDiT()) as session,
        pytest.raises(ValueError, match="follow the data.*pass fullgraph=False"),
    ):
        session.compile()


def test_dydit_flops_loss_is_one_when_all_on_and_pushes_masks_down() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(bias=20.0, flops=0.9)) as session:
        method = session.method.train()
        model(**call)
        assert method.flops_share(session.ctx).item() == pytest.approx(1.0)
        assert method.losses(session.ctx)["flops"].item() == pytest.approx(0.0)
        session.ctx.explore = Exploration(step=600)
        assert method.target(session.ctx) == pytest.approx(0.95)
        session.ctx.explore = Exploration(step=10_000)
        loss = method.losses(session.ctx)["flops"]
        assert loss.item() == pytest.approx(2 * (1 - 0.9) ** 2)
        loss.backward()
        for router in method.routers:
            assert router.logit.bias.grad > 0  # descent lowers the logits


def test_dydit_target_goes_on_falling_from_stage_to_stage() -> None:
    stages = (Stage(name="first", steps=300, trains=("router",)), Stage(name="second", steps=900, trains=("router",)))
    method, targets = shiva.DyDiT(flops=0.8).build(SPEC), []
    for step in (0, 299, 300, 600, 1150):
        now = moment(stages, step)
        assert now is not None
        explore = exploration(now, Temperatures(), step, 0.0, 0, None)
        targets.append(method.target(StepContext(Layout(1, 1), 500.0, explore=explore)))
    assert targets == pytest.approx([1.0, 0.9602, 0.96, 0.9, 0.8])


def test_dydit_flops_share_is_that_of_the_counted_model() -> None:
    """With all masks off, F is what remains of the blocks: dense without the FFN, counted by torch."""
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(bias=-50.0, flops=0.99)) as session:
        output(model, call)
        summary, cost = session.summary(), session.cost_model()
        blocks = sum(layer(64).true for layer in cost.layers)
        expected = (summary.flops.true - cost.outside.true) / blocks
        session.method.train()
        model(**call)
        assert session.method.flops_share(session.ctx).item() == pytest.approx(expected, rel=1e-6)


def test_dydit_aims_at_the_flops_of_the_model_without_its_adapter() -> None:
    """The adapter is folded into the weights afterwards: with all masks off F is the same with it and without."""
    shares = []
    for adapted in (False, True):
        model, arguments = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
        with shiva.attach(model, shiva.DyDiT(bias=-50.0, flops=0.99, hold=0, warmup=1)) as session:
            if adapted:
                add_adapter(model, adapter_config(model, session.backbone, 4, 4, True), seed=0)
                session.rehook()
            method = session.method.train()
            _, record = call(session, arguments, explore=Exploration(step=10))
            shares.append(0.99 - (record.losses["flops"].item() / method.config.flops_weight) ** 0.5)
    assert shares[1] == pytest.approx(shares[0], rel=1e-6)


@torch.no_grad()
def test_dydit_has_its_losses_also_at_the_end_of_a_run_without_gradient() -> None:
    """As where the state that a micro-batch learns from is reached by the model's own run."""
    model = make_sd3()
    session, timesteps = sampled(model, shiva.DyDiT(flops=0.99), 2)
    with session:
        session.method.train()
        for timestep in timesteps:
            _, record = call(session, BACKBONES["sd3"].call(2, 8, 8, timestep))
            assert "flops" in record.losses


def test_dydit_refuses_a_target_that_its_ffns_cannot_reach() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(flops=0.2)) as session:
        session.method.train()
        model(**call)
        with pytest.raises(ValueError, match=r"flops=0\.2 cannot be reached"):
            session.method.losses(session.ctx)


def test_dydit_loss_trains_its_routers_to_the_target() -> None:
    model, call = make_sd3().requires_grad_(False), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(flops=0.85, hold=0, warmup=1)) as session:
        method = session.method.train()
        optimizer = torch.optim.Adam(method.parameters(), lr=0.05)
        shares = []
        for _ in range(80):
            _, ctx = session.call(call, explore=Exploration(step=10))
            optimizer.zero_grad()
            method.losses(ctx)["flops"].backward()
            optimizer.step()
            shares.append(method.flops_share(ctx).item())
        assert sum(shares[-20:]) / 20 == pytest.approx(0.85, abs=0.02)
