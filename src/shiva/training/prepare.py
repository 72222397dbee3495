"""From a recipe to samples: load the pipeline, encode once to disk where asked, hold some out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.core.options import unknown_key
from shiva.training.cache import SHARD, LatentCache, made_by
from shiva.training.data import Example, digest, read_examples
from shiva.training.encode import Family, Text, family_of
from shiva.training.feed import Feed, ImageItems, Items, MapFeed, StreamFeed
from shiva.training.images import Size, bucket_sizes, nearest_size, to_tensor
from shiva.training.recipe import Recipe
from shiva.training.sampling import generator_of, seed_of

Report = Callable[[str, int, int], None]
"""report(what, done, total): progress of the preparation."""


def load_family(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Family:
    """The pipeline on the device, everything frozen."""
    from diffusers import DiffusionPipeline

    model = recipe.model
    if model.path.startswith((".", "/")) and not Path(model.path).is_dir():
        raise FileNotFoundError(f"model.path={model.path!r} is not a folder; paths are relative to the current folder")
    index = DiffusionPipeline.load_config(model.path, revision=model.revision)
    absent = {name: None for name, value in index.items() if value == [None, None]}
    for name in model.without:
        if name not in index:
            raise ValueError(f"model.without: {unknown_key(name, index, 'the pipeline')}")
        absent[name] = None
    pipe = DiffusionPipeline.from_pretrained(model.path, revision=model.revision, dtype=dtype, **absent)
    pipe.to(device)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    return family_of(pipe, model.text_length, model.guidance)


@dataclass
class Prepared:
    """What the loop reads: training's feed, and the samples validation measures on."""

    feed: Feed
    held_out: Items
    held_out_indices: list[int]


@dataclass(frozen=True)
class Ranks:
    """Which part of the preparation is this process's, and how to wait for the others."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], object] = lambda: None


def prepare(recipe: Recipe, family: Family, output: Path, ranks: Ranks, report: Report) -> Prepared:
    """Open the data; with a cache, each rank encodes its part of what is missing, and waits for the rest."""
    data = recipe.data
    sizes = bucket_sizes(data.resolution, family.factor * family.patch, data.buckets)
    family.keep_empty()
    if data.streaming:
        micro, held_out = recipe.sampling.micro_batch, recipe.validation.samples
        feed = StreamFeed(data, family, sizes, micro, recipe.seed, held_out)
        first = feed.first(held_out)
        return Prepared(feed, ImageItems(first, family, sizes), list(range(len(first))))
    items: Items
    if data.kind == "latents":
        items = LatentCache.open(Path(data.path), made_by(family, ("vae", *family.text_encoders)))
    elif data.cache is None:
        items = ImageItems(read_examples(data), family, sizes)
    else:
        folder = output / "latents" if data.cache == "auto" else Path(data.cache)
        items = fill_cache(recipe, family, folder, sizes, ranks, report)
    return split(recipe, items)


def split(recipe: Recipe, items: Items) -> Prepared:
    """Hold out the first samples of a permutation; with little data at most a quarter."""
    order = torch.randperm(len(items), generator=generator_of(recipe.seed, "held out")).tolist()
    number = min(recipe.validation.samples, len(items) // 4)
    feed = MapFeed(items, sorted(order[number:]), recipe.sampling.micro_batch, recipe.seed)
    return Prepared(feed, items, order[:number] or order[:1])


def fill_cache(
    recipe: Recipe, family: Family, folder: Path, sizes: list[Size], ranks: Ranks, report: Report
) -> LatentCache:
    """A cache with all samples."""
    examples = read_examples(recipe.data)
    cache = LatentCache.open(folder, origin_of(recipe, family, examples), len(examples))
    encode = (
        generated(recipe, family, examples, sizes)
        if recipe.data.kind == "prompts"
        else encoded(family, examples, sizes)
    )
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
        **made_by(family, ("vae", *family.text_encoders)),
        "data": f"{digest(examples)} of {len(examples)} captions",
        "resolution": f"{data.resolution}{' in buckets' if data.buckets else ''}",
        "text_length": str(recipe.model.text_length),
    }
    if data.kind == "prompts":
        origin |= made_by(family, ("transformer", "scheduler"))
        origin["generate"] = f"{data.generate.steps} steps, guidance {data.generate.guidance}, seed {recipe.seed}"
    return origin


def encoded(
    family: Family, examples: Sequence[Example], sizes: list[Size]
) -> Callable[[int], tuple[Tensor, Text, str]]:
    """encode(i) for images."""

    def encode(index: int) -> tuple[Tensor, Text, str]:
        example: Example = examples[index]
        pixels = to_tensor(example.image, example.size(sizes))[None]
        text = family.encode([example.caption])
        return family.latents(pixels)[0], {name: value[0] for name, value in text.items()}, example.caption

    return encode


def generated(
    recipe: Recipe, family: Family, examples: Sequence[Example], sizes: list[Size]
) -> Callable[[int], tuple[Tensor, Text, str]]:
    """encode(i) for prompts: the dense pipeline draws them, a few at once."""
    options, size = recipe.data.generate, nearest_size(1, 1, sizes)
    made: dict[int, tuple[Tensor, Text, str]] = {}

    def encode(index: int) -> tuple[Tensor, Text, str]:
        if index not in made:
            made.clear()
            shard_end = (index // SHARD + 1) * SHARD
            batch = range(index, min(index + options.batch, shard_end, len(examples)))
            captions = [examples[i].caption for i in batch]
            text = family.encode(captions)
            seeds = [seed_of(recipe.seed, "generate", i) for i in batch]
            latents: Any = family.draw_latents(text, size, options.steps, options.guidance, seeds)
            for place, i in enumerate(batch):
                made[i] = (latents[place], {name: value[place] for name, value in text.items()}, captions[place])
        return made[index]

    return encode
