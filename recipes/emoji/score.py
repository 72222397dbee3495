"""Say how good the model is: images of training labels and of held-out labels, scored separately.

    python -m recipes.emoji.score --model models/emoji --out results/emoji
    python -m recipes.emoji.score --model models/emoji-128-turbo --steps 4 --guidance 0 --file scores-128-turbo.json

Only stock classes load the model. "Text-image score" is the cosine of this project's own towers; the Fréchet and
kernel distances are on EfficientNet-Lite0 features: neither is CLIP score nor FID, nor comparable with them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from transformers import ResNetForImageClassification

from recipes.emoji.autoencoder import psnr
from recipes.emoji.captions import paraphrases_of
from recipes.emoji.common import EmojiData, load_data, parquet, save_grid, state_folder, to_unit, write_json
from reproduce.metrics.distances import frechet_distance, kernel_distance, retrieval
from reproduce.metrics.text import SIDE, TextImageScore
from shiva.bench.table import environment
from shiva.evaluate.drawing import load_with_arguments
from shiva.evaluate.metrics import resized

COLUMNS = 16
"""Of a grid of images."""


def pick_labels(data: EmojiData, split: str, count: int) -> Tensor:
    """`count` core rows of a split, evenly spaced over the list and so over the groups; all if count is 0."""
    rows = data.rows(split)
    if count <= 0 or count >= len(rows):
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]


def bare(data: EmojiData, row: int) -> str:
    return data.labels[row].lower()


def asked_otherwise(data: EmojiData, row: int) -> str:
    """A label as a visitor may ask for it, with an article, in the plural or as a serving: always the same one."""
    return paraphrases_of(data.labels[row], data.groups[row], [], 1, random.Random(row))[0]


def generate(
    pipe: StableDiffusion3Pipeline, prompts: list[str], steps: int, guidance: float, batch: int = 16, seed: int = 0
) -> Tensor:
    """(B, 3, S, S) in [-1, 1]; each prompt has its own seed, so batching changes nothing."""
    images = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        made = pipe(
            some,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=0,
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(some))],
            output_type="np",
        ).images
        images.append(torch.from_numpy(made).permute(0, 3, 1, 2) * 2 - 1)
    return torch.cat(images).float()


def as_seen(images: Tensor) -> Tensor:
    """Images in [-1, 1] at the size that the scoring tower was trained on."""
    return resized(images / 2 + 0.5, (SIDE, SIDE)) * 2 - 1


def score_images(
    images: Tensor, data: EmojiData, rows: Tensor, score: TextImageScore, features: Any
) -> dict[str, Any]:
    """All scores of one set of generated images; `features` is EfficientNetLite0, or None to leave it out."""
    real = to_unit(data.images[rows])
    cosines = score(as_seen(images))
    result: dict[str, Any] = {"images": len(rows), **retrieval(cosines, rows)}
    result["real_images"] = retrieval(score(as_seen(real)), rows)
    groups = sorted({data.groups[row] for row in rows.tolist()})
    members = {g: torch.tensor([data.groups[row] == g for row in rows.tolist()]) for g in groups}
    result["top5_by_group"] = {g: retrieval(cosines[m], rows[m])["top5"] for g, m in members.items()}
    if features is not None:
        made, true = features(images), features(real)
        result["efficientnet_lite0_frechet_distance"] = frechet_distance(made, true)
        result["efficientnet_lite0_kernel_distance"] = kernel_distance(made, true)
        result["efficientnet_lite0_lpips_style_distance"] = features.distance(images, real).mean().item()
        shuffled = features.distance(images, real.roll(len(real) // 2, 0)).mean().item()
        result["efficientnet_lite0_lpips_style_distance_to_another_emoji"] = shuffled
    return result


@torch.no_grad()
def autoencoder_psnr(pipe: StableDiffusion3Pipeline, images: Tensor) -> float:
    values = []
    for chunk in to_unit(images).split(64):
        rebuilt = pipe.vae.decode(pipe.vae.encode(chunk).latent_dist.mode()).sample
        values.append(psnr(rebuilt.clamp(-1, 1), chunk))
    return torch.cat(values).mean().item()


def beside_the_true(true: Tensor, drawn: Tensor) -> Tensor:
    """Rows of true images, below each the row drawn of the same labels: some of all (M, 3, S, S), evenly spaced."""
    some = torch.linspace(0, len(true) - 1, 2 * COLUMNS).round().long().split(COLUMNS)
    return torch.cat([images[row] for row in some for images in (true, drawn)])


def plot_curve(curve: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    hours = np.array([entry["minutes"] for entry in curve]) / 60
    named = {"loss": "training batches", "ema_train": "EMA, training labels", "ema_held_out": "EMA, held out"}
    for key in (key for key in named if key in curve[-1]):
        axes.plot(hours, [entry[key] for entry in curve], label=named[key])
    axes.set(xlabel="hours of training, one to two cores", ylabel="loss", title="The embedded model")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--out", type=Path, default=Path("results/emoji"))
    parser.add_argument("--file", default="scores.json", help="of the scores, inside --out")
    parser.add_argument("--state", help="folder of checkpoints, for the training curve")
    parser.add_argument("--name", default="transformer", help="name of the training run inside the state folder")
    parser.add_argument("--count", type=int, default=0, help="labels of each split to draw; 0: all")
    parser.add_argument("--paraphrased", action="store_true", help="ask for labels in articles, plurals and servings")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-features", action="store_true", help="leave EfficientNet-Lite0 out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    pipe, _ = load_with_arguments(options.model)
    data = load_data(parquet(pipe.transformer.config.sample_size * pipe.vae_scale_factor))
    vision = ResNetForImageClassification.from_pretrained(options.model / "score")
    score, features = TextImageScore(pipe, vision, data.labels), None
    if not options.no_features:
        from reproduce.metrics.networks import EfficientNetLite0

        features = EfficientNetLite0()
    result: dict[str, Any] = {
        "model": options.model.name,
        "size": [pipe.transformer.config.sample_size * pipe.vae_scale_factor] * 2,
        "training": json.loads((options.model / "manifest.json").read_text())["training"],
        "paraphrased": options.paraphrased,
        "steps": options.steps,
        "guidance": options.guidance,
        "seed": options.seed,
        "labels_to_choose_from": len(data.labels),
        "autoencoder_psnr": {
            split: autoencoder_psnr(pipe, data.images[data.rows(split, core_only=False)])
            for split in ("train", "validation")
        },
        "environment": environment(),
    }
    for split in ("train", "validation"):
        rows, start = pick_labels(data, split, options.count), time.monotonic()
        words = asked_otherwise if options.paraphrased else bare
        prompts = [words(data, row) for row in rows.tolist()]
        images = generate(pipe, prompts, options.steps, options.guidance, seed=options.seed)
        seconds = (time.monotonic() - start) / len(rows)
        result[split] = {**score_images(images, data, rows, score, features), "seconds_per_image": seconds}
        if split == "train":  # the card shows it
            stem = Path(options.file).stem.replace("scores", split)
            drawn = ((images + 1) * 127.5).round().to(torch.uint8)
            save_grid(beside_the_true(data.images[rows], drawn), options.out / f"{stem}.png", COLUMNS)
        print(split, json.dumps(result[split], indent=1), flush=True)
    write_json(options.out / options.file, result)
    curve_file = state_folder(options.state) / f"{options.name}-curve.json"
    if curve_file.exists():
        curve = json.loads(curve_file.read_text())["curve"]
        write_json(options.out / "curve.json", curve)
        plot_curve(curve, options.out / "curve.png")


if __name__ == "__main__":
    main()
