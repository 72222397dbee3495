"""A rehearsal for GPUs without one: every method runs on fake tensors of a device, which have shapes, no values.

What a step may not do there is found here: mix devices, read a value on the host, compute in float64.
Registering the device changes what torch takes for the process's accelerator, so no other test may share a process
with these: pytest does not collect this file by itself, `make unit` runs it apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import shiva
from shiva.core import layout as layouts

from method_table import METHODS
from tiny import BACKBONES

_setup_privateuseone_for_python_backend("rehearsal")
DEVICE = torch.device("rehearsal", 0)
"""Stands for CUDA: a build of torch without CUDA cannot index even fake tensors of a device."""
STEPS = (1000.0, 750.0, 500.0, 250.0)
WAITS = {
    "dydit": "its counts follow the data, once a site",
    "lapsum": "its learned ratios are read on the host, once a step",
    "diffcr": "its learned ratios are read on the host, once a step",
}
"""Methods that wait for the device, and for what; docs/performance.md lists them."""
READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}


class Watch(TorchDispatchMode):
    """Notes what would cost on a GPU: values read on the host, tensors of two devices in one operation, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in tensors if tensor.device.type == "rehearsal"]
        if str(func) in READS and there:
            self.found.append(f"{func} reads a value of the device")
        if there and any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
            self.found.append(f"{func} mixes devices")
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if any(tensor.dtype == torch.float64 and tensor.device.type == "rehearsal" for tensor in made):
            self.found.append(f"{func} makes float64")
        return out


def on_device(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=DEVICE)


def move(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Put fake weights in the place of all of a module's; without a dtype each keeps its own."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(on_device(parameter.data, dtype or parameter.dtype), False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_device(buffer, dtype or buffer.dtype)


def rehearse(backbone: str, config: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run of four steps does on the device that it should not, and the model itself does not (Flux: float64).

    A step settles its context on the host: the timestep it reads there, the layout once a run, and the counts.
    """
    tiny = BACKBONES[backbone]
    call, model = tiny.call(2, 7, 9), tiny.make()
    session = shiva.attach(model, config, cfg="batched")
    layout, context, timesteps = session.backbone.layout(model, call), session._context, iter(STEPS)
    monkeypatch.setattr(session, "_read_layout", lambda call: layout)
    monkeypatch.setattr(session, "_remember_shapes", lambda call: None)
    monkeypatch.setattr(session, "_move_method", lambda device: None)

    def on_host(arguments: Any) -> Any:
        with unset_fake_temporarily():
            return context(arguments)

    monkeypatch.setattr(session, "_context", on_host)
    watch, own = Watch(), Watch()
    with torch.no_grad():
        model(**call)  # what is cached once a layout, on the host, is there
    session.begin_run()
    monkeypatch.setattr("shiva.session.read_timestep", lambda timestep: next(timesteps))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        made = layouts._windows
        monkeypatch.setattr(layouts, "_windows", lambda *shape: tuple(map(fake.from_tensor, made(*shape))))
        move(model, dtype)
        move(session.method, None)
        arguments = tree_map(lambda value: on_device(value, dtype), call)
        with own, session.disabled():
            model(**arguments)
        with watch:
            for _ in STEPS:
                output = model(**arguments)[0]
                assert (output.device, output.dtype) == (DEVICE, dtype)
    return sorted(set(watch.found) - set(own.found))


CASES = [
    (backbone, method, dtype)
    for dtype in (torch.bfloat16, torch.float16)
    for backbone in ("sd3", "flux", "pixart")
    for method, row in METHODS.items()
    if backbone in row.backbones and (dtype == torch.bfloat16 or backbone == "sd3")
]


@pytest.mark.parametrize(("backbone", "method", "dtype"), CASES)
def test_a_run_on_a_gpu_reads_nothing_mixes_nothing_and_has_no_float64(
    backbone: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = METHODS[method].on
    if method in WAITS:
        with pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
            rehearse(backbone, config, dtype, monkeypatch)
        return
    assert rehearse(backbone, config, dtype, monkeypatch) == []


def test_the_rehearsal_sees_a_host_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from shiva.methods.tomesd import ToMeSDMethod

    reduction = ToMeSDMethod.reduction

    def reads(self: Any, x: torch.Tensor, *args: Any) -> Any:
        x.sum().item()
        return reduction(self, x, *args)

    monkeypatch.setattr(ToMeSDMethod, "reduction", reads)
    with pytest.raises(DataDependentOutputException):
        rehearse("sd3", shiva.ToMeSD(), torch.bfloat16, monkeypatch)
