"""FLOPs on the meta device: the paper's dense figures, and prices that agree with a real count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import shiva
from baseline_tools import pair, sampled
from shiva import cost
from shiva.backbones.base import Site
from shiva.bench.shapes import shape
from shiva.core.cost import SiteCost, count, total
from shiva.cost import site_cost

from method_table import METHODS
from tiny import BACKBONES

DENSE = [("sd3-medium", 17.81, 11.80), ("flux-dev", 74.38, 44.63), ("pixart-sigma", 13.27, 8.96)]


@pytest.mark.parametrize(("name", "true", "paper"), DENSE)
def test_dense_flops_at_real_shapes(name: str, true: float, paper: float) -> None:
    model, call = shape(name).build("meta"), shape(name).call("meta")
    flops = count(lambda: model(**call))
    assert flops.true / 1e12 == pytest.approx(true, abs=0.01)
    assert flops.paper / 1e12 == pytest.approx(paper, abs=0.01)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_price_of_a_reduced_step_is_what_torch_counts(backbone: str) -> None:
    """Router and selection aside, which a keep-all run of the same method measures."""
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    dense = count(lambda: model(**call))
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        whole = count(lambda: model(**call))
        priced = session.cost_model()
        signals = count(lambda: session.backbone.signals(model, call))
        with torch.no_grad():
            context = session.ctx
            assert context is not None
            tokens = torch.randn(2, 64, session.spec.width)
            context.now = session.method.new_step()
            places = [site for site in session.hooks.reduced() if site.layer in (1, 2, 3)]
            router = count(lambda: [session.method.scores(tokens, site, context) for site in places])
        counts = context.counts
        assert priced.dense.true == dense.true
        assert priced.step(counts).true == whole.true - signals.true - router.true
        assert session.summary().flops.true == pytest.approx(priced.step(counts).true)


class Watched(TorchFunctionMode):
    """FLOPs of a model's own layers and attentions, by the shapes they run on."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.flops = 0
        self.weights = {id(parameter) for parameter in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (F.linear, F.conv2d) and id(args[1]) in self.weights:
            self.flops += 2 * result.numel() * args[1][0].numel()
        elif func is F.scaled_dot_product_attention:
            query, key, value = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3]
            self.flops += 2 * query[..., 0].numel() * key.shape[-2] * (key.shape[-1] + value.shape[-1])
        return result


# The price of SparseDiT's blocks knows nothing of their keys; DyDiT's counts are rounded to whole tokens a sample.
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"sparsedit", "dydit"}))
def test_a_run_costs_what_the_models_own_layers_compute(name: str) -> None:
    tiny = BACKBONES["pixart"]
    model, steps = tiny.make(), 4
    session, timesteps = sampled(model, METHODS[name].on, steps, cfg="batched")
    with session, torch.no_grad():
        with Watched(model) as watched:
            for timestep in timesteps:
                model(**pair(tiny.call(2, 7, 9, timestep)))
        with Watched(model) as signals:
            if session.method.needs_signals:
                session.backbone.signals(model, tiny.call(2, 7, 9))
        own = total(step.own for step in session.stats)
        assert session.summary().flops.true - own.true == pytest.approx(watched.flops - steps * signals.flops)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_blocks_of_one_make_are_counted_once(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []

    def price(site: Site, *rest: Any) -> SiteCost:
        counted.append(site.name)
        return site_cost(site, *rest)

    monkeypatch.setattr(cost, "site_cost", price)
    tiny = BACKBONES[backbone]
    model = tiny.make()
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session, torch.no_grad():
        model(**tiny.call(2, 8, 8))
        together = session.cost_model()
        once = len(counted)
        monkeypatch.setattr(cost, "what_prices", lambda site, *rest: site.name)
        assert session.cost_model() == together
    assert once < len(counted) - once == len(together.layers)
