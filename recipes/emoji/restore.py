"""Take training up on another machine: a state folder from the committed pipeline, or from a snapshot of a run.

    python -m recipes.emoji.restore --model models/emoji
    python -m recipes.emoji.restore --name transformer-128 --snapshot recipes/emoji/data/transformer-128.safetensors
    python -m recipes.emoji.restore --name transformer-128 --take recipes/emoji/data/transformer-128.safetensors

Both hold the averaged weights in float16 and no optimizer: training goes on from them with its clock and curve, and
the optimizer's moments start afresh. `--take` writes the snapshot of a run that is not finished.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file

from recipes.emoji.assemble import MANIFEST, load_transformer, verify
from recipes.emoji.common import state_folder, write_atomic
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


def restore(model: Path, state: Path, name: str = "transformer", snapshot: Path | None = None) -> Clock:
    """Write the state that continues a committed pipeline, or with its towers a snapshot; one that is there stays."""
    verify(model)
    path = state / f"{name}.safetensors"
    if path.exists():
        raise FileExistsError(f"{path} is there already; training resumes from it, or pass another --state")
    for source, target in FOLDERS.items():
        if (model / source).is_dir():
            shutil.copytree(model / source, state / target, dirs_exist_ok=True)
    if snapshot is None:
        transformer = SD3Transformer2DModel.from_pretrained(str(model / "transformer")).float()
        clock = Clock(**json.loads((model / MANIFEST).read_text())["training"])
    else:
        transformer, known = load_transformer(snapshot)
        transformer, clock = transformer.float().train(), Clock(**known)
    optimizers = Optimizers(transformer, rate=1e-3, muon_rate=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(clock.step)
    save_state(path, transformer, copy.deepcopy(transformer), optimizers, generator, clock)
    return clock


def take(state: Path, name: str, snapshot: Path) -> Clock:
    """Write the averaged weights of a run in float16, with its clock."""
    transformer, clock = load_transformer(state / f"{name}.safetensors")
    tensors = {f"ema.{key}": value.half().contiguous() for key, value in transformer.state_dict().items()}
    metadata = {"clock": json.dumps(clock), "config": json.dumps(dict(transformer.config))}
    write_atomic(snapshot, lambda path: save_file(tensors, path, metadata=metadata))
    return Clock(**clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--name", default="transformer", help="name of the run inside the state folder")
    parser.add_argument("--snapshot", type=Path, help="continue this snapshot")
    parser.add_argument("--take", type=Path, help="write a snapshot of the run instead")
    options = parser.parse_args()
    if options.take is not None:
        clock = take(state_folder(options.state), options.name, options.take)
        print(f"snapshot at step {clock.step}, {clock.images} images")
        return
    clock = restore(options.model, state_folder(options.state), options.name, options.snapshot)
    print(f"restored at step {clock.step}, {clock.seconds / 60:.0f} minutes, {clock.images} images")


if __name__ == "__main__":
    main()
