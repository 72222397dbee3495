"""Image quality: every metric by name, one function of a set of images; what happens when its weights are not here."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from shiva.core.options import unknown_key
from shiva.evaluate.checkout import reproduce

Needs = Literal["images", "dense", "prompts", "reference"]
T = TypeVar("T")


class MissingWeights(Exception):
    """A metric's weights or package are not here; the message says which, and how to get them."""


class Pictures:
    """Images (3, H, W) in [0, 1], read when asked for: a set need not fit in memory."""

    def __init__(self, load: Callable[[int], Tensor], count: int) -> None:
        self._load, self._count = load, count

    @classmethod
    def of(cls, images: Tensor) -> Pictures:
        """Of a tensor (M, 3, H, W) in [0, 1]."""
        return cls(lambda index: images[index], len(images))

    @classmethod
    def files(cls, paths: Sequence[Path]) -> Pictures:
        return cls(lambda index: decode(paths[index].read_bytes()), len(paths))

    def __len__(self) -> int:
        return self._count

    def batches(self, size: int = 16) -> Iterator[Tensor]:
        """(b, 3, H, W); a change of size within the set ends a batch early."""
        batch: list[Tensor] = []
        for index in range(self._count):
            image = self._load(index)
            if batch and (len(batch) == size or image.shape != batch[0].shape):
                yield torch.stack(batch)
                batch = []
            batch.append(image)
        if batch:
            yield torch.stack(batch)

    def beside(self, others: Pictures) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of this set with the images at the same places of another."""
        if len(self) != len(others):
            raise ValueError(f"{len(self)} images cannot be paired with {len(others)}; generate the missing ones")
        start = 0
        for batch in self.batches():
            stop = start + len(batch)
            pair = [others._load(index) for index in range(start, stop)]
            start = stop
            yield batch, torch.cat([resized(image[None], batch.shape[-2:]) for image in pair])


def decode(data: bytes) -> Tensor:
    """An image file's bytes as (3, H, W) in [0, 1]."""
    from PIL import Image

    return pixels_of(Image.open(io.BytesIO(data)))


def pixels_of(image: Any) -> Tensor:
    """A PIL image as (3, H, W) in [0, 1]."""
    import numpy as np

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def resized(images: Tensor, size: tuple[int, ...]) -> Tensor:
    """(B, 3, H, W) in [0, 1] at another size, antialiased; the same where the size is already right."""
    if images.shape[-2:] == size:
        return images
    return torch.nn.functional.interpolate(images, size=size, mode="bilinear", antialias=True).clamp(0, 1)


@dataclass
class Memo:
    """What several metrics read, such as features or networks; each made when the first asks for it."""

    memo: dict[Any, Any] = field(default_factory=dict, kw_only=True)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


@dataclass
class Subject(Memo):
    """What is measured: images, and what they can be held against."""

    images: Pictures
    prompts: Sequence[str] = ()
    """The text of each image."""
    labels: Sequence[str] = ()
    """Texts among which the right one must be found; the prompts themselves if empty."""
    dense: Pictures | None = None
    """The dense model's images of the same prompts and noise."""
    reference: Pictures | None = None
    """Real images of the same prompts."""

    def has(self, needs: Needs) -> bool:
        return bool(getattr(self, needs))


@dataclass
class Tools(Memo):
    """Where networks and weights come from."""

    pipe: Callable[[], Any] | None = None
    """The evaluated pipeline: its text encoder reads prompts for the text-image score."""
    score: Path | None = None
    """Folder of the image tower of the text-image score."""
    clip: str | None = None
    """Folder or hub id of a CLIPModel with its processor."""
    inception: Any = None
    """File of torch-fidelity's Inception weights, or a feature module; None lets torchmetrics find them."""
    reward: str | None = None
    """Name or path of ImageReward's weights; v1.0 otherwise."""
    device: str = "cpu"


Function = Callable[[Subject, Tools], Any]


@dataclass(frozen=True)
class Metric:
    """One way to judge images."""

    name: str
    title: str
    """As a table's heading."""
    unit: str
    higher: bool
    """Whether more is better."""
    needs: Needs
    each: bool
    """Whether every image has a value of its own; otherwise only the set has one."""
    extra: bool
    """Needs weights that pip does not bring; it runs only when asked for."""
    function: Function

    def __call__(self, subject: Subject, tools: Tools) -> Score:
        found = self.function(subject, tools)
        if not self.each:
            return Score(float(found))
        values = [float(value) for value in found]
        return Score(sum(values) / len(values), values)


@dataclass(frozen=True)
class Score:
    """A metric's value, and each image's where there is such a thing."""

    value: float
    each: list[float] | None = None


METRICS: dict[str, Metric] = {}
ORDER: tuple[str, ...] = ("frechet", "kernel", "lpips_real", "text_image", "top1", "top5")
ORDER += ("psnr", "ssim", "lpips", "mse", "cosine", "fid", "clip", "clip_iqa", "image_reward")
"""As tables show them: against the real images, against the text, against dense, and those that need more."""


def metric(
    name: str,
    title: str,
    *,
    needs: Needs,
    higher: bool,
    unit: str = "",
    each: bool = True,
    extra: bool = False,
) -> Callable[[Function], Function]:
    """Register a function of (subject, tools): a value per image (M,), or one of the set."""

    def register(function: Function) -> Function:
        METRICS[name] = Metric(name, title, unit, higher, needs, each, extra, function)
        return function

    return register


def chosen(names: Iterable[str] | None, tools: Tools) -> list[Metric]:
    """The metrics asked for; without any, all whose weights pip brings, and those whose weights were passed."""
    if names is None:
        passed = {"fid": tools.inception, "clip": tools.clip, "clip_iqa": tools.clip, "image_reward": tools.reward}
        known = [METRICS[name] for name in ORDER if name in METRICS]
        return [metric for metric in known if not metric.extra or passed.get(metric.name) is not None]
    for name in names:
        if name not in METRICS:
            raise ValueError(unknown_key(name, METRICS, "--metrics"))
    return [METRICS[name] for name in names]


def measure(metrics: Iterable[Metric], subject: Subject, tools: Tools) -> tuple[dict[str, Score], dict[str, str]]:
    """Every metric that can be measured, and why the others cannot; one that fails leaves the others alone."""
    scores, missing = {}, {}
    for metric in metrics:
        if not subject.has(metric.needs):
            missing[metric.name] = f"{metric.title} needs {metric.needs}, which this run has not"
            continue
        if not metric.each and len(subject.images) < 2:
            missing[metric.name] = f"{metric.title} compares sets of images, and this run has only one; generate more"
            continue
        try:
            scores[metric.name] = metric(subject, tools)
        except MissingWeights as error:
            missing[metric.name] = str(error)
        except Exception as error:
            missing[metric.name] = f"{type(error).__name__}: {error}"
    return scores, missing


from shiva.evaluate.metrics import learned, pixels  # noqa: E402, F401  (each registers its metrics)

reproduce("metrics")  # registers those of a checkout
