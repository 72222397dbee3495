"""What every site of one transformer call may know: where in time, which prompt, which grid."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiva.core.cost import CostModel
from shiva.core.trace import Trace


@dataclass
class Clock:
    """Seconds spent in the phases of the reduction path (routing, selection, gather, scatter)."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


def unpriced() -> CostModel:
    raise RuntimeError("this context has no cost model; attach to a transformer to price its layers")


@dataclass
class StepContext:
    """One forward pass of the transformer, filled in by the session before any block runs."""

    grid: tuple[int, int]
    """Rows and columns of the image tokens: N = rows * columns."""
    timestep: float
    """The scheduler's timestep, 0 (clean) to 1000 (noise); NaN where it cannot be read (meta tensors)."""
    step: int = 0
    """Index of this step among the scheduler's, from 0."""
    first: int = 0
    """Index of the run's first step, above 0 where it starts from an image."""
    steps: int | None = None
    """Number of the scheduler's steps, where one is known."""
    channels: int = 0
    """Channels of the latents; a model that also predicts their variance returns twice as many."""
    text_tokens: int = 0
    """Length of the text that leads a joint sequence (Flux single blocks)."""
    guidance_pairs: bool = False
    """The batch is [first half, second half] of classifier-free guidance over the same latents."""
    conditional_half: int = 1
    """Which of the two is the prompt's own, 0 or 1."""
    branch: int = 0
    """0, or 1 for the second call of a step under sequential guidance."""
    time_embedding: Tensor | None = None
    """(B, Dt), the backbone's own embedding of the timestep."""
    prompt: Tensor | None = None
    """(B, Dp), the backbone's own global embedding of prompt or class."""
    blocks_adjoin: bool = True
    """Nothing is added to the image tokens between two blocks (a ControlNet would)."""
    cost: Callable[[], CostModel] = field(default=unpriced, repr=False)
    """Prices of this call's layers, computed when asked for."""
    counts: tuple[int, ...] = ()
    """Tokens to keep per layer, for methods that read a schedule; known before any block runs."""
    memory: dict[Any, Any] = field(default_factory=dict)
    """What a method carries between the sites of this call, and between the branches of one step."""
    run: dict[Any, Any] = field(default_factory=dict)
    """What a method carries from step to step of one sampling run; empty at its first step."""
    kept: dict[str, int] = field(default_factory=dict)
    """Tokens that each site ran on, by site name."""
    ran: dict[str, bool] = field(default_factory=dict)
    """Blocks that were called; a cache over them may answer in their place."""
    teacher: Any = None
    """The dense pass of the same batch (a `Tape`), where training provides one."""
    trace: Trace | None = field(default=None, repr=False)
    """Where choices and scores are noted while `Session.trace` is open."""
    clock: Clock | None = None

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        if self.clock is None or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        return self.clock.measure(name)


@dataclass
class Earlier:
    """Updates that a dense pass of the same samples made at a noisier timestep: a simulated cache."""

    updates: dict[int, Tensor]  # layer -> (B, N, D)
    steps: float
    """How many sampler steps earlier that timestep lies."""


@dataclass
class Tape:
    """Block outputs and updates of one pass, by layer: what distillation compares."""

    outputs: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, N, D) image tokens after it
    updates: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, N, D) what the block added
    output_layers: Collection[int] | None = None
    """Layers whose outputs are kept; None keeps all."""
    update_layers: Collection[int] | None = None
    """Layers whose updates are kept; None keeps all."""
    earlier: Earlier | None = None
    """The same samples some steps earlier, for methods that reuse updates."""

    def note(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Keep what is wanted of a block's input and output (B, N, D)."""
        if self.output_layers is None or layer in self.output_layers:
            self.outputs[layer] = after
        if after.shape == before.shape and (self.update_layers is None or layer in self.update_layers):
            self.updates[layer] = after - before
