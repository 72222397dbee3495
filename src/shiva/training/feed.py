"""Which samples a step trains on, as a function of (seed, step), and reading them one step ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiva.training.cache import LatentCache, Ranks, Report, fill_cache, origin_of_latents
from shiva.training.data import Example, Grid, ImageItems, Images, read_examples, stream_examples
from shiva.training.draws import generator_of
from shiva.training.family import Family, Size, Text
from shiva.training.pictures import bucket_sizes
from shiva.training.recipe import Recipe
from shiva.training.sections import Data

Items = ImageItems | LatentCache
"""Samples by number: `read` is the part that a thread can do ahead, `encode` the part that needs the models."""


@dataclass(frozen=True)
class Ref:
    """One micro-batch, not yet read: sample numbers, or the examples of a stream."""

    members: tuple[Any, ...]
    grid: Grid


def group(members: Iterator[tuple[Any, Grid]], size: int) -> Iterator[Ref]:
    """Micro-batches of equal shape in order of completion; the rest of a shape is filled up with its own first."""
    waiting: dict[Grid, list[Any]] = defaultdict(list)
    seen: dict[Grid, list[Any]] = defaultdict(list)
    for member, grid in members:
        waiting[grid].append(member)
        if len(seen[grid]) < size:
            seen[grid].append(member)
        if len(waiting[grid]) == size:
            yield Ref(tuple(waiting.pop(grid)), grid)
    for grid, rest in waiting.items():
        filling = [seen[grid][i % len(seen[grid])] for i in range(size - len(rest))]
        yield Ref((*rest, *filling), grid)


class MapFeed:
    """Random access: each epoch is a permutation, cut into micro-batches."""

    def __init__(self, items: Items, indices: Sequence[int], micro_batch: int, seed: int):
        if not len(indices):
            raise ValueError("no sample is left to train on; lower validation.samples or give more data")
        self.items, self.indices, self.micro_batch, self.seed = items, list(indices), micro_batch, seed
        self._epoch, self._refs = 0, self._cut(0)

    def _cut(self, epoch: int) -> list[Ref]:
        order = torch.randperm(len(self.indices), generator=generator_of(self.seed, "epoch", epoch)).tolist()
        picked = (self.indices[place] for place in order)
        return list(group(((i, self.items.grid(i)) for i in picked), self.micro_batch))

    def step(self, step: int, micro_batches: int) -> list[Ref]:
        """The micro-batches of a global batch. Every epoch has equally many, so a step's place is known."""
        return [self._at(step * micro_batches + index) for index in range(micro_batches)]

    def _at(self, number: int) -> Ref:
        epoch, place = divmod(number, len(self._refs))
        if epoch != self._epoch:
            self._epoch, self._refs = epoch, self._cut(epoch)
        return self._refs[place]

    def read(self, ref: Ref) -> Any:
        return self.items.read(ref.members)

    def encode(self, raw: Any) -> tuple[Tensor, Text]:
        return self.items.encode(raw)


class StreamFeed(Images):
    """A stream, read in order; going back or resuming reads it again from its start, without decoding."""

    def __init__(self, data: Data, family: Family, sizes: list[Size], micro_batch: int, seed: int, held_out: int):
        super().__init__(family, sizes)
        self.data, self.micro_batch, self.seed, self.held_out = data, micro_batch, seed, held_out
        self._next, self._refs = 0, self._stream()

    def first(self, number: int) -> list[Example]:
        """Examples held out for validation: the first of the first epoch."""
        found = list(islice(stream_examples(self.data, self.seed, 0), number))
        if not found:
            raise ValueError(f"the stream {self.data.path!r} has no rows; check data.where={self.data.where}")
        return found

    def _stream(self) -> Iterator[Ref]:
        held_out = self.first(self.held_out)
        for epoch in count():
            examples = (e for e in stream_examples(self.data, self.seed, epoch) if e not in held_out)
            refs = group(((e, self.grid_of(e)) for e in examples), self.micro_batch)
            first = next(refs, None)
            if first is None:
                raise ValueError(
                    f"the stream {self.data.path!r} has no rows beside the {len(held_out)} held out for validation; "
                    f"lower validation.samples, check data.where={self.data.where}, or give more data"
                )
            yield first
            yield from refs

    def step(self, step: int, micro_batches: int) -> list[Ref]:
        wanted = step * micro_batches
        if wanted < self._next:
            self._next, self._refs = 0, self._stream()
        while self._next < wanted:
            next(self._refs)
            self._next += 1
        self._next += micro_batches
        return [next(self._refs) for _ in range(micro_batches)]

    def read(self, ref: Ref) -> Any:
        return self.read_all(ref.members)


Feed = MapFeed | StreamFeed


@dataclass(frozen=True)
class Loaded:
    """A global batch: the shapes of all its micro-batches, and this rank's own, being read."""

    refs: list[Ref]
    mine: dict[int, Future[Any]]


def load_ahead(feed: Feed, start: int, end: int, micro_batches: int, mine: Sequence[int]) -> Iterator[Loaded]:
    """Global batches of steps start to end, each read while the one before it trains."""
    with ThreadPoolExecutor(1) as pool:

        def submit(step: int) -> Loaded:
            refs = feed.step(step, micro_batches)
            return Loaded(refs, {index: pool.submit(feed.read, refs[index]) for index in mine})

        ahead = submit(start) if start < end else None
        for step in range(start, end):
            current, ahead = ahead, submit(step + 1) if step + 1 < end else None
            assert current is not None
            yield current


# -- from a recipe -----------------------------------------------------------------------------------


@dataclass
class Prepared:
    """What the loop reads: training's feed, and the samples validation measures on."""

    feed: Feed
    held_out: Items
    held_out_indices: list[int]


def prepare(recipe: Recipe, family: Family, output: Path, ranks: Ranks, report: Report) -> Prepared:
    """Open the data, encoded to disk where asked, and hold some out."""
    data, micro_batch, seed = recipe.data, recipe.sampling.micro_batch, recipe.seed
    sizes = bucket_sizes(data.resolution, family.factor * family.patch, data.buckets)
    family.keep_empty()
    if data.streaming:
        stream = StreamFeed(data, family, sizes, micro_batch, seed, recipe.validation.samples)
        first = stream.first(recipe.validation.samples)
        return Prepared(stream, ImageItems(first, family, sizes), list(range(len(first))))
    items: Items
    if data.kind == "latents":
        items = LatentCache.open(Path(data.path), origin_of_latents(recipe, family))
    elif data.cache is None:
        items = ImageItems(read_examples(data), family, sizes)
    else:
        folder = output / "latents" if data.cache == "auto" else Path(data.cache)
        items = fill_cache(recipe, ImageItems(read_examples(data), family, sizes), folder, ranks, report)
    order = torch.randperm(len(items), generator=generator_of(seed, "held out")).tolist()
    number = min(recipe.validation.samples, len(items) // 4)  # with little data at most a quarter
    feed = MapFeed(items, sorted(order[number:]), micro_batch, seed)
    return Prepared(feed, items, order[:number] or order[:1])
