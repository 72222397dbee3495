"""One rank of a distributed run: trains a recipe and notes every timestep and micro-batch it saw.

python training_rank.py RECIPE OUTPUT; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from shiva.training.recipe import load_recipe
from shiva.training.trainer import Trainer


def train_noting(recipe: Path, output: Path) -> None:
    """Train, and write what this rank ran to seen-<rank>.json: step, index and timestep of each micro-batch."""
    trainer = Trainer(load_recipe(recipe), output)
    trainer.prepare()
    seen: list[list[float]] = []
    backward = trainer.objectives.backward

    def note(batch: Any, *rest: Any) -> Any:
        seen.append([trainer.step, batch.exploration.index, batch.timestep])
        return backward(batch, *rest)

    trainer.objectives.backward = note  # type: ignore[method-assign]
    trainer.prepare = lambda: None  # type: ignore[method-assign]
    trainer.run()
    (output / f"seen-{trainer.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    train_noting(Path(sys.argv[1]), Path(sys.argv[2]))
