"""Merging tokens: partition a grid, match sources to destinations, combine groups, copy results back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shiva.core.context import StepContext
from shiva.core.layout import Windows
from shiva.core.method import GuidancePolicy
from shiva.core.reduction import Reduction, flat_rows, gather

Combine = Literal["mean", "mlerp", "prune"]
"""What a destination becomes: its group's mean, that mean at the group's largest norm, or unchanged."""


# -- partitions --------------------------------------------------------------------------------------


def draw(cells: Windows, layers: int, generator: torch.Generator | None) -> Tensor:
    """Which member of each cell is chosen, (layers, C): uniformly at random, or the first without a generator."""
    count, size = cells.members.shape
    if generator is None:
        return torch.zeros(layers, count, dtype=torch.long, device="cpu")
    return torch.randint(size, (layers, count), generator=generator, device="cpu")


def split(destinations: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Destinations (..., M) and all other tokens (..., N - M), each in grid order."""
    chosen = torch.zeros(*destinations.shape[:-1], tokens, dtype=torch.int8, device=destinations.device)
    order = chosen.scatter(-1, destinations, 1).argsort(dim=-1, descending=True, stable=True)
    return order[..., : destinations.shape[-1]], order[..., destinations.shape[-1] :]


def partition(cells: Windows, pick: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Destinations (L, C), the picked (L, C) member of each cell, and sources (L, N - C)."""
    chosen = cells.members.expand(pick.shape[0], -1, -1).gather(2, pick[..., None])
    return split(chosen[..., 0], tokens)


# -- matchings ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matching:
    """Which tokens merge into which. All but `target` are grid positions."""

    kept: Tensor  # (B, U) tokens that stay alone
    destinations: Tensor  # (B, M) tokens that others merge into
    sources: Tensor  # (B, R) tokens merged away
    target: Tensor  # (B, R) index into `destinations` of each source

    @property
    def positions(self) -> Tensor:
        return torch.cat([self.kept, self.destinations], dim=1)  # (B, K)

    def repeat(self, times: int) -> Matching:
        """The same matching for each of several guidance halves."""
        if times == 1:
            return self
        parts = (self.kept, self.destinations, self.sources, self.target)
        return Matching(*(part.repeat(times, 1) for part in parts))


def unit(x: Tensor) -> Tensor:
    """Tokens at length one; a zero token stays zero."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def best_destination(metric: Tensor, destinations: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Highest cosine similarity of each source (B, S) to a destination, and that destination's index.

    In float32: in half precision cosines tie by the hundred, and ties fall to the top of the image.
    """
    tokens, directions = metric.shape[1], unit(metric.float())
    rows = gather(directions, flat_rows(sources, tokens))
    columns = gather(directions, flat_rows(destinations, tokens))
    similarity, target = (rows @ columns.transpose(-1, -2)).max(dim=-1)
    return similarity, target


def merge_best(score: Tensor, target: Tensor, destinations: Tensor, sources: Tensor, removed: int) -> Matching:
    """Merge the `removed` sources of highest score (B, S); the others stay alone."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    merged, alone = order[:, :removed], order[:, removed:]
    return Matching(sources.gather(1, alone), destinations, sources.gather(1, merged), target.gather(1, merged))


def match(metric: Tensor, destinations: Tensor, sources: Tensor, removed: int) -> Matching:
    """Bipartite soft matching of tokens with features metric (B, N, D)."""
    batch = metric.shape[0]
    destinations, sources = destinations.expand(batch, -1), sources.expand(batch, -1)
    return merge_best(*best_destination(metric, destinations, sources), destinations, sources, removed)


Matchings: TypeAlias = dict[tuple[int, int], "Matching"]
"""The matchings of a step, by layer and guidance branch."""


def block_matching(
    known: Matchings,
    layer: int,
    metric: Tensor,
    policy: GuidancePolicy,
    ctx: StepContext,
    make: Callable[[Tensor], Matching],
) -> Matching:
    """The one matching of a block, made at the first call and shared by the block's sub-layers.

    Under the `shared` policy the first guidance half, or the first branch of a step, decides for both.
    """
    shared = policy == "shared"
    key = (layer, 0 if shared else ctx.branch)
    if key not in known:
        halves = 2 if shared and ctx.guidance_pairs else 1
        with ctx.phase("match"), torch.no_grad():
            known[key] = make(metric.chunk(halves)[0]).repeat(halves)
    return known[key]


# -- merging and unmerging ---------------------------------------------------------------------------


def merge(x: Tensor, matching: Matching, combine: Combine = "mean") -> Tensor:
    """Tokens x (B, N, D) as [kept, destinations] (B, K, D)."""
    tokens, alone = x.shape[1], matching.kept.shape[1]
    reduced = gather(x, flat_rows(matching.positions, tokens))
    if combine == "prune":
        return reduced
    destinations = reduced[:, alone:]
    sources = gather(x, flat_rows(matching.sources, tokens))
    groups = group_mean(destinations, sources, matching.target)
    if combine == "mlerp":
        groups = groups * mlerp_scale(groups, destinations, sources, matching.target)
    return torch.cat([reduced[:, :alone], groups], dim=1)


def group_mean(destinations: Tensor, sources: Tensor, target: Tensor) -> Tensor:
    """The plain mean of each destination (B, M, D) and the sources (B, R, D) that merge into it."""
    rows = flat_rows(target, destinations.shape[1])
    totals = destinations.flatten(0, 1).float().index_add(0, rows, sources.flatten(0, 1).float())
    sizes = totals.new_ones(totals.shape[0]).index_add(0, rows, totals.new_ones(rows.shape[0]))  # bf16 counts to 256
    return (totals / sizes[:, None]).view(destinations.shape).to(destinations.dtype)


def mlerp_scale(mean: Tensor, destinations: Tensor, sources: Tensor, target: Tensor) -> Tensor:
    """What brings each group's mean (B, M, D) to the largest norm in the group: (B, M, 1)."""
    largest = destinations.float().norm(dim=-1).scatter_reduce(1, target, sources.float().norm(dim=-1), "amax")
    return (largest / mean.float().norm(dim=-1).clamp(min=1e-6)).to(mean.dtype)[..., None]


def slots(matching: Matching) -> Tensor:
    """For each of the N tokens, the reduced token that speaks for it: (B, N)."""
    alone, reduced = matching.kept.shape[1], matching.positions
    own = torch.arange(reduced.shape[1], device=reduced.device).expand_as(reduced)
    places = torch.cat([reduced, matching.sources], dim=1)  # a permutation of the grid
    return torch.empty_like(places).scatter(1, places, torch.cat([own, matching.target + alone], dim=1))


def unmerge(values: Tensor, matching: Matching) -> Tensor:
    """Results (B, K, D) at all N places; a merged source receives a copy of its destination's."""
    return gather(values, flat_rows(slots(matching), values.shape[1]))


def merging(matching: Matching, combine: Combine = "mean") -> Reduction:
    """A site on merged tokens; every token receives a result, so the base is not needed."""
    return Reduction(
        reduce=lambda x: merge(x, matching, combine),
        restore=lambda values, base: unmerge(values, matching),
        positions=matching.positions,
    )
