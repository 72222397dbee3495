"""Our hooks in diffusers' registries: one around the transformer, one around each site."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import BaseState, StateManager
from torch import Tensor, nn

from shiva.backbones.base import Call, Site, bind
from shiva.compat import HOOK, Hooked, announced
from shiva.core.context import Held, StepContext
from shiva.core.reduction import Reduction, Streams

if TYPE_CHECKING:
    from shiva.step import Stepper

logger = logging.getLogger("shiva")


class NoState(BaseState):
    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass


class RootHook(ModelHook):
    """Around the transformer: reads timestep, prompt and layout once, before any block runs.

    Being stateful, with a manager of its own, it is where diffusers' `cache_context` arrives.
    """

    _is_stateful = True

    def __init__(self, session: Stepper):
        super().__init__()
        self.session = session
        self.announced = StateManager(NoState)

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.session.begin_run()
        return module

    @torch.compiler.disable(recursive=False)
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.fn_ref.original_forward
        session = self.session
        if session.enabled:
            return session._step(forward, args, kwargs)
        if session._recording is not None:
            call = bind(session._names, args, kwargs)
            session._remember_shapes(call)
            session._read_layout(call)
        return forward(*args, **kwargs)


def call_beneath(
    module: nn.Module, compiled: Callable[..., Any], beneath: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a compiled module with the forward that lies beneath our hook, and no hook in the graph."""
    above = module.__dict__["forward"]
    if getattr(beneath, "__func__", None) is type(module).forward:
        del module.forward
    else:
        module.forward = beneath
    try:
        return compiled(*args, **kwargs)
    finally:
        module.forward = above


class SiteHook(ModelHook):
    """Around a block, attention or FFN: hands its image tokens to the method."""

    def __init__(self, session: Stepper, site: Site):
        super().__init__()
        self.session = session
        self.site = site
        self.acts = self.counts = self.reduces = False
        """Whether the method acts here, whether what ran here is counted, and whether that may be less than all."""
        self.model: Site | None = None
        """The whole model as a site, where this is the first block of a method that reduces it."""
        self.ends = False
        """Whether this is the last block of such a method."""
        self.compiled: Callable[..., Any] | None = None
        """The block as a user compiled it alone; it runs beneath this hook, which has a state for each layer."""
        self.runs_compiled = False

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        session, site, forward = self.session, self.site, self.fn_ref.original_forward
        if self.runs_compiled and session.hooks.calls is None and not torch.compiler.is_compiling():
            assert self.compiled is not None
            forward = partial(call_beneath, module, self.compiled, forward)
        ctx, recording = session.ctx, session._recording
        idle = not self.acts and site.kind != "block"
        if not session.enabled or ctx is None or idle:
            call = site.bind(args, kwargs)
            if session.hooks.calls is not None:
                session.hooks.calls[site.name] = call
            output = forward(*args, **kwargs)
            if recording is not None and session.layout is not None and site.kind == "block":
                before, _ = site.split(call[site.image], session.layout)
                recording.note(site.layer, before, site.unpack(output, session.layout).image)
            return output

        call = site.bind(args, kwargs)
        x = site.image_of(call, ctx)
        if site.kind == "block":
            ctx.ran[site.name] = True
            ctx.block_input = x

        def run(image: Tensor, reduction: Reduction | None) -> Streams:
            if ctx.trace is not None and reduction is not None:
                ctx.trace.note(ctx.step, site.layer, reduction.positions, x.shape[0])
            return site.run(forward, call, image, reduction, ctx)._replace(ran=image.shape[1])

        if self.model is not None and not ctx.reruns(site.name):
            ctx.held = self._hold(x, self.model, ctx)
        if ctx.held is not None and site.kind == "block" and self.reduces:
            streams = run(x if x.shape[1] < ctx.tokens else ctx.held.reduction.reduce(x), ctx.held.reduction)
            if self.ends:
                streams = streams._replace(image=ctx.held.reduction.restore(streams.image, ctx.held.base))
        elif self.acts:
            base = x if site.kind == "block" else x.new_zeros(()).expand_as(x)  # a broadcast zero costs no memory
            streams = session.method.around(run, x, base, site, ctx)
        else:
            streams = run(x, None)
        if self.counts and streams.ran is not None:
            ctx.kept[site.name] = streams.ran
        if recording is not None and site.kind == "block":
            recording.note(site.layer, x, streams.image)
        return site.pack(streams, ctx.layout)

    def _hold(self, x: Tensor, model: Site, ctx: StepContext) -> Held | None:
        """The reduction of a method that acts on the whole model, from its first block's input x (B, N, D)."""
        method = self.session.method
        with torch.set_grad_enabled(torch.is_grad_enabled() and method.training):
            reduction = method.reduction(x, model, ctx)
        if reduction is not None and not ctx.blocks_adjoin:
            raise ValueError(
                f"a ControlNet adds to all tokens between blocks, where {method} holds fewer; detach one of them"
            )
        return None if reduction is None else Held(reduction, x)


class Hooks:
    """All hooks of a session: put on, settled at each run, taken off without a trace."""

    def __init__(self, session: Stepper):
        self.session = session
        self.calls: dict[str, Call] | None = None
        """Arguments of each site's latest call, while they are `probed`."""
        self._root = RootHook(session)
        self._sites: list[SiteHook] = []
        self._hooked: list[Hooked] = []

    def register(self) -> None:
        session = self.session
        kinds = session.method.sites | {"block"}
        sites = session.backbone.sites(session.transformer)
        self._sites = [SiteHook(session, site) for site in sites if site.kind in kinds]
        try:
            self.settle()
            for hook in self._sites:
                self._register(hook.site.module, hook)
            self._register(session.transformer, self._root)
        except BaseException:
            self.release()
            raise

    def _register(self, module: nn.Module, hook: ModelHook) -> None:
        own = module.__dict__.get("forward")
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK)
        self._hooked.append(Hooked(module, own, module.forward))

    def release(self) -> None:
        for hooked in reversed(self._hooked):
            hooked.release()
        self._hooked.clear()
        for hook in self._sites:
            if hook.compiled is not None:
                hook.site.module._compiled_call_impl, hook.compiled = hook.compiled, None

    def take_compiled(self) -> None:
        """Put blocks that a user compiled alone (`compile_repeated_blocks`) beneath their hooks, one graph for all.

        Where the method acts inside a block too, its graph would depend on the layer: such a block runs as it is.
        """
        inside = {hook.site.layer for hook in self._sites if hook.acts and hook.site.kind != "block"}
        dropped = False
        for hook in self._sites:
            module, compiled = hook.site.module, hook.site.module._compiled_call_impl
            if compiled is not None:
                module._compiled_call_impl, hook.compiled = None, compiled
                dropped |= hook.site.layer in inside
            hook.runs_compiled = hook.compiled is not None and hook.site.layer not in inside
        if dropped:
            logger.warning(
                "%r acts inside blocks that were compiled one by one, and now run uncompiled; "
                "session.compile() compiles the transformer with the method in it",
                self.session.method,
            )

    @property
    def registered(self) -> bool:
        return bool(self._hooked)

    def settle(self) -> None:
        """Ask the method where it acts; its dense layers may have changed since the last run."""
        method, spec = self.session.method, self.session.spec
        blocks = [hook for hook in self._sites if hook.site.kind == "block"]
        model = "model" in method.sites
        for hook in self._sites:
            hook.acts = method.selects(hook.site) and not (model and hook.site.kind == "block")
            leads, hook.ends = model and hook is blocks[method.leading], model and hook is blocks[-1]
            hook.model = replace(hook.site, name="", kind="model") if leads else None
        acting = [hook.site for hook in self._sites if hook.acts]
        whole = {site.layer for site in acting if site.kind == "block"}
        for hook in self._sites:
            inside = hook.site.kind == "keys" or (hook.site.kind != "block" and hook.site.layer in whole)
            hook.counts = hook.site.kind == "block" or (hook.acts and not inside)
            hook.reduces = hook.counts and (hook.acts or (model and hook.site.layer >= method.leading))
        if not acting and not model:
            raise ValueError(
                f"{type(method).__name__} matches none of the {len(self._sites)} sites of "
                f"{spec.name} ({spec.layers} layers); widen its layers or sites"
            )
        if method.holds and not self.session.backbone.lets_hold:
            raise ValueError(
                f"{method} holds fewer tokens from block to block, and {spec.name} counts all of them in between; "
                "pass span=1 where it has one, or take another method"
            )
        for kind in sorted(method.requires - {"keys", "model"} - {site.kind for site in acting}):
            raise ValueError(f"{method} needs to reduce the {kind} of a block, which {spec.name} does not offer apart")
        keyed = {hook.site.layer for hook in self._sites if hook.site.kind == "keys"}
        whole_blocks = [hook.site for hook in blocks if hook.reduces]
        keyless = [site.name for site in whole_blocks if site.layer not in keyed]
        if "keys" in method.requires and (keyless or not self.key_sites()):
            raise ValueError(
                f"{method} needs separate projections to keys and values, which {spec.name} lacks here"
                f"{f' ({keyless[0]})' if keyless else ''}; "
                "call unfuse_qkv_projections() first, or pass attends='selected' without freeze_references"
            )

    @property
    def announced(self) -> str | None:
        """The name that the pipeline gives the current call, where it announces one."""
        return announced(self._root.announced)

    @property
    def blocks(self) -> list[str]:
        return [hook.site.name for hook in self._sites if hook.site.kind == "block"]

    def key_sites(self) -> list[Site]:
        """The projections to keys and values at which the method acts."""
        return [hook.site for hook in self._sites if hook.acts and hook.site.kind == "keys"]

    def reduced(self, others: Collection[str] = ()) -> list[Site]:
        """Sites that may run on fewer tokens, and others by name."""
        return [hook.site for hook in self._sites if hook.reduces or hook.site.name in others]

    @contextlib.contextmanager
    def probed(self) -> Iterator[dict[str, Call]]:
        """Run dense and unrecorded inside this context, and collect the arguments of every site's call."""
        session, self.calls = self.session, {}
        recording, session._recording = session._recording, None
        try:
            with session.disabled():
                yield self.calls
        finally:
            self.calls, session._recording = None, recording
