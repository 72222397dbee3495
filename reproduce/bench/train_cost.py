"""`shiva bench train`: an optimizer step of each trained method, through the trainer's own objectives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from reproduce.bench.pages import seconds
from shiva.adapter import adapted_layers
from shiva.api import attach
from shiva.bench.entries import interleave, twin
from shiva.bench.shapes import Shape
from shiva.bench.table import Table
from shiva.core.context import Exploration
from shiva.core.method import MethodConfig, Trainable
from shiva.methods import DiffCR, DyDiT, NeuralSort, Shiva, SparseDiT
from shiva.training.adapter import adapter_config, adapter_parameters, add_adapter
from shiva.training.call import begin_batch
from shiva.training.draws import MicroBatch
from shiva.training.family import SD3Family
from shiva.training.noise import FlowMatching
from shiva.training.objectives import Objectives
from shiva.training.recipe import WEIGHTS

PLAIN = "plain DoRA"
"""PEFT's own layers, which is what a user has without Shiva; every other row runs an adapted layer as one product."""

FOLDED = "DoRA, one product"
OFFICIAL = {"distill": 0.0, "output": 0.0}
"""The other methods' own objectives have no dense teacher; DyDiT's adds the diffusion loss of the complete model."""


@dataclass(frozen=True)
class Trained:
    """A method as it is trained: its config, and the weights of its objectives over the recipe's own."""

    config: MethodConfig
    weights: dict[str, float]
    paper: float
    """The paper's time of a step over plain fine-tuning (table train_cost)."""
    paper_mb: int


def trained_methods() -> dict[str, Trained]:
    return {
        "shiva 0.6": Trained(Shiva(budget=0.6), {}, 1.07, 47650),
        "neuralsort": Trained(NeuralSort.preset("paper"), {}, 1.77, 58088),
        "dydit": Trained(DyDiT.preset("paper", bias=0.0), {**OFFICIAL, "complete": 1.0}, 1.30, 59610),
        "sparsedit": Trained(SparseDiT.preset("paper", bottom=1, top=1), OFFICIAL, 0.94, 54826),
        "diffcr": Trained(DiffCR.preset("paper", initial=0.876), OFFICIAL, 1.65, 66374),
    }


@dataclass(frozen=True)
class TrainResult:
    """One method's optimizer step."""

    name: str
    seconds: float
    spread: float
    relative: float
    """To plain DoRA in the same turns."""
    peak: float
    """Bytes above the weights and optimizer at rest; NaN where the system does not tell."""
    paper: float
    paper_mb: int


class Learner:
    """A transformer with a DoRA adapter, perhaps a method, and an optimizer."""

    def __init__(
        self, base: nn.Module, batch: MicroBatch, trained: Trained | None, checkpointing: bool, folded: bool = True
    ):
        transformer: Any = twin(base)
        pipe = SimpleNamespace(transformer=transformer)
        config = Shiva(budget=1.0) if trained is None else trained.config
        self.session = attach(pipe, config, cfg="none")
        method = self.session.method.train()
        rank = 32
        add_adapter(transformer, adapter_config(transformer, self.session.backbone, rank, rank, True), seed=0)
        if not folded:
            for layer in adapted_layers(transformer):
                del layer.forward
        self.session.rehook()
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        weights = WEIGHTS if trained is None else {**WEIGHTS, **trained.weights}
        self.objectives = Objectives(self.session, SD3Family(pipe), FlowMatching(), weights, distill_every=4)
        assert isinstance(method, Trainable)
        own = [] if trained is None else [p for group in method.groups().values() for p in group]
        self.parameters = [*adapter_parameters(transformer), *own]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.batch, self.plain = batch, trained is None

    def step(self) -> None:
        if self.plain:
            with self.session.disabled():
                self.objectives.diffusion(self.objectives.forward(self.batch), self.batch).backward()
        else:
            begin_batch(self.session, self.batch.exploration, [self.batch.timestep], seed=0)
            self.objectives.backward(self.batch, 1.0, Tensor.backward)
        self.optimizer.step()
        self.optimizer.zero_grad()


def random_batch(chosen: Shape) -> MicroBatch:
    call = chosen.call()
    latents = torch.randn_like(call["hidden_states"])
    text = {"hidden": call["encoder_hidden_states"], "pooled": call["pooled_projections"]}
    return MicroBatch(latents, torch.randn_like(latents), text, 500.0, 0, Exploration())


def peak_bytes(call: Callable[[], Any]) -> float:
    """Most memory above what was held before the call."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what an earlier call freed would hide this one's
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        call()
        return resident("VmHWM") - before
    except (OSError, AttributeError):
        return float("nan")


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure_train(
    chosen: Shape,
    methods: dict[str, Trained],
    rounds: int = 3,
    checkpointing: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[list[TrainResult], dict[str, str]]:
    """Optimizer steps of plain DoRA and each method in turns; also why a method was left out."""
    torch.manual_seed(0)
    base, batch = chosen.build(), random_batch(chosen)
    learners: dict[str, Learner] = {}
    skipped: dict[str, str] = {}
    for name, trained in {PLAIN: None, FOLDED: None, **methods}.items():
        try:
            learners[name] = Learner(base, batch, trained, checkpointing, folded=name != PLAIN)
            learners[name].step()
        except ValueError as error:
            skipped[name] = str(error)
            learners.pop(name, None)
        progress(f"first step of {name}")
    peaks = {name: peak_bytes(learner.step) for name, learner in learners.items()}
    turns = {name: lambda learner=learner: learner.step for name, learner in learners.items()}
    timings = interleave(turns, rounds, warmup=0, progress=progress)
    plain = timings[PLAIN].median
    results = []
    for name, timing in timings.items():
        paper, paper_mb = (methods[name].paper, methods[name].paper_mb) if name in methods else (1.0, 51564)
        row = (name, timing.median, timing.spread, timing.median / plain, peaks[name], paper, paper_mb)
        results.append(TrainResult(*row))
    return results, skipped


def train_table(chosen: Shape, results: list[TrainResult], skipped: dict[str, str]) -> Table:
    plain, folded = (next(row for row in results if row.name == name) for name in (PLAIN, FOLDED))
    rows = [
        (
            row.name,
            seconds(row.seconds),
            f"{row.spread:.1%}",
            f"{row.relative:.2f}x",
            f"{row.seconds / folded.seconds:.2f}x",
            "" if row is plain else f"{row.paper:.2f}x",
            f"{row.peak / 2**30:.2f} GiB",
            f"{row.peak / plain.peak:.2f}x" if plain.peak else "",
            f"{row.peak / folded.peak:.2f}x" if folded.peak else "",
            "" if row is plain else f"{row.paper_mb / plain.paper_mb:.2f}x",
        )
        for row in results
    ]
    ratios = ("of plain", "of one product", "paper")
    left_out = "".join(f"; {name} left out: {reason}" for name, reason in skipped.items())
    return Table(
        title=f"One optimizer step, {chosen.described}",
        columns=("method", "step", "±", *ratios, "peak above rest", *ratios),
        rows=rows,
        caption="Shiva and NeuralSort with their dense teacher, the others with their own objectives; paper: 8 H200, "
        f"whole model, memory in all{left_out}",
    )
