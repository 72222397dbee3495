"""Arguments with a row for each token, and how each form is cut to the tokens that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shiva.core.layout import Layout


class RopeRows:
    """Rotary rows of each sample's own tokens, (B, S, D), for an attention that expects one (S, D) for all.

    diffusers adds the batch and head axes itself, by indexing or `unsqueeze`; each sample's rows already have the
    batch axis, so only the head axis is added, where the attention wants it.
    """

    def __init__(self, rows: Tensor):
        self.rows = rows

    def __getitem__(self, axes: Any) -> Tensor:
        heads_before_tokens = axes[1] is None  # [None, None, :, :], not [None, :, None, :]
        return self.rows[:, None] if heads_before_tokens else self.rows[:, :, None]

    def unsqueeze(self, axis: int) -> Tensor:
        return self.rows[:, :, None]


class InTurn:
    """A rotary table for an attention that turns its queries by it first, then its keys, which are more.

    Every attention of diffusers reads the table once for each of the two, in this order: the pair (cos, sin) by
    unpacking it, complex rows by `unsqueeze`.
    """

    def __init__(self, queries: Any, keys: Any):
        self.order = [keys, queries]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order.pop())

    def unsqueeze(self, axis: int) -> Tensor:
        return self.order.pop().unsqueeze(axis)


class Chosen(NamedTuple):
    """The tokens a site runs on, for whatever it is given per token."""

    positions: Tensor  # (B, K), of the image's own tokens
    layout: Layout
    whole_keys: bool
    """Attention still sees a key of every token."""
    frozen: bool = False
    """Reference tokens are keys, and do not run."""

    def rows(self, length: int, after_text: bool, keys: bool = False) -> Tensor:
        """Rows (B, S) of a sequence of this length: all that is not the image's own, and of that what is chosen."""
        batch, device = self.positions.shape[0], self.positions.device
        start = self.layout.before + (self.layout.text if after_text else 0)
        stop = start + self.layout.tokens
        before, after = (self.layout.before, self.layout.after) if self.frozen and not keys else (0, 0)
        head = torch.arange(start - before, device=device).expand(batch, -1)
        tail = torch.arange(stop + after, length, device=device).expand(batch, -1)
        return torch.cat([head, self.positions + start, tail], dim=1)

    @property
    def more_keys(self) -> bool:
        """Keys are more than queries."""
        return self.whole_keys or self.frozen

    @property
    def missing(self) -> int:
        """How many more."""
        missing = self.layout.tokens - self.positions.shape[1] if self.whole_keys else 0
        return missing + (self.layout.reference if self.frozen else 0)


PerToken: TypeAlias = Callable[[Any, Chosen], Any]
"""How an argument that has a row for each token is cut to the tokens that run."""
PerTokens: TypeAlias = Mapping[str, PerToken]
"""The same by the argument's name."""


def shared_rows(table: Tensor, rows: Tensor) -> Any:
    """Rows (B, S) of a table (T, D) that all samples share, as an attention takes it in the table's place."""
    return table.index_select(0, rows[0]) if rows.shape[0] == 1 else RopeRows(table[rows])


def gather_axis(value: Tensor, rows: Tensor, axis: int) -> Tensor:
    """Entries of a tensor with a batch axis, of size B or 1, at each sample's own rows (B, S) along another axis."""
    if rows.shape[0] == 1:
        return value.index_select(axis, rows[0])
    first = value.movedim(axis, 1)
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None] if value.shape[0] > 1 else torch.zeros_like(rows)
    return first[batch, rows].movedim(1, axis)


def key_columns(mask: Tensor, chosen: Chosen) -> Tensor:
    """A mask (B, 1, N) over image keys."""
    if chosen.whole_keys:
        return mask
    keys = chosen.positions[:, None, :]
    return mask.expand(keys.shape[0], -1, -1).gather(2, keys)


@dataclass(frozen=True)
class SharedRope:
    """One rotary table for all samples: (cos, sin), each (S, D), or complex (S, D/2) as one of a pair.

    Forms R1 (heads after tokens) and R2 (heads before) are told apart by how an attention indexes them.
    """

    after_text: bool = False
    """Rows of the text lead it."""

    def __call__(self, rope: Any, chosen: Chosen) -> Any:
        rows = chosen.rows(rope[0].shape[0], self.after_text)
        queries = tuple(shared_rows(part, rows) for part in rope)
        if not chosen.more_keys:
            return queries
        rows = chosen.rows(rope[0].shape[0], self.after_text, keys=True)
        return InTurn(queries, rope if chosen.whole_keys else tuple(shared_rows(part, rows) for part in rope))


def image_and_text_rope(ropes: tuple[Tensor, Tensor], chosen: Chosen) -> Any:
    """Complex rows of the image (S, D/2), R3, and of the text, apart."""
    image, text = ropes
    queries = shared_rows(image, chosen.rows(image.shape[0], after_text=False))
    if not chosen.more_keys:
        return queries, text
    rows = chosen.rows(image.shape[0], after_text=False, keys=True)
    return InTurn(queries, image if chosen.whole_keys else shared_rows(image, rows)), text


def rope_of_each_head(rope: tuple[Tensor, Tensor], chosen: Chosen) -> Any:
    """(cos, sin), each (S, H, D/2), R9."""
    rows = chosen.rows(rope[0].shape[0], after_text=False)
    queries = tuple(part[rows] for part in rope)
    return InTurn(queries, rope) if chosen.whole_keys else queries


@dataclass(frozen=True)
class Rows:
    """A tensor, or a tuple of them, with the tokens along an axis and the batch, or 1 for all samples, first.

    Rotary tables of each sample (R4 to R8) are such, and modulation of each token.
    """

    axis: int = 1
    after_text: bool = False
    """Rows of the text lead it."""
    only_with_axes: int | None = None
    """Per token only where it has this many axes."""

    def cut(self, value: Any, chosen: Chosen, keys: bool = False) -> Any:
        if isinstance(value, tuple):
            return tuple(self.cut(part, chosen, keys) for part in value)
        length = value.shape[self.axis]
        if length == 1 or self.only_with_axes not in (None, value.ndim):
            return value
        return gather_axis(value, chosen.rows(length, self.after_text, keys), self.axis)

    def __call__(self, value: Any, chosen: Chosen) -> Any:
        return self.cut(value, chosen)


@dataclass(frozen=True)
class Rope(Rows):
    """A rotary table with rows of each sample, which keys take too."""

    def __call__(self, value: Any, chosen: Chosen) -> Any:
        cut = self.cut(value, chosen)
        if not chosen.more_keys:
            return cut
        return InTurn(cut, value if chosen.whole_keys else self.cut(value, chosen, keys=True))


@dataclass(frozen=True)
class KeyMask(Rows):
    """A mask over the keys of the sequence, its last axis."""

    axis: int = -1

    def __call__(self, value: Any, chosen: Chosen) -> Any:
        return value if chosen.whole_keys else self.cut(value, chosen, keys=True)


@dataclass(frozen=True)
class SquareMask(Rows):
    """A mask of queries by keys, its last two axes."""

    def __call__(self, value: Any, chosen: Chosen) -> Any:
        queries = Rows(-2, self.after_text).cut(value, chosen)
        return queries if chosen.whole_keys else Rows(-1, self.after_text).cut(queries, chosen, keys=True)


@dataclass(frozen=True)
class Within:
    """An entry, by its key, of an argument that is a dictionary."""

    key: str
    form: PerToken

    def __call__(self, value: dict[str, Any], chosen: Chosen) -> dict[str, Any]:
        if value.get(self.key) is None:
            return value
        return {**value, self.key: self.form(value[self.key], chosen)}


def text_mask_before_ones(mask: Tensor, chosen: Chosen) -> Tensor | None:
    """A mask (B, T) of the text, to which an attention adds a column for each query of the image.

    Pricing also asks for more queries than there are tokens, and for them the mask costs nothing.
    """
    missing = chosen.missing
    if not missing:
        return mask
    return torch.cat([mask, mask.new_ones(mask.shape[0], missing)], dim=1) if missing > 0 else None
