"""`shiva bench reach`: Shiva's speed-up over what its FLOPs allow, on slices of the transformers people run most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from shiva.bench.entries import Attached, interleave, shiva_entry, twin
from shiva.bench.shapes import DEPTHS, SHAPES, Shape
from shiva.bench.table import Table
from shiva.core.options import unknown_key

Grid = tuple[int, int, int]
"""Frames, rows and columns of image tokens."""
Call = dict[str, Any]


@dataclass(frozen=True)
class Real:
    """A transformer at the size that its pipeline draws by default; what `config` leaves out is its class's own."""

    cls: str
    size: Grid
    """Frames of the video, height and width in pixels."""
    token: Grid
    """Frames and pixels on a side of a token."""
    text: int
    call: Callable[[Real], Call]
    """Arguments of the transformer."""
    depths: tuple[str, ...] = ("num_layers",)
    """What the config calls its numbers of blocks."""
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    """As its pipeline runs it: 2 under batched guidance."""

    @property
    def grid(self) -> Grid:
        frames, height, width = (length // step for length, step in zip(self.size, self.token, strict=True))
        return max(1, frames + (self.size[0] % self.token[0] > 0)), height, width

    @property
    def tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    def within(self, tokens: int) -> Real:
        """With fewer frames, or else smaller, as memory allows."""
        real = self
        while real.tokens > tokens and real.grid[0] > 1:
            real = replace(real, size=(max(1, real.size[0] - real.token[0]), *real.size[1:]))
        while real.tokens > tokens and min(real.grid[1:]) > 4:
            real = replace(real, size=(real.size[0], real.size[1] - real.token[1], real.size[2] - real.token[2]))
        return real

    def build(self, layers: int) -> nn.Module:
        """With random weights, and so many blocks in all, of each kind as many."""
        each, more = divmod(layers, len(self.depths))
        depths = {name: each + (place < more) for place, name in enumerate(self.depths)}
        model = getattr(diffusers, self.cls)(**{**self.config, **depths})
        return model.eval().requires_grad_(False)

    def texts(self, width: int) -> Tensor:
        return torch.randn(self.batch, self.text, width)

    def times(self, value: float) -> Tensor:
        return torch.full((self.batch,), value)

    def clip(self, channels: int, patch: int = 2) -> Tensor:
        """Latents (B, C, F, H, W); under guidance both halves hold the same."""
        frames, rows, columns = self.grid
        return torch.randn(1, channels, frames, patch * rows, patch * columns).repeat(self.batch, 1, 1, 1, 1)

    def ids(self, width: int) -> Tensor:
        """Position ids (N, width) of one frame."""
        _, rows, columns = self.grid
        ids = torch.zeros(rows, columns, width)
        ids[..., 1] += torch.arange(rows)[:, None]
        ids[..., 2] += torch.arange(columns)[None]
        return ids.view(-1, width)

    def packed(self, channels: int, text: int, time: float = 0.5) -> Call:
        latents = torch.randn(1, self.tokens, channels).repeat(self.batch, 1, 1)
        return {"hidden_states": latents, "encoder_hidden_states": self.texts(text), "timestep": self.times(time)}


# -- the calls -------------------------------------------------------------------------------------------


def known(shape: Shape) -> Real:
    """What other benchmarks run too."""

    def call(real: Real) -> Call:
        _, height, width = real.size
        return replace(shape, height=height, width=width, text=real.text).call(str(torch.get_default_device()))

    size, token = (1, shape.height, shape.width), (1, shape.token, shape.token)
    return Real(shape.cls, size, token, shape.text, call, DEPTHS[shape.cls], shape.config, shape.batch)


def chroma(real: Real) -> Call:
    mask = torch.ones(real.batch, real.text + real.tokens, dtype=torch.bool)
    ids = {"img_ids": real.ids(3), "txt_ids": torch.zeros(real.text, 3)}
    return {**real.packed(64, 4096), **ids, "attention_mask": mask}


def flux2(real: Real) -> Call:
    return {**real.packed(128, 7680), "img_ids": real.ids(4)[None], "txt_ids": torch.zeros(1, real.text, 4)}


def qwen(real: Real) -> Call:
    return {**real.packed(64, 3584), "img_shapes": [[real.grid]] * real.batch}


def zimage(real: Real) -> Call:
    return {"x": list(real.clip(16)), "t": real.times(0.5), "cap_feats": list(real.texts(2560)), "return_dict": False}


def wan(real: Real) -> Call:
    texts = real.texts(4096)
    return {"hidden_states": real.clip(16), "encoder_hidden_states": texts, "timestep": real.times(500.0)}


def ltx(real: Real) -> Call:
    frames, rows, columns = real.grid
    call = real.packed(128, 4096, 500.0)
    return {**call, "encoder_attention_mask": torch.ones(real.batch, real.text)} | {
        "num_frames": frames,
        "height": rows,
        "width": columns,
    }


def hunyuan(real: Real) -> Call:
    masks = {"encoder_attention_mask": torch.ones(real.batch, real.text)}
    return {**wan(real), **masks, "pooled_projections": torch.randn(real.batch, 768), "guidance": real.times(6000.0)}


def cogvideox(real: Real) -> Call:
    latents = real.clip(16).transpose(1, 2)
    return {"hidden_states": latents, "encoder_hidden_states": real.texts(4096), "timestep": real.times(500.0)}


DOUBLE_AND_SINGLE = ("num_layers", "num_single_layers")
KLEIN = {"num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False}
WAN = {"num_attention_heads": 12, "ffn_dim": 8960}
SQUARE: Grid = (1, 1024, 1024)
REACH: dict[str, Real] = {
    "sd3-medium": known(SHAPES["sd3-medium"]),
    "flux-dev": known(SHAPES["flux-dev"]),
    "flux2-klein-4b": Real("Flux2Transformer2DModel", SQUARE, (1, 16, 16), 512, flux2, DOUBLE_AND_SINGLE, KLEIN),
    "qwen-image": Real("QwenImageTransformer2DModel", (1, 1328, 1328), (1, 16, 16), 128, qwen),
    "z-image": Real("ZImageTransformer2DModel", SQUARE, (1, 16, 16), 128, zimage, ("n_layers",)),
    "chroma": Real("ChromaTransformer2DModel", SQUARE, (1, 16, 16), 512, chroma, DOUBLE_AND_SINGLE),
    "wan-2.1-1.3b": Real("WanTransformer3DModel", (81, 480, 832), (4, 16, 16), 512, wan, config=WAN),
    "ltx-video": Real("LTXVideoTransformer3DModel", (161, 512, 704), (8, 32, 32), 128, ltx, batch=2),
    "hunyuan-video": Real(
        "HunyuanVideoTransformer3DModel", (61, 544, 960), (4, 16, 16), 256, hunyuan, DOUBLE_AND_SINGLE
    ),
    "cogvideox-2b": Real("CogVideoXTransformer3DModel", (49, 480, 720), (4, 16, 16), 226, cogvideox, batch=2),
}


# -- measuring -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """One row of the table."""

    name: str
    grid: Grid
    tokens: int
    cut: bool
    """Whether it has fewer tokens than its pipeline draws."""
    seconds: float
    spread: float
    """Of the dense call."""
    speedup: float
    limit: float
    """The speed-up that the FLOPs alone would allow."""

    @property
    def efficiency(self) -> float:
        return self.speedup / self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "efficiency": self.efficiency}


def chosen_reach(names: str) -> dict[str, Real]:
    """Those of a list between commas; all ten of an empty one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(REACH)
    for name in wanted:
        if name not in REACH:
            raise ValueError(unknown_key(name, REACH, "shiva bench reach"))
    return {name: REACH[name] for name in wanted}


def measure_reach(
    models: Mapping[str, Real],
    budget: float = 0.6,
    layers: int = 4,
    tokens: int | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Reached]:
    """Dense and Shiva in turns on each model, one model in memory at a time."""
    rows = []
    for name, whole in models.items():
        real = whole if tokens is None else whole.within(tokens)
        progress(f"{name}: building")
        torch.manual_seed(0)
        transformer, call = real.build(layers), real.call(real)
        dense = twin(transformer)
        cfg = "batched" if real.batch == 2 else "none"
        reduced = Attached(shiva_entry(budget, flat=True), transformer, call, cfg)
        turns: dict[str, Callable[[], Callable[[], Any]]] = {
            "dense": lambda dense=dense, call=call: lambda: dense(**call),  # type: ignore[misc]
            "shiva": reduced.prepare,
        }
        with torch.inference_mode():
            timings = interleave(turns, rounds, 1, lambda turn, name=name: progress(f"{name}: {turn}"))  # type: ignore[misc]
        assert reduced.session.ctx is not None
        cost = reduced.session.cost_model()
        limit = cost.dense.true / cost.step(reduced.session.ctx.counts).true
        speedup = timings["dense"].median / timings["shiva"].median
        seconds, spread = timings["dense"].median, timings["dense"].spread
        rows.append(Reached(name, real.grid, real.tokens, real != whole, seconds, spread, speedup, limit))
    return rows


def reach_table(rows: list[Reached], budget: float, layers: int) -> Table:
    lines = [
        {
            "model": row.name,
            "frames x rows x columns": "x".join(map(str, row.grid)),
            "tokens": f"{row.tokens}{' (cut)' if row.cut else ''}",
            "dense": f"{row.seconds:.2f} s",
            "±": f"{row.spread:.1%}",
            "speed-up": f"{row.speedup:.2f}x",
            "limit": f"{row.limit:.2f}x",
            "of the limit": f"{row.efficiency:.2f}",
        }
        for row in rows
    ]
    return Table.of(
        f"One call of Shiva {budget:g}, slices of {layers} blocks, random weights",
        lines,
        "limit: what FLOPs alone allow, the first block dense; cut: fewer tokens than the pipeline draws",
    )
