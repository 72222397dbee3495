"""Train the image tower of the text-image score, against the frozen first text tower.

The score judges the generator, which never sees it; so the image tower learns all labels, the held-out ones too,
while the text towers have seen no held-out pair. Distortions make it tolerate a generator's blur and noise.

    python -m recipes.emoji.vision --minutes 10 --threads 1
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification

from recipes.emoji.common import load_data, state_folder, to_unit, write_json


def make_vision_tower(
    projection: int = 128, widths: tuple[int, ...] = (32, 64, 128, 256)
) -> ResNetForImageClassification:
    """A small ResNet whose "logits" are the image embedding: convolutions learn fast from 1500 pictures."""
    config = ResNetConfig(
        embedding_size=widths[0],
        hidden_sizes=list(widths),
        depths=[1] * len(widths),
        layer_type="basic",
        num_labels=projection,
    )
    return ResNetForImageClassification(config)


def uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """(count, 1, 1, 1) numbers, one per image."""
    return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator)


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift, scale, rotate, recolour, blur and noise each of (B, 3, H, W) images in [-1, 1], on white."""
    count = len(images)
    scale = uniform(count, 0.88, 1.12, generator).flatten()
    angle = uniform(count, -0.15, 0.15, generator).flatten()
    shift = (torch.rand(count, 2, generator=generator) - 0.5) * 0.25
    cosine, sine = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack(
        [torch.stack([cosine, -sine, shift[:, 0]], 1), torch.stack([sine, cosine, shift[:, 1]], 1)], 1
    )  # (B, 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    moved = F.grid_sample(1 - images, grid, align_corners=False)  # zeros outside, so white outside
    pixels = (1 - moved + 1) / 2
    grey = pixels.mean(1, keepdim=True)
    pixels = grey + (pixels - grey) * uniform(count, 0.6, 1.3, generator)
    pixels = 1 - (1 - pixels) * uniform(count, 0.8, 1.2, generator)
    tint = 1 + (torch.rand(count, 3, 1, 1, generator=generator) - 0.5) * 0.1
    pixels = pixels * tint
    blurred = F.avg_pool2d(F.pad(pixels, (1,) * 4, mode="replicate"), 3, stride=1)
    blurred = F.avg_pool2d(F.pad(blurred, (1,) * 4, mode="replicate"), 3, stride=1)
    pixels = torch.lerp(pixels, blurred, uniform(count, -0.3, 1.0, generator).clamp_min(0))
    noise = torch.randn(pixels.shape, generator=generator) * uniform(count, 0, 0.06, generator)
    return (pixels + noise).clamp(0, 1) * 2 - 1


@torch.no_grad()
def retrieve(tower: ResNetForImageClassification, images: Tensor, texts: Tensor) -> Tensor:
    """Rank of text i for image i among all texts, 0 the best: (B,)."""
    embedded = torch.cat([tower(chunk).logits for chunk in images.split(128)])
    scores = F.normalize(embedded, dim=-1) @ texts.T  # (B, L)
    return (scores > scores.diagonal()[:, None]).sum(1)


def main() -> None:
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer

    from recipes.emoji.autoencoder import save_folder
    from recipes.emoji.towers import tokenize

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--minutes", type=float, default=10, help="of processor time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    state, data = state_folder(options.state), load_data()
    text_tower = CLIPTextModelWithProjection.from_pretrained(state / "text_encoder").eval()
    tokenizer = CLIPTokenizer.from_pretrained(state / "tokenizer")
    with torch.no_grad():
        ids = tokenize(tokenizer, [label.lower() for label in data.labels])
        texts = F.normalize(text_tower(ids).text_embeds, dim=-1)  # (L, D)
    tower = make_vision_tower(texts.shape[1])
    scale = torch.nn.Parameter(torch.tensor(math.log(20.0)))
    parameters = [*tower.parameters(), scale]
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.05)
    print(f"{tower.num_parameters() / 1e6:.2f} M parameters", flush=True)

    start, step, curve = time.process_time(), 0, []
    while (done := (time.process_time() - start) / 60 / options.threads / options.minutes) < 1:
        warm = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = options.rate * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        pick = torch.randint(0, len(texts), (options.batch,), generator=generator)
        images = distort(to_unit(data.images[pick]), generator)
        embedded = F.normalize(tower(images).logits, dim=-1)
        loss = F.cross_entropy(scale.exp().clamp(max=60) * embedded @ texts.T, pick)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            probe = distort(to_unit(data.images), torch.Generator().manual_seed(1))[::3]
            subset = torch.cat([texts[::3], texts])  # own label first, so that the diagonal is the right answer
            tower.eval()
            ranks = retrieve(tower, probe, subset)
            tower.train()
            top1, top5 = [(ranks < k).float().mean().item() for k in (1, 5)]
            curve.append({"step": step, "loss": loss.item(), "top1": top1, "top5": top5})
            print(f"step {step} loss {loss.item():.3f} top-1 {top1:.3f} top-5 {top5:.3f} {done:.0%}", flush=True)
    tower.eval()
    save_folder(tower, state / "score")
    write_json(state / "vision.json", {"options": vars(options), "steps": step, "curve": curve})


if __name__ == "__main__":
    main()
