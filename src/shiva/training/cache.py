"""Latents and text embeddings on disk, made once: safetensors shards, and a manifest of what made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from shiva.checkpoint import write_atomically
from shiva.files import read_json, to_json
from shiva.training.data import Example, ImageItems, digest, digest_images
from shiva.training.draws import seed_of
from shiva.training.family import Family, Text
from shiva.training.pictures import nearest_size
from shiva.training.recipe import Recipe

MANIFEST = "manifest.json"
FORMAT = 1
SHARD = 64
"""Samples in a shard; with another number the format is another."""

Report = Callable[[str, int, int], None]
"""report(what, done, total): progress of the preparation."""
Encode = Callable[[int], tuple[Tensor, Text]]
"""encode(i): latents (C, h, w) and text tensors of a sample, without batch."""


@dataclass(frozen=True)
class Ranks:
    """Which part of the preparation is this process's, and how to wait for the others."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], object] = lambda: None


def fingerprint(part: Any) -> str:
    """A short hash of a model's values, 64 of each tensor, alike whether it was loaded in float32 or in bfloat16;
    loaded in float16 they were rounded twice, and may differ."""
    state = hashlib.blake2b(digest_size=8)
    if isinstance(part, nn.Module):
        for name, tensor in sorted(part.state_dict().items()):
            values = tensor.detach().flatten()
            sample = values[:: max(1, values.numel() // 64)][:64]
            state.update(f"{name}{tuple(tensor.shape)}".encode())
            state.update(json.dumps(sample.to("cpu", torch.bfloat16).float().tolist()).encode())
    else:
        state.update(json.dumps(dict(part.config), sort_keys=True, default=str).encode())
    return state.hexdigest()


def made_by(family: Family, parts: Sequence[str]) -> dict[str, str]:
    """Fingerprints of the pipeline's parts, by name."""
    found = {name: getattr(family.pipe, name, None) for name in parts}
    return {name: fingerprint(part) for name, part in found.items() if part is not None}


class LatentCache:
    """A folder of encoded samples, filled shard by shard; a killed run goes on where it stopped."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        self._open: dict[int, Any] = {}
        self._stored: list[str] = []
        """What there is of each sample."""

    @classmethod
    def open(cls, folder: Path, origin: dict[str, str], count: int | None = None) -> LatentCache:
        """Open or begin a cache, refusing one that another model or other data made."""
        path = folder / MANIFEST
        if path.exists():
            manifest = read_json(path)
            if manifest["format"] != FORMAT:
                raise ValueError(
                    f"the latents in {folder} have format {manifest['format']}, this version reads {FORMAT}; delete "
                    "the folder, or set data.cache to another one"
                )
            check_origin(folder, manifest["made_by"], origin, whole=count is not None)
            return cls(folder, manifest["count"])
        if count is None:
            raise FileNotFoundError(f"{path} is missing; data.path must be a folder of latents that shiva train made")
        write_atomically(path, to_json({"format": FORMAT, "made_by": origin, "count": count}))
        return cls(folder, count)

    def shard_path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def missing(self) -> list[int]:
        return [shard for shard in range(-(-self.count // SHARD)) if not self.shard_path(shard).exists()]

    def fill(self, shard: int, encode: Encode) -> None:
        tensors = {}
        for index in range(shard * SHARD, min((shard + 1) * SHARD, self.count)):
            latents, text = encode(index)
            tensors[f"{index}.latents"] = latents.cpu().contiguous()
            tensors.update({f"{index}.text.{name}": value.cpu().contiguous() for name, value in text.items()})
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{name} holds NaN or infinity, which float16 makes of some autoencoders and text encoders; it is "
                    "not kept: set compute.precision to bf16, or to no"
                )
        path = self.shard_path(shard)
        for left in self.folder.glob(f".{path.name}.*"):  # by a run that was killed as it wrote
            left.unlink()
        write_atomically(path, save(tensors))

    def _shard(self, index: int) -> Any:
        shard = index // SHARD
        if shard not in self._open:
            path = self.shard_path(shard)
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing; prepare the latents again")
            self._open[shard] = safe_open(path, "pt")
        return self._open[shard]

    # -- items ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.count

    def grid(self, index: int) -> tuple[int, int]:
        """Height and width of a sample's latents; only the file's header is read."""
        _, height, width = self._shard(index).get_slice(f"{index}.latents").get_shape()
        return height, width

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Text]:
        """Latents (B, C, h, w) and text of some samples."""
        if not self._stored:
            names = self._shard(0).keys()
            self._stored = sorted(name.partition(".")[2] for name in names if name.startswith("0."))
        stacked = {n: torch.stack([self._shard(i).get_tensor(f"{i}.{n}") for i in indices]) for n in self._stored}
        latents = stacked.pop("latents")
        return latents, {name.removeprefix("text."): value for name, value in stacked.items()}

    def encode(self, raw: Any) -> tuple[Tensor, Text]:
        return raw


def check_origin(folder: Path, made: dict[str, str], wanted: dict[str, str], *, whole: bool) -> None:
    """Refuse latents of another model, naming the part that differs; `whole` also one that is absent."""
    mend = "delete the folder, or set data.cache to another one" if whole else "make it the same, or change data.path"
    for name in sorted(made.keys() | wanted.keys() if whole else made.keys() & wanted.keys()):
        before, now = made.get(name, "none"), wanted.get(name, "none")
        if before != now:
            raise ValueError(
                f"the latents in {folder} were made with another {name} ({before}, this run has {now}); {mend}"
            )


# -- filling it --------------------------------------------------------------------------------------


def fill_cache(recipe: Recipe, images: ImageItems, folder: Path, ranks: Ranks, report: Report) -> LatentCache:
    """A cache with all samples: each rank encodes its part of what is missing, and waits for the rest."""
    cache = LatentCache.open(folder, origin_of(recipe, images.family, images.examples), len(images))
    encode = drawn_by_pipeline(recipe, images) if recipe.data.kind == "prompts" else encoded(images)
    missing = cache.missing()
    for done, shard in enumerate(missing):
        if shard % ranks.world == ranks.rank:
            report("encoding the data", done, len(missing))
            cache.fill(shard, encode)
    ranks.wait()
    report("encoding the data", len(missing), len(missing))
    return cache


def origin_of(recipe: Recipe, family: Family, examples: Sequence[Example]) -> dict[str, str]:
    """Everything that the cached tensors depend on."""
    data = recipe.data
    origin = {
        **origin_of_latents(recipe, family),
        "data": f"{digest(examples)} of {len(examples)} captions",
        "resolution": f"{data.resolution}{' in buckets' if data.buckets else ''}",
    }
    if data.kind == "prompts":
        origin |= made_by(family, ("transformer", "scheduler"))
        origin["generate"] = f"{data.generate.steps} steps, guidance {data.generate.guidance}, seed {recipe.seed}"
        origin["frames"] = str(recipe.model.frames)
    else:
        origin["images"] = digest_images(examples)
    return origin


def origin_of_latents(recipe: Recipe, family: Family) -> dict[str, str]:
    """What latents made beforehand must agree with."""
    return {**made_by(family, ("vae", *family.text_encoders)), "text_length": str(recipe.model.text_length)}


def encoded(images: ImageItems) -> Encode:
    def encode(index: int) -> tuple[Tensor, Text]:
        latents, text = images.encode(images.read([index]))
        return latents[0], {name: value[0] for name, value in text.items()}

    return encode


def drawn_by_pipeline(recipe: Recipe, images: ImageItems) -> Encode:
    """For prompts alone: the dense pipeline draws them, a few at once."""
    family, options, size = images.family, recipe.data.generate, nearest_size(1, 1, images.sizes)
    made: dict[int, tuple[Tensor, Text]] = {}

    def encode(index: int) -> tuple[Tensor, Text]:
        if index not in made:
            made.clear()
            shard_end = (index // SHARD + 1) * SHARD
            batch = range(index, min(index + options.batch, shard_end, len(images)))
            text = family.encode([images.examples[i].caption for i in batch])
            seeds = [seed_of(recipe.seed, "generate", i) for i in batch]
            latents = family.draw_latents(text, size, options.steps, options.guidance, seeds)
            for place, i in enumerate(batch):
                made[i] = (latents[place], {name: value[place] for name, value in text.items()})
        return made[index]

    return encode
