"""The paper's metrics: FID, CLIP score, CLIP-IQA, ImageReward. They need weights from elsewhere and run when asked."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.evaluate.metrics.base import MissingWeights, Pictures, Subject, Tools, metric

CLIP = "openai/clip-vit-large-patch14"
GOOD, BAD = "Good photo.", "Bad photo."
"""The pair of texts that CLIP-IQA (Wang et al., AAAI 2023) asks for quality with."""


@metric("fid", "FID", needs="reference", higher=False, weights="torch-fidelity's Inception", each=False, extra=True)
def fid(subject: Subject, tools: Tools) -> float:
    """Fréchet distance to the real images on Inception features, through torchmetrics."""
    reference = subject.reference
    assert reference is not None

    def update(distance: Any, pictures: Pictures, real: bool) -> Any:
        for batch in pictures.batches():
            distance.update(batch.to(tools.device), real=real)
        return distance

    # the set itself is kept with its features, so that its id stays its own
    distance, _ = tools.once(
        ("fid", id(reference)), lambda: (update(inception_distance(tools), reference, real=True), reference)
    )
    distance.reset()  # of the candidate before; the real images' part stays
    return float(update(distance, subject.images, real=False).compute())


def inception_distance(tools: Tools) -> Any:
    """torchmetrics' FID, which keeps what it knows of the real images."""
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance

        given = tools.inception
        chosen = (
            {"feature": given} if isinstance(given, torch.nn.Module) else {"feature_extractor_weights_path": given}
        )
        distance = FrechetInceptionDistance(normalize=True, reset_real_features=False, **chosen)
    except (ImportError, OSError) as error:
        raise MissingWeights(
            f"FID needs torch-fidelity and its Inception weights ({error}); pip install torch-fidelity, and without a "
            "network pass --inception FILE"
        ) from error
    return distance.to(tools.device)


def pil_images(batch: Tensor) -> Iterator[Any]:
    """The eight-bit images that a batch (B, 3, H, W) in [0, 1] was read from."""
    from PIL import Image

    for image in (batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy():
        yield Image.fromarray(image)


class Clip:
    """A CLIPModel and its processor, from a folder or the hub."""

    def __init__(self, name: str, device: str) -> None:
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizerFast

        try:
            self.model = CLIPModel.from_pretrained(name).to(device).eval()
            self.tokenizer = CLIPTokenizerFast.from_pretrained(name)
            self.processor = CLIPImageProcessor.from_pretrained(name)
        except Exception as error:
            raise MissingWeights(
                f"{name} does not load as a CLIPModel with its processor ({type(error).__name__}); "
                f"pass --clip a folder that holds both, or a hub id such as {CLIP}"
            ) from error
        self.device = device

    @torch.no_grad()
    def images(self, batch: Tensor) -> Tensor:
        """Unit vectors (B, D) of images (B, 3, H, W) in [0, 1]."""
        pixels = self.processor(list(pil_images(batch)), return_tensors="pt").pixel_values.to(self.device)
        return vectors(self.model.get_image_features(pixel_values=pixels))

    @torch.no_grad()
    def texts(self, texts: list[str]) -> Tensor:
        """Unit vectors (B, D)."""
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        return vectors(self.model.get_text_features(**inputs))


def vectors(output: Any) -> Tensor:
    """A tower's projection, normalized; newer transformers wrap it in an output object."""
    tensor = output if isinstance(output, Tensor) else output.pooler_output
    return F.normalize(tensor.float(), dim=-1).cpu()


def embedded(subject: Subject, tools: Tools) -> tuple[Clip, Tensor]:
    clip = tools.once("clip", lambda: Clip(tools.clip or CLIP, tools.device))
    return clip, subject.once("clip", lambda: torch.cat([clip.images(batch) for batch in subject.images.batches()]))


@metric("clip", "CLIP score", needs="prompts", higher=True, weights="a CLIPModel", extra=True)
def clip_score(subject: Subject, tools: Tools) -> Tensor:
    """100 times the cosine of an image with its prompt, at least 0 (Hessel et al., 2021, without their 2.5)."""
    clip, images = embedded(subject, tools)
    texts = torch.cat([clip.texts([text]) for text in subject.prompts])
    return (100 * (images * texts).sum(1)).clamp(min=0)


@metric("clip_iqa", "CLIP-IQA", needs="images", higher=True, weights="a CLIPModel", extra=True)
def clip_iqa(subject: Subject, tools: Tools) -> Tensor:
    """Probability that CLIP gives to a good photo against a bad one."""
    clip, images = embedded(subject, tools)
    scale = clip.model.logit_scale.exp().item()
    return (scale * images @ clip.texts([GOOD, BAD]).T).softmax(1)[:, 0]


@metric("image_reward", "ImageReward", needs="prompts", higher=True, weights="ImageReward-v1.0", extra=True)
def image_reward(subject: Subject, tools: Tools) -> Tensor:
    """The human preference model of Xu et al. (NeurIPS 2023), through its own package."""

    def load() -> Any:
        try:
            return import_module("ImageReward").load(tools.reward, device=tools.device)
        except Exception as error:
            raise MissingWeights(
                f"ImageReward does not load ({type(error).__name__}: {error}); pip install image-reward (it needs "
                "transformers 4, so an environment of its own), and without a network pass --reward FILE"
            ) from error

    model = tools.once("image reward", load)
    images = (image for batch in subject.images.batches() for image in pil_images(batch))
    return torch.tensor([float(model.score(text, image)) for text, image in zip(subject.prompts, images, strict=True)])
