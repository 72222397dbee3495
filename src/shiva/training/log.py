"""What a run tells: a progress bar, lines of JSON, TensorBoard, a summary at the end, and pictures."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from shiva.checkpoint import write_atomically
from shiva.core.method import Trainable
from shiva.core.needs import need
from shiva.ops.schedule import RatioSchedule
from shiva.training.draws import Moment
from shiva.training.recipe import Recipe

QUIET_SECONDS = 15
"""Between lines where there is no terminal to draw a bar on."""
VIRIDIS = torch.tensor([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])
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


# -- pictures ----------------------------------------------------------------------------------------


def grid_of(rows: list[list[Any]]) -> Any:
    """PIL images in rows as one, with room for the largest."""
    width, height = (max(sides) for sides in zip(*(picture.size for row in rows for picture in row), strict=True))
    sheet = need("PIL.Image", "train").new("RGB", (width * len(rows[0]), height * len(rows)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * width, y * height))
    return sheet


def colours(values: Tensor) -> Tensor:
    """Colours (..., 3) of the viridis map for values in 0 to 1."""
    position = values.clamp(0, 1) * (len(VIRIDIS) - 1)
    left = position.long().clamp(max=len(VIRIDIS) - 2)
    return torch.lerp(VIRIDIS[left].float(), VIRIDIS[left + 1].float(), (position - left)[..., None]).round().byte()


def heat_map(ratios: Tensor, timesteps: tuple[float, ...], cell: int = 14, rows: int = 50) -> Any:
    """Keep ratios (steps, layers) as a picture: layers to the right, time downwards from noise to image."""
    pil, margin = need("PIL.Image", "train"), 44
    shown = torch.linspace(0, len(ratios) - 1, min(rows, len(ratios))).round().long()
    steps, layers = len(shown), ratios.shape[1]
    sheet = pil.new("RGB", (max(margin + layers * cell + 60, 300), max(margin + steps * cell, 220)), "white")
    draw = need("PIL.ImageDraw", "train").Draw(sheet)

    def paste(values: Tensor, left: int) -> None:
        pixels = pil.fromarray(colours(values.detach().float().cpu()).numpy())
        sheet.paste(
            pixels.resize((values.shape[1] * cell, len(values) * cell), pil.Resampling.NEAREST), (left, margin)
        )

    draw.text((4, 4), "keep by layer (right) and timestep (down)", fill="black")
    paste(ratios[shown], margin)
    for y in range(0, steps, max(1, steps // 10)):
        draw.text((4, margin + y * cell), f"{timesteps[int(shown[y])]:.0f}", fill="black")
    for x in range(0, layers, max(1, layers // 12)):
        draw.text((margin + x * cell, margin - 14), str(x), fill="black")
    scale, left = torch.linspace(1, 0, 11)[:, None], margin + layers * cell + 10
    paste(scale, left)
    for i, value in enumerate(scale.flatten().tolist()):
        draw.text((left + cell + 4, margin + i * cell), f"{value:.1f}", fill="black")
    return sheet
