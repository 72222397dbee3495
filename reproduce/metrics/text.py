"""Does an image show its text? The embedded model's own towers: never to be called CLIP score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from reproduce.metrics.distances import ranks_of
from shiva.evaluate.metrics import MissingWeights, Subject, Tools, metric, resized

WEIGHTS = "the pipeline's `score` folder (a ResNetForImageClassification) and its first text encoder"


SIDE = 64
"""Pixels of the images that the tower was trained on."""


class TextImageScore:
    """Cosines of images with each of a list of texts."""

    def __init__(self, pipe: Any, vision: Any, labels: list[str]) -> None:
        self.vision = vision.float().eval()
        tokenizer = pipe.tokenizer
        length = tokenizer.model_max_length
        with torch.no_grad():
            ids = tokenizer(
                [label.lower() for label in labels],
                padding="max_length",
                max_length=length,
                truncation=True,
                return_tensors="pt",
            ).input_ids
            embedded = pipe.text_encoder(ids.to(pipe.text_encoder.device)).text_embeds.float().cpu()
            self.texts = F.normalize(embedded, dim=-1)  # (L, D)

    @torch.no_grad()
    def __call__(self, images: Tensor, batch: int = 64) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, L)."""
        embedded = torch.cat([self.vision(chunk.to(self.vision.device)).logits.cpu() for chunk in images.split(batch)])
        return F.normalize(embedded, dim=-1) @ self.texts.T


def cosines(subject: Subject, tools: Tools) -> tuple[Tensor, Tensor]:
    """Scores (M, L) of the images with every label, and the number (M,) of each image's own."""

    def load_vision() -> Any:
        if tools.pipe is None or tools.score is None or not (tools.score / "config.json").is_file():
            raise MissingWeights(
                f"the text-image score needs {WEIGHTS}, here {tools.score}; only models/emoji brings it along"
            )
        from transformers import ResNetForImageClassification

        try:
            return ResNetForImageClassification.from_pretrained(tools.score).to(tools.device)
        except Exception as error:
            raise MissingWeights(
                f"{tools.score} does not load ({type(error).__name__}: {error}); fetch the model again"
            ) from error

    def scores() -> tuple[Tensor, Tensor]:
        vision = tools.once("text-image vision", load_vision)
        assert tools.pipe is not None
        labels = list(dict.fromkeys(text.lower() for text in (subject.labels or subject.prompts)))
        absent = [text for text in subject.prompts if text.lower() not in labels]
        labels += list(dict.fromkeys(text.lower() for text in absent))
        pipe = tools.pipe
        score = tools.once(("text-image", tuple(labels)), lambda: TextImageScore(pipe(), vision, labels))
        number = {label: index for index, label in enumerate(labels)}
        right = torch.tensor([number[text.lower()] for text in subject.prompts])
        batches = (resized(batch, (SIDE, SIDE)) for batch in subject.images.batches())
        return torch.cat([score(batch * 2 - 1) for batch in batches]), right

    return subject.once("text-image", scores)


def ranks(subject: Subject, tools: Tools) -> Tensor:
    return ranks_of(*cosines(subject, tools))


@metric("text_image", "text-image score", needs="prompts", higher=True)
def text_image(subject: Subject, tools: Tools) -> Tensor:
    """Cosine of the image with its own text; not CLIP score."""
    scores, right = cosines(subject, tools)
    return scores.gather(1, right[:, None])[:, 0]


@metric("top1", "top-1 label", needs="prompts", higher=True)
def top1(subject: Subject, tools: Tools) -> Tensor:
    """Share of images whose own label is the best of all."""
    return (ranks(subject, tools) < 1).float()


@metric("top5", "top-5 labels", needs="prompts", higher=True)
def top5(subject: Subject, tools: Tools) -> Tensor:
    """Share of images whose own label is among the best five."""
    return (ranks(subject, tools) < 5).float()
