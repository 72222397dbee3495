"""What else makes a pipeline faster, for nothing: a better solver, step caches of diffusers and cache-dit, INT8."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.hooks.hooks import StateManager
from torch import nn

from shiva.backbones.base import Site, backbone_of, bind, parameter_names
from shiva.compat import INNER_CACHES, REFUSED_HOOKS, announce, hooks_changed
from shiva.core.needs import need
from shiva.core.options import REFUSALS

Solver = Literal["own", "even", "multistep"]
CacheName = Literal["MagCache", "FirstBlockCache", "TaylorSeer", "DBCache"]
DEFAULTS: dict[str, float] = {"MagCache": 0.06, "FirstBlockCache": 0.05, "TaylorSeer": 2, "DBCache": 0.08}
"""Thresholds above which a step is computed again, and how many steps TaylorSeer computes one of."""


# -- solvers ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def solving(pipe: Any, solver: Solver) -> Iterator[None]:
    """The pipeline under another solver inside this context."""
    if solver == "own":
        yield
    elif solver == "even":
        with evenly_spaced(pipe.scheduler):
            yield
    else:
        with scheduled(pipe, multistep(pipe.scheduler)):
            yield


@contextlib.contextmanager
def scheduled(pipe: Any, scheduler: Any) -> Iterator[None]:
    """The pipeline with another scheduler inside this context."""
    own, pipe.scheduler = pipe.scheduler, scheduler
    try:
        yield
    finally:
        pipe.scheduler = own


@contextlib.contextmanager
def evenly_spaced(scheduler: Any) -> Iterator[None]:
    """Noise levels 1, 1 - 1/n, ..., 1/n: diffusers' own spacing, 1 to 0.001, spends the last step next to nothing."""
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ValueError(f"{type(scheduler).__name__} has a spacing of its own; solver 'even' is for flow matching")
    set_timesteps = scheduler.set_timesteps

    @functools.wraps(set_timesteps)
    def evenly(num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, **given: Any) -> None:
        if num_inference_steps is None or sigmas is not None:
            raise ValueError("this pipeline says itself how its steps are spaced; leave solver 'even' out")
        even = [1 - place / num_inference_steps for place in range(num_inference_steps)]
        set_timesteps(num_inference_steps, device=device, sigmas=even, **given)

    scheduler.set_timesteps = evenly
    try:
        yield
    finally:
        del scheduler.set_timesteps


def multistep(scheduler: Any) -> Any:
    """A second-order multistep solver of the scheduler's family: as many calls of the model, smaller errors."""
    config = scheduler.config
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": scheduler.shift}
        kept = ("num_train_timesteps", "use_dynamic_shifting", "time_shift_type", "shift_terminal")
        return UniPCMultistepScheduler(**flow, **{name: config[name] for name in kept if name in config})
    if isinstance(scheduler, (DPMSolverMultistepScheduler, UniPCMultistepScheduler)):
        raise ValueError(f"this pipeline's own {type(scheduler).__name__} is a multistep solver")
    if DPMSolverMultistepScheduler not in scheduler.compatibles:
        raise ValueError(f"no multistep solver is known for {type(scheduler).__name__}")
    return DPMSolverMultistepScheduler.from_config(config)


# -- caches ----------------------------------------------------------------------------------------------


def wraps_blocks(cache: str | None) -> bool:
    """Whether it runs the blocks itself, and so comes before a session; the others come after it."""
    return cache == "DBCache"


@contextlib.contextmanager
def caching(pipe: Any, cache: CacheName, setting: float | None, ratios: Sequence[float] = ()) -> Iterator[None]:
    """A step cache inside this context; `ratios` are MagCache's, measured on this pipeline.

    What others' code raises on a model that it does not fit is refused in a line, as what ours does not fit is.
    """
    value = DEFAULTS[cache] if setting is None else setting
    try:
        with block_cache(pipe, value) if cache == "DBCache" else hooked(pipe, made(pipe, cache, value, ratios)):
            yield
    except (*REFUSALS, OSError):
        raise
    except Exception as error:
        name = type(pipe.transformer).__name__
        raise ValueError(f"{cache} fails on {name} ({type(error).__name__}: {error}); leave it out") from error


def made(pipe: Any, cache: CacheName, value: float, ratios: Sequence[float]) -> Callable[[], None]:
    """What puts a cache of diffusers on a pipeline's transformer."""
    hooks, transformer = importlib.import_module("diffusers.hooks"), pipe.transformer
    if cache == "MagCache":
        how = {"threshold": value, "num_inference_steps": len(ratios), "mag_ratios": list(ratios)}
        return functools.partial(hooks.apply_mag_cache, transformer, hooks.MagCacheConfig(**how))
    if cache == "TaylorSeer":
        how = {"cache_interval": round(value), "disable_cache_before_step": 2, "taylor_factors_dtype": None}
        return functools.partial(hooks.apply_taylorseer_cache, transformer, hooks.TaylorSeerCacheConfig(**how))
    if type(transformer).__name__ == "SD3Transformer2DModel":
        raise ValueError("FirstBlockCache cannot run SD3: its last block returns no text, which the cache subtracts")
    return functools.partial(hooks.apply_first_block_cache, transformer, hooks.FirstBlockCacheConfig(threshold=value))


@contextlib.contextmanager
def hooked(pipe: Any, apply: Callable[[], None]) -> Iterator[None]:
    """A cache of diffusers inside this context: begun anew at every run, and nothing of it left afterwards."""
    scheduler, transformer = pipe.scheduler, pipe.transformer
    set_timesteps, own = scheduler.set_timesteps, "set_timesteps" in vars(scheduler)
    unnamed = not hasattr(transformer, "cache_context")

    @functools.wraps(set_timesteps)
    def begin(*args: Any, **kwargs: Any) -> None:
        for module, name in cache_hooks(transformer):
            hook = module._diffusers_hook.hooks[name]
            if hook._is_stateful:
                hook.reset_state(module)
            if unnamed:  # the pipelines of such transformers announce no call
                for manager in vars(hook).values():
                    if isinstance(manager, StateManager):
                        announce(manager, "run")
        set_timesteps(*args, **kwargs)

    try:
        apply()
        scheduler.set_timesteps = begin
        hooks_changed(transformer)
        yield
    finally:
        scheduler.set_timesteps = set_timesteps
        if not own:
            del scheduler.set_timesteps
        for module, name in cache_hooks(transformer):
            module._diffusers_hook.remove_hook(name, recurse=False)


def cache_hooks(transformer: Any) -> list[tuple[Any, str]]:
    """Modules under hooks of diffusers' caches, and the hooks' names."""
    known = INNER_CACHES | REFUSED_HOOKS
    inside = ((module, getattr(module, "_diffusers_hook", None)) for module in transformer.modules())
    return [(module, name) for module, registry in inside for name in getattr(registry, "hooks", ()) if name in known]


@contextlib.contextmanager
def block_cache(pipe: Any, threshold: float) -> Iterator[None]:
    """cache-dit's DBCache inside this context."""
    cache_dit = need("cache_dit", "cache-dit")
    for name in logging.root.manager.loggerDict:
        if name.startswith(("CACHE_DIT", "cache_dit")):
            logging.getLogger(name).setLevel(logging.ERROR)
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=threshold
    )
    cache_dit.enable_cache(pipe, cache_config=config)
    try:
        yield
    finally:
        cache_dit.disable_cache(pipe)


@contextlib.contextmanager
def magnitude_ratios(transformer: Any) -> Iterator[list[float]]:
    """Fill a list with MagCache's ratios of the dense run inside: |update of all blocks| over the last step's.

    One number a step, the mean over tokens; the first is 1, as in MagCache's own calibration. Where guidance makes
    several calls a step, the first ones count: MagCache looks them up by the step for all.
    """
    backbone, names = backbone_of(transformer), parameter_names(transformer)
    blocks: list[Site] = [site for site in backbone.sites(transformer) if site.kind == "block"]
    first, last = blocks[0], blocks[-1]
    ratios: list[float] = []
    seen: dict[str, Any] = {}

    def place(module: Any, args: Any, kwargs: Any) -> None:
        call = bind(names, args, kwargs)
        timestep = float(backbone.timestep(call).max())
        seen["again"] = timestep == seen.get("timestep")
        seen.update(layout=backbone.layout(transformer, call), timestep=timestep)

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        seen["input"] = first.split(first.bind(args, kwargs)[first.image], seen["layout"])[0]

    def leave(module: Any, args: Any, output: Any) -> None:
        if seen["again"]:
            return
        size = (last.unpack(output, seen["layout"]).image - seen["input"]).float().norm(dim=-1)
        before = seen.get("size")
        ratios.append(1.0 if before is None else float((size / (before + 1e-8)).mean()))
        seen["size"] = size

    handles = [
        transformer.register_forward_pre_hook(place, with_kwargs=True),
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
def quantized(pipe: Any, blocks: int) -> Iterator[None]:
    """Weights and activations of the last `blocks` blocks' FFNs in INT8; a trained adapter is merged in first.

    Linear layers are replaced by quantized copies and put back afterwards, so nothing of it stays.
    """
    if blocks <= 0:
        yield
        return
    quantization, transformer = need("torchao.quantization", "quant"), pipe.transformer
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    layers = backbone_of(transformer).spec(transformer).layers
    if blocks > layers:
        raise ValueError(f"int8: {blocks} is more than the {layers} blocks of {type(transformer).__name__}")
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for site in backbone_of(transformer).sites(transformer):
            if site.kind == "ffn" and site.layer >= layers - blocks:
                for parent, name, linear in _linears(site.module):
                    parent._modules[name] = holder = nn.Sequential(_merged(linear))
                    replaced.append((parent, name, linear))
                    quantization.quantize_(holder, config)
        yield
    finally:
        for parent, name, linear in replaced:
            parent._modules[name] = linear


def _linears(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every linear layer inside, with or without an adapter around it: (parent, name, layer)."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) or hasattr(child, "base_layer"):
            found.append((module, name, child))
        else:
            found += _linears(child)
    return found


def _merged(layer: nn.Module) -> nn.Module:
    """A plain linear copy of a layer, its adapter folded in."""
    layer = copy.deepcopy(layer)
    if not hasattr(layer, "base_layer"):
        return layer
    adapted: Any = layer
    adapted.merge()
    return adapted.get_base_layer()
