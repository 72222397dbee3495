"""What a run tells: a progress bar, lines of JSON, TensorBoard, and a summary at the end."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shiva.checkpoint import write_atomically
from shiva.core.method import Trainable
from shiva.ops.schedule import RatioSchedule
from shiva.training.draws import Moment
from shiva.training.recipe import Recipe

QUIET_SECONDS = 15
"""Between lines where there is no terminal to draw a bar on."""
SHOWN = {"loss": "loss {:.4f}", "keep": "keep {:.3f}", "budget_ema": "ema {:.3f}", "rate": "{:.2f} it/s"}


class Log:
    """Written by the main process only; the others call it in vain."""

    def __init__(self, output: Path, accelerator: Any, recipe: Recipe):
        self.output, self.accelerator, self.recipe = output, accelerator, recipe
        self.console = Console(stderr=True)
        self.main = accelerator.is_main_process
        self.progress: Progress | None = None
        self._rate = 0.0
        self._spoke = 0.0

    def lacks_validation(self, step: int) -> bool:
        """Known to the main process, which writes it; the others ask it."""
        return self.main and all(record["step"] != step for record in self._read("validation"))

    def say(self, text: str) -> None:
        if self.main:
            self.console.print(text, highlight=False, soft_wrap=True)

    def preparing(self, what: str, done: int, total: int) -> None:
        if total and (self.console.is_terminal or done in (0, total)):
            self.say(f"{what}: {done} of {total} shards")

    # -- the loop ------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Open the trackers and the bar; records after `step` belong to a run that was killed, and go."""
        if not self.main:
            return
        for name in ("metrics", "validation"):
            path = self.output / f"{name}.jsonl"
            if path.exists():
                kept = [record for record in self._read(name) if record["step"] <= step]
                write_atomically(path, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
        self.accelerator.init_trackers(self.recipe.logging.wandb or "tensorboard")
        loss, keep, average, rate = (f"{{task.fields[shown][{name}]}}" for name in SHOWN)
        columns = [TextColumn(text) for text in ("{task.description}", loss, keep, average)]
        bar, ends = (BarColumn(), MofNCompleteColumn()), (TextColumn(rate), TimeRemainingColumn())
        self.progress = Progress(*columns, *bar, *ends, console=self.console, disable=not self.console.is_terminal)
        self.progress.start()
        blank = dict.fromkeys(SHOWN, "")
        self._task = self.progress.add_task("training", total=self.recipe.steps, completed=step, shown=blank)

    def step(self, step: int, now: Moment, numbers: dict[str, float], seconds: float) -> None:
        if not self.main or self.progress is None:
            return
        self._rate = 1 / seconds if not self._rate else 0.9 * self._rate + 0.1 / seconds
        values = {**numbers, "rate": self._rate}
        shown = {name: form.format(values.get(name, math.nan)) for name, form in SHOWN.items()}
        self.progress.update(self._task, completed=step, description=now.stage.name, shown=shown, refresh=False)
        if step % self.recipe.logging.every == 0 or now.last:
            self._write("metrics", {"step": step, "stage": now.stage.name, "seconds": seconds, **numbers})
            self.accelerator.log({f"train/{name}": value for name, value in numbers.items()}, step=step)
        if not self.console.is_terminal and time.monotonic() - self._spoke > QUIET_SECONDS:
            self._spoke = time.monotonic()
            left = (self.recipe.steps - step) / max(self._rate, 1e-9) / 60
            self.say(f"{now.stage.name} {step}/{self.recipe.steps} {' '.join(shown.values())}, {left:.1f} min left")

    def validation(self, step: int, results: dict[str, float]) -> None:
        self._write("validation", {"step": step, **results})
        self.accelerator.log({f"validation/{name}": value for name, value in results.items()}, step=step)
        mse = ", ".join(f"{n.removeprefix('mse/')} {v:.4g}" for n, v in results.items() if n.startswith("mse/"))
        self.say(f"step {step}: MSE to dense: {mse}")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.accelerator.end_training()

    def summary(self, method: Trainable) -> dict[str, Any]:
        """The run for a program: where it ended, and how far its schedule is from the budget."""
        recipe = self.recipe
        result: dict[str, Any] = {"recipe": recipe.to_dict(), "steps": recipe.steps, "readings": method.readings()}
        schedule = getattr(method, "schedule", None)
        if isinstance(schedule, RatioSchedule):
            result["schedule"] = {"mean_keep": schedule.mean_keep, "budget": getattr(method.config, "budget", None)}
        return {**result, **{name: self._read(name) for name in ("metrics", "validation")}}

    # -- records -------------------------------------------------------------------------------------

    def _write(self, name: str, record: dict[str, Any]) -> None:
        with open(self.output / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def _read(self, name: str) -> list[dict[str, Any]]:
        return read_records(self.output / f"{name}.jsonl")


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a run; a line that a kill cut short counts as never written."""
    records = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and "step" in record]
