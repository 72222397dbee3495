"""ToFu holds what its paper says of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch.nn.functional import cosine_similarity

import shiva
from baseline_tools import SPEC, matched, output
from shiva.ops.merging import merge

from tiny import call_sd3, make_sd3


def test_mlerp_keeps_direction_of_the_mean_and_the_largest_norm() -> None:
    x, matching = matched(2, (8, 8), 0.6)
    alone = matching.kept.shape[1]
    means, fused = merge(x, matching)[:, alone:], merge(x, matching, "mlerp")[:, alone:]
    torch.testing.assert_close(cosine_similarity(means, fused, dim=-1), torch.ones(2, 16))
    for sample, slot in itertools.product(range(2), range(16)):
        others = matching.sources[sample][matching.target[sample] == slot]
        group = torch.cat([matching.destinations[sample, slot : slot + 1], others])
        largest = x[sample, group].norm(dim=-1).max()
        torch.testing.assert_close(fused[sample, slot].norm(), largest, rtol=1e-5, atol=0)
        if len(group) == 1:
            assert torch.equal(fused[sample, slot], x[sample, group[0]])


def test_pruning_leaves_destinations_as_they_are() -> None:
    x, matching = matched(2, (8, 8), 0.6)
    kept = x.gather(1, matching.positions[..., None].expand(-1, -1, 16))
    assert torch.equal(merge(x, matching, "prune"), kept)


def test_tofu_that_only_averages_is_tomesd() -> None:
    model, call = make_sd3(), call_sd3(2, 8, 8)
    results = []
    for config in (shiva.ToMeSD(), shiva.ToFu(switch=0.0, rule="mean"), shiva.ToFu()):
        with shiva.attach(model, config):
            results.append(output(model, call))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_tofu_switches_at_its_depth() -> None:
    method = shiva.ToFu().build(replace(SPEC, layers=4))
    assert [method.combine(layer) for layer in range(4)] == ["prune", "prune", "mlerp", "mlerp"]
