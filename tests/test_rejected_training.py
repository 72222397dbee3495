"""Training with reused updates: the counterfactual, the simulated cache, and the loop around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shiva
from shiva.core.context import Earlier, Exploration
from shiva.core.method import BackboneSpec
from shiva.methods import shiva as shiva_module
from shiva.ops.fill import geometric_age, stale_updates
from shiva.ops.networks import ContextRouter
from shiva.ops.topk import Selection
from shiva.training.noise import FlowMatching, VariancePreserving
from shiva.training.recipe import recipe_from
from shiva.training.trainer import Trainer
from training_tiny import make_folder, tiny_recipe

from tiny import call_sd3, make_sd3

ROWS = COLUMNS = 4
N, LAYER, AGO = ROWS * COLUMNS, 2, 3.0


@pytest.mark.parametrize("options", [{"fill": "cached"}, {"fill": "near"}, {"fill": "near", "near": "spatial"}, {}])
def test_the_counterfactual_is_the_derivative_of_moving_a_token_to_its_own_update(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """dL/dpi_i against a finite difference of the definition, in float64.

    Token i leaves the block with x_i + g * own_i + (1 - g) * other_i: `own` is its update (the teacher's where the
    block did not run on it), `other` what it gets if rejected, found here by looking at every token.
    """
    model = make_sd3().double()
    calls = [
        {name: value.double() if value.is_floating_point() else value for name, value in call.items()}
        for call in (call_sd3(2, ROWS, COLUMNS, timestep=500.0), call_sd3(2, ROWS, COLUMNS, timestep=700.0))
    ]
    target = torch.randn(2, 4, 2 * ROWS, 2 * COLUMNS, dtype=torch.float64)
    caught: dict[str, Tensor] = {}

    def leaf(scores: Tensor, k: int, *rest: Any) -> Selection:
        caught["indices"] = scores.detach().topk(k).indices.sort(dim=-1).values
        caught["pi"] = torch.rand(scores.shape, dtype=torch.float64, requires_grad=True)
        return Selection(caught["indices"], caught["pi"])

    monkeypatch.setattr(shiva_module, "select_tokens", leaf)
    config = shiva.Shiva(budget=0.4, dense=(0, 1, 3), **options)
    with shiva.attach(model, config) as session:
        method = session.method.train()
        ages: list[Tensor] = []
        draw = method.fill.simulated_age
        method.fill.simulated_age = lambda *args: ages.append(draw(*args)) or ages[-1]  # type: ignore[method-assign]
        with torch.no_grad(), session.disabled():
            with session.record() as teacher:
                model(**calls[0])
            with session.record() as earlier:
                model(**calls[1])
        teacher.earlier = Earlier(earlier.updates, AGO)
        output, _ = session.call(calls[0], teacher=teacher, explore=Exploration(ratio=0.4))
        loss = (output[0] - target).square().sum()
        loss.backward()
        (age,) = ages

    indices = caught["indices"]
    block: Any = model.transformer_blocks[LAYER]
    forward = block.forward

    def brute(sample: int, token: int, shift: float) -> float:
        """The loss with g moved by `shift` for one token, from a block whose tokens are chosen here by hand."""

        def replaced(hidden_states: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
            chosen = torch.stack([x[i] for x, i in zip(hidden_states, indices, strict=True)])
            text, values = forward(hidden_states=chosen, **rest)
            out = torch.empty_like(hidden_states)
            for b in range(2):
                picked = indices[b].tolist()
                updates = {i: values[b, place] - hidden_states[b, i] for place, i in enumerate(picked)}
                for i in range(N):
                    own = updates.get(i, teacher.updates[LAYER][b, i])
                    other = what_it_gets(b, i, hidden_states[b], updates)
                    g = float(i in updates) + (shift if (b, i) == (sample, token) else 0.0)
                    out[b, i] = hidden_states[b, i] + g * own + (1 - g) * other
            return text, out

        def what_it_gets(b: int, i: int, x: Tensor, updates: dict[int, Tensor]) -> Tensor:
            if not options:
                return torch.zeros_like(x[i])
            if options["fill"] == "cached":
                share = (float(age[b, i]) + 1) / AGO
                return (1 - share) * teacher.updates[LAYER][b, i] + share * earlier.updates[LAYER][b, i]

            def distance(j: int) -> float:
                if options.get("near") == "spatial":
                    return float((i // COLUMNS - j // COLUMNS) ** 2 + (i % COLUMNS - j % COLUMNS) ** 2)
                return -float(torch.cosine_similarity(x[i], x[j], dim=0))

            return updates[min((j for j in updates if j != i), key=distance)]

        block.forward = replaced
        try:
            with torch.no_grad():
                return float((model(**calls[0])[0] - target).square().sum())
        finally:
            block.forward = forward

    assert brute(0, 0, 0.0) == pytest.approx(float(loss.detach()), rel=1e-9), "the forward is the hard one"
    step = 1e-4
    found = caught["pi"].grad
    assert found is not None
    for sample, token in [(0, 0), (0, 5), (0, 11), (1, 2), (1, 7), (1, 15), *enumerate(indices[:, 0].tolist())]:
        slope = (brute(sample, token, step) - brute(sample, token, -step)) / (2 * step)
        assert float(found[sample, token]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_simulated_ages_follow_the_geometric_law_up_to_the_oldest() -> None:
    waited = geometric_age(torch.rand(200_000), keep=0.6, oldest=4)
    shares = [(waited == a).float().mean().item() for a in range(5)]
    assert shares == pytest.approx([0.6, 0.24, 0.096, 0.064, 0.0], abs=5e-3)
    assert geometric_age(torch.rand(9), keep=1.0, oldest=4).max() == 0
    now, earlier = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    stale = stale_updates(now, earlier, torch.tensor([[0.0, 1.0, 7.0]]), steps=2)
    torch.testing.assert_close(stale[0, 0], (now + earlier)[0, 0] / 2)
    torch.testing.assert_close(stale[0, 1:], earlier[0, 1:])


def test_an_earlier_timestep_is_where_the_sampler_was() -> None:
    """A run of 25 steps: three steps before its 10th is its 7th, whatever the training density."""
    for shift in (1.0, 3.0):
        sigmas = [shift * q / (1 + (shift - 1) * q) for q in ((25 - i) / 25 for i in range(25))]
        for density in ("uniform", "scheduler"):
            process = FlowMatching(density, shift)
            assert process.earlier(1000 * sigmas[9], 3 / 25, tokens=64) == pytest.approx(1000 * sigmas[6])
            assert process.earlier(1000 * sigmas[1], 3 / 25, tokens=64) == pytest.approx(1000), "not before its start"
    assert VariancePreserving([0.5] * 1000).earlier(500.0, 2 / 25, tokens=64) == 580.0


def test_a_router_that_reads_age_starts_as_one_that_does_not() -> None:
    torch.manual_seed(0)
    plain = ContextRouter(8, 4, 4, 2, bottleneck=6)
    torch.manual_seed(0)
    aware = ContextRouter(8, 4, 4, 2, bottleneck=6, signals=("time", "prompt", "layer", "age"))
    x, time, prompt, age = torch.randn(2, N, 8), torch.randn(2, 4), torch.randn(2, 4), torch.rand(2, N) * 5
    assert torch.equal(aware(x, time, prompt, 1, age), plain(x, time, prompt, 1))
    assert "proj_a" not in plain.state_dict(), "checkpoints without it load as they are"
    torch.nn.init.normal_(aware.proj_a)
    hidden = x @ aware.proj_x.weight.T + aware.contexts(time, prompt)[1][:, None]
    hidden = torch.nn.functional.silu(hidden + torch.log(1 + age)[..., None] * aware.proj_a)
    torch.testing.assert_close(aware(x, time, prompt, 1, age), aware.score(aware.norm(hidden))[..., 0])


# -- the loop --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reuse"))


AGED = {"fill": "cached", "signals": ["time", "prompt", "layer", "age"]}


def trained(folder: Path, output: Path, **changes: Any) -> tuple[Trainer, Path]:
    stages = {"warmup": {"steps": 4, "warmup": 0}, "policy": {"steps": 1}, "joint": {"steps": 1}}
    recipe = tiny_recipe(folder, stages=stages, validation={"images": 0}, **changes)
    trainer = Trainer(recipe_from(recipe), output)
    return trainer, trainer.run()


def test_training_with_a_cache_learns_age_and_costs_one_dense_pass_more(folder: Path, tmp_path: Path) -> None:
    calls = {}
    for name, method in (("identity", {}), ("cached", AGED)):
        trainer = Trainer(recipe_from(tiny_recipe(folder, method=method)), tmp_path / f"count-{name}")
        trainer.prepare()
        batch = trainer.validator.batches()[0]
        seen: list[float] = []
        trainer.session.transformer.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(float(kwargs["timestep"][0])), with_kwargs=True
        )
        trainer.objectives.losses(batch)
        calls[name] = seen
    assert len(calls["identity"]) == 2
    now, before, again = calls["cached"]
    assert now == again < before

    trainer, checkpoint = trained(folder, tmp_path / "run", method=AGED)
    routers: Any = trainer.method.routers
    assert any(router.proj_a.abs().max() > 0 for router in routers.routers)
    loaded = shiva.ShivaCheckpoint.from_pretrained(checkpoint)
    assert loaded.method_config.signals == ("time", "prompt", "layer", "age")
    assert loaded.method_config.fill == "cached"
    measured = trainer.validator.measure()
    assert measured["mse/keep_0.5"] > 0, "validation runs the reduced model, not a first step"


def test_recomputing_blocks_draws_the_same_ages(folder: Path, tmp_path: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        compute = {"gradient_checkpointing": checkpointing}
        stages = {"warmup": {"steps": 1, "score_noise": 0.3}}
        recipe = recipe_from(tiny_recipe(folder, method=AGED, compute=compute, stages=stages))
        trainer = Trainer(recipe, tmp_path / str(checkpointing))
        trainer.prepare()
        routers = list(trainer.method.parameters())
        for parameter in routers:
            parameter.requires_grad_(True)
        batch = trainer.validator.batches()[0]
        batch = replace(batch, exploration=replace(batch.exploration, ratio=0.5, score_noise=0.3))
        trainer.session.transformer.train(checkpointing)
        trainer.objectives.backward(batch, 1.0, Tensor.backward)
        gradients.append([p.grad for p in routers if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 4
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fill", ["cached", "near", "auto"])
@pytest.mark.parametrize("name", ["NeuralSort", "LapSum", "DiffCR", "Shiva"])
def test_every_selector_trains_with_it(name: str, fill: str, folder: Path, tmp_path: Path) -> None:
    method: dict[str, Any] = {"name": name, "fill": fill, "keep": 0.5}
    if name == "Shiva":
        method = {"fill": fill, "estimator": "input", "budget": 0.5}
    recipe = tiny_recipe(folder, stages=[])
    recipe["method"] = method
    recipe["stages"] = [{"name": "all", "steps": 1, "trains": ["router"], "ratios": "stratified"}]
    trainer = Trainer(recipe_from(recipe), tmp_path)
    trainer.prepare()
    batch = trainer.validator.batches()[0]
    batch = replace(batch, exploration=replace(batch.exploration, ratio=0.5))
    routers = trainer.method.groups()["router"]
    for parameter in routers:
        parameter.requires_grad_(True)
    losses, _ = trainer.objectives.backward(batch, 1.0, Tensor.backward)
    assert losses["loss"].isfinite()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in routers)


def test_what_cannot_train_with_it_says_why() -> None:
    spec = BackboneSpec("SD3Transformer2DModel", 4, 32, 32, 32)
    model = make_sd3()
    with shiva.attach(model, shiva.DyDiT(fill="cached")) as session:
        session.method.train()
        with pytest.raises(ValueError, match="DyDiT trains with fill='identity'"):
            model(**call_sd3(1, ROWS, COLUMNS))
    with shiva.attach(model, shiva.Shiva(fill="cached")) as session:
        session.method.train()
        with pytest.raises(ValueError, match=r"the teacher's `earlier`"):
            session.call(call_sd3(1, ROWS, COLUMNS), explore=Exploration(ratio=0.5))
    with pytest.raises(ValueError, match=r"signals\[1\]='size' is unknown"):
        shiva.Shiva(signals=("time", "size")).build(spec)
