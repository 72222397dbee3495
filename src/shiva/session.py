"""A session: a method at work in a transformer, as its user holds it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any

from diffusers.hooks import HookRegistry
from torch import nn

from shiva.adapter import AttachedAdapter
from shiva.backbones.base import Backbone, Call
from shiva.compat import HOOK, transformer_of, under_cache_dit
from shiva.compiled import GraphRunner, StepProgram, compile_forward
from shiva.core.context import Exploration, Recording, StepContext, Trace
from shiva.core.cost import ZERO
from shiva.core.method import Method
from shiva.cost import Summary, tensor_bytes
from shiva.step import Stepper

logger = logging.getLogger("shiva")


class Session(Stepper):
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
        self._adapter = adapter
        self._over_cache_dit = under_cache_dit(transformer)
        if method.holds and self._over_cache_dit:
            raise ValueError(
                f"{method} holds fewer tokens from block to block, where cache-dit adds what all tokens had; pass "
                "span=1 where it has one, or call cache_dit.disable_cache(pipe)"
            )
        super().__init__(transformer, backbone, method, pipeline, cfg, fresh)
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
        self.begin_run()
        if isinstance(self.runner, GraphRunner):
            self.runner.forget()
        self.method._forget()
        self.hooks.release()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Detached for another to take its place inside this context; at work again where that one is refused."""
        adapter = self._adapter
        self.detach()
        try:
            yield
        except BaseException:
            if adapter is not None:
                self._adapter = adapter.again()
            self.hooks.register()
            raise

    def rehook(self) -> None:
        """Act on the modules that are at the sites now, as after a trainable adapter has wrapped some of them."""
        self.hooks.release()
        self.hooks.register()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

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

    # -- what it did ---------------------------------------------------------------------------------

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
        if self.pipeline is not None and transformer_of(self.pipeline) is not self.transformer:
            replaced = (
                "pipe.transformer was replaced after attach, and the new one runs without a session; "
                "detach() this one and attach again"
            )
            if not self.stats:
                raise RuntimeError(replaced)
            logger.warning("this is a summary of an earlier run: %s", replaced)
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
