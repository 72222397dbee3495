"""DoRA as one product against PEFT's own forward."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from shiva.adapter import adapted_layers
from shiva.backbones.base import backbone_of
from shiva.training.adapter import adapter_config, add_adapter, fold_in_training

from tiny import make_flux

NAME = "shiva"


def adapted(bias: bool = True, dtype: torch.dtype = torch.float64, **config: object) -> nn.Module:
    """One PEFT linear whose adapter has left its starting point."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10, bias=bias, dtype=dtype))
    options = {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["0"], **config}
    peft.inject_adapter_in_model(peft.LoraConfig(**options), model, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
        if "lora" in name:
            parameter.data = parameter.data.to(dtype) + torch.randn_like(parameter, dtype=dtype) / 4
    return model


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    y = model(x)
    return [y, *torch.autograd.grad((y.sin() * torch.arange(10)).sum(), [x, *trained])]


@pytest.mark.parametrize("bias", [True, False])
def test_output_and_all_gradients_are_pefts(bias: bool) -> None:
    theirs, ours = adapted(bias), adapted(bias)
    fold_in_training(ours[0], NAME)
    assert ours[0].forward.func.__name__ == "folded_forward"
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    for mine, reference in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        torch.testing.assert_close(mine, reference)


def test_an_adapter_switched_off_leaves_the_base_layer() -> None:
    model = adapted()
    fold_in_training(model[0], NAME)
    x = torch.randn(4, 6, dtype=torch.float64)
    model[0].enable_adapters(False)
    assert torch.equal(model(x), model[0].get_base_layer()(x))


@pytest.mark.parametrize("config", [{"use_dora": False}, {"lora_dropout": 0.1}])
def test_layers_of_another_kind_keep_pefts_forward(config: dict[str, object]) -> None:
    model = adapted(**config)
    fold_in_training(model[0], NAME)
    assert "forward" not in vars(model[0])


def test_autocast_runs_the_product_in_its_dtype_and_gradients_stay_float32() -> None:
    model = adapted(dtype=torch.float32)
    fold_in_training(model[0], NAME)
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in [x, *model.parameters()] if p.requires_grad)


def test_nothing_of_the_weights_size_is_kept_for_backward() -> None:
    model = adapted()
    fold_in_training(model[0], NAME)
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        model(torch.randn(2, 6, dtype=torch.float64, requires_grad=True))
    assert max(t.numel() for t in kept if t.data_ptr() not in parameters) == 2 * 10


def test_flux_is_adapted_in_its_blocks_and_not_behind_them() -> None:
    model = make_flux()
    backbone = backbone_of(model)
    add_adapter(model, adapter_config(model, backbone, 2, 2, True), seed=0)
    inside = {module for site in backbone.sites(model) if site.kind == "block" for module in site.module.modules()}
    adapted = adapted_layers(model)
    assert inside.issuperset(adapted)
    assert model.single_transformer_blocks[1].proj_out in adapted
