"""A session: one step of a method in a transformer. The only module that knows both a backbone and a method."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from diffusers.hooks import HookRegistry
from torch import nn
from torch.utils._pytree import tree_map

from shiva.adapter import AttachedAdapter
from shiva.backbones.base import Backbone, Call, Site, bind, parameter_names
from shiva.compat import (
    HOOK,
    caches_off,
    offloading_off,
    plain_linears,
    refuse_always,
    refuse_replaced,
    under_cache_dit,
)
from shiva.compiled import StepProgram, compile_forward
from shiva.core import options
from shiva.core.context import Clock, Exploration, Recording, StepContext
from shiva.core.cost import ZERO, CostModel, Flops, SiteCost, count
from shiva.core.layout import Layout
from shiva.core.method import Method
from shiva.core.trace import Trace
from shiva.core.trainable import Trainable
from shiva.cost import Keys, StepRecord, Summary, meta_call, site_costs, tensor_bytes, to_meta, total
from shiva.hooks import Hooks
from shiva.progress import CFG, Run, RunTracker, Seen, read_timestep, shape_of

logger = logging.getLogger("shiva")

BETWEEN_BLOCKS = (
    "block_controlnet_hidden_states",
    "controlnet_block_samples",
    "controlnet_single_block_samples",
    "control_hidden_states",
)
"""Arguments that a transformer adds to its tokens between blocks."""


NOISE = 1000
"""The scheduler's timestep of pure noise."""


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
        self.runner: Callable[[StepContext, Call], Any] | None = None
        """Runs a step in the transformer's place, such as by replaying a recorded graph of it."""
        self._adapter = adapter
        self._turned: Any = None
        """The config from the next run on, where it was changed."""
        self._fresh = fresh
        self._busy = threading.Lock()
        self._clock, self._clock_at_start = Clock(), dict[str, float]()
        self._cached_bytes = 0
        self._teacher: Recording | None = None
        self._explore = Exploration()
        self._recording: Recording | None = None
        self._trace: Trace | None = None
        self._tracker = RunTracker(options.choice("cfg", cfg, CFG))
        self._names = parameter_names(transformer)
        self._example: Call | None = None
        self._shapes: list[Any] = []
        self._batch = 0
        self.layout: Layout | None = None
        """Of the latest call."""
        self._layout_of: tuple[list[Any], Seen] | None = None
        self._priced: Layout | None = None
        """Of the call whose shapes are kept for pricing."""
        self._compiled: Callable[..., Any] | None = None
        self._over_cache_dit = under_cache_dit(transformer)
        method.to(next(transformer.parameters()).device)
        self.hooks = Hooks(self)
        self.hooks.register()
        self._say_adapter_stays(method.config)

    def __repr__(self) -> str:
        if not self.attached:
            return f"<detached session of {self.method}>"
        adapted = "" if self._adapter is None else ", its adapter in the weights"
        sites = [site.name for site in self.hooks.reduced()]
        kept = [(step.kept.get(name, 0), step.tokens) for step in self.stats for name in sites]
        share = sum(count for count, _ in kept) / max(sum(tokens for _, tokens in kept), 1)
        ran = "nothing has run yet"
        if self.stats:
            ran = f"{len(self.stats)} calls ran {share:.0%} of the tokens of the layers it reduces"
        return f"<{self._turned or self.method.config} at work in {self.spec.name}{adapted}; {ran}>"

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("a model with a Shiva session attached cannot be copied: detach(), copy, attach again")

    def __reduce__(self) -> Any:
        raise RuntimeError("a model with a Shiva session attached cannot be pickled: detach() first")

    # -- on and off -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove every trace of the session and let go of its run; the pipeline computes exactly as before it."""
        if self._adapter is not None:
            self._adapter.remove()
            self._adapter = None
        if self.ctx is not None:
            self.ctx.run = self.ctx.now = self._tracker.run.state = None
        self._tracker.forget()
        self.method.forget()
        self.hooks.release()

    def rehook(self) -> None:
        """Act on the modules that are at the sites now, as after a trainable adapter has wrapped some of them."""
        self.hooks.release()
        self.hooks.register()

    @property
    def attached(self) -> bool:
        return self.hooks.registered

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
    def record(
        self, outputs: Collection[int] | None = None, updates: Collection[int] | None = None
    ) -> Iterator[Recording]:
        """Collect blocks' outputs and updates inside this context, dense or reduced; None means every layer."""
        before, self._recording = self._recording, Recording(output_layers=outputs, update_layers=updates)
        try:
            yield self._recording
        finally:
            self._recording = before

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

    def call(
        self, arguments: Call, *, teacher: Recording | None = None, explore: Exploration | None = None
    ) -> tuple[Any, StepContext]:
        """A call of training: the transformer's output, and the context that the method's `losses` read.

        `teacher` is a dense pass of the same batch; `explore` says how the call departs from inference.
        """
        self._teacher, self._explore = teacher, explore or Exploration()
        try:
            output = self.transformer(**arguments)
        finally:
            self._teacher, self._explore = None, Exploration()
        assert self.ctx is not None
        return output, self.ctx

    # -- what it costs -------------------------------------------------------------------------------

    @property
    def budget(self) -> Any:
        """What the method's knob is at, or the share of FLOPs where that is set; `set_budget` turns it."""
        config = self._turned or self.method.config
        knob = getattr(config, config.knob) if config.knob else None
        return getattr(config, "flops", None) if knob is None else knob

    @budget.setter
    def budget(self, value: Any) -> None:
        raise AttributeError(f"budget is set by a call, from the next run on: session.set_budget({value!r})")

    def set_budget(self, budget: Any = None, *, flops: float | None = None) -> None:
        """Turn the method's knob, or bring it to a share of dense FLOPs, from the next run on; nothing is rebuilt."""
        config = self._turned or self.method.config
        name, value = (config.knob, budget) if flops is None else ("flops", flops)
        if (budget is None) == (flops is None):
            raise ValueError(f"set_budget got budget={budget!r} and flops={flops!r}; pass one of them")
        if name is None or (name == "flops" and "flops" not in config.either):
            raise ValueError(f"{type(config).__name__} has no {name or 'budget'} to turn; attach it again with others")
        self._turned = config.changed({name: value})
        self._say_adapter_stays(self._turned)

    def _say_adapter_stays(self, config: Any) -> None:
        if self._adapter is not None and 1 in (getattr(config, name, None) for name in ("budget", "keep", "flops")):
            logger.warning(
                "%r keeps every token, and the checkpoint's adapter stays in the weights, because it was trained with "
                "the method: images are the fine-tuned model's; detach() for the pipeline as it was",
                type(config).__name__,
            )

    # -- one transformer call ------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)
    def _step(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = bind(self._names, args, kwargs)
        if self.backbone.is_extra(call):
            with self.disabled():
                return forward(*args, **kwargs)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "this session is running a step in another thread; a session serves one run at a time: "
                "load a pipeline for each thread, or take turns"
            )
        try:
            self.ctx = ctx = self._place(call)
            if self.runner is not None and ctx.trace is None:
                output = self.runner(ctx, call)
            else:
                self._begin(ctx, call)
                run = forward if self._compiled is None or ctx.trace is not None else self._compiled
                output = self._end(run(*args, **kwargs), ctx)
            self._close(ctx)
            return output
        finally:
            self._busy.release()

    @torch.compiler.disable
    def _place(self, call: Call) -> StepContext:
        """Where a call stands, which is read on the host: a transformer that the user compiled has none of it."""
        self._remember_shapes(call)
        return self._context(call)

    def _remember_shapes(self, call: Call) -> None:
        """Keep a call for pricing, its shapes alone where they are enough; steps of a run have the same."""
        shapes = [(name, shape_of(value)) for name, value in call.items()]
        if shapes != self._shapes:
            self._shapes = shapes
            priced = {name: value for name, value in call.items() if name not in self.backbone.unpriced}
            self._example = priced if self.backbone.priced_by_running else tree_map(to_meta, priced)

    def _begin(self, ctx: StepContext, call: Call) -> None:
        """What a step computes before the transformer runs: it reads no value on the host."""
        if self.method.needs_signals:
            with ctx.phase("signals"):
                ctx.time_embedding, ctx.prompt = self.backbone.signals(self.transformer, call)
        if self.method.needs_sigma:
            ctx.sigma = self.backbone.timestep(call).max() / NOISE
        self.method.begin_step(ctx)

    def _end(self, output: Any, ctx: StepContext) -> Any:
        """The transformer's output, with the prediction that the method puts in its place."""
        given = output[0]
        prediction = self.method.end_step(self.backbone.channels_second(given), ctx)
        if prediction is None:
            return output
        replaced = self.backbone.in_place_of(prediction, given)
        if isinstance(output, tuple):
            return (replaced, *output[1:])
        output[next(iter(output))] = replaced
        return output

    @torch.compiler.disable
    def _close(self, ctx: StepContext) -> None:
        """Book what ran, and free what the run carried once it is over: the autoencoder needs the memory."""
        skipped = tuple(name for name in self.hooks.blocks if name not in ctx.ran)
        self.stats.append(
            StepRecord(ctx.timestep, ctx.tokens, dict(ctx.kept), skipped, self._own_flops(ctx), ctx.frozen)
        )
        ctx.block_input = ctx.latents = None
        if torch.is_grad_enabled():  # gradient checkpointing will run the blocks again, and find what they found
            return
        ctx.held = None
        if self._tracker.run.is_over(ctx.steps):
            self._cached_bytes = tensor_bytes(ctx.run)
            self._tracker.run.state = ctx.run = self.method.new_run()

    def _own_flops(self, ctx: StepContext, counts: Sequence[float] | None = None) -> Flops:
        """What the method itself spends on a call."""
        return Flops(self._batch * self.method.own_flops(ctx, ctx.counts if counts is None else counts), 0.0)

    def _context(self, call: Call) -> StepContext:
        self._priced = layout = self._read_layout(call)
        latents = self.backbone.latents_of(call)
        seen = self.backbone.channels_second(latents)
        self._batch = latents.shape[0]
        timestep = read_timestep(self.backbone.timestep(call))
        schedule = getattr(getattr(self.pipeline, "scheduler", None), "timesteps", None)
        guided = getattr(self.pipeline, "do_classifier_free_guidance", None)
        announced = self.hooks.announced
        previous = self._tracker.run
        run, timesteps = self._tracker.follow(timestep, latents, schedule, guided, announced, layout.grid)
        if self.backbone.rises:
            timestep = 1000 - timestep
            timesteps = None if timesteps is None else [1000 - t for t in timesteps]
        if run is not previous:
            self._begin_run(run)
        if self._trace is not None:
            self._trace.begin(run.step, timestep, layout.grid, self.spec.layers, fresh=run is not previous)
        ctx = StepContext(
            layout=layout,
            timestep=timestep,
            step=run.step,
            first=run.first,
            steps=None if timesteps is None else len(timesteps),
            latents=seen,
            channels=seen.shape[-1 if seen.ndim == 3 else 1],
            guidance_pairs=run.paired,
            conditional_half=self.backbone.conditional_half,
            branch=run.branch,
            run=run.state,
            now=self.ctx.now if run.branch and self.ctx is not None else self.method.new_step(),
            blocks_adjoin=all(call.get(name) is None for name in BETWEEN_BLOCKS),
            cost=self.cost_model,
            teacher=self._teacher,
            explore=self._explore,
            trace=self._trace,
            clock=self._clock if latents.device.type == "cpu" else None,
        )
        self._move_method(latents.device)
        with ctx.phase("lookup"):
            ctx.counts = self.method.plan(ctx, timesteps)
        if self._fresh and not latents.is_meta and min(ctx.counts, default=0) < ctx.tokens:
            self._warn_untrained()
        return ctx

    def _begin_run(self, run: Run) -> None:
        if self._turned is not None:
            self.method.turn(self._turned)
            self._turned = None
        run.state = self.method.new_run()
        refuse_always(self.transformer)
        self.hooks.settle()
        self.hooks.take_compiled()
        refuse_replaced(self.transformer, {site.name: site.module for site in self.hooks.key_sites()})
        self.stats, self._cached_bytes = [], 0
        self._clock_at_start = dict(self._clock.seconds)

    def _read_layout(self, call: Call) -> Layout:
        """The backbone's layout of a call; values on a device are read once as long as their tensors stay."""
        values = [call.get(name) for name in self.backbone.layout_reads]
        if self.layout is not None and self._layout_of is not None:
            shapes, seen = self._layout_of
            if shapes == self._shapes and seen.still(values):
                return self.layout
        self.layout = self.backbone.layout(self.transformer, call)
        self._layout_of = (self._shapes, Seen(values))
        return self.layout

    def _warn_untrained(self) -> None:
        """Say once that a method which `attach` built chooses tokens by weights that it was never given."""
        self._fresh = False
        if isinstance(self.method, Trainable) and self.method.groups() and not self.method.trained:
            warnings.warn(f"{self.method} {self.method.untrained}", stacklevel=2)

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
            self.ctx = ctx = self._place(call)
        return StepProgram(self, ctx)

    def original_forward(self) -> Callable[..., Any]:
        """The transformer's forward beneath the session."""
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
        self._compiled = compile_forward(self.original_forward(), fullgraph=fullgraph, dynamic=dynamic, **options)
        return self

    # -- accounting ----------------------------------------------------------------------------------

    def cost_model(self) -> CostModel:
        """FLOPs of each block at any number of image tokens, at the shapes of the latest call."""
        blocks = [site for site in self.backbone.sites(self.transformer) if site.kind == "block"]
        dense, costs = self._price(blocks)
        assert self._priced is not None
        layout = self._priced
        layers = tuple(costs[site.name] for site in blocks)
        own = functools.partial(self._own_flops, StepContext(layout=layout, timestep=0.0))
        return CostModel(dense - total(cost(layout.tokens) for cost in layers), layers, layout.tokens, own)

    def _price(self, sites: Sequence[Site], frozen: bool = False) -> tuple[Flops, dict[str, SiteCost]]:
        """FLOPs of the latest call run dense, and of each site by its number of tokens; nothing is computed.

        `frozen`, the sites are priced without the reference tokens, which are keys only.
        """
        if self._example is None or self._priced is None:
            raise RuntimeError("no call has been seen yet; run the pipeline once, then ask for its cost")
        if not self.attached:
            raise RuntimeError("the session is detached; ask for its cost or summary before detach()")
        example = self._example
        shapes = StepContext(layout=self._priced, timestep=0.0, frozen=frozen)
        whole = self.method.whole_keys
        keys = Keys(self.hooks.key_sites() if whole or frozen else [], whole, self.method.fresh_keys)
        with contextlib.ExitStack() as stack:
            calls = stack.enter_context(self.hooks.probed())
            for aside in (caches_off, offloading_off, plain_linears):
                stack.enter_context(aside(self.transformer))
            dense = count(lambda: meta_call(self.transformer, **example))
            return dense, site_costs(sites, calls, shapes, keys)

    def phases(self) -> dict[str, float]:
        """Seconds spent so far, over all runs, in each phase of the reduction path."""
        return dict(self._clock.seconds)

    def summary(self) -> Summary:
        """Kept tokens, keep ratio and FLOPs by layer and step of the current run, and where time went."""
        if not self.stats and under_cache_dit(self.transformer) and not self._over_cache_dit:
            raise RuntimeError(
                "cache-dit was enabled after attach and runs the model past this session; "
                "call cache_dit.disable_cache(pipe) and detach(), enable it again, then attach"
            )
        frozen = any(step.frozen for step in self.stats)
        blocks = set(self.hooks.blocks) if frozen else set()
        reduced = self.hooks.reduced(blocks)
        skipped = {name for step in self.stats for name in step.skipped}
        dense, costs = self._price(self.hooks.reduced(blocks | skipped)) if self.stats else (ZERO, {})
        before = self._clock_at_start
        return Summary(
            method=repr(self.method),
            places=[(site.name, site.kind, site.layer) for site in reduced],
            steps=list(self.stats),
            costs=costs,
            dense=dense,
            frozen=self._price(reduced, frozen=True)[1] if frozen else {},
            seconds={phase: spent - before.get(phase, 0.0) for phase, spent in self._clock.seconds.items()},
            cached_bytes=max(self._cached_bytes, tensor_bytes(self._tracker.run.state)),
        )
