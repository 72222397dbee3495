"""A tiny SD3 pipeline with text encoders on disk, a data set, and recipes for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from tiny import make_sd3, randomized

CAPTIONS = ("a red ball", "a blue box", "two green trees", "one cat", "a dog on a hill", "rain")


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Letters and their word-ending forms; no merges."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789,."]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def make_text_encoder(width: int) -> CLIPTextModelWithProjection:
    torch.manual_seed(width)
    config = CLIPTextConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=10,
        bos_token_id=0,
        eos_token_id=1,
    )
    return CLIPTextModelWithProjection(config).eval()


def save_pipeline(folder: Path) -> Path:
    """An SD3 pipeline of the real classes: 4 layers, 8x8 tokens of 64x64 images... in a few hundred kB."""
    vae = randomized(
        AutoencoderKL(
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=2,
            layers_per_block=1,
            shift_factor=0.0,
            scaling_factor=1.0,
        )
    )
    StableDiffusion3Pipeline(
        transformer=make_sd3(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        vae=vae,
        text_encoder=make_text_encoder(12),
        tokenizer=make_tokenizer(folder / "words"),
        text_encoder_2=make_text_encoder(12),
        tokenizer_2=make_tokenizer(folder / "words"),
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save_folder(folder: Path, count: int = 12) -> Path:
    """An image folder with metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        picture(i).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": CAPTIONS[i % len(CAPTIONS)]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tiny_recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe over the tiny pipeline: three stages of a few steps."""
    from shiva.core.options import merge

    recipe: dict[str, Any] = {
        "model": {"path": str(folder / "pipeline"), "text_length": 0},
        "data": {"kind": "imagefolder", "path": str(folder / "images"), "caption": "text", "resolution": 32},
        "method": {"budget": 0.5, "bottleneck": 8},
        "sampling": {"batch": 4, "micro_batch": 2},
        "stages": {"warmup": {"steps": 3}, "policy": {"steps": 3}, "joint": {"steps": 3}},
        "adapter": {"rank": 2, "alpha": 2},
        "checkpoints": {"every": 2, "keep": 2},
        "validation": {"every": 0, "samples": 2, "keeps": [0.5], "images": 1, "image_steps": 2},
        "logging": {"every": 1},
    }
    return merge(recipe, changes)


def make_folder(folder: Path) -> Path:
    save_pipeline(folder / "pipeline")
    save_folder(folder / "images")
    return folder
