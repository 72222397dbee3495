"""What every site of one transformer call may know: where in time, which prompt, which layout."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.cost import CostModel
from shiva.core.layout import Layout
from shiva.core.reduction import Reduction

NOISE = 1000
"""The scheduler's timestep of pure noise."""


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


@dataclass(frozen=True)
class Exploration:
    """How a training step departs from inference; a stage of training chooses it for each micro-batch."""

    ratio: float | None = None
    """Keep ratio of every reduced layer; None asks the method's own policy."""
    logit_noise: float = 0.0
    """Deviation of the noise on the policy's logits."""
    score_noise: float = 0.0
    """Deviation of the noise on the router's scores."""
    tau_rank: float = 0.2
    """Temperature of the soft rank."""
    tau_sel: float = 0.1
    """Temperature of the inclusion, as a share of N."""
    step: int = 0
    """Optimizer steps taken so far, in all stages."""
    index: int = 0
    """Which micro-batch of the global batch this is, counted over ranks and accumulation steps."""


@dataclass
class Earlier:
    """Updates that a dense pass of the same samples made at a noisier timestep: a simulated cache."""

    updates: dict[int, Tensor]  # layer -> (B, N, D)
    steps: float
    """How many sampler steps earlier that timestep lies."""


@dataclass
class Recording:
    """Block outputs and updates of one pass, by layer: what distillation compares."""

    outputs: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, N, D) image tokens after it
    updates: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, N, D) what the block added
    output_layers: Collection[int] | None = None
    """Layers whose outputs are kept; None keeps all."""
    update_layers: Collection[int] | None = None
    """Layers whose updates are kept; None keeps all."""
    earlier: Earlier | None = None
    """The same samples some steps earlier, for methods that reuse updates."""

    def update_over(self, layers: range) -> Tensor | None:
        """What layers in a row added together, (B, N, D); None unless the update of each is kept."""
        if not all(layer in self.updates for layer in layers):
            return None
        first, *others = (self.updates[layer] for layer in layers)
        return sum(others, first)

    def note(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Keep what is wanted of a block's input and output (B, N, D)."""
        if self.output_layers is None or layer in self.output_layers:
            self.outputs[layer] = after
        if after.shape == before.shape and (self.update_layers is None or layer in self.update_layers):
            self.updates[layer] = after - before


def normalized_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distance of layer-normalised features (B, N, D) (Eq. distill_cal, averaged)."""
    width = (student.shape[-1],)
    return F.mse_loss(F.layer_norm(student.float(), width), F.layer_norm(teacher.float(), width))


class Held(NamedTuple):
    """A reduction that serves several blocks, and what their tokens held before it."""

    reduction: Reduction
    base: Tensor


def unpriced() -> CostModel:
    raise RuntimeError("this context has no cost model; attach to a transformer to price its layers")


@dataclass
class StepContext:
    """One forward pass of the transformer, filled in by the session before any block runs."""

    layout: Layout
    timestep: float
    """The scheduler's timestep, 0 (clean) to 1000 (noise); NaN where it cannot be read (meta tensors)."""
    step: int = 0
    """Index of this step among the scheduler's, from 0."""
    first: int = 0
    """Index of the run's first step, above 0 where it starts from an image."""
    steps: int | None = None
    """Number of the scheduler's steps, where one is known."""
    latents: Tensor | None = field(default=None, repr=False)
    """What the model was given, noisy: (B, C, H, W), (B, C, F, H, W) or (B, N, C); None outside a call."""
    guidance_pairs: bool = False
    """The batch is [first half, second half] of classifier-free guidance over the same latents."""
    conditional_half: int = 1
    """Which of the two is the prompt's own, 0 or 1."""
    toward: Literal[1, 0, -1] = 1
    """What the prediction is: 1, noise - clean; -1, clean - noise; 0, nothing of a flow."""
    branch: int = 0
    """Which of a step's calls this is, where guidance makes several: 0, 1, ..."""
    sigma: Tensor | None = None
    """(), the noise level, 0 to 1, as a tensor: what is compiled or recorded of a step serves the others too."""
    time_embedding: Tensor | None = None
    """(B, Dt), the backbone's own embedding of the timestep."""
    prompt: Tensor | None = None
    """(B, Dp), the backbone's own global embedding of prompt or class."""
    blocks_adjoin: bool = True
    """Nothing is added to the image tokens between two blocks (a ControlNet would)."""
    cost: Callable[[], CostModel] = field(default=unpriced, repr=False)
    """Prices of this call's layers, computed when asked for."""
    frozen: bool = False
    """Reference tokens do not run in this call: attention sees the keys and values that they last had."""
    counts: tuple[int, ...] = ()
    """Tokens to keep per layer, as `Method.plan` settled them before any block runs."""
    now: Any = None
    """The method's own state of this step, as its `new_step` made it; the calls of one step share it."""
    run: Any = None
    """The method's own state of this run, as its `new_run` made it; freed at the run's last step."""
    block_input: Tensor | None = field(default=None, repr=False)
    """(B, N, D), what the block around the current site was given."""
    kept: dict[str, int] = field(default_factory=dict)
    """Tokens that each site ran on, by site name; the session alone writes it."""
    ran: dict[str, bool] = field(default_factory=dict)
    """Blocks that were called, as the session saw; a cache over them may answer in their place."""
    held: Held | None = field(default=None, repr=False)
    """Tokens that stay reduced from the first block to the last."""
    teacher: Recording | None = None
    """The dense pass of the same batch, where training provides one."""
    explore: Exploration = field(default_factory=Exploration)
    """How this call of training departs from inference."""
    trace: Trace | None = field(default=None, repr=False)
    """Where choices and scores are noted while `Session.trace` is open."""
    clock: Clock | None = None

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    def here(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device of this call: moved once, not in every layer."""
        return tensor if self.latents is None else tensor.to(self.latents.device)

    @property
    def ends_run(self) -> bool:
        """Whether no step comes after this one."""
        return self.steps is not None and self.step >= self.steps - 1

    def of_run(self, otherwise: int) -> tuple[int, int]:
        """Which of the run's own steps this is, and their number: `otherwise`, where no scheduler tells."""
        return self.step - self.first, otherwise if self.steps is None else self.steps - self.first

    def reruns(self, site: str) -> bool:
        """Whether a site, by name, is run again in the same call, as gradient checkpointing does on the way back."""
        return site in self.kept

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        if self.clock is None or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        return self.clock.measure(name)


@dataclass
class Trace:
    """What one sampling run chose, by (step, layer); a new run starts it afresh. Layers that ran dense are absent.

    Rows of the batch are the transformer's. Under sequential guidance the last call of a step is what stays.
    """

    grid: tuple[int, int] = (0, 0)
    """Rows and columns; the frames of a video lie under each other."""
    layers: int = 0
    row: int = -1
    """Of the batch, what is shown where none is named: the last sample of the prompt's own half."""
    timesteps: dict[int, float] = field(default_factory=dict)
    """Of each step seen so far."""
    positions: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)  # (K,) of each sample
    scores: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (B, N)
    """Of the pruners, which score tokens layer by layer."""

    def begin(self, step: int, timestep: float, grid: tuple[int, int], layers: int, row: int, fresh: bool) -> None:
        """A transformer call starts; `fresh` if it is the first of a sampling run."""
        if fresh:
            self.timesteps, self.positions, self.scores = {}, {}, {}
        self.grid, self.layers, self.row = grid, layers, row
        self.timesteps[step] = timestep

    def note(self, step: int, layer: int, positions: Tensor, batch: int) -> None:
        """A layer runs on positions (B, K) of a batch, or on rows (1, M) of it flattened."""
        if len(positions) == batch:
            self.positions[step, layer] = tuple(positions)
        else:
            rows, tokens = positions[0], math.prod(self.grid)
            self.positions[step, layer] = tuple(rows[rows // tokens == sample] % tokens for sample in range(batch))

    def mask(self, step: int, layer: int, row: int | None = None) -> Tensor:
        """Which tokens (rows, columns) of one sample a layer ran on; all of them where it ran dense."""
        if not self.timesteps:
            raise ValueError("nothing was run; call the pipeline inside `with session.trace() as trace:`")
        if step not in self.timesteps or not 0 <= layer < self.layers:
            raise ValueError(
                f"step {step}, layer {layer} was not run; steps are {sorted(self.timesteps)}, layers 0 to "
                f"{self.layers - 1}"
            )
        chosen = self.positions.get((step, layer))
        if chosen is None:
            return torch.ones(self.grid, dtype=torch.bool, device="cpu")
        mask = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.bool, device="cpu")
        mask[chosen[self.row if row is None else row].cpu()] = True
        return mask.view(self.grid)

    def masks(self, row: int | None = None) -> Tensor:
        """All masks of one sample: (steps, layers, rows, columns)."""
        return torch.stack(
            [torch.stack([self.mask(step, layer, row) for layer in range(self.layers)]) for step in self.timesteps]
        )

    def score_map(self, step: int, layer: int, row: int | None = None) -> Tensor:
        """Scores (rows, columns) of one sample's tokens."""
        if (step, layer) not in self.scores:
            raise ValueError(f"step {step}, layer {layer} scored no tokens; pass a reduced layer of a pruner")
        row = self.row if row is None else row
        return self.scores[step, layer][row].float().cpu().view(self.grid)

    def keep(self) -> Tensor:
        """Share of tokens kept (steps, layers)."""
        return self.masks().float().mean(dim=(-2, -1))
