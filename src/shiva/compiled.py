"""Steps as programs: torch.compile, torch.export, and CUDA graphs.

A CUDA graph is recorded for each distinct row of the schedule and replayed at every step that has that row.

A recorded graph repeats the same kernels on the same memory. That suits a step whose token counts are settled
beforehand (Shiva, NeuralSort, SOFT, LapSum), and frees it from the speed of the host.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shiva.backbones.base import Call
from shiva.core.context import StepContext

if TYPE_CHECKING:
    from shiva.session import Session

WARMUP = 3
"""Runs before recording, as torch.cuda.graph asks: libraries set themselves up in them."""


def compile_forward(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A transformer's forward under `torch.compile`, with room for a graph of every row of a schedule."""
    compiled = torch.compile(forward, **options)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
            return compiled(*args, **kwargs)

    return call


def fresh_copy(state: Any) -> Any:
    """A step's state whose collections can be written without touching the original's."""
    copied = copy.copy(state)
    for name, value in vars(state).items() if state is not None else ():
        if isinstance(value, dict):
            setattr(copied, name, dict(value))
    return copied


class StepProgram(nn.Module):
    """One step with its token counts settled: signals, then the transformer with the method inside."""

    def __init__(self, session: Session, ctx: StepContext):
        super().__init__()
        self.transformer, self.method = session.transformer, session.method
        self._session, self.ctx = session, ctx
        self._forward, self._known = session.original_forward(), ctx.now

    def forward(self, **call: Any) -> Any:
        session = self._session
        before, session.ctx = session.ctx, self.ctx
        self.ctx.now = fresh_copy(self._known)  # every run chooses its tokens itself
        try:
            session._begin(self.ctx, call)
            return session._end(self._forward(**call), self.ctx)
        finally:
            session.ctx = before


class Recorder(Protocol):
    """Turns a call on fixed memory into something that repeats it."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(replay, the output that replaying brings up to date)."""


class CudaRecorder:
    """Records with torch.cuda.graph; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARMUP):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = run()
        return graph.replay, output


@dataclass
class RecordedStep:
    """A step's graph with the memory it reads and writes."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    output: Any
    ctx: StepContext


class GraphRunner:
    """Runs the steps of a session from recorded graphs; recording happens at the first step of each row."""

    def __init__(self, session: Session, recorder: Recorder):
        self.session, self.recorder = session, recorder
        self.recordings: dict[Hashable, RecordedStep] = {}
        """By the calls of a step up to the recorded one: under guidance the later read what the first has chosen."""
        self._calls: tuple[Hashable, ...] = ()

    def __call__(self, ctx: StepContext, call: Call) -> Any:
        if not ctx.counts:
            raise ValueError(
                f"{self.session.method} does not settle its token counts before a step, so no graph of it can be "
                "recorded; stop with session.runner = None"
            )
        if not self.session.method.recordable:
            raise ValueError(
                f"{self.session.method} carries tensors from step to step, which a recorded graph would not see; "
                "pass recall=0, steady=0 and age=0, and fill='identity' if that is not enough, to a method that has "
                "them, or stop with session.runner = None"
            )
        leaves, structure = tree_flatten(call)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        latest = (ctx.layout, ctx.counts, ctx.guidance_pairs, str(structure), tuple(others), tuple(shapes))
        self._calls = (*self._calls, latest) if ctx.branch else (latest,)
        recording = self.recordings.get(self._calls)
        if recording is None:
            recording = self.recordings[self._calls] = self._record(ctx, leaves, structure)
        for static, tensor in zip(recording.inputs, tensors, strict=True):
            static.copy_(tensor)
        recording.replay()
        ctx.kept, ctx.ran, ctx.now = dict(recording.ctx.kept), recording.ctx.ran, recording.ctx.now
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, recording.output)

    def forget(self) -> None:
        """Drop what was recorded, whose memory and weights are another's now."""
        self.recordings.clear()

    def _record(self, ctx: StepContext, leaves: list[Any], structure: Any) -> RecordedStep:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call = tree_unflatten(static, structure)
        call["return_dict"] = False
        program = self.session.program(ctx, **call)
        with torch.no_grad():
            replay, output = self.recorder.record(lambda: program(**call))
        inputs = [leaf for leaf in static if isinstance(leaf, Tensor)]
        return RecordedStep(inputs, replay, output, copy.copy(ctx))  # the call's own is let go of with its run


def use_graphs(session: Session, recorder: Recorder | None = None) -> bool:
    """Run the session's steps from CUDA graphs; whether they will be.

    Where the transformer is not on a CUDA device a warning says so, and steps run as before. Outputs are
    tuples, as with return_dict=False, which is how pipelines call. `session.runner = None` ends it.
    """
    if recorder is None:
        device = next(session.transformer.parameters()).device
        if device.type != "cuda":
            reason = (
                "this torch has no CUDA" if not torch.cuda.is_available() else "move the pipeline with .to('cuda')"
            )
            warnings.warn(
                f"CUDA graphs need a CUDA device, but the transformer is on {device} ({reason}); steps run as before",
                stacklevel=2,
            )
            return False
        recorder = CudaRecorder()
    session.runner = GraphRunner(session, recorder)
    return True
