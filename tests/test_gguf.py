"""A transformer from a GGUF file, in which linear layers hold packed bytes, in a pipeline from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig
from torch import nn

import shiva
from pipelines import PIPELINES
from test_checkpoint import adapter, varied_method

from tiny import make_flux

FLUX = PIPELINES["flux"]


def write_gguf(model: nn.Module, path: Path) -> None:
    """Linear layers in blocks of 32 numbers of 8 bits, as far as their rows are whole blocks."""
    gguf = pytest.importorskip("gguf")
    packed = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), packed), raw_dtype=packed)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    pipe: Any = FLUX.load(tmp_path)
    write_gguf(pipe.transformer, tmp_path / "flux.gguf")
    pipe.transformer = FluxTransformer2DModel.from_single_file(
        tmp_path / "flux.gguf",
        config=str(tmp_path),
        subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    assert any(parameter.dtype == torch.uint8 for parameter in pipe.transformer.parameters())
    return pipe


def test_a_pipeline_of_a_gguf_file(pipe: Any) -> None:
    dense = FLUX.image(pipe)
    plain: Any = FLUX.make()
    plain.set_progress_bar_config(disable=True)
    with shiva.attach(pipe, shiva.Shiva(budget=1.0)):
        assert torch.equal(FLUX.image(pipe), dense)
    for method in (shiva.Sweep(budget=0.5), shiva.ShivaCheckpoint.of(varied_method(make_flux(), budget=0.5))):
        with shiva.attach(pipe, method) as session, shiva.attach(plain, method) as other:
            assert not torch.equal(FLUX.image(pipe), dense)
            FLUX.image(plain)
            assert session.summary().flops == other.summary().flops
    assert torch.equal(FLUX.image(pipe), dense)


def test_an_adapter_on_packed_bytes_is_refused_where_it_needs_their_norms(pipe: Any) -> None:
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(make_flux(), budget=0.5), **adapter(make_flux()))
    dense = FLUX.image(pipe)
    with pytest.raises(ValueError, match=r"DoRA.*GGUF.*pipe\.transformer\.dequantize\(\)"):
        shiva.attach(pipe, checkpoint)
    assert torch.equal(FLUX.image(pipe), dense)
    pipe.transformer.dequantize()
    with shiva.attach(pipe, checkpoint):
        adapted = FLUX.image(pipe)
    assert (adapted - dense).abs().max() > 1e-3
    torch.testing.assert_close(FLUX.image(pipe), dense, rtol=1e-3, atol=1e-3)


def test_a_plain_low_rank_adapter_runs_beside_packed_bytes(pipe: Any) -> None:
    made = adapter(make_flux())
    made["adapter_config"] |= {"use_dora": False}
    made["adapter_weights"] = {name: t for name, t in made["adapter_weights"].items() if "magnitude" not in name}
    checkpoint = shiva.ShivaCheckpoint.of(varied_method(make_flux(), budget=0.5), **made)
    dense = FLUX.image(pipe)
    with shiva.attach(pipe, checkpoint, budget=1.0):
        adapted = FLUX.image(pipe)
    assert (adapted - dense).abs().max() > 1e-3
    assert torch.equal(FLUX.image(pipe), dense)
