"""diffusers' MagCache around a pipeline, with ratios measured on that pipeline: a whole-step cache to compare with.

FirstBlockCache is the other one; it refuses SD3 (`reproduce.bench.compose.add_cache` says why).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks import HookRegistry
from diffusers.hooks.mag_cache import MagCacheConfig, apply_mag_cache
from torch import Tensor

from shiva.backbones.base import Site, backbone_of
from shiva.compat import INNER_CACHES
from shiva.core.layout import Layout
from shiva.evaluate.candidates import Candidate


def block_sites(transformer: Any) -> list[Site]:
    return [site for site in backbone_of(transformer).sites(transformer) if site.kind == "block"]


@contextlib.contextmanager
def magnitude_ratios(transformer: Any) -> Iterator[list[float]]:
    """Fill a list with MagCache's ratios of the dense run inside: |update of all blocks| over the last step's.

    One number a call, the mean over tokens; the first is 1, as in MagCache's own calibration.
    """
    sites = block_sites(transformer)
    first, last = sites[0], sites[-1]
    ratios: list[float] = []
    seen: dict[str, Tensor] = {}

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        seen["input"] = first.bind(args, kwargs)[first.image]

    def leave(module: Any, args: Any, output: Any) -> None:
        tokens = seen["input"]
        image = last.unpack(output, Layout(1, tokens.shape[1])).image
        size = (image - tokens).float().norm(dim=-1)
        before = seen.get("size")
        ratios.append(1.0 if before is None else float((size / (before + 1e-8)).mean()))
        seen["size"] = size

    handles = [
        first.module.register_forward_pre_hook(enter, with_kwargs=True),
        last.module.register_forward_hook(leave),
    ]
    try:
        with torch.no_grad():
            yield ratios
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def mag_cache(transformer: Any, config: MagCacheConfig) -> Iterator[None]:
    """MagCache on every block inside this context; after it nothing of it is left."""
    apply_mag_cache(transformer, config)
    try:
        yield
    finally:
        for site in block_sites(transformer):
            registry = HookRegistry.check_if_exists_or_initialize(site.module)
            for name in [name for name in registry.hooks if name in INNER_CACHES]:
                registry.remove_hook(name, recurse=False)


@dataclass(frozen=True)
class MagCached(Candidate):
    """A candidate inside MagCache; attached first, because a cache must see whole steps."""

    ratios: Sequence[float] = ()
    """Of a dense run of as many steps."""
    threshold: float = 0.06
    """Accumulated error at which a step is computed again."""

    @contextlib.contextmanager
    def attached(self, pipe: Any) -> Any:
        ratios = list(self.ratios)
        config = MagCacheConfig(threshold=self.threshold, num_inference_steps=len(ratios), mag_ratios=ratios)
        with super().attached(pipe) as session, mag_cache(pipe.transformer, config):
            yield session
