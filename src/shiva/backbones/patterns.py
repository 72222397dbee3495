"""Architectures as data: most transformers are an entry of some ten lines in a table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shiva.backbones.base import (
    Backbone,
    Call,
    Signals,
    Site,
    TextPlace,
    key_sites,
    parameter_names,
)
from shiva.backbones.per_token import PerTokens
from shiva.core.context import NOISE
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, SiteKind

TEXT_IMAGE, IMAGE_TEXT = ("text", "image"), ("image", "text")


@dataclass(frozen=True)
class Inner:
    """A sub-layer of every block of a stack, at which tokens may be reduced too."""

    name: str
    kind: SiteKind
    outputs: tuple[str, ...] = ("image",)
    per_token: PerTokens = field(default_factory=dict)
    text: TextPlace | None = None
    """Where the text is in its image argument, if elsewhere than in the block's."""
    keys: TextPlace | None = None
    """Where the text is in what its projections to keys and values are given; None if they cannot be whole."""

    def sites(self, block: Site) -> list[Site]:
        """The sub-layer and its projections; these alone where its kind is "keys", none where a block lacks it."""
        if getattr(block.module, self.name) is None:
            return []
        site = block.inside(
            self.name,
            self.kind,
            outputs=self.outputs,
            per_token=self.per_token,
            text=self.text or block.text,
            image=parameter_names(getattr(block.module, self.name))[0],
        )
        projections = key_sites(site, self.keys) if self.keys else []
        return projections if self.kind == "keys" else [site, *projections]


@dataclass(frozen=True)
class Stack:
    """A list of alike blocks."""

    path: str
    """The list's attribute in the transformer."""
    outputs: tuple[str, ...] = ("image",)
    """The streams a block returns, in its order; a lone stream comes without a tuple."""
    per_token: PerTokens = field(default_factory=dict)
    """Arguments of a block with a row for each token."""
    image: str = "hidden_states"
    """The argument of a block with image tokens."""
    text: TextPlace = "apart"
    """Whether the image argument is one sequence with the text, and which comes first."""
    inner: tuple[Inner, ...] = ()
    single_stream: bool = False
    rotary: bool = True

    def sites(self, transformer: Any, first: int) -> list[Site]:
        """Its sites, its blocks numbered from `first`."""
        sites = []
        for index, module in enumerate(transformer.get_submodule(self.path)):
            block = Site(
                f"{self.path}.{index}",
                "block",
                first + index,
                module,
                self.outputs,
                self.image,
                self.text,
                self.per_token,
                stack=self.path,
                index=index,
                single_stream=self.single_stream,
                rotary=self.rotary,
            )
            sites.append(block)
            for inner in self.inner:
                sites += inner.sites(block)
        return sites

    @property
    def pattern(self) -> str:
        """Its kind in one word or two."""
        if self.text != "apart":
            return "text first" if self.text == "leads" else "image first"
        return "joint" if len(self.outputs) > 1 else "image alone"


def last_width(module: nn.Module) -> int:
    """How wide a module's output is, by the last linear layer or table in it."""
    widths = (getattr(layer, "out_features", getattr(layer, "embedding_dim", None)) for layer in module.modules())
    return [width for width in widths if width is not None][-1]


@dataclass(frozen=True)
class Time:
    """How the transformer embeds a timestep, by paths of its modules."""

    projection: str | None
    """Sinusoids of the timestep; None where the embedder makes its own."""
    embedder: str | None
    """What comes after them; None takes the sinusoids as they are."""
    scale: float = 1.0
    argument: str = "timestep"

    def width(self, transformer: Any) -> int:
        if self.embedder is None:
            return transformer.get_submodule(self.projection).num_channels
        return last_width(transformer.get_submodule(self.embedder))

    def __call__(self, transformer: Any, call: Call, like: Tensor) -> Tensor:
        """(B, Dt); of a sample whose tokens are at several timesteps, the noisiest's; B may exceed that of `like`."""
        time = call[self.argument] * self.scale
        time = time.reshape(time.shape[0] if time.ndim else 1, -1).amax(dim=1)
        embedded = time if self.projection is None else transformer.get_submodule(self.projection)(time)
        if self.embedder is not None:
            embedder = transformer.get_submodule(self.embedder)
            if self.projection is not None:
                embedded = embedded.to(precision_of(embedder, like))
            embedded = embedder(embedded)
        return embedded.to(like.dtype).expand(max(like.shape[0], embedded.shape[0]), -1)


def precision_of(module: nn.Module, like: Tensor) -> torch.dtype:
    """A module's own, which may be kept above the transformer's; the latter where its weights are stored in 8 bits."""
    weight = next(module.parameters(), like)
    return weight.dtype if weight.is_floating_point() and weight.itemsize > 1 else like.dtype


@dataclass(frozen=True)
class Prompt:
    """A vector for the prompt: a pooled argument, or the mean of its projected tokens that are not padding."""

    argument: str = "encoder_hidden_states"
    through: tuple[str, ...] = ()
    """Paths of the modules that project it, in order; one that a transformer does without is None there."""
    mask: str | None = None
    """The argument (B, T) that is zero where text is padded."""
    config: str | None = None
    """Of the transformer's config: its width where nothing projects it."""

    def width(self, transformer: Any) -> int:
        if self.config is not None:
            return getattr(transformer.config, self.config)
        return last_width(transformer.get_submodule(self.through[-1]))

    def __call__(self, transformer: Any, call: Call) -> Tensor:
        text: Tensor = call[self.argument]
        for path in self.through:
            projection = functools.reduce(getattr, path.split("."), transformer)
            text = text if projection is None else projection(text)
        if text.ndim == 2:
            return text
        text = text.flatten(2, -2).mean(dim=2) if text.ndim > 3 else text
        mask = call.get(self.mask) if self.mask is not None else None
        if mask is None or mask.ndim != 2:
            return text.mean(dim=1)
        weights = mask.to(text.dtype)[..., None]  # (B, T, 1)
        return (text * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


TimeForm = Literal["fraction", "scheduler", "rising fraction", "rising"]
"""A timestep as the transformer gets it: falling 1 to 0, falling 1000 to 0, rising 0 to 1 against a scheduler that
falls, or rising 0 to 1000 with it."""


@dataclass(frozen=True, kw_only=True)
class PatternBackbone(Backbone):
    """An architecture by its declaration alone."""

    transformers: tuple[str, ...]
    stacks: tuple[Stack, ...]
    grid: Callable[[Any, Call], Layout]
    clock: TimeForm
    time: Time
    prompt: Prompt
    latents: str = "hidden_states"
    channel_axis: int | None = None
    conditional_half: int = 1
    toward: Literal[1, 0, -1] = 1
    layout_reads: tuple[str, ...] = ()
    heads: str | Callable[[Any], int] = "num_attention_heads"
    """Of the transformer's config, or a function of it."""
    width: str | None = None
    """Of the transformer's config; None if it is heads times their width."""
    head_width: str = "attention_head_dim"
    variant: Callable[[Any], str] = lambda config: ""
    """Of the transformer's config, what tells apart models of the same class and sizes."""
    notes: str = ""
    priced_by_running: bool = False
    lets_hold: bool = True
    unpriced: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that mark a call beside a step's own unless they have these values."""

    def sites(self, transformer: Any) -> list[Site]:
        sites: list[Site] = []
        for stack in self.stacks:
            first = 1 + max((site.layer for site in sites), default=-1)
            sites += stack.sites(transformer, first)
        return sites

    def spec(self, transformer: Any) -> BackboneSpec:
        config = transformer.config
        heads = getattr(config, self.heads) if isinstance(self.heads, str) else self.heads(config)
        return BackboneSpec(
            name=type(transformer).__name__,
            layers=sum(len(transformer.get_submodule(stack.path)) for stack in self.stacks),
            width=getattr(config, self.width) if self.width else heads * getattr(config, self.head_width),
            time_width=self.time.width(transformer),
            prompt_width=self.prompt.width(transformer),
            heads=heads,
            variant=self.variant(config),
        )

    def layout(self, transformer: Any, call: Call) -> Layout:
        return self.grid(transformer, call)

    @property
    def rises(self) -> bool:  # type: ignore[override]
        return self.clock == "rising"

    def timestep(self, call: Call) -> Tensor:
        time = call[self.time.argument]
        if self.clock == "rising fraction":
            return NOISE * (1 - time)
        return time * NOISE if self.clock == "fraction" else time

    def signals(self, transformer: Any, call: Call) -> Signals:
        prompt = self.prompt(transformer, call)
        time = self.time(transformer, call, prompt)
        return Signals(time, prompt.expand(time.shape[0], -1))  # one prompt may serve several images

    def is_extra(self, call: Call) -> bool:
        return any(call.get(name, usual) not in (usual, None) for name, usual in self.extra.items())
