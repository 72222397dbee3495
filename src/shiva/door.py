"""Checks at the door: what a session may be attached to, and what it refuses by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diffusers.hooks import HookRegistry
from torch import nn

HOOK = "shiva"
"""The name of our hooks in diffusers' registries."""

REFUSED_HOOKS = {
    "pyramid_attention_broadcast": "Pyramid Attention Broadcast",
    "faster_cache_denoiser": "FasterCache",
    "faster_cache_block": "FasterCache",
    "taylorseer_cache": "TaylorSeer",
}
INNER_CACHES = {
    "fbc_leader_block_hook": "FirstBlockCache",
    "fbc_block_hook": "FirstBlockCache",
    "mag_cache_leader_block_hook": "MagCache",
    "mag_cache_block_hook": "MagCache",
}
"""Block-level caches, which work around pruned blocks but not inside them."""
CACHE_DIT = "_original_forward"
"""Where cache-dit keeps the forward that it wraps; it runs the blocks themselves, so it comes before `attach`."""
REFUSED_PIPELINES = ("FluxKontextPipeline", "FluxKontextInpaintPipeline")


def under_cache_dit(transformer: nn.Module) -> bool:
    return hasattr(transformer, CACHE_DIT)


def transformer_of(target: Any) -> nn.Module:
    """The transformer of a pipeline, or the module itself, without a torch.compile wrapper."""
    transformer = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
    if transformer is None:
        raise TypeError(f"{type(target).__name__} has no transformer; pass a DiT pipeline or its transformer")
    return getattr(transformer, "_orig_mod", transformer)


def refuse_conflicts(target: Any, transformer: nn.Module) -> None:
    if type(target).__name__ in REFUSED_PIPELINES:
        raise TypeError(
            f"{type(target).__name__} mixes reference-image tokens with the image's own; pruning would drop "
            "parts of the reference; use FluxPipeline"
        )
    for name, module in transformer.named_modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in getattr(registry, "hooks", {}):
            if hook == HOOK:
                raise RuntimeError("a Shiva session is already attached here; call its detach() first")
            if hook in INNER_CACHES:
                raise RuntimeError(
                    f"{INNER_CACHES[hook]} at {name or 'the transformer'} would see pruned tokens only; call "
                    "transformer.disable_cache(), attach first, then enable the cache again"
                )
            if hook in REFUSED_HOOKS:
                raise RuntimeError(
                    f"{REFUSED_HOOKS[hook]} caches attention outputs at {name or 'the transformer'}, which go "
                    "wrong when the kept tokens change; call transformer.disable_cache() first"
                )


@contextlib.contextmanager
def caches_off(transformer: nn.Module) -> Iterator[None]:
    """Block-level caches taken off for a while: pricing calls blocks at other lengths, which a cache must not see."""
    taken = []
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        for name in reversed(getattr(registry, "hooks", {}).copy()):
            if name not in INNER_CACHES:
                break
            taken.append((registry, name, registry.hooks[name]))
            registry.remove_hook(name, recurse=False)
    ours: Any = HookRegistry.check_if_exists_or_initialize(transformer).get_hook(HOOK)
    wrapped = ours.fn_ref.original_forward
    ours.fn_ref.original_forward = getattr(transformer, CACHE_DIT, wrapped)
    try:
        yield
    finally:
        ours.fn_ref.original_forward = wrapped
        for registry, name, hook in reversed(taken):
            registry.register_hook(hook, name)
