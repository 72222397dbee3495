"""What a benchmark compares: Shiva under a table of ratios, and the other methods as the paper ran them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiva.core.cost import Flops, count
from shiva.core.method import Method, MethodConfig
from shiva.measure.shapes import Shape
from shiva.methods import (
    IBTM,
    SDTM,
    DiffCR,
    DyDiT,
    NeuralSort,
    Shiva,
    ShivaMethod,
    SparseDiT,
    ToFu,
    ToMA,
    ToMeSD,
)
from shiva.modules.policy import logit
from shiva.modules.schedule import RatioSchedule
from shiva.session import Session, attach, backbone_of

KEEP_AT_NOISE, KEEP_AT_IMAGE = 0.4, 0.8
"""Mean keep at the first and last timestep of the paper's learned table (sec. Impact of Adaptive Ratio Policy)."""
DEPTH_SPAN = 1.0
"""Logits from the first reduced layer down to the last: the paper's table preserves shallow layers; our figure."""


def learned_shape(layers: int, dense: tuple[int, ...] = (0,)) -> RatioSchedule:
    """A table of the learned one's shape: structure first (shallow layers), detail later (small timesteps)."""
    time = torch.tensor([logit(KEEP_AT_NOISE), logit(KEEP_AT_IMAGE)], dtype=torch.float64)[:, None]
    depth = torch.linspace(DEPTH_SPAN / 2, -DEPTH_SPAN / 2, layers, dtype=torch.float64)[None]
    return RatioSchedule((1000.0, 0.0), time + depth, dense=frozenset(dense))


def typical_row(schedule: RatioSchedule, budget: float, steps: int = 50) -> RatioSchedule:
    """The one step of a run whose mean keep is nearest the run's own: what a single timed step stands for."""
    run = schedule.resample([1000.0 * (1 - step / steps) for step in range(steps)]).shift(budget)
    means = run.ratios()[:, run.reduced].mean(dim=1)
    row = int((means - budget).abs().argmin())
    return dataclasses.replace(run, timesteps=run.timesteps[row : row + 1], logits=run.logits[row : row + 1])


@dataclass(frozen=True)
class Entry:
    """A method as it enters a comparison."""

    config: MethodConfig
    schedule: Callable[[int], RatioSchedule] | None = None
    """From the number of layers: the table a Shiva method reads."""
    paper: float | None = None
    """The paper's speed-up on SD3-Medium (table main_results)."""
    keep_ffn: float | None = None
    """DyDiT: the share of tokens that its untrained masks are set to."""

    @property
    def carries(self) -> bool:
        """Whether a step needs those before it: what is timed then is a later step of a run, not its dense first."""
        return getattr(self.config, "rejected", None) == "cached"

    def build(self, transformer: nn.Module) -> Method:
        method = self.config.build(backbone_of(transformer).spec(transformer))
        if self.schedule is not None:
            assert isinstance(method, ShivaMethod)
            method.set_schedule(self.schedule(method.spec.layers))
        if self.keep_ffn is not None:
            set_masks(method, self.keep_ffn)
        return method


PAPER_SHIVA = {0.9: 1.09, 0.8: 1.25, 0.7: 1.37, 0.6: 1.54}


def shiva_entry(budget: float, flat: bool = False, **options: Any) -> Entry:
    def table(layers: int) -> RatioSchedule:
        flat_table = RatioSchedule.flat(budget, layers)
        return flat_table if flat else typical_row(learned_shape(layers), budget)

    return Entry(Shiva(**options), table, PAPER_SHIVA.get(budget))


def sweep_entry(budget: float) -> Entry:
    """The moving band that attends to all tokens, at a flat ratio."""
    return Entry(Shiva.preset("sweep"), lambda layers: RatioSchedule.flat(budget, layers))


DYDIT_FFN_KEEP = 0.36
"""The share of FFN tokens at which SD3-Medium takes the paper's 9.42 of 11.80 TFLOPs (its convention)."""


def baseline_entries(layers: int = 24) -> dict[str, Entry]:
    """Every other method at its paper preset, as it would run once trained to that preset's budget.

    IBTM's first step of a run is dense and its later ones are not: a timed step stands for those. Of its blocks, which
    it numbers, a slice of so many `layers` has the first.
    """
    ibtm = IBTM.preset("paper", first_step="partition")
    first, last = ibtm.layers
    return {
        "tomesd": Entry(ToMeSD.preset("paper"), paper=1.04),
        "tofu": Entry(ToFu.preset("paper"), paper=1.05),
        "sdtm": Entry(SDTM.preset("paper"), paper=1.07),
        "toma": Entry(ToMA.preset("paper"), paper=1.03),
        "ibtm": Entry(dataclasses.replace(ibtm, layers=(first, max(first, min(last, layers - 1)))), paper=1.02),
        "neuralsort": Entry(NeuralSort.preset("paper"), paper=1.20),
        "diffcr": Entry(DiffCR.preset("paper", initial=0.876), paper=1.14),
        "dydit": Entry(DyDiT.preset("paper"), paper=1.17, keep_ffn=DYDIT_FFN_KEEP),
        "sparsedit": Entry(SparseDiT.preset("paper"), paper=1.24),
    }


def set_masks(method: Method, keep: float) -> None:
    """Shift each untrained DyDiT router, at its first call, so that it keeps this share of tokens (any sample's)."""

    def shift(router: nn.Module, args: Any, logits: Tensor) -> Tensor | None:
        if logits.is_meta or router in done:
            return None
        done.add(router)
        offset = torch.quantile(logits.amax(dim=0).float(), 1 - keep)
        head: Any = router.logit
        head.bias.data -= offset
        return logits - offset

    done: set[nn.Module] = set()
    for router in method.routers:  # type: ignore[union-attr]
        router.register_forward_hook(shift)


def twin(transformer: nn.Module) -> nn.Module:
    """A second module tree over the very same weights, so that each contender keeps its own hooks and graphs."""
    shared = {id(t): t for t in [*transformer.parameters(), *transformer.buffers()]}
    return copy.deepcopy(transformer, shared)


class Contender:
    """An entry attached to a twin of the transformer, ready to take turns."""

    def __init__(self, entry: Entry, transformer: nn.Module, call: dict[str, Any], cfg: str = "auto"):
        self.transformer = twin(transformer)
        self.session: Session = attach(self.transformer, entry.build(transformer), cfg=cfg)
        self.call, self.carries = call, entry.carries
        self.turns = 0

    def prepare(self) -> Callable[[], Any]:
        """One turn: a run of its own, or the next step of one run, which begins here with a dense step."""
        call = new_run(self.call)
        if self.carries:
            if self.turns == 0:
                self.transformer(**call)
            call["timestep"] = call["timestep"] * (1 - (self.turns + 1) / 1000)
        self.turns += 1
        return lambda: self.transformer(**call)

    def compile(self) -> None:
        self.session.compile()

    def priced(self) -> Flops:
        """FLOPs of the latest turn by the session's own prices, without the method's own products."""
        assert self.session.ctx is not None
        return self.session.cost_model().step(self.session.ctx.counts)

    def overhead(self) -> dict[str, float]:
        """Milliseconds a step in each phase of the reduction path, over all turns."""
        return {phase: 1e3 * spent / max(1, self.turns) for phase, spent in self.session.phases().items()}


def new_run(call: dict[str, Any]) -> dict[str, Any]:
    """New latents begin a new run, as they do for the session in a pipeline; unless the timestep falls."""
    return {**call, "hidden_states": call["hidden_states"].clone()}


def count_step(shape: Shape, entry: Entry | None) -> Flops:
    """FLOPs of a step, the method's own included, on the meta device."""
    transformer, call = shape.build("meta"), shape.call("meta")
    if entry is None:
        return count(lambda: transformer(**call))
    return count(Contender(entry, transformer, call, shape.cfg).prepare())
