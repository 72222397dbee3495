"""SIGTERM and SIGINT end a run after the step in progress, with its state saved."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """A run was asked to stop, and saved itself."""

    def __init__(self, number: int, step: int, saved: Path | None):
        self.code = 128 + number
        """The exit code shells use for the signal: 143 for SIGTERM, 130 for SIGINT."""
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}, saved as {saved}; the same command continues it")


class Interrupts:
    """Notes the first signal; a second one acts as it would have."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
