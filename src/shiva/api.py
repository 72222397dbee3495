"""attach, detach and summary: what a user of the library calls."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from diffusers.hooks import HookRegistry
from torch import nn

from shiva.backbones.base import backbone_of
from shiva.checkpoint import ShivaCheckpoint
from shiva.compat import HOOK, refuse_conflicts, transformer_of
from shiva.core.method import Method, MethodConfig
from shiva.cost import Summary
from shiva.hooks import RootHook
from shiva.methods import Sweep
from shiva.session import Session

logger = logging.getLogger("shiva")

SECOND_EXPERT = "transformer_2"
"""Where a pipeline keeps the transformer of its last steps, if it has two (Wan 2.2)."""


def attach(
    target: Any,
    method: str | Path | ShivaCheckpoint | MethodConfig | type[MethodConfig] | Method | None = None,
    *,
    cfg: str = "auto",
    **overrides: Any,
) -> Session:
    """Make a pipeline (or bare transformer) run its blocks on fewer image tokens.

    `method` is a trained checkpoint (path or hub id), or any method: its config, its class or its name ("sweep",
    "tomesd"); without one it is Sweep, which needs no training. `overrides` change its options (`budget=0.6`, ...).
    `cfg` says how classifier-free guidance is run: "batched" halves, "sequential" calls, "none", or "auto", which asks
    the pipeline and looks. A session that is attached already is replaced. Returns the `Session`.
    """
    transformer = transformer_of(target)
    backbone = backbone_of(transformer)
    spec = backbone.spec(transformer)
    chosen = resolve(method)
    built: Method
    checkpoint = chosen if isinstance(chosen, ShivaCheckpoint) else None
    with torch.random.fork_rng(devices=[]):
        if checkpoint is not None:
            checkpoint.check(spec)
            built = checkpoint.method(**overrides)
        elif isinstance(chosen, MethodConfig):
            built = chosen.changed(overrides).build(spec)
        elif overrides:
            raise ValueError(
                f"a built {type(chosen).__name__} takes no options ({', '.join(overrides)}); pass its config"
            )
        else:
            assert isinstance(chosen, Method)
            built = chosen
        previous = session_of(transformer)
        if previous is not None:
            logger.warning("%r is replaced by %r", previous, built)
            previous.detach()
        refuse_conflicts(transformer)
        adapter = None if checkpoint is None else checkpoint.add_adapter(transformer)
    pipeline = None if isinstance(target, nn.Module) else target
    expert = getattr(pipeline, SECOND_EXPERT, None)
    if expert is not None and session_of(expert) is None:
        logger.warning("this pipeline has two transformers; attach to pipe.%s too, or it runs dense", SECOND_EXPERT)
    try:
        return Session(transformer, backbone, built, pipeline, cfg, adapter, fresh=isinstance(chosen, MethodConfig))
    except BaseException:
        if adapter is not None:
            adapter.remove()
        raise


def resolve(method: Any) -> ShivaCheckpoint | MethodConfig | Method:
    """What a user named: a checkpoint, a config, or a built method."""
    if method is None:
        logger.warning("no method was named: taking shiva.Sweep(), which needs no training; pass budget= to turn it")
        return Sweep()
    if isinstance(method, str):
        named = {name.lower(): config for name, config in MethodConfig.known.items()}.get(method.lower())
        if named is not None and not Path(method).is_dir():
            return named()
    if isinstance(method, (str, Path)):
        return ShivaCheckpoint.from_pretrained(method)
    if inspect.isclass(method) and issubclass(method, MethodConfig):
        return method()
    if isinstance(method, (ShivaCheckpoint, MethodConfig, Method)):
        return method
    raise TypeError(
        f"cannot attach a {type(method).__name__}; pass a checkpoint path, a method's name, or a method's config"
    )


def session_of(target: Any) -> Session | None:
    """The session at work in a pipeline or transformer, if there is one."""
    registry = getattr(transformer_of(target), "_diffusers_hook", None)
    hook = registry.get_hook(HOOK) if isinstance(registry, HookRegistry) else None
    return hook.session if isinstance(hook, RootHook) else None


def detach(target: Any) -> None:
    """Take the session off a pipeline or transformer; without one nothing happens."""
    session = session_of(target)
    if session is not None:
        session.detach()


def summary(target: Any) -> Summary:
    """What the session of a pipeline or transformer did in its last run."""
    session = session_of(target)
    if session is None:
        raise ValueError(f"no Shiva session is attached to this {type(target).__name__}; call shiva.attach first")
    return session.summary()
