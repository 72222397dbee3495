"""The model's prediction, token by token: pictures (B, C, H, W), clips (B, C, F, H, W) or tokens (B, N, C)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shiva.core.layout import Layout


def to_tokens(prediction: Tensor, layout: Layout) -> Tensor:
    """A prediction as (B, N, features): what a token's patch holds, references left out."""
    if prediction.ndim == 3:
        return prediction[:, layout.before : layout.before + layout.tokens]
    clip = prediction[:, :, None] if prediction.ndim == 4 else prediction  # (B, C, F, H, W)
    batch, channels, *sizes = clip.shape
    counts = layout.shape
    cut = [part for size, count in zip(sizes, counts, strict=True) for part in (count, size // count)]
    patches = clip.reshape(batch, channels, *cut)  # (B, C, f, pf, h, ph, w, pw)
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, layout.tokens, -1)


def to_prediction(tokens: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """The reverse of `to_tokens`, in the form of another prediction, whose references stay."""
    if like.ndim == 3:
        after = like[:, layout.before + layout.tokens :]
        return torch.cat([like[:, : layout.before], tokens, after], dim=1) if layout.reference else tokens
    sizes = like.shape[2:] if like.ndim == 5 else (1, *like.shape[2:])
    patch = [size // count for size, count in zip(sizes, layout.shape, strict=True)]
    cut = tokens.view(tokens.shape[0], *layout.shape, like.shape[1], *patch)  # (B, f, h, w, C, pf, ph, pw)
    return cut.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like.shape)


def token_mask(mask: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """A mask (B, N) over tokens as one over a prediction; its references count as masked."""
    if like.ndim == 3:
        return F.pad(mask, (layout.before, layout.after), value=True)[..., None]
    grid = mask.view(mask.shape[0], 1, *layout.shape).float()
    sizes = like.shape[2:] if like.ndim == 5 else (1, *like.shape[2:])
    spread = F.interpolate(grid, size=sizes, mode="nearest") > 0
    return spread if like.ndim == 5 else spread[:, :, 0]
