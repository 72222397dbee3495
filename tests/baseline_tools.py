"""What the tests of several compared methods use."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

import shiva
from shiva.core.cost import Flops, count
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, MethodConfig
from shiva.cost import Summary
from shiva.ops import seeded
from shiva.ops.merging import Matching, draw, match, partition
from shiva.session import Session

from tiny import noise

SPEC = BackboneSpec("toy", layers=6, width=16, time_width=8, prompt_width=8)


def scores(batch: int = 2, tokens: int = 23, seed: int = 4) -> Tensor:
    return noise(batch, tokens, seed=seed).double()


def output(model: nn.Module, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**call)[0]


def pair(call: dict[str, Any]) -> dict[str, Any]:
    """The same latents in both halves of the batch, under two prompts."""
    latents = call["hidden_states"][:1]
    return {**call, "hidden_states": torch.cat([latents, latents])}


def sampled(model: nn.Module, config: MethodConfig, steps: int, **options: Any) -> tuple[Session, list[float]]:
    """A session that knows how long its run is."""
    timesteps = torch.linspace(1000, 1000 / steps, steps)
    pipeline = SimpleNamespace(transformer=model, scheduler=SimpleNamespace(timesteps=timesteps))
    return shiva.attach(pipeline, config, **options), timesteps.tolist()


def cells_of(grid: tuple[int, int], generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    cells = Layout(*grid).windows()
    destinations, sources = partition(cells, draw(cells, 1, generator), grid[0] * grid[1])
    return destinations[0], sources[0]


def matched(batch: int, grid: tuple[int, int], ratio: float, seed: int = 0) -> tuple[Tensor, Matching]:
    x = noise(batch, grid[0] * grid[1], 16, seed=seed)
    return x, match(x, *cells_of(grid, seeded(seed, 0)), int(ratio * x.shape[1]))


class Medium:
    """SD3-Medium at its real shape on the meta device: only shapes run."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self.model = SD3Transformer2DModel(
                sample_size=128,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=24,
                attention_head_dim=64,
                num_attention_heads=24,
                joint_attention_dim=4096,
                caption_projection_dim=1536,
                pooled_projection_dim=2048,
                pos_embed_max_size=192,
            )
            self.call = {
                "hidden_states": torch.empty(2, 16, 128, 128),
                "encoder_hidden_states": torch.empty(2, 333, 4096),
                "pooled_projections": torch.empty(2, 2048),
                "timestep": torch.empty(2),
            }

    def records(
        self, config: MethodConfig, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> tuple[Summary, list[Flops]]:
        """Run some steps of a 50-step run; also their FLOPs with all the method's own matrix products."""
        session, timesteps = sampled(self.model, config, 50, cfg="batched")
        counted = []
        with session:
            for step in steps:
                monkeypatch.setattr("shiva.step.read_timestep", lambda _, step=step: timesteps[step])
                counted.append(count(lambda: self.model(**self.call)))
            return session.summary(), counted


@functools.lru_cache(maxsize=1)
def medium() -> Medium:
    return Medium()


def tera(flops: Flops) -> float:
    return flops.paper / 1e12
