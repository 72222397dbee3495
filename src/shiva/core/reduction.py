"""A Reduction turns N image tokens into K and back; it is all a method has to return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Streams(NamedTuple):
    """What flows through a block: image tokens and, where the block has them, text tokens."""

    image: Tensor  # (B, N, D)
    text: Tensor | None = None  # (B, T, D)
    rest: Tensor | None = None  # (B, R, D), what the image's own argument holds beside it: references, or text
    ran: int | None = None
    """Tokens a sample that were computed, where that is not how many the site was called with."""


@dataclass(frozen=True)
class Reduction:
    """How a site's N image tokens become K, and how K results become N again.

    `base` is what a token holds if the site adds nothing to it: its own value around a whole block,
    zero around an attention or FFN, whose output is an update.
    """

    reduce: Callable[[Tensor], Tensor]  # (B, N, D) -> (B, K, D)
    restore: Callable[[Tensor, Tensor], Tensor]  # results (B, K, D), base (B, N, D) -> (B, N, D)
    positions: Tensor  # (B, K): the grid position each reduced token stands for; a list over samples: its rows (1, M)
    whole_keys: bool = False
    """Attention inside still sees a key of every token, so a mask over keys stays whole."""


def flat_rows(indices: Tensor, tokens: int) -> Tensor:
    """Indices (B, K) into each sample's N tokens as rows of the flattened (B * N, D) matrix."""
    batch = indices.shape[0]
    if batch == 1:
        return indices.flatten()
    offsets = torch.arange(0, batch * tokens, tokens, device=indices.device)
    return (indices + offsets[:, None]).flatten()  # (B * K,)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x (B, N, D) at `flat_rows`: (B, K, D). Whole rows move at once, unlike torch.gather."""
    batch, _, width = x.shape
    return x.flatten(0, 1).index_select(0, rows).view(batch, -1, width)


def scatter(values: Tensor, base: Tensor, rows: Tensor) -> Tensor:
    """A copy of base (B, N, D) with values (B, K, D) written at `flat_rows`; theirs is the dtype under autocast."""
    return base.to(values.dtype).flatten(0, 1).index_copy(0, rows, values.flatten(0, 1)).view(base.shape)


def overwrite(full: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """`scatter` into a tensor (B, N, D) that nobody else has."""
    return full.to(values.dtype).flatten(0, 1).index_copy_(0, rows, values.flatten(0, 1)).view(full.shape)


def select(indices: Tensor, tokens: int) -> Reduction:
    """Keep the tokens at indices (B, K); the others keep their base value."""
    rows = flat_rows(indices, tokens)
    return Reduction(
        reduce=lambda x: gather(x, rows),
        restore=lambda values, base: scatter(values, base, rows),
        positions=indices,
    )
