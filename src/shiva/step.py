"""One call of the transformer under a method: placed, begun, run, ended, booked."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shiva.backbones.base import Backbone, Call, Site, bind, parameter_names
from shiva.compat import refuse_always, refuse_replaced
from shiva.core import options
from shiva.core.context import NOISE, Clock, Exploration, Recording, StepContext, Trace
from shiva.core.cost import CostModel, Flops, SiteCost, total
from shiva.core.layout import Layout
from shiva.core.method import Method, Trainable
from shiva.cost import Keys, StepRecord, price, tensor_bytes, to_meta
from shiva.hooks import Hooks
from shiva.progress import CFG, Run, RunTracker, Seen, read_timestep, shape_of

Self = TypeVar("Self", bound="Stepper")

BETWEEN_BLOCKS = (
    "block_controlnet_hidden_states",
    "controlnet_block_samples",
    "controlnet_single_block_samples",
    "control_hidden_states",
)
"""Arguments that a transformer adds to its tokens between blocks."""


class Stepper:
    """Runs a transformer's calls under a method: the part of a session that hooks call."""

    def __init__(
        self,
        transformer: nn.Module,
        backbone: Backbone,
        method: Method,
        pipeline: Any = None,
        cfg: str = "auto",
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
        self._compiled: Callable[..., Any] | None = None
        method.to(next(transformer.parameters()).device)
        self.hooks = Hooks(self)
        self.hooks.register()

    @property
    def attached(self) -> bool:
        return self.hooks.registered

    @contextlib.contextmanager
    def disabled(self: Self) -> Iterator[Self]:
        """Run dense inside this context: the teacher of training, or a reference image."""
        before, self.enabled = self.enabled, False
        try:
            yield self
        finally:
            self.enabled = before

    def begin_run(self, first: int | None = None) -> None:
        """Begin a new run with the next call, and let go of this one's state: for those who call the transformer
        themselves, not by a pipeline.

        Its budget is met over the scheduler's steps from `first` on, which may lie before that call.
        """
        self._tracker.forget(first)
        run = self._tracker.run
        self._cached_bytes = max(self._cached_bytes, tensor_bytes(run.state))  # which the summary still tells
        run.state = None
        if self.ctx is not None:
            self.ctx.run = self.ctx.now = None

    # -- one call ------------------------------------------------------------------------------------

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
        except BaseException:
            self.begin_run()  # the same call made again is not the second of its step
            raise
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
            priced = self.backbone.priced(call)
            self._example = priced if self.backbone.priced_by_running else tree_map(to_meta, priced)

    def _begin(self, ctx: StepContext, call: Call) -> None:
        """What a step computes before the transformer runs: it reads no value on the host."""
        if self.method.needs_signals:
            with ctx.phase("signals"):
                ctx.time_embedding, ctx.prompt = self.backbone.signals(self.transformer, call)
        if self.method.needs_sigma:
            level = self.backbone.timestep(call).max() / NOISE
            ctx.sigma = 1 - level if self.backbone.rises else level
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
        run = self._tracker.run
        if run.is_over(ctx.steps):
            self._cached_bytes = tensor_bytes(ctx.run)
            run.state = ctx.run = self.method.new_run()
            may_be_read = run.step == run.first or self.method.training  # by another call of guidance; by losses
            if not may_be_read:
                ctx.now = self.method.new_step()

    def _own_flops(self, ctx: StepContext, counts: Sequence[float] | None = None) -> Flops:
        """What the method itself spends on a call."""
        return Flops(self._batch * self.method.own_flops(ctx, ctx.counts if counts is None else counts), 0.0)

    def _context(self, call: Call) -> StepContext:
        layout = self._read_layout(call)
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
            timestep = NOISE - timestep
            timesteps = None if timesteps is None else [NOISE - t for t in timesteps]
        if run is not previous:
            self._begin_run(run)
        if self._trace is not None:
            row = self._batch // 2 - 1 if run.paired and not self.backbone.conditional_half else -1
            self._trace.begin(run.step, timestep, layout.grid, self.spec.layers, row, fresh=run is not previous)
        ctx = StepContext(
            layout=layout,
            timestep=timestep,
            step=run.step,
            first=run.first,
            steps=None if timesteps is None else len(timesteps),
            latents=seen,
            guidance_pairs=run.paired,
            conditional_half=self.backbone.conditional_half,
            toward=self.backbone.toward,
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
            self.method.config, self._turned = self._turned, None
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

    # -- its cost ------------------------------------------------------------------------------------

    def cost_model(self) -> CostModel:
        """FLOPs of each block at any number of image tokens, at the shapes of the latest call."""
        blocks = [site for site in self.backbone.sites(self.transformer) if site.kind == "block"]
        dense, costs = self._price(blocks)
        assert self.layout is not None
        layers = tuple(costs[site.name] for site in blocks)
        own = functools.partial(self._own_flops, StepContext(layout=self.layout, timestep=0.0))
        tokens = self.layout.tokens
        return CostModel(dense - total(cost(tokens) for cost in layers), layers, tokens, own)

    def _price(self, sites: Sequence[Site], frozen: bool = False) -> tuple[Flops, dict[str, SiteCost]]:
        """FLOPs of the latest call run dense, and of each site by its number of tokens; nothing is computed.

        `frozen`, the sites are priced without the reference tokens, which are keys only.
        """
        if self._example is None or self.layout is None:
            raise RuntimeError("no call has been seen yet; run the pipeline once, then ask for its cost")
        if not self.attached:
            raise RuntimeError("the session is detached; ask for its cost or summary before detach()")
        first, steps = self._tracker.run.first, self._tracker.steps
        shapes = StepContext(layout=self.layout, timestep=0.0, first=first, steps=steps, frozen=frozen)
        whole = self.method._sees_all(shapes)
        keys = Keys(self.hooks.key_sites() if whole or frozen else [], whole, self.method.fresh_keys)
        return price(self.transformer, self._example, sites, shapes, keys, self.hooks.probed())
