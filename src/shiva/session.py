"""attach / detach: the only module that knows both a backbone and a method."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shiva.adapters import AttachedAdapter
from shiva.backbones.base import Backbone, Call, Site, backbone_of, bind, parameter_names
from shiva.checkpoint import ShivaCheckpoint
from shiva.core import options
from shiva.core.context import Clock, StepContext, Tape
from shiva.core.cost import ZERO, CostModel, Flops, SiteCost, count
from shiva.core.method import Method, MethodConfig
from shiva.core.reduction import Reduction, Streams
from shiva.core.trace import Trace
from shiva.door import (
    HOOK,
    Hooked,
    caches_off,
    offloading_off,
    refuse_attention_caches,
    refuse_conflicts,
    refuse_replaced,
    transformer_of,
    under_cache_dit,
)
from shiva.pricing import meta_call, site_costs, tensor_bytes, to_meta
from shiva.runs import CFG, RunTracker, read_timestep
from shiva.summary import StepRecord, Summary

BETWEEN_BLOCKS = ("block_controlnet_hidden_states", "controlnet_block_samples", "controlnet_single_block_samples")
"""Arguments that a transformer adds to its tokens between blocks."""


class RootHook(ModelHook):
    """Around the transformer: reads timestep, prompt and grid once, before any block runs."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session

    @torch.compiler.disable(recursive=False)
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.fn_ref.original_forward
        if not self.session.enabled:
            return forward(*args, **kwargs)
        return self.session._step(forward, args, kwargs)


class SiteHook(ModelHook):
    """Around a block, attention or FFN: hands its image tokens to the method."""

    def __init__(self, session: Session, site: Site):
        super().__init__()
        self.session = session
        self.site = site
        self.acts = session.method.selects(site)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        session, site, forward = self.session, self.site, self.fn_ref.original_forward
        ctx, tape = session.ctx, session._tape
        if not session.enabled or ctx is None:
            if session._probe is not None:
                session._probe[site.name] = site.bind(args, kwargs)
            output = forward(*args, **kwargs)
            if tape is not None and site.kind == "block":
                before = site.bind(args, kwargs)[site.image]
                tape.note(site.layer, before, site.unpack(output).image)
            return output

        call = site.bind(args, kwargs)
        x = site.image_of(call, ctx)
        if site.kind == "block":
            ctx.ran[site.name] = True
            session.method.observe(x, site, ctx)

        def run(image: Tensor, reduction: Reduction | None) -> Streams:
            ctx.kept[site.name] = image.shape[1]
            if ctx.trace is not None and reduction is not None:
                ctx.trace.note(ctx.step, site.layer, reduction.positions, x.shape[0])
            return site.run(forward, call, image, reduction, ctx)

        streams = session.method.around(run, x, site.base_of(x), site, ctx) if self.acts else run(x, None)
        if tape is not None and site.kind == "block":
            tape.note(site.layer, x, streams.image)
        return site.pack(streams)


class Session:
    """A method at work in a transformer. Also a context manager that detaches at its end."""

    def __init__(
        self,
        transformer: nn.Module,
        backbone: Backbone,
        method: Method,
        pipeline: Any = None,
        cfg: str = "auto",
        adapter: AttachedAdapter | None = None,
        fresh: bool = False,
    ):
        if cfg == "none" and method.needs_guidance:
            raise ValueError(
                f"{method} compares the two predictions of guidance, and cfg='none' says there is one; "
                "pass 'auto', 'batched' or 'sequential'"
            )
        self.transformer = transformer
        self.backbone = backbone
        self.method = method
        self.pipeline = pipeline
        self.spec = backbone.spec(transformer)
        self.enabled = True
        self.ctx: StepContext | None = None
        self.stats: list[StepRecord] = []
        """One record per transformer call of the current sampling run."""
        self.teacher: Tape | None = None
        """A dense pass of the coming batch, which training sets; methods find it in their context."""
        self._adapter = adapter
        self._fresh = fresh
        self._clock = Clock()
        self._tape: Tape | None = None
        self._trace: Trace | None = None
        self._tracker = RunTracker(options.choice("cfg", cfg, CFG))
        self._names = parameter_names(transformer)
        self._example: Call | None = None
        self._shapes: list[Any] = []
        self._probe: dict[str, Call] | None = None
        self._compiled: Callable[..., Any] | None = None
        self.runner: Callable[[StepContext, Call], Any] | None = None
        """Runs a step in the transformer's place, such as by replaying a recorded graph of it."""
        self._hooked: list[Hooked] = []
        self._prepared = contextlib.ExitStack()
        self._over_cache_dit = under_cache_dit(transformer)
        self._keys: list[Site] = []
        self._blocks = [site.name for site in backbone.sites(transformer) if site.kind == "block"]
        method.to(next(transformer.parameters()).device)
        self._attach()

    # -- hooks ---------------------------------------------------------------------------------------

    def _attach(self) -> None:
        sites = self.backbone.sites(self.transformer)
        acting = [site for site in sites if self.method.selects(site)]
        if not acting:
            raise ValueError(
                f"{type(self.method).__name__} matches none of the {len(sites)} sites of "
                f"{self.spec.name} ({self.spec.layers} layers); widen its layers or sites"
            )
        self.method.check_sites(acting)
        self._keys = [site for site in acting if site.kind == "keys"]
        whole = {site.layer for site in self._keys if self.method.whole_keys(site.layer)}
        try:
            self._prepared.enter_context(self.backbone.whole_keys(self.transformer, whole))
            for site in sites:
                if site.kind == "block" or site in acting:
                    self._register(site.module, SiteHook(self, site))
            self._register(self.transformer, RootHook(self))
        except BaseException:
            self.detach()
            raise

    def _register(self, module: nn.Module, hook: ModelHook) -> None:
        own = module.__dict__.get("forward")
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK)
        self._hooked.append(Hooked(module, own, module.forward))

    def detach(self) -> None:
        """Remove every trace of the session and let go of its run; the pipeline computes exactly as before it."""
        if self._adapter is not None:
            self._adapter.remove()
            self._adapter = None
        if self.ctx is not None:
            self.ctx.run.clear()
            self.ctx.memory.clear()
        self._release()

    def _release(self) -> None:
        for hooked in reversed(self._hooked):
            hooked.release()
        self._hooked.clear()
        self._prepared.close()

    def rehook(self) -> None:
        """Act on the modules that are at the sites now, as after a trainable adapter has wrapped some of them."""
        self._release()
        self._attach()

    @property
    def attached(self) -> bool:
        return bool(self._hooked)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @contextlib.contextmanager
    def disabled(self) -> Iterator[Session]:
        """Run dense inside this context: the teacher of training, or a reference image."""
        before, self.enabled = self.enabled, False
        try:
            yield self
        finally:
            self.enabled = before

    @contextlib.contextmanager
    def record(self, outputs: Collection[int] | None = None, updates: Collection[int] | None = None) -> Iterator[Tape]:
        """Collect blocks' outputs and updates inside this context, dense or reduced; None means every layer."""
        before, self._tape = self._tape, Tape(output_layers=outputs, update_layers=updates)
        try:
            yield self._tape
        finally:
            self._tape = before

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Note which tokens each layer runs on, and their scores, inside this context; steps then run uncompiled."""
        before, self._trace = self._trace, Trace()
        try:
            yield self._trace
        finally:
            self._trace = before

    def begin_run(self) -> None:
        """Begin a new run with the next call: for those who call the transformer themselves, not by a pipeline."""
        self._tracker.forget()

    # -- one transformer call ------------------------------------------------------------------------

    def _step(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = bind(self._names, args, kwargs)
        if self.backbone.is_extra(call):
            with self.disabled():
                return forward(*args, **kwargs)
        self._remember_shapes(call)
        self.ctx = ctx = self._context(call)
        if self.runner is not None and ctx.trace is None:
            output = self.runner(ctx, call)
        else:
            self._begin(ctx, call)
            run = forward if self._compiled is None or ctx.trace is not None else self._compiled
            output = run(*args, **kwargs)
            self.method.end_step(output[0], ctx)
        skipped = tuple(name for name in self._blocks if name not in ctx.ran)
        self.stats.append(StepRecord(ctx.timestep, ctx.tokens, dict(ctx.kept), skipped))
        return output

    def _remember_shapes(self, call: Call) -> None:
        """Keep a call's shapes, on the meta device, for pricing; steps of a run have the same."""
        shapes = [(name, getattr(value, "shape", value is None)) for name, value in call.items()]
        if shapes != self._shapes:
            self._shapes, self._example = shapes, tree_map(to_meta, call)

    def _begin(self, ctx: StepContext, call: Call) -> None:
        """What a step computes before the transformer runs: it reads no value on the host."""
        if self.method.needs_signals:
            with ctx.phase("signals"):
                ctx.time_embedding, ctx.prompt = self.backbone.signals(self.transformer, call)
        self.method.begin_step(ctx)

    def _context(self, call: Call) -> StepContext:
        around = self.backbone.surroundings(self.transformer, call)
        latents = call[self.backbone.latents]
        timestep = read_timestep(around.timestep)
        schedule = getattr(getattr(self.pipeline, "scheduler", None), "timesteps", None)
        guided = getattr(self.pipeline, "do_classifier_free_guidance", None)
        previous = self._tracker.run
        run, timesteps = self._tracker.follow(timestep, latents, schedule, guided)
        if run is not previous:
            refuse_attention_caches(self.transformer)
            refuse_replaced(self.transformer, {site.name: site.module for site in self._keys})
            self.stats = []
        if self._trace is not None:
            self._trace.begin(run.step, timestep, around.grid, self.spec.layers, fresh=run is not previous)
        ctx = StepContext(
            grid=around.grid,
            timestep=timestep,
            step=run.step,
            first=run.first,
            steps=None if timesteps is None else len(timesteps),
            channels=latents.shape[1 if latents.ndim == 4 else -1],
            text_tokens=around.text_tokens,
            guidance_pairs=run.paired,
            conditional_half=self.backbone.conditional_half,
            branch=run.branch,
            run=run.memory,
            blocks_adjoin=all(call.get(name) is None for name in BETWEEN_BLOCKS),
            cost=self.cost_model,
            teacher=self.teacher,
            trace=self._trace,
            clock=self._clock if latents.device.type == "cpu" else None,
        )
        if run.branch and self.ctx is not None:
            ctx.memory = self.ctx.memory
        self._move_method(latents.device)
        with ctx.phase("lookup"):
            ctx.counts = self.method.plan(ctx, timesteps)
        if self._fresh and not latents.is_meta and min(ctx.counts, default=0) < ctx.tokens:
            self._warn_untrained()
        return ctx

    def _warn_untrained(self) -> None:
        """Say once that a method which `attach` built chooses tokens by weights that it was never given."""
        self._fresh = False
        if self.method.needs_training and not self.method.trained:
            warnings.warn(
                f"{self.method} chooses tokens by untrained weights; attach a trained checkpoint, or "
                "shiva.Shiva.preset('sweep'), which needs no training",
                stacklevel=2,
            )

    def _move_method(self, device: torch.device) -> None:
        """Follow a transformer that offloading has moved; weights on the meta device would be lost."""
        parameter = next(self.method.parameters(), None)
        if parameter is not None and parameter.device != device and device.type != "meta":
            self.method.to(device)

    # -- compiling -----------------------------------------------------------------------------------

    def program(self, ctx: StepContext | None = None, **call: Any) -> StepProgram:
        """The coming step as a module of its own, for `torch.export` or a CUDA graph; `call` as the transformer's.

        Token counts are settled here, on the host. Inside, nothing depends on a value.
        """
        if ctx is None:
            self._remember_shapes(call)
            self.ctx = ctx = self._context(call)
        return StepProgram(self, ctx)

    def _original_forward(self) -> Callable[..., Any]:
        hook = HookRegistry.check_if_exists_or_initialize(self.transformer).get_hook(HOOK)
        if hook is None:
            raise RuntimeError("the session is detached; attach again first")
        return hook.fn_ref.original_forward

    def compile(self, *, fullgraph: bool = True, dynamic: bool = False, **options: Any) -> Session:
        """Compile the transformer with `torch.compile`, the session's bookkeeping outside the graph.

        Token counts are static, so there is one graph per distinct row of the schedule; round them with
        `bucket` if the rows are many. With `dynamic=True` one graph serves all counts. A method whose counts
        follow the data (DyDiT) has no whole graph: pass `fullgraph=False`.
        """
        if fullgraph and not self.method.static:
            raise ValueError(
                f"token counts of {self.method} follow the data and break the graph; pass fullgraph=False"
            )
        forward = self._original_forward()
        compiled = torch.compile(forward, fullgraph=fullgraph, dynamic=dynamic, **options)

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
                return compiled(*args, **kwargs)

        self._compiled = call
        return self

    # -- accounting ----------------------------------------------------------------------------------

    def cost_model(self) -> CostModel:
        """FLOPs of each block at any number of image tokens, at the shapes of the latest call."""
        blocks = [site for site in self.backbone.sites(self.transformer) if site.kind == "block"]
        dense, costs = self._price(blocks)
        tokens = self._tokens()
        layers = tuple(costs[site.name] for site in blocks)
        inside = sum((cost(tokens) for cost in layers), ZERO)
        return CostModel(outside=dense - inside, layers=layers, tokens=tokens)

    def _tokens(self) -> int:
        assert self._example is not None
        rows, columns = self.backbone.surroundings(self.transformer, self._example).grid
        return rows * columns

    def _price(self, sites: list[Site]) -> tuple[Flops, dict[str, SiteCost]]:
        """FLOPs of the latest call run dense, and of each site by its number of tokens.

        Everything runs on the meta device with the shapes of that call, so nothing is computed.
        """
        if self._example is None:
            raise RuntimeError("no call has been seen yet; run the pipeline once, then ask for its cost")
        if not self.attached:
            raise RuntimeError("the session is detached; ask for its cost or summary before detach()")
        example = self._example
        around = self.backbone.surroundings(self.transformer, example)
        shapes = StepContext(grid=around.grid, timestep=0.0, text_tokens=around.text_tokens)
        acting = filter(self.method.selects, self.backbone.sites(self.transformer))
        keys = [site for site in acting if site.kind == "keys" and self.method.whole_keys(site.layer)]
        self._probe = {}
        try:
            with self.disabled(), caches_off(self.transformer), offloading_off(self.transformer):
                dense = count(lambda: meta_call(self.transformer, **example))
                costs = site_costs(sites, self._probe, shapes, keys)
        finally:
            self._probe = None
        return dense, costs

    def phases(self) -> dict[str, float]:
        """Seconds spent so far in each phase of the reduction path."""
        return dict(self._clock.seconds)

    def summary(self) -> Summary:
        """Kept tokens, keep ratio and FLOPs by layer and step of the current run, and where time went."""
        if not self.stats and under_cache_dit(self.transformer) and not self._over_cache_dit:
            raise RuntimeError(
                "cache-dit was enabled after attach and runs the model past this session; "
                "call cache_dit.disable_cache(pipe) and detach(), enable it again, then attach"
            )
        sites = self.backbone.sites(self.transformer)
        acting = [site for site in sites if site.kind != "keys" and self.method.selects(site)]
        skipped = {name for step in self.stats for name in step.skipped}
        priced = [site for site in sites if site in acting or site.name in skipped]
        dense, costs = self._price(priced) if self.stats else (ZERO, {})
        return Summary(
            method=repr(self.method),
            places=[(site.name, site.kind, site.layer) for site in acting],
            steps=list(self.stats),
            costs=costs,
            dense=dense,
            seconds=self.phases(),
            cached_bytes=0 if self.ctx is None else tensor_bytes(self.ctx.run),
        )


class StepProgram(nn.Module):
    """One step with its token counts settled: signals, then the transformer with the method inside."""

    def __init__(self, session: Session, ctx: StepContext):
        super().__init__()
        self.transformer, self.method = session.transformer, session.method
        self._session, self.ctx = session, ctx
        self._forward, self._known = session._original_forward(), dict(ctx.memory)

    def forward(self, **call: Any) -> Any:
        session = self._session
        before, session.ctx = session.ctx, self.ctx
        self.ctx.memory = dict(self._known)  # every run chooses its tokens itself
        try:
            session._begin(self.ctx, call)
            output = self._forward(**call)
            self.method.end_step(output[0], self.ctx)
        finally:
            session.ctx = before
        return output


def attach(
    target: Any,
    method: str | Path | ShivaCheckpoint | MethodConfig | Method,
    *,
    cfg: str = "auto",
    **overrides: Any,
) -> Session:
    """Make a pipeline (or bare transformer) run its blocks on fewer image tokens.

    `method` is a trained checkpoint (path or hub id) or the config of any method; `overrides` change its
    fields (`budget=0.6`, `keep=0.8`, ...). `cfg` says how classifier-free guidance is run: "batched" halves,
    "sequential" calls, "none", or "auto", which asks the pipeline and looks. Returns the `Session`.
    """
    transformer = transformer_of(target)
    backbone = backbone_of(transformer)
    refuse_conflicts(target, transformer)
    spec = backbone.spec(transformer)
    if isinstance(method, (str, Path)):
        method = ShivaCheckpoint.from_pretrained(method)
    adapter = None
    if isinstance(method, ShivaCheckpoint):
        method.check(spec)
        with torch.random.fork_rng(devices=[]):
            built = method.method(**overrides)
        adapter = method.add_adapter(transformer)
    elif isinstance(method, MethodConfig):
        with torch.random.fork_rng(devices=[]):
            built = method.changed(overrides).build(spec)
    elif isinstance(method, Method):
        if overrides:
            raise ValueError(
                f"a built {type(method).__name__} takes no options ({', '.join(overrides)}); pass its config"
            )
        built = method
    else:
        raise TypeError(f"cannot attach a {type(method).__name__}; pass a checkpoint path or a method config")
    pipeline = None if isinstance(target, nn.Module) else target
    try:
        return Session(transformer, backbone, built, pipeline, cfg, adapter, fresh=isinstance(method, MethodConfig))
    except BaseException:
        if adapter is not None:
            adapter.remove()
        raise
