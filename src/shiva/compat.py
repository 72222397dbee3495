"""At the door: what a session may be attached to, what it refuses by name, and how it lives with others' hooks."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from diffusers.hooks import HookRegistry, hooks
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import Tensor, nn

from shiva.backbones.base import is_fused

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
ACCELERATE = "_old_forward"
"""Where accelerate's hooks keep the forward that they wrap."""
BACKEND = "_attention_backend"
"""Where a processor keeps what `set_attention_backend` chose; None takes the one that all share."""
CONTEXT_PARALLEL = ("cp_input", "cp_output")
"""How diffusers' hooks that split a sequence over processes begin."""
OFFLOADING = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


# -- what differs between releases of diffusers ----------------------------------------------------------


def announced(manager: Any) -> str | None:
    """The name that a pipeline gives its call (`cache_context`); before 0.41 a manager keeps the name alone."""
    context = manager._context if hasattr(manager, "_context") else manager._current_context
    return getattr(context, "name", context)


def announce(manager: Any, name: str) -> None:
    """Tell a manager of hooks the name of a call, as a pipeline does."""
    context: Any = getattr(hooks, "CacheContext", str)
    manager.set_context(context(name))


def hooks_changed(transformer: nn.Module) -> None:
    """Have hooks of blocks found anew, among which a registry remembers those that it has seen."""
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        if registry is not None:
            registry._child_registries_cache = None


# -- others' hooks ---------------------------------------------------------------------------------------


def under_cache_dit(transformer: nn.Module) -> bool:
    return hasattr(transformer, CACHE_DIT)


def transformer_of(target: Any) -> nn.Module:
    """The transformer of a pipeline, or the module itself, without a torch.compile wrapper."""
    transformer = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
    if transformer is None:
        raise ValueError(f"{type(target).__name__} has no transformer; pass a DiT pipeline, as in shiva.attach(pipe)")
    return getattr(transformer, "_orig_mod", transformer)


@dataclass(frozen=True)
class Hooked:
    """A module under our hook, with the forward that it had of its own and the one that the hook gave it."""

    module: Any
    own: Callable[..., Any] | None
    given: Callable[..., Any]

    def release(self) -> None:
        """Take the hook off; whatever came before it or was put over it since stays."""
        registry, over = HookRegistry.check_if_exists_or_initialize(self.module), self.module.forward
        under = registry.get_hook(HOOK).fn_ref.original_forward
        above = registry._fn_refs[registry._hook_order.index(HOOK) + 1 :][:1]
        kept = [(ref, ref.forward, ref.original_forward) for ref in above]
        registry.remove_hook(HOOK, recurse=False)
        for ref, forward, original in kept:  # remove_hook takes a hook above with a forward of its own out of the way
            ref.forward = under if forward is self.given else forward
            ref.original_forward = under if original is self.given else original
        if getattr(self.module, ACCELERATE, None) is self.given:
            setattr(self.module, ACCELERATE, under)
            self.module.forward = over
        elif not registry.hooks and self.own is None:
            self.module.__dict__.pop("forward", None)
        if not registry.hooks:
            del self.module._diffusers_hook


def refuse_conflicts(transformer: nn.Module) -> None:
    """Refuse what may not be there at attach."""
    refuse_always(transformer)
    for name, hook in hooks_of(transformer):
        if hook in INNER_CACHES:
            raise ValueError(
                f"{INNER_CACHES[hook]} at {name} would see pruned tokens only; call "
                "transformer.disable_cache(), attach first, then enable the cache again"
            )
    if any(offloads(getattr(module, "_hf_hook", None)) for module in transformer.modules()):
        if "disk" in (getattr(transformer, "hf_device_map", None) or {}).values():
            raise ValueError(
                "device_map left weights of this transformer on disk, which a model without hooks does not have; load "
                "it without device_map, attach first, then enable offload, as by "
                "pipe.transformer.enable_group_offload(onload_device=..., offload_to_disk_path=...)"
            )
        raise ValueError(
            "CPU offload is on, and would drop the session after an image; call pipe.remove_all_hooks(), "
            "attach first, then enable offload again"
        )


def refuse_always(transformer: nn.Module) -> None:
    """Refuse what may be there neither at attach nor at the beginning of a run."""
    for name, hook in hooks_of(transformer):
        if hook in REFUSED_HOOKS:
            raise ValueError(
                f"{REFUSED_HOOKS[hook]} caches attention outputs at {name}, which go wrong when the kept tokens "
                "change; call transformer.disable_cache() first"
            )
        if hook.startswith(CONTEXT_PARALLEL):
            raise ValueError(
                "context parallelism splits the tokens over processes before any block sees them, so none could be "
                "chosen of the whole image; load the model without enable_parallelism, and give each process images "
                "of its own"
            )


def refuse_replaced(transformer: nn.Module, projections: Mapping[str, nn.Module]) -> None:
    """Refuse a projection, known by its path, that another module has taken the place of since attach."""
    for name, module in projections.items():
        attention = name.rpartition(".")[0]
        if is_fused(transformer.get_submodule(attention)):
            raise ValueError(
                f"the projections of {attention} were fused after attach, where all tokens are attended to by them; "
                "call unfuse_qkv_projections(), or attach with attends='selected'"
            )
        if transformer.get_submodule(name) is not module:
            raise ValueError(
                f"{name} was replaced after attach, as a LoRA does, which comes before the session: "
                "detach(), load or unload it, then attach again"
            )


def hooks_of(transformer: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of all modules under diffusers' hooks, and of the hooks."""
    found = [("", transformer)]  # named_modules takes milliseconds, and this is asked at every run
    while found:
        name, module = found.pop()
        for hook in getattr(module.__dict__.get("_diffusers_hook"), "hooks", {}):
            yield name or "the transformer", hook
        inside = ((f"{name}.{part}".removeprefix("."), child) for part, child in module._modules.items())
        found += reversed([(path, child) for path, child in inside if child is not None])


def offloads(hook: Any) -> bool:
    """Whether an accelerate hook keeps weights elsewhere between calls."""
    inner = getattr(hook, "hooks", (hook,))
    return any(type(part).__name__ == "CpuOffload" or getattr(part, "offload", False) for part in inner)


@contextlib.contextmanager
def offloading_off(transformer: nn.Module) -> Iterator[None]:
    """Hooks that load or gather weights silenced for a while: on the meta device there is nothing to load."""
    silenced: list[Any] = []
    gathering = [m for m in transformer.modules() if hasattr(m, "set_reshard_after_forward")]  # torch's FSDPModule
    around = [(module, module._forward_pre_hooks, module._forward_hooks) for module in gathering]
    accelerated: list[tuple[Any, Any]] = [(m, m._hf_hook) for m in transformer.modules() if hasattr(m, ACCELERATE)]
    for module in gathering:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    for module, _ in accelerated:
        module._hf_hook = SimpleNamespace(pre_forward=arguments_alone, post_forward=output_alone, no_grad=False)
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        silenced += [hook for name, hook in getattr(registry, "hooks", {}).items() if name in OFFLOADING]
    for hook in silenced:
        hook.fn_ref.pre_forward, hook.fn_ref.post_forward = arguments_alone, output_alone
    try:
        yield
    finally:
        for hook in silenced:
            hook.fn_ref.pre_forward, hook.fn_ref.post_forward = hook.pre_forward, hook.post_forward
        for module, hook in accelerated:
            module._hf_hook = hook
        for module, before, after in around:
            module._forward_pre_hooks, module._forward_hooks = before, after


def arguments_alone(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def output_alone(module: nn.Module, output: Any) -> Any:
    return output


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


@contextlib.contextmanager
def native_attention(transformer: nn.Module) -> Iterator[None]:
    """Attention by torch's own operator for a while: other backends run on no meta device, or count as nothing."""
    chosen: list[tuple[Any, Any]] = []
    for module in transformer.modules():
        processor: Any = getattr(module, "processor", None)
        if getattr(processor, BACKEND, None) is not None:
            chosen.append((processor, getattr(processor, BACKEND)))
            setattr(processor, BACKEND, None)
    try:
        with attention_backend(AttentionBackendName.NATIVE):
            yield
    finally:
        for processor, backend in chosen:
            setattr(processor, BACKEND, backend)


@contextlib.contextmanager
def plain_linears(transformer: nn.Module) -> Iterator[None]:
    """Quantised linear layers as plain ones for a while: theirs run on no meta device, and count as nothing."""
    replaced: list[tuple[Any, Any]] = []
    module: Any
    for module in transformer.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "in_features") or hasattr(module, "base_layer") or not isinstance(weight, Tensor):
            continue
        if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
            replaced.append((module, module.__dict__.get("forward")))
            module.forward = functools.partial(plain_linear, module.out_features)
    try:
        yield
    finally:
        for module, own in replaced:
            del module.forward
            if own is not None:
                module.forward = own


def plain_linear(width: int, x: Tensor) -> Tensor:
    """What a linear layer costs, with any weights."""
    return nn.functional.linear(x, x.new_zeros(width, x.shape[-1]))
