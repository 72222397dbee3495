"""Train the two CLIP text towers that condition the transformer.

Both are trained contrastively against frozen EfficientNet-Lite0 features of the training emoji (through a small
head that is thrown away), and distilled from MiniLM over captions and frequent English words, so that words the
captions never use still land near their meaning. The second tower weighs MiniLM more. Held-out labels are in
neither the contrastive pairs nor the distilled captions.

    python -m recipes.emoji.towers --minutes 6 --threads 1
"""

from __future__ import annotations

import argparse
import math
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from recipes.emoji.autoencoder import save_folder
from recipes.emoji.captions import build_tokenizer, captions_of
from recipes.emoji.common import MAX_TOKENS, EmojiData, load_data, state_folder, to_unit, write_json
from recipes.emoji.features import MiniLM
from recipes.emoji.vision import distort
from reproduce.metrics.networks import EfficientNetLite0

VOCABULARY, ENGLISH_WORDS, WIDTH, VARIANTS = 9000, 5000, 128, 8


def make_text_tower(vocabulary: int, width: int = WIDTH, layers: int = 3) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            projection_dim=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def tokenize(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    """B texts -> (B, 16) ids, as StableDiffusion3Pipeline makes them."""
    options = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    return tokenizer(texts, **options).input_ids


def start_embeddings(towers: list[CLIPTextModelWithProjection], tokenizer: CLIPTokenizer, teacher: MiniLM) -> None:
    """Token embeddings start as the principal components of MiniLM's embedding of each token's text."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    embedded = teacher([token.removesuffix("</w>") or " " for token, _ in tokens])  # (V, 384)
    centred = embedded - embedded.mean(0)
    _, _, directions = torch.linalg.svd(centred[::4], full_matrices=False)
    reduced = centred @ directions[:WIDTH].T  # (V, 128)
    for tower in towers:
        with torch.no_grad():
            tower.text_model.embeddings.token_embedding.weight.copy_(reduced / reduced.std() * 0.1)


def image_features(data: EmojiData, rows: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """(copies, R, 1280) standardized EfficientNet-Lite0 features of distorted images; the first copy is clean."""
    extract = EfficientNetLite0(side=128)
    images = to_unit(data.images[rows])
    views = [images] + [distort(images, generator) for _ in range(copies - 1)]
    features = torch.stack([extract(view) for view in views])
    return (features - features.mean((0, 1))) / features.std((0, 1)).clamp_min(1e-3)


def contrast(texts: Tensor, images: Tensor, scale: Tensor, same: Tensor) -> Tensor:
    """Symmetric InfoNCE of normalized (B, D) pairs; `same` (B, B) marks rows of one label, each a right answer."""
    logits = scale.exp().clamp(max=50) * texts @ images.T
    target = same.float() / same.sum(1, keepdim=True)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def similarity_match(student: Tensor, teacher: Tensor) -> Tensor:
    """Relational distillation: the pairwise cosines of the student follow the teacher's."""
    return F.mse_loss(student @ student.T, teacher @ teacher.T)


class ImageHead(nn.Sequential):
    """EfficientNet features to the towers' joint space; only needed while the towers train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1280, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, WIDTH))


@torch.no_grad()
def unit_scale(tower: CLIPTextModelWithProjection, ids: Tensor) -> None:
    """Scale the projection so that the pooled text embedding has unit RMS, a fair input for the transformer."""
    rms = tower(ids).text_embeds.square().mean().sqrt()
    tower.text_projection.weight.div_(rms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--copies", type=int, default=3, help="distorted copies of each image")
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    state, data, teacher = state_folder(options.state), load_data(), MiniLM()
    rows, held_out = data.rows("train", core_only=False), data.rows("validation", core_only=False)

    captions = [captions_of(data.labels[r], data.tags[r], VARIANTS, rng) for r in rows.tolist()]
    words = teacher.frequent_words(ENGLISH_WORDS)
    corpus = [caption for group in captions for caption in group] * 4 + words
    tokenizer = build_tokenizer(corpus, VOCABULARY)
    tokenizer.save_pretrained(state / "tokenizer")
    towers = [make_text_tower(len(tokenizer)) for _ in range(2)]
    start_embeddings(towers, tokenizer, teacher)
    ids = tokenize(tokenizer, [c for group in captions for c in group]).view(len(rows), VARIANTS, MAX_TOKENS)
    meanings = teacher([c for group in captions for c in group]).view(len(rows), VARIANTS, -1)
    word_ids, word_meanings = tokenize(tokenizer, words), teacher(words)
    print(f"{len(tokenizer)} tokens, {towers[0].num_parameters() / 1e6:.2f} M parameters a tower", flush=True)
    features = image_features(data, rows, options.copies, generator)  # (C, R, 1280)
    print("features ready", flush=True)

    heads = nn.ModuleList(ImageHead() for _ in towers)
    scales = nn.ParameterList(nn.Parameter(torch.tensor(math.log(10.0))) for _ in towers)
    parameters = [p for module in (*towers, heads, scales) for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.05)
    start, step, curve = time.monotonic(), 0, []
    while (done := (time.monotonic() - start) / 60 / options.minutes) < 1:
        rate = options.rate * min(1.0, (step + 1) / 30) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        optimizer.param_groups[0]["lr"] = rate
        pick = torch.randint(0, len(rows), (options.batch,), generator=generator)
        variant = torch.randint(0, VARIANTS, (options.batch,), generator=generator)
        copy = torch.randint(0, options.copies, (options.batch,), generator=generator)
        extra = torch.randint(0, len(words), (options.batch // 3,), generator=generator)
        same = pick[:, None] == pick[None]
        batch_ids = torch.cat([ids[pick, variant], word_ids[extra]])
        target = torch.cat([meanings[pick, variant], word_meanings[extra]])
        loss, right = torch.zeros(()), []
        for tower, head, scale, weight in zip(towers, heads, scales, (5.0, 40.0), strict=True):
            text = F.normalize(tower(batch_ids).text_embeds, dim=-1)
            image = F.normalize(head(features[copy, pick]), dim=-1)
            loss = loss + contrast(text[: options.batch], image, scale, same)
            loss = loss + weight * similarity_match(text, target)
            match = (text[: options.batch] @ image.T).argmax(1)
            right.append((pick[match] == pick).float().mean().item())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            curve.append({"step": step, "loss": loss.item(), "batch_top1": right})
            print(f"step {step} loss {loss.item():.3f} top-1 in batch {right} {done:.0%}", flush=True)

    labels = [label.lower() for label in data.labels]
    label_ids, label_meanings = tokenize(tokenizer, labels), teacher(labels)
    agreement = []
    for index, tower in enumerate(towers):
        tower.eval()
        unit_scale(tower, label_ids[rows])
        with torch.no_grad():
            text = F.normalize(tower(label_ids).text_embeds, dim=-1)
        mine, theirs = text[held_out] @ text[rows].T, label_meanings[held_out] @ label_meanings[rows].T
        agreement.append(torch.corrcoef(torch.stack([mine.flatten(), theirs.flatten()]))[0, 1].item())
        save_folder(tower, state / f"text_encoder{'_2' if index else ''}")
    record = {
        "options": vars(options),
        "steps": step,
        "held_out_agreement_with_minilm": agreement,
        "curve": curve,
    }
    write_json(state / "towers.json", record)
    print(f"{step} steps; held-out cosines correlate with MiniLM's at {agreement}", flush=True)


if __name__ == "__main__":
    main()
