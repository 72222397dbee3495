"""What training asks of a method, beside what inference does."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from shiva.core.context import Exploration, StepContext
from shiva.core.method import Method

Self = TypeVar("Self", bound="Trainable")


class Trainable(Method):
    """A method whose weights, or whose adapter, are learned."""

    needs_updates: bool = False
    """Whether training must provide the dense pass's updates, in `ctx.teacher`."""
    needs_earlier: bool = False
    """Whether training must provide those of an earlier step too, in `ctx.teacher.earlier`."""
    trained: bool = False
    """Whether its weights were loaded, or are being trained."""
    untrained: ClassVar[str] = (
        "chooses tokens by untrained weights; attach a trained checkpoint, or shiva.Sweep, which needs no training"
    )
    """What a user should know who attached it without any."""

    def train(self: Self, mode: bool = True) -> Self:
        self.trained = self.trained or mode
        return super().train(mode)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.trained = True
        return super().load_state_dict(*args, **kwargs)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """What a stage of training may choose to train, by name."""
        return {"router": list(self.parameters())} if any(True for _ in self.parameters()) else {}

    def begin_batch(self, timesteps: Sequence[float], explore: Exploration) -> None:
        """The timestep of each micro-batch of the global batch, before the first of them runs.

        Every rank is told all of them, so what depends on time alone needs no communication.
        """

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        """The method's own objectives of a call, by name."""
        return {}

    def readings(self) -> dict[str, float]:
        """Numbers of its state that a training log should show."""
        return {}

    def at_keep(self, keep: float) -> contextlib.AbstractContextManager[None] | None:
        """A context that keeps this share everywhere, for measuring; None where the method has no such knob."""
        return None

    def finish(self) -> None:
        """Turn what was learned so far into what inference reads, such as a policy into its table."""

    def tables(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside the weights, such as a compiled schedule."""
        return {}

    def load_tables(self, tables: dict[str, Tensor]) -> None:
        """The reverse of `tables`."""
