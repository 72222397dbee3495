"""Train the SD3Transformer2DModel by flow matching, over as many sittings as it needs.

python -m recipes.emoji.transformer --threads 1              # starts, or resumes where it stopped
python -m recipes.emoji.transformer --threads 1 --finish 40  # last sitting: decay the rate over 40 minutes, end
python -m recipes.emoji.transformer --size 128               # 1024 tokens, from the weights of models/emoji
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import Tensor

from recipes.emoji.common import SIZES, load_data, parquet, save_grid, state_folder, to_unit
from recipes.emoji.conditioning import Text, TextEncoder, encode_captions
from recipes.emoji.flow import (
    flow_loss,
    half_of_cells,
    logit_normal,
    make_transformer,
    sample,
    start_from,
    start_gently,
)
from recipes.emoji.sitting import add_arguments, sit

GRID_PROMPTS = (
    "pizza",
    "a slice of pizza",
    "hamburger",
    "red apple",
    "a banana",
    "strawberry",
    "birthday cake",
    "hot beverage",
    "dog face",
    "a fox",
    "octopus",
    "butterfly",
    "sunflower",
    "cactus",
    "rocket",
    "sailboat",
    "fire engine",
    "castle",
    "rainbow",
    "soccer ball",
    "guitar",
    "violin",
    "gem stone",
    "crown",
    "light bulb",
    "robot",
    "ghost",
    "heart on fire",
    "smiling face with sunglasses",
    "astronaut",
    "check mark",
    "tiger",
)


class Prepared:
    """Latents and caption embeddings of the core labels, computed once per sitting."""

    def __init__(self, state: Path, size: int, variants: int, paraphrases: int, small: bool = True) -> None:
        data, self.encoder = load_data(parquet(size)), TextEncoder(state)
        self.autoencoder = AutoencoderKL.from_pretrained(state / "autoencoder").eval()
        self.rows = {split: data.rows(split) for split in ("train", "validation")}
        self.latents = {split: self.encode_images(data.images[rows]) for split, rows in self.rows.items()}
        if small and size > SIZES[0]:
            self.latents["small"] = self.encode_images(load_data().images[self.rows["train"]])
        self.texts = {
            split: encode_captions(self.encoder, data, rows, variants, paraphrases)
            for split, rows in self.rows.items()
        }
        self.empty = self.encoder([""])

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """uint8 images to scaled latents (B, C, S / 4, S / 4)."""
        means = torch.cat([self.autoencoder.encode(to_unit(c)).latent_dist.mode() for c in images.split(64)])
        config = self.autoencoder.config
        return (means - config.shift_factor) * config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        config = self.autoencoder.config
        pixels = self.autoencoder.decode(latents / config.scaling_factor + config.shift_factor).sample
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


@torch.no_grad()
def probe(model: SD3Transformer2DModel, prepared: Prepared, split: str, count: int = 64) -> float:
    """Flow loss of the first caption at fixed noise and noise levels: comparable over the whole run."""
    generator = torch.Generator().manual_seed(1)
    clean = prepared.latents[split]
    pick = torch.linspace(0, len(clean) - 1, count).long()
    sigma = logit_normal(count, generator)[torch.randperm(count, generator=generator)]
    noise = torch.randn(clean[pick].shape, generator=generator)
    return flow_loss(model, clean[pick], noise, sigma, prepared.texts[split][pick, 0]).mean().item()


def draw_grid(ema: SD3Transformer2DModel, prepared: Prepared, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    text = prepared.encoder(list(GRID_PROMPTS))
    noise = torch.randn(len(GRID_PROMPTS), *prepared.latents["train"].shape[1:], generator=generator)
    latents = torch.cat(
        [sample(ema, noise[rows], text[rows], prepared.empty) for rows in torch.arange(len(noise)).split(8)]
    )
    save_grid(prepared.decode(latents), path, columns=8)


def draw_batch(
    prepared: Prepared, options: argparse.Namespace, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Text, Tensor | None]:
    """Clean latents, noise, noise levels, text and, if not all, the places of the tokens of one step."""
    size, texts, latents, places = options.batch, prepared.texts["train"], prepared.latents["train"], None
    if "small" in prepared.latents and torch.rand((), generator=generator) < options.small:
        size, latents = 4 * size, prepared.latents["small"]
    elif torch.rand((), generator=generator) < options.halved:
        size *= 2
        places = half_of_cells(size, latents.shape[-1], generator)
    pick = torch.randint(0, len(latents), (size,), generator=generator)
    variant = torch.randint(0, texts.pooled.shape[1], (size,), generator=generator)
    dropped = torch.rand(size, generator=generator) < options.dropout
    hidden = torch.where(dropped[:, None, None], prepared.empty.hidden, texts.hidden[pick, variant])
    pooled = torch.where(dropped[:, None], prepared.empty.pooled, texts.pooled[pick, variant])
    noise = torch.randn(latents[pick].shape, generator=generator)
    sigma = logit_normal(size, generator, options.noise_mean, options.noise_deviation)
    return latents[pick], noise, sigma, Text(hidden, pooled), places


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, name="transformer", batch=16, rate=1e-3, muon=2e-3, ema=0.999)
    parser.add_argument("--size", type=int, default=64, choices=SIZES, help="side of the images")
    parser.add_argument("--start", default="models/emoji", help="at 128: the smaller pipeline")
    parser.add_argument("--small", type=float, default=0.1, help="at 128: share of steps at 64, on 4 times the images")
    parser.add_argument(
        "--halved", type=float, default=0.0, help="share of steps on half of the tokens of twice the images"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1, help="share of captions replaced by the empty one")
    parser.add_argument(
        "--noise-mean",
        type=float,
        default=0.8,
        help="of the noise level's logit; above 0, since what a caption adds shows at high noise only",
    )
    parser.add_argument("--noise-deviation", type=float, default=1.2, help="of the noise level's logit")
    parser.add_argument("--variants", type=int, default=8, help="captions per label")
    parser.add_argument("--paraphrases", type=int, default=0, help="more captions per label: articles, synonyms")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    state = state_folder(options.state)
    prepared = Prepared(state, options.size, options.variants, options.paraphrases)
    _, channels, side, _ = prepared.latents["train"].shape
    model = make_transformer(channels, options.width, options.layers, side=side)
    if options.size > SIZES[0]:
        start_from(model, SD3Transformer2DModel.from_pretrained(options.start, subfolder="transformer").float())
    else:
        start_gently(model)
    ema = make_transformer(channels, options.width, options.layers, side=side).requires_grad_(False)
    ema.load_state_dict(model.state_dict())

    def loss_of(generator: torch.Generator) -> tuple[Tensor, int]:
        clean, noise, sigma, text, places = draw_batch(prepared, options, generator)
        if torch.rand((), generator=generator) < options.zero_tokens:
            text = text.with_zero_tokens()
        return flow_loss(model, clean, noise, sigma, text, places).mean(), len(clean)

    def losses() -> dict[str, float]:
        return {"ema_train": probe(ema, prepared, "train"), "ema_held_out": probe(ema, prepared, "validation")}

    sit(options, state, model, ema, loss_of, losses, lambda path: draw_grid(ema, prepared, path))


if __name__ == "__main__":
    main()
