"""SparseDiT holds what its paper says of it, and what its adaptation to text promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiva
from baseline_tools import SPEC, output
from shiva.adapter import AttachedAdapter
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec
from shiva.methods.sparsedit import SparseDiTMethod, cell_centres, pool, pruning_rate, sparse_grid, upsample
from shiva.training.adapter import adapter_config, adapter_parameters, adapter_state, add_adapter

from method_table import METHODS
from tiny import BACKBONES, make_sd3, noise


def test_sparsedit_schedule() -> None:
    assert pruning_rate(0.0, 0.61, 0.86) == pytest.approx(0.61)
    assert pruning_rate(250.0, 0.61, 0.86) == pytest.approx(0.61)
    assert pruning_rate(625.0, 0.61, 0.86) == pytest.approx((0.61 + 0.86) / 2)
    assert pruning_rate(1000.0, 0.61, 0.86) == pytest.approx(0.86)
    assert pruning_rate(float("nan"), 0.61, 0.86) == pytest.approx(0.61)
    assert [sparse_grid((32, 32), r) for r in (0.61, 0.86, 0.90, 0.96)] == [(20, 20), (12, 12), (10, 10), (6, 6)]
    assert sparse_grid((64, 48), 0.75) == (32, 24)
    assert sparse_grid((2, 2), 0.99) == (1, 1)


def test_sparsedit_pooling_and_upsampling() -> None:
    x = noise(2, 48, 5)
    pooled = pool(x, Layout(6, 8), (3, 4))
    cells = x.view(2, 3, 2, 4, 2, 5).mean(dim=(2, 4)).flatten(1, 2)
    torch.testing.assert_close(pooled, cells)
    torch.testing.assert_close(pool(upsample(pooled, (3, 4), Layout(6, 8)), Layout(6, 8), (3, 4)), pooled)
    torch.testing.assert_close(pool(torch.ones(1, 63, 2), Layout(7, 9), (4, 5)), torch.ones(1, 20, 2))
    assert cell_centres(Layout(6, 8), (3, 4), x.device).tolist()[:5] == [9, 11, 13, 15, 25]
    assert torch.equal(cell_centres(Layout(6, 8), (6, 8), x.device), torch.arange(48))


def test_sparsedit_layout_of_24_layers() -> None:
    method = shiva.SparseDiT().build(BackboneSpec("toy", 24, 8, 8, 8))
    assert isinstance(method, SparseDiTMethod)
    layout = "".join(method.roles.get(layer, ("-", 0))[0][0] for layer in range(24))
    assert layout == "--" + "gsssrd" * 3 + "----"
    assert len(method.merges) == 3
    with pytest.raises(ValueError, match="do not fit the 6 layers"):
        shiva.SparseDiT().build(SPEC)


def test_sparsedit_recover_starts_from_the_modules_input() -> None:
    method = shiva.SparseDiT(bottom=0, top=0).build(SPEC)
    dense = noise(1, 9, 16)
    assert torch.equal(method.merges[0](noise(1, 9, 16, seed=5), dense), dense)


@pytest.mark.parametrize("backbone", ["sd3", "sd35", "pixart", "dit"])
def test_sparsedit_blocks_on_the_full_grid_are_ordinary_blocks(backbone: str) -> None:
    """With equal query and key sets, and merging that passes the sparse tokens on, nothing is approximated."""
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    dense = output(model, call)
    with shiva.attach(model, METHODS["sparsedit"].off) as session:
        method = session.method
        nn.init.eye_(method.merges[0].sparse.weight)
        nn.init.zeros_(method.merges[0].dense.weight)
        method.around = lambda run, x, base, site, ctx: (
            method.block(run, x, ctx.layout.shape[1:], site, ctx)
            if site.kind == "block"
            else method.inside(run, x, site, ctx)
        )
        torch.testing.assert_close(output(model, call), dense, atol=1e-5, rtol=1e-5)


def test_sparsedit_generate_attends_from_pooled_tokens_and_text_to_all_tokens() -> None:
    """The block written out for SD3: q of pooled tokens and text, k and v of all tokens and text."""
    model = make_sd3(layers=4)
    block: Any = model.transformer_blocks[0]
    x, text, temb = noise(1, 64, 32), noise(1, 5, 32, seed=2), noise(1, 32, seed=3)
    seen: dict[str, Tensor] = {}
    with shiva.attach(model, METHODS["sparsedit"].on), torch.no_grad():
        block.register_forward_hook(lambda m, a, out: seen.update(out=out[1], text=out[0]))
        handle = block.register_forward_pre_hook(
            lambda m, a, kw: (a, {**kw, "hidden_states": x, "encoder_hidden_states": text, "temb": temb}),
            with_kwargs=True,
        )
        output(model, BACKBONES["sd3"].call(1, 8, 8))
        handle.remove()
    with torch.no_grad():
        pooled = pool(x, Layout(8, 8), (4, 4))
        query, gate, shift, scale, gate_mlp = block.norm1(pooled, emb=temb)
        keys = block.norm1(x, emb=temb)[0]
        context = block.norm1_context(text, emb=temb)[0]
        attn = block.attn

        def heads(*parts: Tensor) -> Tensor:
            return torch.cat(parts, dim=1).unflatten(2, (4, 8)).transpose(1, 2)

        attended = nn.functional.scaled_dot_product_attention(
            heads(attn.to_q(query), attn.add_q_proj(context)),
            heads(attn.to_k(keys), attn.add_k_proj(context)),
            heads(attn.to_v(keys), attn.add_v_proj(context)),
        )
        update = attn.to_out[0](attended.transpose(1, 2).flatten(2)[:, :16])
        hidden = pooled + gate[:, None] * update
        ffn = block.ff(block.norm2(hidden) * (1 + scale[:, None]) + shift[:, None])
        expected = hidden + gate_mlp[:, None] * ffn
    torch.testing.assert_close(seen["out"], expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_training_acts_on_sparsedits_keys_as_the_folded_one_does() -> None:
    trained, plain = make_sd3(), make_sd3()
    call = BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(trained, METHODS["sparsedit"].on) as session, torch.no_grad():
        config = adapter_config(trained, session.backbone, 4, 4, True)
        add_adapter(trained, config, seed=0)
        session.rehook()
        for seed, parameter in enumerate(adapter_parameters(trained)):
            parameter.add_(0.1 * noise(*parameter.shape, seed=seed))
        live = trained(**call)[0]
        state, weights = adapter_state(trained), session.method.state_dict()
    adapter = AttachedAdapter(plain, config, state)
    with shiva.attach(plain, METHODS["sparsedit"].on) as session, torch.no_grad():
        session.method.load_state_dict(weights)
        torch.testing.assert_close(plain(**call)[0], live, rtol=1e-4, atol=1e-5)
    adapter.remove()


def test_sparsedit_tokens_stay_few_inside_a_module_and_follow_the_timestep() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    config = shiva.SparseDiT(rates=(0.44, 0.75), split=(1, 1, 1, 1), bottom=0, top=0)
    with shiva.attach(model, config) as session, session.record() as tape:
        for timestep, side in [(1000.0, 4), (100.0, 6)]:
            output(model, tiny.call(1, 8, 8, timestep))
            assert [tape.outputs[layer].shape[1] for layer in range(4)] == [side**2, side**2, 64, 64]
            assert list(session.ctx.counts) == [side**2, side**2, 64, 64]
            assert set(session.stats[-1].kept) == {f"transformer_blocks.{i}" for i in range(4)}
        assert session.summary().flops_share < 1


def test_sparsedit_is_refused_where_attention_is_rotary() -> None:
    with pytest.raises(ValueError, match="SparseDiT is not defined on FluxTransformer2DModel"):
        shiva.attach(BACKBONES["flux"].make(), METHODS["sparsedit"].on)
