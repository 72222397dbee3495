"""What a skipped token gets without state: a regression on its own value, and its neighbours' residual.

    fill_i = lin(x_i) + sum_j w_ij (update_j - lin(x_j)),   j over the computed tokens near i

A block's update is largely a linear function of its own normed input, and what that misses is smooth over the image,
so the computed tokens tell it. In geostatistics this is regression kriging, with Gaussian weights for the variogram's.

The regression is linear in the noise level too, and of low rank r in what it can add:

    lin(x; sigma) = LN(x) (V_0 + sigma V_1) U + b_0 + sigma b_1,   V_g (D, r), U (r, D)

At a step, V_0 + sigma V_1 is one matrix. Sharing U, not V, is what makes the best rank r a closed form
(`ops.shortcut_fit`).
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiva.core.reduction import Reduction, flat_rows, gather, select

Shape = tuple[int, int, int]
"""Frames, rows and columns of the image tokens; an image has one frame."""
Parts = Literal["identity", "mean", "neighbours", "lin", "both"]
"""What a skipped token gets: nothing, the computed ones' mean update, or one or both parts of the sum above."""

WINDOW = (1, 2, 2)
"""How far a neighbour may be: frames, rows, columns."""
SPREAD = 0.5
"""Deviation of the Gaussian weights, in tokens; .4 to .65 do alike, wider blurs."""
EPS = 1e-6
ABSENT = -1e30


# -- the regression ----------------------------------------------------------------------------------------


class Lin(NamedTuple):
    """The regression of one layer at one noise level."""

    down: Tensor  # (D, r)
    up: Tensor  # (r, D)
    offset: Tensor  # (D,)

    def __call__(self, x: Tensor) -> Tensor:
        """What the layer would add to x (B, N, D)."""
        seen, up, offset = normed(x) @ self.down.to(x.dtype), self.up.to(x.dtype), self.offset.to(x.dtype)
        return F.linear(seen, up.t(), offset)


class Recalling:
    """A layer's regression at one call, and what is recalled of each token (B, N, D) beside it.

    A share `recall` of what was `missed` is added to the regression; `ended` is what tokens became at the step before,
    and a share `steady` of the estimate is that they become it again.
    """

    def __init__(
        self,
        lin: Lin,
        missed: Tensor | None = None,
        recall: float = 1.0,
        ended: Tensor | None = None,
        steady: float = 0.0,
    ):
        self.lin, self.before, self.recall, self.ended, self.steady = lin, missed, recall, ended, steady
        self.told: Tensor | None = None
        """What the regression alone said of the tokens it was last asked about."""

    def __call__(self, x: Tensor) -> Tensor:
        told, before = self.lin(x), self.before
        self.told = told
        found = told.clone() if before is None else told.add(before.to(x.dtype), alpha=self.recall)
        return found if self.ended is None else found.lerp_((self.ended - x).to(found.dtype), self.steady)

    def missed(self, restored: Tensor, base: Tensor) -> Tensor:
        """Of what tokens (B, N, D) got, the part that the regression had not said."""
        assert self.told is not None
        return (restored - base).sub_(self.told).detach()


Estimate = Lin | Recalling
"""What tokens (B, N, D) would get before any neighbour is asked."""


class Factors(NamedTuple):
    """The regression of one layer: its terms in the powers 0 to G - 1 of the noise level."""

    down: Tensor  # (G, D, r)
    up: Tensor  # (r, D)
    bias: Tensor  # (G, D)

    def at(self, sigma: Tensor | float) -> Lin:
        """At a noise level."""
        level = torch.as_tensor(sigma, dtype=self.down.dtype, device=self.down.device)
        levels = level ** torch.arange(len(self.down), device=level.device)  # (G,)
        down = (levels[:, None, None] * self.down).sum(dim=0)
        return Lin(down, self.up, (levels[:, None] * self.bias).sum(dim=0))


def normed(x: Tensor) -> Tensor:
    """LN(x), which has no weights."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class Shortcut(nn.Module):
    """The regressions of all layers. Before it is fitted or trained it adds nothing."""

    def __init__(self, layers: int, width: int, rank: int = 32, degree: int = 1):
        super().__init__()
        self.down = nn.Parameter(torch.zeros(layers, degree + 1, width, rank))
        self.up = nn.Parameter(torch.zeros(layers, rank, width))
        self.bias = nn.Parameter(torch.zeros(layers, degree + 1, width))
        nn.init.normal_(self.down[:, 0], std=width**-0.5)

    def layer(self, layer: int) -> Factors:
        return Factors(self.down[layer], self.up[layer], self.bias[layer])

    def at(self, layer: int, sigma: Tensor | float) -> Lin:
        """A layer's regression at a noise level; sigma as a tensor, so that steps share what is compiled."""
        return self.layer(layer).at(sigma)

    def all_at(self, sigma: Tensor) -> list[Lin]:
        """Of all layers, at one noise level, in a few operations."""
        levels = sigma.to(self.down.dtype) ** torch.arange(self.down.shape[1], device=sigma.device)  # (G,)
        down, offset = ((levels.view(-1, *[1] * (w.ndim - 2)) * w).sum(dim=1) for w in (self.down, self.bias))
        return [Lin(*layer) for layer in zip(down, self.up, offset, strict=True)]

    @torch.no_grad()
    def set_layer(self, layer: int, factors: Factors) -> None:
        for own, fitted in zip(self.layer(layer), factors, strict=True):
            own.copy_(fitted)


def shortcut_flops(tokens: int, k: float, width: int, rank: int, neighbours: int = 25) -> float:
    """FLOPs of filling tokens - k of a sample's; `neighbours` is the window's size, 0 leaves the matrix products."""
    return 2 * width * (2 * rank * tokens + neighbours * (tokens - k))


# -- the neighbours ----------------------------------------------------------------------------------------


class Neighbours(NamedTuple):
    """Which of the computed tokens stand near each of T tokens, and their weights."""

    rows: Tensor  # (B * T, J) of the flattened (B * k, D)
    weights: Tensor  # (B * T, J), float32, of sum 1; 0 where no computed token is near

    def mean(self, values: Tensor) -> Tensor:
        """The weighted mean (B, T, D) of values (B, k, D), in one pass over them."""
        flat, weights = values.flatten(0, 1), self.weights.to(values.dtype)
        near = F.embedding_bag(self.rows, flat, mode="sum", per_sample_weights=weights)
        return near.view(values.shape[0], -1, values.shape[-1])


def window(shape: Shape, spread: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens around each of the grid's, (N, J), N where it ends, and their log weights (J,); itself has none."""
    own = torch.meshgrid(*(torch.arange(n, device=device) for n in shape), indexing="ij")
    away = torch.meshgrid(*(torch.arange(-w, w + 1, device=device) for w in reach(shape)), indexing="ij")
    place, logits = torch.zeros((), dtype=torch.long, device=device), torch.zeros((), device=device)
    inside = torch.ones((), dtype=torch.bool, device=device)
    for n, start, offset in zip(shape, own, away, strict=True):
        axis = start.flatten()[:, None] + offset.flatten()  # (N, J)
        place, inside = place * n + axis, inside & (axis >= 0) & (axis < n)
        logits = logits - offset.flatten() ** 2 / (2 * spread**2)
    return place.where(inside, math.prod(shape)), logits.where(logits < 0, ABSENT)


kept_window = functools.lru_cache(maxsize=64)(window)


def reach(shape: Shape) -> list[int]:
    """How far a neighbour may be along each axis; a single frame has none before or after."""
    return [min(w, n - 1) for w, n in zip(WINDOW, shape, strict=True)]


def find_neighbours(indices: Tensor, targets: Tensor, shape: Shape, spread: float = SPREAD) -> Neighbours:
    """The computed tokens (B, k) around each target (B, T).

    With Gaussian weights this is the normalised convolution of a map that is zero where nothing was computed,
    conv(map) / conv(mask), at the targets alone. A target that was itself computed does not count for itself.
    """
    (batch, k), tokens = indices.shape, math.prod(shape)
    around = window if torch.compiler.is_compiling() else kept_window  # a compiler fuses it, and knows no cache
    places, logits = around(shape, spread, indices.device)
    computed = torch.arange(batch * k, device=indices.device).view(batch, k)
    row_of = computed.new_zeros(batch, tokens + 1).scatter(1, indices, computed)
    absence = logits.new_full((batch, tokens + 1), ABSENT).scatter(1, indices, 0.0)
    near = flat_rows(places.index_select(0, targets.flatten()).view(batch, -1), tokens + 1)
    unlikely = absence.view(-1).index_select(0, near).view(-1, len(logits)) + logits  # (B * T, J)
    weights = unlikely.softmax(dim=-1) * (unlikely > ABSENT / 2)
    return Neighbours(row_of.view(-1).index_select(0, near).view(weights.shape), weights)


# -- the fill ----------------------------------------------------------------------------------------------


def skipped_tokens(indices: Tensor, tokens: int) -> Tensor:
    """The others of the N tokens than indices (B, k): (B, N - k), ascending."""
    computed = torch.zeros(indices.shape[0], tokens, dtype=torch.uint8, device=indices.device).scatter(1, indices, 1)
    return computed.sort(dim=-1, stable=True).indices[:, : tokens - indices.shape[1]]


class Places(NamedTuple):
    """Where the tokens that run and the others are, and which of the former tell what the latter get."""

    computed: Tensor  # (B * k,), `flat_rows` of the N tokens
    skipped: Tensor  # (B * (N - k),)
    near: Neighbours | None


def places_of(indices: Tensor, shape: Shape, spread: float = SPREAD, parts: Parts = "both") -> Places:
    """Of the tokens that run (B, k)."""
    tokens = math.prod(shape)
    skipped = skipped_tokens(indices, tokens)
    near = find_neighbours(indices, skipped, shape, spread) if parts in ("neighbours", "both") else None
    return Places(flat_rows(indices, tokens), flat_rows(skipped, tokens), near)


def fill_updates(
    updates: Tensor,
    x: Tensor,
    indices: Tensor,
    lin: Estimate,
    shape: Shape,
    spread: float = SPREAD,
    parts: Parts = "both",
) -> Tensor:
    """What each token of x (B, N, D) would get if it were skipped, from the updates (B, k, D) that indices (B, k) got.

    A computed token's is what an estimator compares its own update to.
    """
    own = lin(x).to(updates.dtype) if parts in ("lin", "both") else torch.zeros_like(x, dtype=updates.dtype)
    if parts in ("identity", "lin"):
        return own
    if parts == "mean":
        return own + updates.mean(dim=1, keepdim=True)
    every = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    near = find_neighbours(indices, every, shape, spread)
    return own + near.mean(updates - gather(own, flat_rows(indices, x.shape[1])))


def shortcut_fill(
    indices: Tensor,
    x: Tensor,
    lin: Estimate,
    shape: Shape,
    spread: float = SPREAD,
    parts: Parts = "both",
    places: Places | None = None,
) -> Reduction:
    """Run the tokens at indices (B, k) of x (B, N, D); the others add what `fill_updates` would give them.

    `lin` is a layer's regression at the step's noise level, `Shortcut.at`, or that with what is recalled; `places` are
    those of the indices, where they are known.
    """
    tokens = x.shape[1]
    if parts == "identity" or indices.shape[1] == tokens:
        return select(indices, tokens)
    rows, skipped, near = places or places_of(indices, shape, spread, parts)

    def restore(values: Tensor, base: Tensor) -> Tensor:
        """The regression is added to all tokens, so that what neighbours tell beyond it is one difference."""
        wide = torch.promote_types(values.dtype, torch.float32)
        restored = lin(x).to(wide).add_(base) if parts in ("lin", "both") else base.to(wide, copy=True)
        flat, results = restored.flatten(0, 1), values.to(wide)
        if parts != "lin":
            beyond, others = results - gather(restored, rows), tokens - indices.shape[1]
            told = beyond.mean(dim=1, keepdim=True).expand(-1, others, -1) if near is None else near.mean(beyond)
            flat.index_add_(0, skipped, told.flatten(0, 1))
        return flat.index_copy_(0, rows, results.flatten(0, 1)).view(base.shape).to(values.dtype)

    return Reduction(lambda full: gather(full, rows), restore, indices)
