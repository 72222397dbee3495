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

from shiva.core.reduction import Reduction, flat_rows, gather, scatter, select

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
    """The regression of one layer at one noise level, or at one for each sample: (B, D, r) and (B, 1, G)."""

    down: Tensor  # (D, r)
    levels: Tensor  # (G,), the powers of the noise level that the offsets are multiplied by
    up: Tensor  # (r + G, D), the offsets below

    def __call__(self, x: Tensor) -> Tensor:
        """What the layer would add to x (B, N, D)."""
        return project(x, self) @ self.up.to(x.dtype)


class Factors(NamedTuple):
    """The regression of one layer: its terms in the powers 0 to G - 1 of the noise level."""

    down: Tensor  # (G, D, r)
    up: Tensor  # (r, D)
    bias: Tensor  # (G, D)

    def at(self, sigma: Tensor | float) -> Lin:
        """At a noise level, or at one for each sample (B,)."""
        level = torch.as_tensor(sigma, dtype=self.down.dtype, device=self.down.device)[..., None]
        levels = level ** torch.arange(len(self.down), device=level.device)  # (G,) or (B, G)
        down = (levels[..., None, None] * self.down).sum(dim=-3)
        return Lin(down, levels if levels.ndim == 1 else levels[:, None], torch.cat([self.up, self.bias]))


def normed(x: Tensor) -> Tensor:
    """LN(x), which has no weights."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def project(x: Tensor, lin: Lin) -> Tensor:
    """What the regression sees of x (B, N, D): (B, N, r + G), the last constant over a sample's tokens."""
    seen = normed(x) @ lin.down.to(x.dtype)
    return torch.cat([seen, lin.levels.to(seen.dtype).expand(*seen.shape[:2], -1)], dim=-1)


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

    @torch.no_grad()
    def set_layer(self, layer: int, factors: Factors) -> None:
        for own, fitted in zip(self.layer(layer), factors, strict=True):
            own.copy_(fitted)


def shortcut_flops(tokens: int, k: float, width: int, rank: int, degree: int = 1, neighbours: int = 25) -> float:
    """FLOPs of filling tokens - k of a sample's; `neighbours` is the window's size, 0 leaves the matrix products."""
    skipped, seen = tokens - k, rank + degree + 1
    return 2 * width * (rank * tokens + seen * skipped) + 2 * skipped * neighbours * (width + seen)


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
    """The tokens around each of the grid's: their places and log weights, both (N, J); itself does not count."""
    own = torch.meshgrid(*(torch.arange(n, device=device) for n in shape), indexing="ij")
    away = torch.meshgrid(*(torch.arange(-w, w + 1, device=device) for w in reach(shape)), indexing="ij")
    place, logits = torch.zeros((), dtype=torch.long, device=device), torch.zeros((), device=device)
    for n, start, offset in zip(shape, own, away, strict=True):
        axis = start.flatten()[:, None] + offset.flatten()  # (N, J)
        place = place * n + axis.clamp(0, n - 1)
        logits = (logits - offset.flatten() ** 2 / (2 * spread**2)).where((axis >= 0) & (axis < n), ABSENT)
    return place, logits.where(logits < 0, ABSENT)


kept_window = functools.lru_cache(maxsize=64)(window)


def reach(shape: Shape) -> list[int]:
    """How far a neighbour may be along each axis; a single frame has none before or after."""
    return [min(w, n - 1) for w, n in zip(WINDOW, shape, strict=True)]


def find_neighbours(indices: Tensor, targets: Tensor, shape: Shape, spread: float = SPREAD) -> Neighbours:
    """The computed tokens (B, k) around each target (B, T).

    With Gaussian weights this is the normalised convolution of a map that is zero where nothing was computed,
    conv(map) / conv(mask), at the targets alone. A target that was itself computed does not count for itself.
    """
    batch, k = indices.shape
    around = window if torch.compiler.is_compiling() else kept_window  # a compiler fuses it, and knows no cache
    places, logits = around(shape, spread, indices.device)
    computed = torch.arange(batch * k, device=indices.device).view(batch, k)
    row_of = torch.full((batch, math.prod(shape)), -1, device=indices.device).scatter(1, indices, computed)
    rows = row_of.gather(1, places[targets].flatten(1)).view(-1, logits.shape[-1])  # (B * T, J)
    near = logits[targets].flatten(0, 1)
    present = (rows >= 0) & (near > ABSENT)
    weights = near.masked_fill(~present, ABSENT).softmax(dim=-1) * present
    return Neighbours(rows.clamp(min=0), weights)


# -- the fill ----------------------------------------------------------------------------------------------


def skipped_tokens(indices: Tensor, tokens: int) -> Tensor:
    """The others of the N tokens than indices (B, k): (B, N - k), ascending."""
    computed = torch.zeros(indices.shape[0], tokens, dtype=torch.uint8, device=indices.device).scatter(1, indices, 1)
    return computed.sort(dim=-1, stable=True).indices[:, : tokens - indices.shape[1]]


def fill_updates(
    updates: Tensor,
    x: Tensor,
    indices: Tensor,
    targets: Tensor,
    lin: Lin,
    shape: Shape,
    spread: float = SPREAD,
    parts: Parts = "both",
) -> Tensor:
    """What each target (B, T) gets (B, T, D), from the updates (B, k, D) that indices (B, k) of x (B, N, D) got.

    A target among the indices gets what it would if it were skipped, which is what an estimator compares its own
    update to.

    As lin has low rank, the neighbours' residual is not made for the k tokens: their mean update takes one pass, and
    the mean of what the regression sees of them is narrow. Offsets cancel in it wherever there is a neighbour.
    """
    tokens, width = x.shape[1:]
    if parts == "identity":
        return updates.new_zeros(*targets.shape, width)
    if parts == "mean":
        return updates.mean(dim=1, keepdim=True).expand(-1, targets.shape[1], -1)
    if parts == "neighbours":
        return find_neighbours(indices, targets, shape, spread).mean(updates)
    dtype, up = updates.dtype, lin.up.to(updates.dtype)
    seen = project(x, lin).float() if dtype.itemsize < 4 else project(x, lin)  # (B, N, r + G)
    own = gather(seen, flat_rows(targets, tokens))
    if parts == "lin":
        return (own.to(dtype) @ up).to(dtype)
    near = find_neighbours(indices, targets, shape, spread)
    beyond = own - near.mean(gather(seen, flat_rows(indices, tokens)))  # (B, T, r + G)
    filled = torch.addmm(near.mean(updates).flatten(0, 1), beyond.flatten(0, 1).to(dtype), up)
    return filled.view(*targets.shape, width).to(dtype)  # autocast may have made it another


def shortcut_fill(
    indices: Tensor, x: Tensor, lin: Lin, shape: Shape, spread: float = SPREAD, parts: Parts = "both"
) -> Reduction:
    """Run the tokens at indices (B, k) of x (B, N, D); the others add what `fill_updates` makes of the results.

    `lin` is a layer's regression at the step's noise level, `Shortcut.at`.
    """
    tokens = x.shape[1]
    if parts == "identity" or indices.shape[1] == tokens:
        return select(indices, tokens)
    rows = flat_rows(indices, tokens)

    def restore(values: Tensor, base: Tensor) -> Tensor:
        skipped = skipped_tokens(indices, tokens)
        updates = values - gather(base, rows)
        filled = fill_updates(updates, x, indices, skipped, lin, shape, spread, parts)
        restored = scatter(values, base, rows)
        return restored.flatten(0, 1).index_add_(0, flat_rows(skipped, tokens), filled.flatten(0, 1)).view(base.shape)

    return Reduction(lambda full: gather(full, rows), restore, indices)
