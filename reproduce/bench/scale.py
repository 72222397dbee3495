"""How the pruning path and a whole step grow with tokens, batch and depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reproduce.bench.pages import seconds
from reproduce.bench.selector import available_bytes
from shiva.backbones.base import backbone_of
from shiva.bench.entries import Timing, shiva_entry, timed
from shiva.bench.shapes import Shape
from shiva.bench.step import StepResult, measure_step
from shiva.bench.table import Table
from shiva.core.context import Clock, StepContext
from shiva.core.layout import Layout
from shiva.core.reduction import Reduction, Streams

LENGTHS = (1024, 4096, 16384, 65536)
KEEP = 0.6


@dataclass(frozen=True)
class PathResult:
    """The pruning path of one layer at one length, without the block."""

    tokens: int
    seconds: float = float("nan")
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by stage."""
    bytes: int = 0
    """Written by the path: the kept tokens, and the residual stream once."""
    block_tflops: float = float("nan")
    """Of the dense block at this length: what the path stands beside."""
    skipped: str = ""


def measure_path(
    shape: Shape,
    lengths: tuple[int, ...] = LENGTHS,
    rounds: int = 5,
    warmup: int = 2,
    progress: Callable[[str], None] = lambda name: None,
) -> list[PathResult]:
    """Router, sort, gather and scatter of one layer, by the number of image tokens."""
    model = shape.build("meta")
    spec = backbone_of(model).spec(model)
    method = shiva_entry(KEEP, flat=True).build(model)
    site = next(s for s in backbone_of(model).sites(model) if s.kind == "block" and s.layer == 1)
    results = []
    for tokens in lengths:
        if 4.0 * shape.batch * tokens * spec.width * 4 > available_bytes():
            results.append(PathResult(tokens, skipped="does not fit memory"))
            continue
        x = torch.randn(shape.batch, tokens, spec.width)
        clock, timing = Clock(), Timing()
        ctx = StepContext(
            layout=Layout(1, tokens),
            timestep=500.0,
            guidance_pairs=shape.batch % 2 == 0,
            time_embedding=torch.randn(shape.batch, spec.time_width),
            prompt=torch.randn(shape.batch, spec.prompt_width),
            clock=clock,
        )
        ctx.counts = method.plan(ctx, None)

        def run(image: Tensor, reduction: Reduction | None, ctx: StepContext = ctx) -> Streams:
            return Streams(image)

        def once(x: Tensor = x, ctx: StepContext = ctx, run: Callable[..., Streams] = run) -> Streams:
            ctx.run, ctx.now = method.new_run(), method.new_step()
            method.begin_step(ctx)
            return method.around(run, x, x, site, ctx)

        with torch.inference_mode():
            for turn in range(warmup + rounds):
                if turn == warmup:
                    clock.seconds.clear()
                spent = timed(once)
                if turn >= warmup:
                    timing.seconds.append(spent)
        stages = {stage: spent / rounds for stage, spent in clock.seconds.items()}
        written = 4 * shape.batch * spec.width * (tokens + ctx.counts[1])
        flops = block_flops(tokens + shape.text, spec.width, shape.batch) / 1e12
        results.append(PathResult(tokens, timing.median, stages, written, flops))
        progress(f"{tokens} tokens")
    return results


def block_flops(tokens: int, width: int, batch: int) -> float:
    """A joint block's true FLOPs: 12 D^2 weights for each stream's tokens, and attention over all of them."""
    return batch * (2 * 12 * width**2 * tokens + 4 * tokens**2 * width)


def path_table(shape: Shape, results: list[PathResult]) -> Table:
    first = results[0]
    rows = []
    for row in results:
        if row.skipped:
            rows.append((str(row.tokens), f"left out: {row.skipped}", *[""] * 7))
            continue
        stages = [seconds(row.stages.get(stage, 0.0)) for stage in ("router", "sort", "gather", "scatter")]
        growth = f"{row.seconds / first.seconds:.1f}x for {row.tokens / first.tokens:g}x"
        written = f"{row.bytes / 2**20:.0f} MiB"
        rows.append((str(row.tokens), seconds(row.seconds), growth, *stages, written, f"{row.block_tflops:.2f}"))
    return Table(
        title=f"The pruning path of one layer by tokens, width of {shape.name}, batch {shape.batch}, keep {KEEP}",
        columns=("N", "path", "growth", "router", "sort", "gather", "scatter", "writes", "dense block, TFLOPs"),
        rows=rows,
        caption="writes: kept tokens and the residual stream once, linear in N, as the path's operators are; its time "
        "grows faster where tensors leave the caches. The block that it shortens grows quadratically",
    )


@dataclass(frozen=True)
class GrowthResult:
    """A whole step at one batch and depth."""

    batch: int
    layers: int
    dense: StepResult
    shiva: StepResult


def measure_growth(
    shape: Shape,
    batches: tuple[int, ...] = (1, 2, 4),
    depths: tuple[int, ...] = (2, 4, 8),
    rounds: int = 3,
    progress: Callable[[str], None] = lambda name: None,
) -> list[GrowthResult]:
    """Dense and Shiva at each batch (at the first depth) and each depth (at the shape's own batch)."""
    settings = [(batch, depths[0]) for batch in batches] + [(shape.batch, depth) for depth in depths]
    results = []
    for batch, layers in dict.fromkeys(settings):
        at = dataclasses.replace(shape.slice(layers), batch=batch)
        (dense, reduced), _ = measure_step(at, {"shiva": shiva_entry(KEEP)}, rounds, progress=progress)
        results.append(GrowthResult(batch, layers, dense, reduced))
    return results


def growth_table(shape: Shape, results: list[GrowthResult]) -> Table:
    rows = [
        (
            f"batch {row.batch}, {row.layers} blocks",
            seconds(row.dense.seconds),
            seconds(row.shiva.seconds),
            f"{row.shiva.speedup:.2f}x",
            f"{row.shiva.limit:.2f}x",
            f"{row.shiva.efficiency:.2f}",
        )
        for row in results
    ]
    return Table(
        title=f"A step by batch and depth, {shape.name}, {shape.height}x{shape.width}, Shiva at {KEEP}",
        columns=("size", "dense", "shiva", "speed-up", "limit", "eff."),
        rows=rows,
        caption="the paper: per image 9.5% faster at two images than at one, dense unchanged (app. Anatomy)",
    )
