"""attach, detach and summary: what a user of the library calls."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from diffusers.hooks import HookRegistry
from torch import nn

import shiva
import shiva.methods  # each registers its config
from shiva.backbones.base import Backbone, backbone_of
from shiva.checkpoint import CONFIG_FILE, ShivaCheckpoint, may_be_hub_id
from shiva.compat import HOOK, refuse_conflicts, transformer_of
from shiva.core.method import Method, MethodConfig
from shiva.cost import Summary
from shiva.hooks import RootHook
from shiva.methods import Sweep
from shiva.methods.counts import DEFAULT
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

        shiva.attach(pipe)                                   # Sweep, which needs no training
        shiva.attach(pipe, "sweep", budget=0.4)              # any method: its name, its class or its config
        shiva.attach(pipe, "path-or-hub-id", budget=0.6)     # a trained checkpoint

    `overrides` change the method's options. `cfg` says how classifier-free guidance is run: "batched" halves,
    "sequential" calls, "none", or "auto", which asks the pipeline and looks. A session that is attached already is
    replaced. Returns the `Session`.
    """
    transformer = transformer_of(target)
    backbone = backbone_of(transformer)
    spec = backbone.spec(transformer)
    if method is None:
        method = Sweep(budget=DEFAULT, fill="auto").changed(overrides)
        logger.warning("no method was named: taking %s, which needs no training", method)
    chosen = resolve(method)
    built: Method
    checkpoint = chosen if isinstance(chosen, ShivaCheckpoint) else None
    with torch.random.fork_rng(devices=[]):
        if checkpoint is not None:
            checkpoint.check(spec)
            built = checkpoint.method(**overrides)
        elif isinstance(chosen, MethodConfig):
            built = as_can(chosen.changed(overrides), backbone, transformer).build(spec)
        elif overrides:
            raise ValueError(
                f"a built {type(chosen).__name__} takes no options ({', '.join(overrides)}); pass its config"
            )
        else:
            assert isinstance(chosen, Method)
            built = chosen
    pipeline = None if isinstance(target, nn.Module) else target
    expert = getattr(pipeline, SECOND_EXPERT, None)
    if expert is not None and session_of(expert) is None:
        logger.warning("this pipeline has two transformers; attach to pipe.%s too, or it runs dense", SECOND_EXPERT)
    refuse_conflicts(transformer)
    previous = session_of(transformer)
    with contextlib.nullcontext() if previous is None else previous.replaced():
        adapter = None if checkpoint is None else checkpoint.add_adapter(transformer)
        try:
            fresh = isinstance(chosen, MethodConfig)
            session = Session(transformer, backbone, built, pipeline, cfg, adapter, fresh)
        except BaseException:
            if adapter is not None:
                adapter.remove()
            raise
    if previous is not None:
        logger.warning("%s is replaced by %s", previous.method.config, built.config)
    return session


def resolve(method: Any) -> ShivaCheckpoint | MethodConfig | Method:
    """What a user named: a checkpoint, a config, or a built method."""
    if isinstance(method, str) and not (Path(method) / CONFIG_FILE).is_file():
        named = methods_by_name().get(plain(method))
        if named is not None:
            return named()
        if not Path(method).is_dir() and not may_be_hub_id(method) and os.sep not in method:
            raise ValueError(unknown_method(method))
    if isinstance(method, (str, Path)):
        return ShivaCheckpoint.from_pretrained(method)
    if inspect.isclass(method) and issubclass(method, MethodConfig):
        return method()
    if isinstance(method, (ShivaCheckpoint, MethodConfig, Method)):
        return method
    if isinstance(method, float):
        raise ValueError(f"a budget goes by its name: shiva.attach(pipe, budget={method!r})")
    raise TypeError(
        f"cannot attach a {type(method).__name__}; pass a checkpoint path, a method's name, or a method's config"
    )


def as_can(config: MethodConfig, backbone: Backbone, transformer: nn.Module) -> MethodConfig:
    """A method that would attend to all tokens, where keys have no projection of their own: to those that run."""
    if getattr(config, "attends", None) != "auto":
        return config
    sites = backbone.sites(transformer)
    keyed, blocks = ({site.layer for site in sites if site.kind == kind} for kind in ("keys", "block"))
    if blocks <= keyed:
        return config
    logger.warning(
        "blocks of %s project no keys apart: the tokens that run attend to one another alone (attends='selected'); if "
        "they were fused, unfuse_qkv_projections() before attach",
        type(transformer).__name__,
    )
    return config.changed({"attends": "selected"})


def public_methods() -> dict[str, type[MethodConfig]]:
    """Methods by name, also those from outside; not the bases that ours share."""
    known = MethodConfig.known.items()
    return {name: cls for name, cls in known if name in shiva.__all__ or not cls.__module__.startswith("shiva.")}


def methods_by_name() -> dict[str, type[MethodConfig]]:
    return {plain(name): config for name, config in public_methods().items()}


def plain(name: str) -> str:
    """A method's name however it is written: ToMeSD, tomesd, soft-top-k."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def unknown_method(name: str) -> str:
    """The error text for a name that is no method's."""
    nearest = difflib.get_close_matches(plain(name), methods_by_name(), n=1)
    known = methods_by_name()[nearest[0]].__name__ if nearest else ""
    hint = f"did you mean {known!r}?" if nearest else f"methods are {', '.join(sorted(public_methods()))}"
    return f"shiva has no method {name!r}; {hint} (a checkpoint goes by its folder or hub id, owner/name)"


def session_of(target: Any) -> Session | None:
    """The session at work in a pipeline or transformer, if there is one."""
    registry = getattr(transformer_of(target), "_diffusers_hook", None)
    hook = registry.get_hook(HOOK) if isinstance(registry, HookRegistry) else None
    session = hook.session if isinstance(hook, RootHook) else None
    return session if isinstance(session, Session) else None


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
