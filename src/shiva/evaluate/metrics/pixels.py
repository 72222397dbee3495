"""How far images are from the dense model's, pixel by pixel: no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.needs import install
from shiva.evaluate.metrics import MissingWeights, Pictures, Subject, Tools, metric, pixels_of

IDENTICAL = 100.0
"""dB that identical images count as; eight-bit images that differ at all stay below 97."""


def mse(images: Tensor, others: Tensor) -> Tensor:
    """(B,) of two batches (B, 3, H, W) in [0, 1]."""
    return (images - others).square().flatten(1).mean(1)


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Peak signal-to-noise ratio (B,) in dB of two batches in [0, 1]; infinite where they are identical."""
    return -10 * torch.log10(mse(images, others))


def image_psnr(image: Any, other: Any) -> float:
    """Of two PIL images."""
    return float(psnr(pixels_of(image)[None].double(), pixels_of(other)[None].double()))


def cosine(images: Tensor, others: Tensor) -> Tensor:
    """Cosine (B,) of pixels around mid-grey, as autoencoders hold them."""
    return F.cosine_similarity(images.flatten(1) * 2 - 1, others.flatten(1) * 2 - 1)


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Structural similarity (B,) of two batches in [0, 1]."""
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError as error:
        raise MissingWeights(f"SSIM needs torchmetrics: {install('metrics')}") from error
    value = structural_similarity_index_measure(images, others, reduction="none", data_range=1.0)
    assert isinstance(value, Tensor)
    return value.reshape(-1)


def paired(images: Pictures, others: Pictures | None, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`compare` over two sets of images, batch by batch: (M,)."""
    assert others is not None
    return torch.cat([compare(a, b) for a, b in images.beside(others)])


def to_dense(name: str, title: str, compare: Callable[[Tensor, Tensor], Tensor], higher: bool, unit: str = "") -> None:
    """Register a comparison with the dense model's images of the same prompts and noise."""

    @metric(name, f"{title} to dense", unit=unit, needs="dense", higher=higher)
    def measure(subject: Subject, tools: Tools) -> Tensor:
        return paired(subject.images, subject.dense, compare)


to_dense("psnr", "PSNR", lambda a, b: psnr(a, b).clamp(max=IDENTICAL), higher=True, unit="dB")
to_dense("ssim", "SSIM", ssim, higher=True)
to_dense("mse", "MSE", mse, higher=False)
to_dense("cosine", "cosine", cosine, higher=True)
