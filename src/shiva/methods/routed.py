"""Pruners whose choice of tokens is learned: the common part of Shiva and the gated ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Place, Trainable
from shiva.core.reduction import Reduction
from shiva.methods.pruner import Pruner, PrunerOptions
from shiva.methods.scores import Router, RouterOptions, full_precision
from shiva.methods.shortcut import ShortcutOptions


@dataclass(frozen=True)
class RoutedOptions(RouterOptions, PrunerOptions):
    """Options of the pruners that learn which tokens to run."""

    fixed: ClassVar = RouterOptions.fixed | ShortcutOptions.fixed


class RoutedPruner(Pruner, Trainable):
    """A pruner whose score is a trained router."""

    needs_signals = True
    gates_inputs: bool = True
    """Whether its gradient estimator scales what selected tokens bring into a block."""
    config: RoutedOptions

    def __init__(self, config: RoutedOptions, spec: BackboneSpec):
        super().__init__(config, spec, tracks_age="age" in config.signals)
        self.routers = config.make_routers(spec)
        self.score = Router(self.routers, self.fill if "age" in config.signals else None)
        self.needs_updates = self.needs_earlier = self.fill.caches

    def groups(self) -> dict[str, list[nn.Parameter]]:
        fill = {} if self.shortcut is None else {"fill": list(self.shortcut.parameters())}
        return {"router": list(self.routers.parameters()), **fill}

    def begin_step(self, ctx: StepContext) -> None:
        if self.training and self.whole_keys and (self.gates_inputs or self.fill.caches):
            raise ValueError(
                "attends='all' is for inference, unless no update is cached and the estimator gates outputs; train "
                "with attends='selected', then pass it to attach"
            )
        super().begin_step(ctx)

    def training_scores(self, x: Tensor, age: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Scores (B, N) with their gradient. Checkpointing runs a block twice: each pass makes its own context."""
        with ctx.phase("router"), full_precision(x.device, self.training):
            waited = age if "age" in self.config.signals else None
            scores = self.routers(x, ctx.time_embedding, ctx.prompt, site.layer, {}, waited)
        if ctx.trace is not None:
            ctx.trace.scores[ctx.step, site.layer] = scores.detach()
        return self.covered(scores, site, ctx)

    def training_reduction(self, x: Tensor, age: Tensor, site: Place, ctx: StepContext) -> Reduction:
        """The reduction of a training step, through which scores learn; `age` (B, N) is how long tokens waited."""
        raise NotImplementedError

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        if not self.training:
            return super().reduction(x, site, ctx)
        age = self.fill.simulated_age(x, ctx.counts[site.layer] / x.shape[1], ctx)
        return self.training_reduction(x, age, site, ctx)
