"""Train the AutoencoderKL: 64x64 pixels to a 16x16 latent grid and back.

python -m recipes.emoji.autoencoder --minutes 15 --threads 1
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from recipes.emoji.common import load_data, save_grid, state_folder, to_unit, write_json
from shiva.evaluate.metrics import pixels

POSTERIOR_LOG_VARIANCE = -5.0
"""Every posterior has this variance: learning it slows the first minutes down and the diffusion needs no more."""


def make_autoencoder(channels: int = 12, widths: tuple[int, ...] = (16, 32, 64)) -> AutoencoderKL:
    """Three resolutions, so that the pipeline's vae_scale_factor is 4 and 64 pixels become 16 latents."""
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=channels,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )
    with torch.no_grad():
        model.encoder.conv_out.weight[channels:] = 0
        model.encoder.conv_out.bias[channels:] = POSTERIOR_LOG_VARIANCE
    return model


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """Per-image PSNR in dB of (B, 3, H, W) images in [-1, 1]: (B,)."""
    return pixels.psnr(images / 2, reference / 2)


def augment(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """A random side x side window of each (3, 64, 64) image on a white margin, half of them mirrored."""
    padded = F.pad(images, (4,) * 4, value=1.0)
    shifts = torch.randint(0, padded.shape[-1] - side + 1, (len(images), 2), generator=generator).tolist()
    moved = [image[:, y : y + side, x : x + side] for image, (y, x) in zip(padded, shifts, strict=True)]
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.stack([image.flip(-1) if m else image for image, m in zip(moved, mirrored, strict=True)])


@torch.no_grad()
def evaluate(model: AutoencoderKL, images: Tensor) -> tuple[float, Tensor, Tensor]:
    """Mean PSNR, reconstructions and latent means of uint8 images."""
    decoded, latents = [], []
    for chunk in images.split(64):
        mode = model.encode(to_unit(chunk)).latent_dist.mode()
        latents.append(mode)
        decoded.append(model.decode(mode).sample.clamp(-1, 1))
    rebuilt = torch.cat(decoded)
    return psnr(rebuilt, to_unit(images)).mean().item(), rebuilt, torch.cat(latents)


def save_folder(model: AutoencoderKL, folder: Path) -> None:
    """Write beside, then swap: a reader never sees half a model."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(fresh)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--name", default="autoencoder", help="name of the result inside the state folder")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--widths", type=int, nargs=3, default=(16, 32, 64))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--crops", type=float, default=0.6, help="share of the time spent on cheap 32x32 windows")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--kl",
        type=float,
        default=1e-4,
        help="weight of the KL term, per latent value; at fixed variance it is mean²/2",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    state, data = state_folder(options.state), load_data()
    train, held_out = data.images[data.train], data.images[~data.train]
    model = make_autoencoder(options.channels, tuple(options.widths)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.99), weight_decay=1e-3)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)

    start, step, curve = time.monotonic(), 0, []
    while (done := (time.monotonic() - start) / 60 / options.minutes) < 1:
        scale = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        optimizer.param_groups[0]["lr"] = options.rate * scale
        side, batch = (32, 2 * options.batch) if done < options.crops else (64, options.batch)
        rows = torch.randint(0, len(train), (batch,), generator=generator)
        images = augment(to_unit(train[rows]), side, generator).contiguous(memory_format=torch.channels_last)
        mean = model.encode(images).latent_dist.mean
        noise = torch.randn(mean.shape, generator=generator) * math.exp(POSTERIOR_LOG_VARIANCE / 2)
        rebuilt = model.decode(mean + noise).sample
        error = F.mse_loss(rebuilt, images) + 0.1 * F.l1_loss(rebuilt, images)
        loss = error + options.kl * 0.5 * mean.square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            mean_psnr, _, _ = evaluate(model, held_out[::4])
            speed = step / (time.monotonic() - start)
            curve.append({"step": step, "loss": loss.item(), "held_out_psnr": mean_psnr})
            print(f"step {step} loss {loss.item():.4f} PSNR {mean_psnr:.2f} dB {speed:.2f} steps/s", flush=True)

    model.eval()
    train_psnr, _, latents = evaluate(model, train)
    held_out_psnr, rebuilt, _ = evaluate(model, held_out)
    model.register_to_config(
        shift_factor=round(latents.mean().item(), 5), scaling_factor=round(1 / latents.std().item(), 5)
    )
    save_folder(model, state / options.name)
    pairs = torch.cat([held_out[:32], ((rebuilt[:32] + 1) * 127.5).round().to(torch.uint8)])
    save_grid(pairs, state / f"{options.name}.png", columns=16)
    deviation = latents.std((0, 2, 3)).tolist()
    result = {
        "train_psnr": train_psnr,
        "held_out_psnr": held_out_psnr,
        "latent_std": deviation,
        "curve": curve,
    }
    write_json(state / f"{options.name}.json", {"options": vars(options), "steps": step, **result})
    print(f"PSNR train {train_psnr:.2f}, held out {held_out_psnr:.2f} dB; latent std {deviation}", flush=True)


if __name__ == "__main__":
    main()
