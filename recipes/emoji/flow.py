"""Flow matching: the training pair, the loss, and a plain Euler sampler with guidance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor, nn

from recipes.emoji.conditioning import Text


def make_transformer(
    channels: int, width: int = 128, layers: int = 8, text: int = 256, side: int = 16
) -> SD3Transformer2DModel:
    """Patch 1 on a grid of side x side latents, 256 image tokens or 1024; heads of 32."""
    return SD3Transformer2DModel(
        sample_size=side,
        patch_size=1,
        in_channels=channels,
        out_channels=channels,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=width // 32,
        joint_attention_dim=text,
        caption_projection_dim=width,
        pooled_projection_dim=text,
        pos_embed_max_size=side,
        qk_norm="rms_norm",
    )


@torch.no_grad()
def start_from(model: SD3Transformer2DModel, smaller: SD3Transformer2DModel) -> None:
    """The weights of a model of the same sizes, its positions spread over the larger grid: the same square in finer
    steps, so that every second position of a grid twice as wide is one of the smaller's."""
    side = model.config.pos_embed_max_size
    table = get_2d_sincos_pos_embed(
        model.inner_dim, side, base_size=smaller.config.pos_embed_max_size, output_type="pt"
    )
    model.load_state_dict({**smaller.state_dict(), "pos_embed.pos_embed": table[None].float()})


@torch.no_grad()
def start_gently(model: SD3Transformer2DModel) -> None:
    """DiT's initialization: modulations and the output start at zero, every block as the identity."""
    for block in model.transformer_blocks:
        for norm in (block.norm1, block.norm1_context):
            norm.linear.weight.zero_()
            norm.linear.bias.zero_()
    model.norm_out.linear.weight.zero_()
    model.norm_out.linear.bias.zero_()
    model.proj_out.weight.zero_()
    model.proj_out.bias.zero_()


def logit_normal(count: int, generator: torch.Generator, mean: float = 0.0, deviation: float = 1.0) -> Tensor:
    """`count` noise levels in (0, 1), stratified so that each batch covers them evenly."""
    quantiles = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    return torch.sigmoid(mean + deviation * torch.special.ndtri(quantiles.clamp(1e-4, 1 - 1e-4)))


def flow_loss(
    model: SD3Transformer2DModel, clean: Tensor, noise: Tensor, sigma: Tensor, text: Text, places: Tensor | None = None
) -> Tensor:
    """Mean squared error of the velocity of each of (B, C, S, S) latents: (B,); at `places` (B, k) alone, if given."""
    level = sigma.view(-1, 1, 1, 1)
    noisy = (1 - level) * clean + level * noise
    with only_tokens(model, places):
        error = (velocity(model, noisy, sigma, text) - (noise - clean)).square().mean(1).flatten(1)  # (B, N)
    return (error if places is None else error.gather(1, places)).mean(1)


def half_of_cells(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Two random tokens of each 2 x 2 cell: (count, side * side / 2) places."""
    cells = torch.arange(side * side).view(side // 2, 2, side // 2, 2).permute(0, 2, 1, 3).reshape(-1, 4)
    chosen = torch.rand(count, len(cells), 4, generator=generator).topk(2).indices
    return cells.expand(count, -1, -1).gather(2, chosen).flatten(1)


@contextmanager
def only_tokens(model: SD3Transformer2DModel, places: Tensor | None) -> Iterator[None]:
    """Inside, the transformer sees the tokens at `places` (B, k) and no others, and predicts zero elsewhere.

    A step on half of the tokens costs a third: what a picture is can be learned from half of it, as MaskDiT and
    SPRINT have shown; the last sitting sees them all.
    """
    if places is None:
        yield
        return

    def drop(_: nn.Module, __: object, tokens: Tensor) -> Tensor:
        return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))

    def put_back(_: nn.Module, __: object, tokens: Tensor) -> Tensor:
        whole = tokens.new_zeros(len(tokens), model.config.sample_size**2, tokens.shape[-1])
        return whole.scatter(1, places[..., None].expand_as(tokens), tokens)

    hooks = [model.pos_embed.register_forward_hook(drop), model.proj_out.register_forward_hook(put_back)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def scheduler_sigmas(steps: int, shift: float, terminal: float | None = None) -> Tensor:
    """The stock scheduler's noise levels, from 1 to 0: (steps + 1,); `terminal` is where its last step begins."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, shift_terminal=terminal)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas


def velocity(model: SD3Transformer2DModel, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
    """What the model predicts for latents (B, C, S, S) at noise levels (B,)."""
    return model(latents, text.hidden, text.pooled, sigma * 1000, return_dict=False)[0]


def guided_velocity(
    model: SD3Transformer2DModel, latents: Tensor, sigma: Tensor, text: Text, empty: Text, guidance: float
) -> Tensor:
    """The same under classifier-free guidance; `empty` is the empty prompt, (1, ...)."""
    count = len(latents)
    hidden = torch.cat([empty.hidden.expand(count, -1, -1), text.hidden])
    pooled = torch.cat([empty.pooled.expand(count, -1), text.pooled])
    both = velocity(model, torch.cat([latents, latents]), torch.cat([sigma, sigma]), Text(hidden, pooled))
    unguided, guided = both.chunk(2)
    return unguided + guidance * (guided - unguided)


@torch.no_grad()
def sample(
    model: SD3Transformer2DModel,
    noise: Tensor,
    text: Text,
    empty: Text,
    steps: int = 16,
    guidance: float = 3.0,
    shift: float = 1.5,
) -> Tensor:
    """Latents (B, C, S, S) from noise; `empty` is the empty prompt, (1, ...)."""
    latents = noise
    for now, following in pairwise(scheduler_sigmas(steps, shift)):
        step = guided_velocity(model, latents, now.expand(len(noise)), text, empty, guidance)
        latents = latents + (following - now) * step
    return latents
