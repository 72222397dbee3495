"""A session under the attention kernels that diffusers offers (`set_attention_backend`), most of which want a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from torch import Tensor
from torch.nn import functional as F

import shiva
from neighbours import TINY
from pipelines import PIPELINES

KERNEL = "sage"


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of each call of a kernel that runs on no meta device and gives half of the plain attention."""
    seen: list[tuple[int, int]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert not query.is_meta, "no kernel of a GPU runs there"
        if not torch.compiler.is_compiling():
            seen.append((query.shape[1], key.shape[1]))
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2) / 2

    name, registry = AttentionBackendName(KERNEL), _AttentionBackendRegistry
    monkeypatch.setitem(registry._backends, name, kernel)
    monkeypatch.setattr("diffusers.models.attention_dispatch._check_attention_backend_requirements", lambda name: None)
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)  # it is all models', and stays
    return seen


@torch.no_grad()
def two_steps(model: Any, name: str = "flux") -> Tensor:
    return [model(**TINY[name].call(1, 6, 6, timestep=timestep))[0] for timestep in (900.0, 600.0)][-1]


CONFIGS = {
    "selected": ("flux", shiva.Shiva(budget=0.5)),
    "kept keys": ("flux", shiva.Sweep(budget=0.5)),
    "fresh keys": ("qwen", shiva.Sweep(budget=0.5, fill="identity")),
}


@pytest.mark.parametrize("attends", CONFIGS)
@pytest.mark.parametrize("chosen", ["before", "after", "around"])
def test_reduced_blocks_run_on_the_kernel_that_was_chosen_and_are_priced_without_it(
    attends: str, chosen: str, lengths: list[tuple[int, int]]
) -> None:
    name, config = CONFIGS[attends]
    model: Any = TINY[name].make()
    with shiva.attach(model, config) as session:
        plain = two_steps(model, name)
        share = session.summary().flops_share
    if chosen == "before":
        model.set_attention_backend(KERNEL)
    with shiva.attach(model, config) as session:
        if chosen == "after":
            model.set_attention_backend(KERNEL)
        with attention_backend(KERNEL) if chosen == "around" else nullcontext():
            found = two_steps(model, name)
            assert session.summary().flops_share == share
    assert not torch.equal(found, plain)
    queries, keys = map(set, zip(*lengths, strict=True))
    assert len(queries) > 1
    assert (len(keys) > 1) == (attends == "selected")
    kept = {block.attn.processor._attention_backend for block in model.transformer_blocks}
    assert kept == {None if chosen == "around" else KERNEL}


@pytest.mark.slow
def test_a_kernel_chosen_after_compiling_is_compiled_anew(lengths: list[tuple[int, int]]) -> None:
    torch._dynamo.reset()
    name, config = CONFIGS["selected"]
    model: Any = TINY[name].make()
    with shiva.attach(model, config) as session:
        with attention_backend(KERNEL):
            expected = two_steps(model, name)
        session.compile(backend="eager")
        assert (two_steps(model, name) - expected).abs().max() > 1e-3
        model.set_attention_backend(KERNEL)
        torch.testing.assert_close(two_steps(model, name), expected)
    torch._dynamo.reset()


def test_a_share_of_flops_is_met_in_a_pipeline_under_another_kernel(
    tmp_path: Path, lengths: list[tuple[int, int]]
) -> None:
    tiny = PIPELINES["flux"]
    pipe: Any = tiny.load(tmp_path)
    pipe.transformer.set_attention_backend(KERNEL)
    dense = tiny.image(pipe)
    with shiva.attach(pipe, shiva.Shiva(flops=0.7)) as session:
        assert not torch.equal(tiny.image(pipe), dense)
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.03)
    assert torch.equal(tiny.image(pipe), dense)
