"""What a run tells: a progress bar, lines of JSON, TensorBoard, and a summary at the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shiva.core.method import Method
from shiva.modules.schedule import RatioSchedule
from shiva.training.recipe import Recipe
from shiva.training.stages import Moment

QUIET_SECONDS = 15
"""Between lines where there is no terminal to draw a bar on."""


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
        path = self.output / "validation.jsonl"
        lines = path.read_text().splitlines() if self.main and path.exists() else []
        return self.main and all(_step(line) != step for line in lines)

    def say(self, text: str) -> None:
        if self.main:
            self.console.print(text, highlight=False, soft_wrap=True)

    def preparing(self, what: str, done: int, total: int) -> None:
        if total and (self.console.is_terminal or done in (0, total)):
            self.say(f"{what}: {done} of {total} shards")

    # -- the loop ------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Open the trackers and the bar; lines after `step` belong to a run that was killed, and go."""
        if not self.main:
            return
        for name in ("metrics.jsonl", "validation.jsonl"):
            path = self.output / name
            if path.exists():
                lines = [line for line in path.read_text().splitlines() if _step(line) <= step]
                path.write_text("".join(f"{line}\n" for line in lines))
        project = self.recipe.logging.wandb or "tensorboard"
        self.accelerator.init_trackers(project)
        columns = ("{task.description}", "loss {task.fields[loss]:.4f}", "keep {task.fields[keep]:.3f}")
        self.progress = Progress(
            *(TextColumn(column) for column in columns),
            TextColumn("ema {task.fields[ema]:.3f}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.2f} it/s"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.progress.start()
        blank: dict[str, Any] = {"loss": float("nan"), "keep": float("nan"), "ema": float("nan"), "rate": 0.0}
        self._task = self.progress.add_task("training", total=self.recipe.steps, completed=step, **blank)

    def step(self, step: int, now: Moment, numbers: dict[str, float], seconds: float) -> None:
        if not self.main or self.progress is None:
            return
        self._rate = 1 / seconds if not self._rate else 0.9 * self._rate + 0.1 / seconds
        shown: dict[str, Any] = {
            "loss": numbers["loss"],
            "keep": numbers["keep"],
            "ema": numbers.get("budget_ema", float("nan")),
        }
        self.progress.update(
            self._task, completed=step, description=now.stage.name, rate=self._rate, refresh=False, **shown
        )
        if step % self.recipe.logging.every == 0 or now.step + 1 == now.stage.steps:
            self._write("metrics.jsonl", {"step": step, "stage": now.stage.name, "seconds": seconds, **numbers})
            self.accelerator.log({f"train/{name}": value for name, value in numbers.items()}, step=step)
        if not self.console.is_terminal and time.monotonic() - self._spoke > QUIET_SECONDS:
            self._spoke = time.monotonic()
            left = (self.recipe.steps - step) / max(self._rate, 1e-9)
            self.say(
                f"{now.stage.name} {step}/{self.recipe.steps} loss {shown['loss']:.4f} keep {shown['keep']:.3f} "
                f"ema {shown['ema']:.3f} {self._rate:.2f} it/s, {left / 60:.1f} min left"
            )

    def validation(self, step: int, results: dict[str, float]) -> None:
        self._write("validation.jsonl", {"step": step, **results})
        self.accelerator.log({f"validation/{name}": value for name, value in results.items()}, step=step)
        mse = ", ".join(f"{n.removeprefix('mse/')} {v:.4g}" for n, v in results.items() if n.startswith("mse/"))
        self.say(f"step {step}: MSE to dense: {mse}")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.accelerator.end_training()

    def _write(self, name: str, record: dict[str, Any]) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        with open(self.output / name, "a") as file:
            file.write(json.dumps(record) + "\n")

    # -- the end -------------------------------------------------------------------------------------

    def summary(self, recipe: Recipe, method: Method) -> dict[str, Any]:
        """The run for a program: where it ended, and how far its schedule is from the budget."""
        result: dict[str, Any] = {"recipe": recipe.to_dict(), "steps": recipe.steps, "readings": method.readings()}
        schedule = getattr(method, "schedule", None)
        if isinstance(schedule, RatioSchedule):
            result["schedule"] = {"mean_keep": schedule.mean_keep, "budget": getattr(method.config, "budget", None)}
        for name in ("metrics", "validation"):
            path = self.output / f"{name}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            result[name] = [json.loads(line) for line in lines]
        return result


def _step(line: str) -> int:
    """The step of a record; a line that a kill cut short counts as never written."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return 1 << 62
