"""What a GPU would take: bytes and FLOPs of every operator of a step, against the device's two limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from reproduce.paper import BENCHED
from shiva.bench.entries import Entry, meta_step, shiva_entry
from shiva.bench.shapes import Shape
from shiva.bench.table import Table
from shiva.cost import tensor_bytes

STEPS = 50
PAPER_MS = {name: row.latency for name, row in BENCHED.items()}
"""An image of 50 steps with SD3-Medium at 1024x1024 on an RTX 4090."""


@dataclass(frozen=True)
class Device:
    """The two limits of a GPU, from its vendor's data sheet: dense fp16 with fp32 accumulation, and memory."""

    name: str
    flops: float
    bandwidth: float
    launch: float = 2.5e-6
    """Seconds that a kernel takes at least; an assumption, as no data sheet gives it."""


DEVICES = (
    Device("RTX 4090", 165.2e12, 1.008e12),
    Device("H100 SXM", 989.4e12, 3.35e12),
    Device("H200", 989.4e12, 4.8e12),
)


@dataclass(frozen=True)
class Kernel:
    """One operator of a step."""

    name: str
    flops: float
    bytes: float

    def seconds(self, device: Device, efficiency: float = 1.0) -> float:
        return max(self.flops / (device.flops * efficiency), self.bytes / device.bandwidth, device.launch)


VIEWS = ("view", "expand", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze", "split", "chunk", "t")
FREE = (*VIEWS, "_unsafe_view", "detach", "alias", "unbind", "as_strided", "empty", "empty_like", "lift_fresh")


class Traffic(TorchDispatchMode):
    """Lists operators with the bytes they read and write and the FLOPs they do; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not self.paused and name not in FREE:
            count = flop_registry.get(func.overloadpacket)
            flops = 0.0 if count is None else count(*args, **kwargs, out_val=result)
            self.kernels.append(Kernel(name, float(flops), tensor_bytes((args, kwargs)) + tensor_bytes(result)))
        return result


class Attention(TorchFunctionMode):
    """Attention as one fused kernel: the meta device would write out all pairs."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.traffic.paused = True
        result = func(*args, **kwargs)
        self.traffic.paused = False
        query, key, value = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3]
        flops = sdpa_flop_count(query.shape, key.shape, value.shape)
        self.traffic.kernels.append(
            Kernel("attention", float(flops), tensor_bytes((query, key, value)) + tensor_bytes(result))
        )
        return result


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    traffic = Traffic()
    with torch.no_grad(), traffic, Attention(traffic):
        call()
    return traffic.kernels


@dataclass(frozen=True)
class Prediction:
    """An image of 50 steps on one device."""

    device: str
    name: str
    limit_ms: float
    """At the device's full rates: no run can be faster."""
    expected_ms: float
    """With the one share of peak FLOPs at which the paper's dense RTX 4090 image takes what it does."""
    compute_share: float
    """Of the time, spent in kernels that FLOPs limit."""
    kernels: int
    paper_ms: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.paper_ms is None else self.expected_ms / self.paper_ms - 1


def total_seconds(kernels: list[Kernel], device: Device, efficiency: float = 1.0) -> float:
    return sum(kernel.seconds(device, efficiency) for kernel in kernels)


def fit_efficiency(kernels: list[Kernel], device: Device, seconds: float) -> float:
    """The share of peak FLOPs at which a step takes so many seconds."""
    low, high = 0.05, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if total_seconds(kernels, device, middle) > seconds else (low, middle)
    return (low + high) / 2


def predict(shape: Shape, budgets: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6)) -> tuple[list[Prediction], float]:
    """Images on each device, dense and at the budgets; and the share of peak that the dense image implies."""
    entries: dict[str, Entry | None] = {"dense": None, **{f"shiva {b:g}": shiva_entry(b) for b in budgets}}
    steps = {name: kernels_of(meta_step(shape, entry, torch.float16)) for name, entry in entries.items()}
    efficiency = fit_efficiency(steps["dense"], DEVICES[0], PAPER_MS["dense"] / 1e3 / STEPS)
    predictions = []
    for device in DEVICES:
        for name, kernels in steps.items():
            total = total_seconds(kernels, device, efficiency)
            bound = sum(
                kernel.seconds(device, efficiency)
                for kernel in kernels
                if kernel.flops / (device.flops * efficiency) >= kernel.bytes / device.bandwidth and kernel.flops
            )
            predictions.append(
                Prediction(
                    device.name,
                    name,
                    1e3 * STEPS * total_seconds(kernels, device),
                    1e3 * STEPS * total,
                    bound / total,
                    len(kernels),
                    PAPER_MS.get(name) if device is DEVICES[0] else None,
                )
            )
    return predictions, efficiency


def roofline_table(shape: Shape, predictions: list[Prediction], efficiency: float) -> Table:
    dense = {row.device: row for row in predictions if row.name == "dense"}
    rows = []
    for row in predictions:
        error = "" if row.error is None or row.name == "dense" else f"{row.error:+.1%}"
        rows.append(
            (
                row.device,
                row.name,
                f"{row.limit_ms:.0f} ms",
                f"{row.expected_ms:.0f} ms",
                f"{dense[row.device].expected_ms / row.expected_ms:.2f}x",
                "" if row.paper_ms is None else f"{row.paper_ms:.1f} ms",
                "" if row.paper_ms is None else f"{PAPER_MS['dense'] / row.paper_ms:.2f}x",
                error,
                f"{row.compute_share:.0%}",
                str(row.kernels),
            )
        )
    return Table(
        title=f"Roofline of 50 steps, {shape.described}, fp16",
        columns=(
            "device",
            "method",
            "limit",
            "expected",
            "speed-up",
            "paper",
            "paper",
            "off by",
            "in FLOPs",
            "kernels",
        ),
        rows=rows,
        caption=f"counted, not run: each operator takes its FLOPs or its bytes, whichever is slower. expected: with "
        f"{efficiency:.0%} of peak FLOPs, at which the dense image takes the paper's 7659.9 ms on an RTX 4090; "
        "autoencoder and text encoders are inside that share",
    )
