"""FLOPs on the meta device: the paper's dense figures, and prices that agree with a real count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shiva
from shiva import cost
from shiva.backbones.base import Site
from shiva.bench.shapes import shape
from shiva.core.cost import SiteCost, count
from shiva.cost import site_cost

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
