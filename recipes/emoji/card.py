"""Write the model card from the manifest and the scores, so that its figures are always the measured ones.

python -m recipes.emoji.card --model models/emoji --scores results/emoji/scores.json \\
  --beside results/emoji/scores-paraphrased.json
python -m recipes.emoji.card --model models/emoji-128 --scores results/emoji/scores-128.json \\
  --beside results/emoji/scores-128-4.json results/emoji/scores.json results/emoji/scores-128-paraphrased.json
python -m recipes.emoji.card --model models/emoji-128-turbo --scores results/emoji/scores-128-turbo.json \\
  --beside results/emoji/scores-128-turbo-8.json results/emoji/scores-128.json results/emoji/scores-128-4.json \\
  results/emoji/scores-128-turbo-paraphrased.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiva.checkpoint import write_atomically

CARD = """---
library_name: diffusers
pipeline_tag: text-to-image
license: apache-2.0
---
# {title}

A 4.7 M-parameter text-to-image Diffusion Transformer in a stock `StableDiffusion3Pipeline`, trained {origin} on
a CPU. It exists so that token selection can be tried, tested and measured anywhere; it draws {side}×{side} emoji and
nothing else.

```python
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained("models/{model}")
pipe("hamburger"{call}).images[0]
```

`docs/emoji.md` says what the parts are, how they were made and what the scores mean.{links}

![Some training labels](../../results/emoji/{grid}.png)

*Training labels, evenly spaced over the list: first the true pictures, below them what the model draws.*

## Data
776 of 1 563 Fluent 3D emoji (Microsoft, MIT) with emojibase captions (MIT), 62 of them held out; see
`recipes/emoji/data/`. Teachers used in training, not part of the model: EfficientNet-Lite0 and MiniLM-L6 (Apache-2.0).

## Training
The transformer: {hours:.1f} hours on one to two CPU cores, {steps} steps, {images} images ({epochs:.0f} per label).
Weights are the EMA, stored as float16.

## Scores
{steps_drawn} steps, guidance {guidance}, 16 text tokens; {drawn} training and {held_out} held-out labels; {date}.

| | training labels | held-out labels | true pictures |
|---|---|---|---|
{table}
{beside}
Autoencoder PSNR: {psnr_train:.1f} dB on training labels, {psnr_held_out:.1f} dB on held-out labels.

The text-image score is this project's own; Fréchet and kernel distances are on EfficientNet-Lite0 features. None of
them compares with CLIP score or FID, nor with a distance over another number of images.

## Limits
It knows about {labels} pictures by heart and little else: unseen words give the picture of a near word, compositions
("a fox in a boat") do not work, and small details are blurred or broken. Faces are cartoon emoji only.
"""


@dataclass(frozen=True)
class Kind:
    """What differs from card to card."""

    title: str
    origin: str
    grid: str
    """Name of its picture of training labels."""
    call: str
    """What the example passes beside the prompt."""


SIXTEEN = ", num_inference_steps=16, guidance_scale=3"
KINDS = {
    "emoji": Kind("Shiva's embedded emoji model", "from nothing", "train", SIXTEEN),
    "emoji-128": Kind("Shiva's embedded emoji model, 1024 tokens", "from `models/emoji`", "train-128", SIXTEEN),
    "emoji-128-turbo": Kind(
        "Shiva's embedded turbo: four steps, no guidance",
        "from `models/emoji-128` by distillation",
        "train-128-turbo",
        ", num_inference_steps=4, guidance_scale=0",
    ),
}
LABELS = 714
LINKS = """

Its towers and its autoencoder are links to those of `models/emoji`; `python -m recipes.emoji.assemble` makes them."""

ROWS = (
    ("retrieval, top 1 of 1 563", "top1", "{:.1%}"),
    ("retrieval, top 5", "top5", "{:.1%}"),
    ("text-image score", "text_image_score", "{:.3f}"),
    ("Fréchet distance (EfficientNet-Lite0)", "efficientnet_lite0_frechet_distance", "{:.2f}"),
    ("kernel distance (EfficientNet-Lite0)", "efficientnet_lite0_kernel_distance", "{:.4f}"),
    ("LPIPS-style distance (EfficientNet-Lite0)", "efficientnet_lite0_lpips_style_distance", "{:.3f}"),
)


def cell(scores: dict[str, Any], key: str, form: str) -> str:
    return form.format(scores[key]) if key in scores else "–"


def compare(others: Sequence[dict[str, Any]]) -> str:
    """A table of the same scores on training labels for other models and numbers of steps; nothing without any."""
    if not others:
        return ""
    shown, count = ROWS[:2] + ROWS[3:4], others[0]["train"]["images"]
    lines = ["", f"| training labels | {' | '.join(title for title, _, _ in shown)} |", f"|---|{'---|' * len(shown)}"]
    for other in others:
        found = dict(other["train"])
        how = f"{other['model']}, {other['steps']} steps, guidance {other['guidance']:g}"
        how += ", asked for in other words" if other.get("paraphrased") else ""
        if found["images"] != count:
            how += f" ({found['images']} labels)"
            found.pop(ROWS[3][1], None)  # comparable at equal counts alone
        lines.append(f"| {how} | {' | '.join(cell(found, key, form) for _, key, form in shown)} |")
    return "\n".join([*lines, ""])


def render(scores: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> str:
    model = scores.get("model", "emoji")
    kind, columns = KINDS[model], (scores["train"], scores["validation"], scores["train"]["real_images"])
    lines = [f"| {title} | " + " | ".join(cell(c, key, form) for c in columns) + " |" for title, key, form in ROWS]
    training = scores["training"]
    return CARD.format(
        model=model,
        title=kind.title,
        origin=kind.origin,
        call=kind.call,
        grid=kind.grid,
        side=scores.get("size", [64])[0],
        links="" if model == "emoji" else LINKS,
        drawn=scores["train"]["images"],
        held_out=scores["validation"]["images"],
        beside=compare([scores, *others] if others else []),
        hours=training["seconds"] / 3600,
        steps=training["step"],
        images=training["images"],
        epochs=training["images"] / LABELS,
        labels=LABELS,
        steps_drawn=scores["steps"],
        guidance=scores["guidance"],
        date=scores["environment"]["date"],
        table="\n".join(lines),
        psnr_train=scores["autoencoder_psnr"]["train"],
        psnr_held_out=scores["autoencoder_psnr"]["validation"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/emoji"))
    parser.add_argument("--scores", type=Path, default=Path("results/emoji/scores.json"))
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other scores to compare with")
    options = parser.parse_args()
    scores = json.loads(options.scores.read_text())
    stored = json.loads((options.model / "manifest.json").read_text())["training"]
    if stored["step"] != scores["training"]["step"]:
        raise SystemExit(
            f"{options.scores} scores step {scores['training']['step']}, {options.model} holds step {stored['step']};"
            " run `python -m recipes.emoji.score` again"
        )
    text = render(scores, [json.loads(path.read_text()) for path in options.beside])
    write_atomically(options.model / "README.md", text.encode())


if __name__ == "__main__":
    main()
