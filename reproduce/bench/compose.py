"""Shiva with INT8, a block-level cache and LoRA: time, weights, and deviation from dense, over a short run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from reproduce.bench.pages import seconds
from shiva.api import attach
from shiva.backbones.base import backbone_of
from shiva.bench.entries import Entry, Timing, shiva_entry, timed, twin
from shiva.bench.shapes import Shape
from shiva.bench.table import Table
from shiva.core.needs import need
from shiva.core.options import unknown_key
from shiva.evaluate.rivals import made

PARTS = ("lora", "int8", "cache-dit", "shiva", "cache")
"""In the order that they must be applied."""
MIXES: tuple[tuple[str, ...], ...] = (
    (),
    ("shiva",),
    ("int8",),
    ("int8", "shiva"),
    ("cache",),
    ("shiva", "cache"),
    ("cache-dit",),
    ("cache-dit", "shiva"),
    ("lora",),
    ("lora", "shiva"),
    ("lora", "shiva", "cache"),
    ("lora", "int8", "shiva", "cache"),
)
PAPER = {(): (3.90, 1.00), ("shiva",): (3.92, 1.46), ("int8", "shiva"): (3.50, 1.57)}
"""Weights in GB and speed-up at Shiva-80%, fp16, RTX 4090 (table quant_speed); caching is its future work."""


@dataclass(frozen=True)
class ComposeResult:
    """One mix; NaN where it is refused."""

    parts: tuple[str, ...]
    seconds: float = float("nan")
    weights: int = 0
    """Bytes of all weights, the router's included."""
    deviation: float = float("nan")
    """Relative L2 distance of the last step's output from dense."""
    computed: int = 0
    """Steps in which the last block ran; in the others the cache answered."""
    refused: str = ""

    @property
    def name(self) -> str:
        return " + ".join(self.parts) or "dense"


def quantize_ffn(transformer: nn.Module) -> None:
    """INT8 weights and activations for every FFN's linear layers, as the paper quantizes."""
    quantization = need("torchao.quantization", "quant")
    inside = {
        id(m)
        for site in backbone_of(transformer).sites(transformer)
        if site.kind == "ffn"
        for m in site.module.modules()
    }
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    quantization.quantize_(
        transformer, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and id(module) in inside
    )


def add_lora(transformer: nn.Module) -> None:
    """A LoRA of small random weights on every block's attention."""
    peft = need("peft", "adapter")
    config = peft.LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=True)
    peft.inject_adapter_in_model(config, transformer)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))
    transformer.requires_grad_(False)


def add_cache(transformer: Any, threshold: float) -> None:
    """diffusers' FirstBlockCache; over Shiva it works because the first block stays dense."""
    made(SimpleNamespace(transformer=transformer), "FirstBlockCache", threshold, ())()


def add_cache_dit(transformer: Any, threshold: float) -> None:
    """cache-dit's DBCache over the blocks themselves; Shiva's hooks, attached later, stay inside of them.

    It knows Flux by its transformer, SD3 by its pipeline alone, which is not here.
    """
    cache_dit = need("cache_dit", "cache-dit")
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=threshold
    )
    known: Any = transformer
    if type(transformer).__name__ == "SD3Transformer2DModel":
        pattern = cache_dit.ForwardPattern.Pattern_1
        known = cache_dit.BlockAdapter(
            transformer=transformer, blocks=transformer.transformer_blocks, forward_pattern=pattern
        )
    cache_dit.enable_cache(known, cache_config=config)


@dataclass
class Mix:
    """A transformer with some parts applied, and how to run it."""

    transformer: Any
    weights: int
    parts: tuple[str, ...]
    detach: Callable[[], None]
    computed: int = 0
    """Steps of the last run in which the last block ran."""

    def __post_init__(self) -> None:
        sites = backbone_of(self.transformer).sites(self.transformer)
        *_, last = (site for site in sites if site.kind == "attention")
        last.module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.computed += 1

    def run(self, calls: Sequence[dict[str, Any]]) -> Tensor:
        output, self.computed = torch.empty(0), 0
        if "cache-dit" in self.parts:
            need("cache_dit", "cache-dit").refresh_context(self.transformer, num_inference_steps=len(calls))
        cached = "cache" in self.parts
        with self.transformer.cache_context("bench") if cached else contextlib.nullcontext():
            for call in calls:
                output = self.transformer(**call, return_dict=False)[0]
        if cached:
            self.transformer._reset_stateful_cache()
        return output


def build_mix(transformer: nn.Module, parts: tuple[str, ...], entry: Entry, threshold: float) -> Mix:
    """Apply the parts in the one order that works."""
    model = twin(transformer)
    if "lora" in parts:
        add_lora(model)
    if "int8" in parts:
        quantize_ffn(model)
    if "cache-dit" in parts:
        add_cache_dit(model, threshold)
    weights, detach = weight_bytes(model), lambda: None
    if "shiva" in parts:
        session = attach(model, entry.build(model))
        weights += weight_bytes(session.method)
        detach = session.detach
    if "cache" in parts:
        add_cache(model, threshold)
    return Mix(model, weights, parts, detach)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers; a quantized weight counts its integers and scales."""
    total = 0
    for tensor in {id(t): t for t in [*module.parameters(), *module.buffers()]}.values():
        flatten = getattr(tensor, "__tensor_flatten__", None)
        inner = [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else [tensor]
        total += sum(part.nbytes if isinstance(part, Tensor) else 0 for part in inner)
    return total


def mixes_without(parts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """All mixes but those with one of these parts; an empty name is none."""
    for part in filter(None, parts):
        if part not in PARTS:
            raise ValueError(unknown_key(part, PARTS, "--without"))
    return tuple(mix for mix in MIXES if not set(mix) & set(parts))


def run_calls(shape: Shape, steps: int) -> list[dict[str, Any]]:
    """The calls of a short run: timesteps fall, and latents drift a little from step to step.

    Timesteps are a quarter apart, as random weights make of a far timestep another model: one apart, the first block's
    update changes by a tenth, and no cache skips anything.
    """
    torch.manual_seed(0)
    first = shape.call(timestep=900.0)
    drift = 0.03 * torch.randn_like(first["hidden_states"][:1])
    return [
        first
        | {"timestep": shape.call(timestep=900.0 - step / 4)["timestep"]}
        | {"hidden_states": first["hidden_states"] + step * drift}
        for step in range(steps)
    ]


def measure_compose(
    shape: Shape,
    mixes: tuple[tuple[str, ...], ...] = MIXES,
    budget: float = 0.8,
    steps: int = 4,
    rounds: int = 2,
    threshold: float = 0.1,
    progress: Callable[[str], None] = lambda name: None,
) -> list[ComposeResult]:
    """Each mix over the same short run, in turns; one that cannot be is a row that says why."""
    torch.manual_seed(0)
    transformer, calls, entry = shape.build(), run_calls(shape, steps), shiva_entry(budget)
    built: dict[tuple[str, ...], Mix] = {}
    refused: dict[tuple[str, ...], str] = {}
    timings: dict[tuple[str, ...], Timing] = {}
    outputs: dict[tuple[str, ...], Tensor] = {}
    with torch.no_grad():
        for parts in mixes:
            try:
                built[parts] = build_mix(transformer, parts, entry, threshold)
                outputs[parts] = built[parts].run(calls)
                timings[parts] = Timing()
            except (ImportError, TypeError, ValueError, RuntimeError) as error:
                refused[parts] = str(error).splitlines()[0]
            progress(" + ".join(parts) or "dense")
        for _ in range(rounds):
            for parts, timing in timings.items():
                timing.seconds.append(timed(lambda mix=built[parts]: mix.run(calls)))  # type: ignore[misc]
                progress(" + ".join(parts) or "dense")
    dense = outputs[()]
    return [
        ComposeResult(parts, refused=refused[parts])
        if parts in refused
        else ComposeResult(
            parts,
            timings[parts].median / steps,
            built[parts].weights,
            float((outputs[parts] - dense).norm() / dense.norm()),
            built[parts].computed,
        )
        for parts in mixes
    ]


def compose_table(shape: Shape, results: list[ComposeResult], refusals: list[tuple[str, str]]) -> Table:
    dense = results[0]
    rows = []
    for row in results:
        if row.refused:
            rows.append((row.name, "refused", "", "", "", "", row.refused))
            continue
        paper = PAPER.get(row.parts) if shape.name == "sd3-medium" else None
        rows.append(
            (
                row.name,
                seconds(row.seconds),
                f"{dense.seconds / row.seconds:.2f}x",
                f"{row.computed} of {dense.computed}",
                f"{row.weights / 2**30:.2f} GiB",
                f"{row.deviation:.3f}",
                "" if paper is None else f"{paper[1]:.2f}x, {paper[0]:.2f} GB",
            )
        )
    rows += [(name, "refused", "", "", "", "", reason) for name, reason in refusals]
    return Table(
        title=f"Composition, {shape.described}",
        columns=("parts", "a step", "speed-up", "computed", "weights", "deviation", "paper"),
        rows=rows,
        caption="computed: steps in which the last block ran; deviation: relative L2 of the run's last output from "
        "dense; random weights, so it shows that parts compose, not what quality they give",
    )


def attention_cache_refusals(shape: Shape) -> list[tuple[str, str]]:
    """Caches inside attention, each with the reason that `attach` gives for refusing it."""
    hooks = importlib.import_module("diffusers.hooks")
    caches = {
        "Pyramid Attention Broadcast": lambda model: hooks.apply_pyramid_attention_broadcast(
            model,
            hooks.PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2,
                spatial_attention_timestep_skip_range=(100, 800),
                current_timestep_callback=lambda: 500,
            ),
        ),
        "TaylorSeer": lambda model: hooks.apply_taylorseer_cache(model, hooks.TaylorSeerCacheConfig()),
    }
    refusals = []
    for name, apply in caches.items():
        model = shape.build("meta")
        try:
            apply(model)
        except (ValueError, TypeError, KeyError) as error:
            refusals.append((name, f"diffusers itself: {str(error).splitlines()[0]}"))
            continue
        try:
            attach(model, shiva_entry(0.8).build(model)).detach()
        except ValueError as error:
            refusals.append((name, str(error)))
    return refusals
