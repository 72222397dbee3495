"""Take training up on another machine: a state folder from a committed pipeline.

    python -m recipes.emoji.restore --model models/emoji
    python -m recipes.emoji.restore --model models/emoji-128 --name transformer-128
    python -m recipes.emoji.restore --model models/emoji-128-turbo --name turbo

It holds the averaged weights in float16 and no optimizer: training goes on from them with its clock and curve, and the
optimizer's moments start afresh, under a rate that rises again.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

from recipes.emoji.assemble import MANIFEST, verify
from recipes.emoji.common import state_folder
from recipes.emoji.optim import Optimizers
from recipes.emoji.sitting import Clock, save_state

FOLDERS = {
    "tokenizer": "tokenizer",
    "text_encoder": "text_encoder",
    "text_encoder_2": "text_encoder_2",
    "vae": "autoencoder",
    "score": "score",
}
"""Components of the pipeline, and their names in the state folder."""


def restore(model: Path, state: Path, name: str = "transformer") -> Clock:
    """Write the state that continues a committed pipeline; components that are there stay."""
    verify(model)
    path = state / f"{name}.safetensors"
    if path.exists():
        raise FileExistsError(f"{path} is there already; training resumes from it, or pass another --state")
    for source, target in FOLDERS.items():
        if (model / source).is_dir() and not (state / target).exists():
            shutil.copytree(model / source, state / target)
    transformer = SD3Transformer2DModel.from_pretrained(str(model / "transformer")).float().train()
    clock = Clock(**json.loads((model / MANIFEST).read_text())["training"])
    optimizers = Optimizers(transformer, rate=1e-3, muon_rate=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(clock.step)
    clock.fresh = clock.step
    save_state(path, transformer, copy.deepcopy(transformer), optimizers, generator, clock)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--name", default="transformer", help="name of the run inside the state folder")
    options = parser.parse_args()
    clock = restore(options.model, state_folder(options.state), options.name)
    print(f"restored at step {clock.step}, {clock.seconds / 60:.0f} minutes, {clock.images} images")


if __name__ == "__main__":
    main()
