"""Train the SD3Transformer2DModel by flow matching, over as many sittings as it needs.

    python -m recipes.emoji.transformer --threads 1              # starts, or resumes where it stopped
    python -m recipes.emoji.transformer --threads 1 --finish 40  # last sitting: decay the rate over 40 minutes, end
    python -m recipes.emoji.transformer --size 128               # 1024 tokens, from the weights of models/emoji

The rate warms up and then stays constant, so a sitting may stop at any time; --finish ends the run with a linear
decay, and a later sitting without it returns to the constant rate. SIGTERM saves and stops. One atomic file holds
weights, EMA, optimizer, generator, clock and curve.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.emoji.common import SIZES, load_data, parquet, save_grid, state_folder, to_unit, write_atomic, write_json
from recipes.emoji.conditioning import Text, TextEncoder, encode_captions
from recipes.emoji.flow import flow_loss, logit_normal, make_transformer, sample, start_from, start_gently
from recipes.emoji.optim import Optimizers

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


@dataclass
class Clock:
    """Where the run is; saved with the weights."""

    step: int = 0
    seconds: float = 0.0
    """Training time over all sittings."""
    images: int = 0
    decay_start: float | None = None
    """`seconds` at which the final decay began."""
    curve: list[dict[str, Any]] = field(default_factory=list)


def rate_factor(clock: Clock, warm_up: int, decay_seconds: float) -> float:
    warm = min(1.0, (clock.step + 1) / warm_up)
    if clock.decay_start is None or decay_seconds <= 0:
        return warm
    return warm * max(0.0, 1 - (clock.seconds - clock.decay_start) / decay_seconds)


@torch.no_grad()
def update_ema(ema: SD3Transformer2DModel, model: SD3Transformer2DModel, decay: float) -> None:
    averages, values = list(ema.parameters()), [p.detach() for p in model.parameters()]
    torch._foreach_lerp_(averages, values, 1 - decay)


def save_state(
    path: Path,
    model: SD3Transformer2DModel,
    ema: SD3Transformer2DModel,
    optimizers: Optimizers,
    generator: torch.Generator,
    clock: Clock,
) -> None:
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    tensors |= {f"ema.{k}": v.contiguous() for k, v in ema.state_dict().items()}
    tensors |= {f"optimizer.{k}": v.contiguous() for k, v in optimizers.tensors().items()}
    tensors["generator"] = generator.get_state()
    metadata = {"clock": json.dumps(asdict(clock)), "config": json.dumps(dict(model.config))}
    write_atomic(path, lambda p: save_file(tensors, p, metadata=metadata))


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def load_state(
    path: Path,
    model: SD3Transformer2DModel,
    ema: SD3Transformer2DModel,
    optimizers: Optimizers,
    generator: torch.Generator,
) -> Clock:
    with safe_open(path, "pt") as file:
        clock = Clock(**json.loads(file.metadata()["clock"]))
    tensors = load_file(path)
    model.load_state_dict(part_of(tensors, "model."))
    ema.load_state_dict(part_of(tensors, "ema."))
    optimizers.load(part_of(tensors, "optimizer."))
    generator.set_state(tensors["generator"])
    return clock


class Prepared:
    """Latents and caption embeddings of the core labels, computed once per sitting."""

    def __init__(self, state: Path, size: int, variants: int, paraphrases: int) -> None:
        data, self.encoder = load_data(parquet(size)), TextEncoder(state)
        self.autoencoder = AutoencoderKL.from_pretrained(state / "autoencoder").eval()
        self.rows = {split: data.rows(split) for split in ("train", "validation")}
        self.latents = {split: self.encode_images(data.images[rows]) for split, rows in self.rows.items()}
        if size > SIZES[0]:
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
) -> tuple[Tensor, Tensor, Tensor, Text]:
    """Clean latents, noise, noise levels and text of one step."""
    size, texts, latents = options.batch, prepared.texts["train"], prepared.latents["train"]
    if "small" in prepared.latents and torch.rand((), generator=generator) < options.small:
        size, latents = 4 * size, prepared.latents["small"]
    pick = torch.randint(0, len(latents), (size,), generator=generator)
    variant = torch.randint(0, texts.pooled.shape[1], (size,), generator=generator)
    dropped = torch.rand(size, generator=generator) < options.dropout
    hidden = torch.where(dropped[:, None, None], prepared.empty.hidden, texts.hidden[pick, variant])
    pooled = torch.where(dropped[:, None], prepared.empty.pooled, texts.pooled[pick, variant])
    noise = torch.randn(latents[pick].shape, generator=generator)
    sigma = logit_normal(size, generator, options.noise_mean, options.noise_deviation)
    return latents[pick], noise, sigma, Text(hidden, pooled)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--name", default="transformer", help="name of the run inside the state folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop this sitting after so long")
    parser.add_argument("--finish", type=float, default=0, help="decay the rate to zero over so many minutes, end")
    parser.add_argument("--size", type=int, default=64, choices=SIZES, help="side of the images")
    parser.add_argument("--start", default="models/emoji", help="at 128: the smaller pipeline")
    parser.add_argument("--small", type=float, default=0.1, help="at 128: share of steps at 64, on 4 times the images")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--muon-rate", type=float, default=2e-3, help="Muon's learning rate; 0: AdamW alone")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--dropout", type=float, default=0.1, help="share of captions replaced by the empty one")
    parser.add_argument("--zero-tokens", type=float, default=0.05, help="share of steps with 256 zero tokens")
    parser.add_argument(
        "--noise-mean",
        type=float,
        default=0.8,
        help="of the noise level's logit; above 0, since what a caption adds shows at high noise only",
    )
    parser.add_argument("--noise-deviation", type=float, default=1.2, help="of the noise level's logit")
    parser.add_argument("--variants", type=int, default=8, help="captions per label")
    parser.add_argument("--paraphrases", type=int, default=0, help="more captions per label: articles, synonyms")
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--probe-minutes", type=float, default=5)
    parser.add_argument("--grid-minutes", type=float, default=20)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    state = state_folder(options.state)
    prepared = Prepared(state, options.size, options.variants, options.paraphrases)
    path = state / f"{options.name}.safetensors"
    _, channels, side, _ = prepared.latents["train"].shape
    model = make_transformer(channels, options.width, options.layers, side=side)
    if options.size > SIZES[0]:
        start_from(model, SD3Transformer2DModel.from_pretrained(options.start, subfolder="transformer").float())
    else:
        start_gently(model)
    ema = make_transformer(channels, options.width, options.layers, side=side).requires_grad_(False)
    ema.load_state_dict(model.state_dict())
    optimizers = Optimizers(model, options.rate, options.muon_rate, options.weight_decay)
    clock = load_state(path, model, ema, optimizers, generator) if path.exists() else Clock()
    clock.decay_start = (clock.decay_start or clock.seconds) if options.finish else None
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(prepared.rows['train'])} labels;"
        f" at step {clock.step}, {clock.seconds / 60:.0f} minutes",
        flush=True,
    )

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    began, saved, probed = clock.seconds, clock.seconds, clock.seconds
    drawn, recent, last = clock.seconds, [], time.monotonic()
    while not stopping:
        factor = rate_factor(clock, 100, options.finish * 60)
        clean, noise, sigma, text = draw_batch(prepared, options, generator)
        if torch.rand((), generator=generator) < options.zero_tokens:
            text = text.with_zero_tokens()
        loss = flow_loss(model, clean, noise, sigma, text).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(factor)
        update_ema(ema, model, min(options.ema, (1 + clock.step) / (10 + clock.step)))
        recent.append(loss.item())
        clock.step += 1
        clock.images += len(clean)
        now = time.monotonic()
        clock.seconds, last = clock.seconds + now - last, now
        ending = stopping or clock.seconds - began > options.minutes * 60 or (options.finish > 0 and factor == 0)
        stopping = stopping or ending

        if clock.step % 50 == 0 or ending:
            speed = clock.images / clock.seconds
            mean = sum(recent) / len(recent)
            print(
                f"step {clock.step} {clock.seconds / 60:.1f} min loss {mean:.4f} {speed:.1f} img/s",
                flush=True,
            )
        if clock.seconds - probed > options.probe_minutes * 60 or ending:
            probed = clock.seconds
            losses = {split: probe(ema, prepared, split) for split in ("train", "validation")}
            mean, recent = sum(recent) / max(len(recent), 1), []
            entry = {"step": clock.step, "minutes": round(clock.seconds / 60, 2), "images": clock.images}
            clock.curve.append(
                {**entry, "loss": mean, "ema_train": losses["train"], "ema_held_out": losses["validation"]}
            )
            print(f"probe {clock.curve[-1]}", flush=True)
            write_json(state / f"{options.name}-curve.json", {"options": vars(options), "curve": clock.curve})
        if clock.seconds - drawn > options.grid_minutes * 60 or (ending and options.finish):
            drawn = clock.seconds
            draw_grid(ema, prepared, state / f"{options.name}-grids" / f"step-{clock.step:06d}.png")
        if clock.seconds - saved > options.save_minutes * 60 or ending:
            saved = clock.seconds
            save_state(path, model, ema, optimizers, generator, clock)


if __name__ == "__main__":
    main()
