"""One rank of a distributed run: trains a recipe and notes every timestep and micro-batch it saw.

python training_rank.py RECIPE OUTPUT [PAUSE]; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from shiva.training.process import Interrupted
from shiva.training.recipe import load_recipe
from shiva.training.trainer import Trainer


def train_noting(recipe: Path, output: Path, pause: int | None = None) -> None:
    """Train, and write what this rank ran to seen-<rank>.json: step, index and timestep of each micro-batch.

    At the step `pause` it is asked to stop.
    """
    trainer = Trainer(load_recipe(recipe), output)
    trainer.prepare()
    path = output / f"seen-{trainer.rank}.json"
    seen: list[list[float]] = json.loads(path.read_text())["micro_batches"] if path.exists() else []
    backward = trainer.objectives.backward

    def note(batch: Any, *rest: Any) -> Any:
        seen.append([trainer.step, batch.exploration.index, batch.timestep])
        if trainer.step + 1 == pause and trainer.main:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(batch, *rest)

    trainer.objectives.backward = note  # type: ignore[method-assign]
    trainer.prepare = lambda: None  # type: ignore[method-assign]
    with contextlib.nullcontext() if pause is None else contextlib.suppress(Interrupted):
        trainer.run()
    parameters = trainer.session.transformer.parameters()
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters)
    path.write_text(json.dumps({"micro_batches": seen, "weights": held}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    train_noting(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
