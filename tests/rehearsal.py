"""A rehearsal for GPUs without one: methods run and train on fake tensors of a device, which have shapes, no values.

What a step may not do there is found here: mix devices, read a value on the host, copy from the host in block after
block, compute in float64, hand a block another dtype than the dense model does. A read is noted and answered with some
value, so that the rest runs too.
Registering the device changes what torch takes for the process's accelerator, so no other test may share a process
with these: pytest does not collect this file by itself, `make unit` runs it apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import shiva
from shiva.core import layout as layouts
from shiva.core.context import Exploration
from shiva.session import Session
from shiva.training.adapter import RunAdapter
from shiva.training.call import blocks_of, learner
from shiva.training.draws import Before, MicroBatch
from shiva.training.noise import FlowMatching
from shiva.training.objectives import Objectives
from shiva.training.sections import WEIGHTS, Adapter
from tiny_images import IMAGES
from tiny_videos import VIDEOS

from method_table import METHODS
from tiny import BACKBONES, Tiny

_setup_privateuseone_for_python_backend("rehearsal")
torch.rehearsal.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
FakeTensorMode.avoid_device_init = True  # type: ignore[assignment]
DEVICE = torch.device("rehearsal", 0)
"""Stands for CUDA: a build of torch without CUDA cannot index even fake tensors of a device."""
STEPS = (1000.0, 750.0, 500.0, 250.0)
MODELS: dict[str, Tiny] = {**BACKBONES, **IMAGES, **VIDEOS}
MOST_USED = ("flux2", "qwen", "zimage", "chroma", "auraflow", "wan", "ltx", "hunyuan-video", "cogvideox", "mochi")
"""Beside SD3, Flux and PixArt."""
READS = {"lapsum": 4, "diffcr": 4, "dydit": 16, "dydit on flux": 8}
"""Values that a run of four steps reads on the host beyond the timesteps; docs/performance.md says which."""
TRAINING_READS = {"diffcr": 4, "dydit": 4, "lapsum": 1, **{name: 1 for name in METHODS if name.startswith("shiva")}}
"""Of a training micro-batch: the ratios it runs at, once, or at each of four layers."""


class Watch(TorchDispatchMode):
    """Notes what would cost on a GPU: values read on the host, tensors of two devices in one operation, float64."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.found: list[str] = []
        self.reads = 0
        self.width = width
        """Of tokens, which alone may not be float64 where it is given."""
        self.block: int | None = None
        self.filled: set[int] = set()
        """Blocks in which something was copied from the host; one of them may do so, once for all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in tensors if tensor.device.type == "rehearsal"]
        if there and any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
            self.found.append(f"{func} mixes devices")
        answer = ANSWERS.get(str(func))
        if answer is not None and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            self.reads += bool(there)
            return answer(*args)
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        from_host = any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors)
        if self.block is not None and from_host and any(tensor.device.type == "rehearsal" for tensor in made):
            self.filled.add(self.block)
        if there and any(tensor.device.type == "cpu" for tensor in made):
            self.found.append(f"{func} copies to the host")
        doubles = [t for t in made if t.dtype == torch.float64 and t.device.type == "rehearsal"]
        if any(self.width is None or tensor.shape[-1:] == (self.width,) for tensor in doubles):
            self.found.append(f"{func} makes float64")
        return out

    def to_list(self, tensor: FakeTensor) -> Any:
        """All values of a tensor, in one read."""
        with unset_fake_temporarily():
            if tensor.constant is not None:
                return tensor.constant.tolist()
            self.reads += 1
            return torch.full(tensor.shape, some_value(tensor)).tolist()


def some_value(tensor: torch.Tensor) -> Any:
    return 0.5 if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 1


def half_of_it(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_zeros((mask.numel() // 2, mask.ndim), dtype=torch.long)


ANSWERS: dict[str, Callable[..., Any]] = {
    "aten._local_scalar_dense.default": some_value,
    "aten.equal.default": lambda *tensors: False,
    "aten.nonzero.default": half_of_it,
}
"""What a read returns here in the place of values that nobody has."""


def on_device(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=DEVICE)


def move(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Put fake weights in the place of all of a module's; an adapter's, and all without a dtype, keep their own."""
    for path, part in module.named_modules():
        own = None if "lora_" in path else dtype
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(on_device(parameter.data, own or parameter.dtype), False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_device(buffer, own or buffer.dtype)


@dataclass
class Rehearsal:
    """A session on the fake device."""

    session: Session
    arguments: dict[str, Any]
    """Of a call, on the device."""
    watch: Watch
    own: Watch
    """What the model itself does."""

    def verdict(self, reads: int, calls: int) -> list[str]:
        read = self.watch.reads - calls * self.own.reads
        counted = [] if read == reads else [f"{read} reads of values, not {reads}"]
        if len(self.watch.filled) > 1:
            counted.append(f"copies from the host in each of the blocks {sorted(self.watch.filled)}")
        return sorted(set(self.watch.found) - set(self.own.found)) + counted


@contextlib.contextmanager
def rehearsed(
    name: str, config: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, training: bool = False
) -> Iterator[Rehearsal]:
    """A session on the device, after one dense call there.

    A step settles its context on the host: the timestep it reads there, the layout once a run, and the counts. In
    training, operators on scores (B, N) are in float64, on tokens they may not be.
    """
    tiny = MODELS[name]
    call, model = tiny.call(2, 7, 9), tiny.make()
    session = shiva.attach(model, config, cfg="batched")
    if training:
        RunAdapter(session, Adapter(rank=2, alpha=2), seed=0).switch_on()
    with torch.no_grad():
        model(**call)  # what is cached once a layout, on the host, is there
    layout, context, timesteps = session.backbone.layout(model, call), session._context, iter(STEPS)
    if training:
        cost = session.cost_model()
        monkeypatch.setattr(session, "cost_model", lambda: cost)
    monkeypatch.setattr(session, "_read_layout", lambda call: layout)
    monkeypatch.setattr(session, "_remember_shapes", lambda call: None)
    monkeypatch.setattr(session, "_move_method", lambda device: None)

    def on_host(arguments: Any) -> Any:
        with contextlib.nullcontext() if training else unset_fake_temporarily():
            return context(arguments)

    monkeypatch.setattr(session, "_context", on_host)
    session.begin_run()
    monkeypatch.setattr("shiva.step.read_timestep", lambda timestep: next(timesteps))
    watch, own = Watch(session.spec.width if training else None), Watch()
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: watch.to_list(tensor))
    given: dict[int, list[torch.dtype]] = {}

    def same_dtypes(layer: int, args: Any, kwargs: Any) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        dtypes = [leaf.dtype for leaf in leaves if leaf.is_floating_point()]
        if given.setdefault(layer, dtypes) != dtypes:
            watch.found.append(f"block {layer} is given {dtypes}, by the dense model {given[layer]}")
        watch.block = layer

    def leave(*block: Any) -> None:
        watch.block = None

    with FakeTensorMode(allow_non_fake_inputs=True):
        made = layouts._windows

        def windows(shape: Any, cell: Any, device: torch.device) -> Any:
            with unset_fake_temporarily():
                real = made(shape, cell, layouts.HOST)
            return layouts.Windows(*(torch.empty(part.shape, dtype=part.dtype, device=device) for part in real))

        monkeypatch.setattr(layouts, "_windows", windows)
        move(model, dtype)
        move(session.method, None)
        for layer, block in blocks_of(session).items():
            block.register_forward_pre_hook(
                lambda module, args, kwargs, layer=layer: same_dtypes(layer, args, kwargs), with_kwargs=True
            )
            block.register_forward_hook(leave)
        arguments = tree_map(lambda value: on_device(value, dtype), call)
        with own, session.disabled(), torch.no_grad():
            model(**arguments)
        yield Rehearsal(session, arguments, watch, own)


def run(name: str, config: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, reads: int = 0) -> list[str]:
    """What a run of four steps does there that it should not, and the model itself does not (Flux: float64)."""
    with rehearsed(name, config, dtype, monkeypatch) as here, torch.no_grad(), here.watch:
        for _ in STEPS:
            output = tree_leaves(here.session.transformer(**{**here.arguments, "return_dict": False}))[0]
            assert (output.device, output.dtype) == (DEVICE, dtype)
    return here.verdict(reads, len(STEPS))


def train(name: str, config: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, reads: int = 0) -> list[str]:
    """What a micro-batch does there: the dense teacher, the reduced pass with an adapter, losses, gradients."""
    with rehearsed(name, config, dtype, monkeypatch, training=True) as here:
        session, arguments = here.session, here.arguments
        method = learner(session)
        method.train().requires_grad_(True)
        for path, parameter in session.transformer.named_parameters():
            parameter.requires_grad_(".shiva." in path)
        family: Any = SimpleNamespace(
            transformer=SimpleNamespace(dtype=dtype),
            call=lambda noisy, timestep, text: {**arguments, "hidden_states": noisy, "return_dict": False},
            prediction=lambda output, noisy: output[:, : noisy.shape[1]],
        )
        objectives = Objectives(session, family, FlowMatching("uniform", 1.0), {**WEIGHTS, "complete": 0.5}, 4)
        clean = arguments["hidden_states"]
        explore = Exploration(ratio=None, logit_noise=0.1, score_noise=0.1)
        batch = MicroBatch(clean, torch.empty_like(clean), {}, 500.0, 0, explore, Before(600.0, 2.0))
        method.begin_batch([500.0], explore)
        monkeypatch.setattr("shiva.step.read_timestep", lambda timestep: 500.0)
        with here.watch:
            losses, _ = objectives.backward(batch, 1.0, lambda loss: loss.backward())
        calls = 3 + method.needs_earlier  # the teacher's, the reduced and the complete one
        gradients = [p.grad for p in (*method.parameters(), *session.transformer.parameters()) if p.requires_grad]
        assert all(loss.device == DEVICE for loss in losses.values())
        assert any(gradient is not None for gradient in gradients)
        assert all(g.dtype == torch.float32 and g.device == DEVICE for g in gradients if g is not None)
    return here.verdict(reads, calls)


DTYPES = {"sd3": torch.bfloat16, "flux": torch.float16, "pixart": torch.bfloat16}
CASES = [
    *((name, method, dtype) for method, row in METHODS.items() for name, dtype in DTYPES.items()
      if name in row.backbones),
    *(("sd3", method, torch.float16) for method, row in METHODS.items() if "flux" not in row.backbones),
    *((name, "shiva", torch.bfloat16) for name in MOST_USED),
    *((name, "sweep", torch.float16) for name in MOST_USED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "method", "dtype"), CASES)
def test_a_run_on_a_gpu_reads_nothing_mixes_nothing_and_has_no_float64(
    name: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = READS.get(f"{method} on {name}", READS.get(method, 0))
    assert run(name, METHODS[method].on, dtype, monkeypatch, reads) == []


TRAINED = [
    *(("sd3", method, torch.bfloat16) for method, row in METHODS.items() if row.differentiable),
    *((name, "shiva", torch.bfloat16) for name in ("flux", "pixart")),
    *(("sd3", method, torch.float16) for method in ("shiva", "dydit")),
]


@pytest.mark.parametrize(("name", "method", "dtype"), TRAINED)
def test_a_micro_batch_on_a_gpu_does_neither(
    name: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(name, METHODS[method].on, dtype, monkeypatch, TRAINING_READS.get(method, 0)) == []


def test_the_rehearsal_sees_a_read_and_a_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    from shiva.methods.tomesd import ToMeSDMethod

    reduction = ToMeSDMethod.reduction

    def reads(self: Any, x: torch.Tensor, *args: Any) -> Any:
        x.sum().item()
        found = reduction(self, x, *args)
        return (
            None if found is None else replace(found, reduce=lambda tokens: found.reduce(tokens.float()).to(x.dtype))
        )

    monkeypatch.setattr(ToMeSDMethod, "reduction", reads)
    found = run("sd3", shiva.ToMeSD(), torch.bfloat16, monkeypatch)
    assert any("reads of values" in line for line in found)
