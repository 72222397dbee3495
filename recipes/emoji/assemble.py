"""Write the pipeline folder that StableDiffusion3Pipeline.from_pretrained loads, from whatever state there is.

    python -m recipes.emoji.assemble --out models/emoji
    python -m recipes.emoji.assemble --out models/emoji-128 --name transformer-128 --shares models/emoji
    python -m recipes.emoji.assemble --out models/emoji-128-turbo --name turbo --shares models/emoji --turbo

With `--shares` only transformer and scheduler are written; all else are links to the folders of that pipeline.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from safetensors import safe_open
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, ResNetForImageClassification

from recipes.emoji.common import state_folder, write_json
from recipes.emoji.placeholder import make_silent_encoder, make_silent_tokenizer

SHIFT = 1.5
"""Of the noise levels at sampling; 256 tokens need little."""
TERMINAL = 0.25
"""Noise level at which the last step of the turbo begins."""
LIMIT = 45_000_000
MANIFEST = "manifest.json"


def load_transformer(path: Path) -> tuple[SD3Transformer2DModel, dict]:
    """The EMA weights of a training state, and its clock."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; train it with `python -m recipes.emoji.transformer`")
    with safe_open(path, "pt") as file:
        config, clock = (json.loads(file.metadata()[key]) for key in ("config", "clock"))
        weights = {key.removeprefix("ema."): file.get_tensor(key) for key in file.keys() if key.startswith("ema.")}  # noqa: SIM118
    model = SD3Transformer2DModel.from_config({k: v for k, v in config.items() if not k.startswith("_")})
    model.load_state_dict(weights)
    return model.eval(), clock


def load_pipeline(
    state: Path, name: str = "transformer", turbo: bool = False
) -> tuple[StableDiffusion3Pipeline, dict]:
    """All components of the state folder in one stock pipeline, and the transformer's clock."""
    transformer, clock = load_transformer(state / f"{name}.safetensors")
    tokenizers = [CLIPTokenizer.from_pretrained(state / "tokenizer") for _ in range(2)]
    towers = [
        CLIPTextModelWithProjection.from_pretrained(state / folder) for folder in ("text_encoder", "text_encoder_2")
    ]
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, shift_terminal=TERMINAL if turbo else None),
        vae=AutoencoderKL.from_pretrained(state / "autoencoder"),
        text_encoder=towers[0],
        tokenizer=tokenizers[0],
        text_encoder_2=towers[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=make_silent_encoder(transformer.config.joint_attention_dim),
        tokenizer_3=make_silent_tokenizer(),
    )
    return pipe, clock


def checksums(folder: Path) -> dict[str, dict[str, int | str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
        if path.suffix in {".safetensors", ".json"}
    }


def verify(folder: Path) -> None:
    """Raise an error that names the file if one of the manifest is missing or differs."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(f"{manifest} is missing; restore {folder} with `git checkout -- {folder}`")
    for name, wanted in json.loads(manifest.read_text())["files"].items():
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; restore it with `git checkout -- {path}`")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != wanted["sha256"]:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes and SHA-256 {found[:12]}…, the manifest says"
                f" {wanted['bytes']} and {wanted['sha256'][:12]}…; restore it with `git checkout -- {path}`"
            )


def tidy_configs(folder: Path) -> None:
    """Let transformers load float16 weights as float32, as diffusers does unless told otherwise; name no folder.

    By default transformers keeps the dtype that the config names, and half a pipeline in float16 fails on its first
    call. diffusers notes where a component was loaded from, which is nobody's business.
    """
    for path in (path for path in folder.glob("*/config.json") if not path.parent.is_symlink()):
        config = {key: value for key, value in json.loads(path.read_text()).items() if key != "_name_or_path"}
        write_json(path, {**config, "dtype": "float32"} if "dtype" in config else config)


OWN = ("transformer", "scheduler")
"""What models of one family do not share."""


def share(fresh: Path, other: Path) -> None:
    """Put links to another pipeline's folders in the place of all that is the same there."""
    if not other.is_dir():
        raise FileNotFoundError(f"{other} is missing; restore it with `git checkout -- {other}`")
    for folder in sorted(path for path in fresh.iterdir() if path.is_dir() and path.name not in OWN):
        shutil.rmtree(folder)
        folder.symlink_to(Path("..") / other.name / folder.name, target_is_directory=True)


def assemble(
    state: Path, out: Path, name: str = "transformer", shares: Path | None = None, turbo: bool = False
) -> dict:
    """Build the folder beside `out`, then swap it in; files of ours that are no component (the card) stay."""
    pipe, clock = load_pipeline(state, name, turbo)
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipe.to(torch.float16).save_pretrained(fresh)
    if (state / "score").exists():
        score = ResNetForImageClassification.from_pretrained(state / "score")
        score.to(torch.float16).save_pretrained(fresh / "score")
    if shares is not None:
        share(fresh, shares)
    tidy_configs(fresh)
    size = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
    if size > LIMIT:
        raise ValueError(f"the pipeline has {size} bytes, more than {LIMIT}; make a tower or the transformer smaller")
    training = {key: clock[key] for key in ("step", "seconds", "images", "curve")}
    write_json(fresh / MANIFEST, {"bytes": size, "training": training, "files": checksums(fresh)})
    for kept in (*out.glob("*.md"), *out.glob("*.png")):
        shutil.copy2(kept, fresh / kept.name)
    if out.exists():
        shutil.rmtree(out)
    fresh.rename(out)
    return {"bytes": size, "step": clock["step"], "minutes": round(clock["seconds"] / 60)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--name", default="transformer", help="name of the training run inside the state folder")
    parser.add_argument("--out", type=Path, default=Path("models/emoji"))
    parser.add_argument("--shares", type=Path, help="link to this pipeline's towers and autoencoder")
    parser.add_argument("--turbo", action="store_true", help="with the noise levels of a distilled model")
    options = parser.parse_args()
    print(assemble(state_folder(options.state), options.out, options.name, options.shares, options.turbo))
    verify(options.out)


if __name__ == "__main__":
    main()
