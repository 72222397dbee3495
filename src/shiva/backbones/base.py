"""What the session must know of an architecture: where image tokens go in, and where they come out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, SiteKind
from shiva.core.reduction import Reduction, Streams

Call = dict[str, Any]
"""The arguments of a module's call, by name."""


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's positional parameters, as its class has them: an instance's forward may be wrapped."""
    skip = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in skip)


def bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    return {**dict(zip(names, args, strict=False)), **kwargs}


class RopeRows:
    """Rotary rows of each sample's own tokens, (B, S, D), for an attention that expects one (S, D) for all.

    diffusers adds the batch and head axes itself by indexing with `[None, :, None, :]`; each sample's
    rows already have the batch axis, so only the head axis is added.
    """

    def __init__(self, rows: Tensor):
        self.rows = rows

    def __getitem__(self, axes: Any) -> Tensor:
        return self.rows[:, :, None, :]


class Ropes(NamedTuple):
    """Rotary (cos, sin) rows where an attention has more keys than queries."""

    queries: tuple[Any, Any]
    keys: tuple[Any, Any]


def gather_rope(rope: tuple[Tensor, Tensor], positions: Tensor, text_tokens: int) -> tuple[Any, Any]:
    """Rows of (cos, sin), each (T + N, D), for all text tokens and the image tokens at positions (B, K)."""
    batch = positions.shape[0]
    text = torch.arange(text_tokens, device=positions.device).expand(batch, -1)
    rows = torch.cat([text, positions + text_tokens], dim=1)  # (B, T + K)
    cos, sin = rope
    if batch == 1:
        return cos.index_select(0, rows[0]), sin.index_select(0, rows[0])
    return RopeRows(cos[rows]), RopeRows(sin[rows])


@dataclass(frozen=True)
class Site:
    """One place where image tokens may be reduced: a block, an attention or an FFN."""

    name: str
    """Path of the module inside the transformer."""
    kind: SiteKind
    layer: int
    module: nn.Module
    outputs: tuple[str, ...] = ("image",)
    """The streams the module returns, in its order; a lone stream comes without a tuple."""
    image: str = "hidden_states"
    """The argument that carries image tokens."""
    text_leads: bool = False
    """The image argument is one sequence, text first (the attention of Flux single blocks)."""
    rope: str | None = None
    """The argument with rotary (cos, sin) rows of [text, image]."""
    mask: str | None = None
    """The argument with an additive mask (B, 1, N) over image keys."""
    names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", parameter_names(self.module))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return bind(self.names, args, kwargs)

    def image_of(self, call: Call, ctx: StepContext) -> Tensor:
        tokens = call[self.image]
        return tokens[:, ctx.text_tokens :] if self.text_leads else tokens

    def base_of(self, image: Tensor) -> Tensor:
        """What a token holds if the site adds nothing; a broadcast zero costs no memory."""
        return image if self.kind == "block" else image.new_zeros(()).expand_as(image)

    def run(
        self,
        forward: Callable[..., Any],
        call: Call,
        image: Tensor,
        reduction: Reduction | None,
        ctx: StepContext,
    ) -> Streams:
        """Call the module on image tokens (B, K, D), with everything per-token gathered alike."""
        call = dict(call)
        if self.text_leads:
            call[self.image] = torch.cat([call[self.image][:, : ctx.text_tokens], image], dim=1)
        else:
            call[self.image] = image
        if reduction is not None and self.rope is not None and call.get(self.rope) is not None:
            with ctx.phase("rope"):
                gathered = gather_rope(call[self.rope], reduction.positions, ctx.text_tokens)
                call[self.rope] = Ropes(gathered, call[self.rope]) if reduction.whole_keys else gathered
        mask = None if self.mask is None else call.get(self.mask)
        if reduction is not None and self.mask and mask is not None and not reduction.whole_keys:
            keys = reduction.positions[:, None, :]
            call[self.mask] = mask.expand(keys.shape[0], -1, -1).gather(2, keys)
        return self.unpack(forward(**call), ctx.text_tokens)

    def unpack(self, output: Any, text_tokens: int = 0) -> Streams:
        if self.text_leads:
            return Streams(image=output[:, text_tokens:], text=output[:, :text_tokens])
        if len(self.outputs) == 1:
            return Streams(image=output)
        if len(output) != len(self.outputs):
            raise ValueError(
                f"{self.name} returned {len(output)} streams where {len(self.outputs)} are known; "
                "detach image prompt adapters, or reduce whole blocks instead"
            )
        return Streams(**dict(zip(self.outputs, output, strict=True)))

    def pack(self, streams: Streams) -> Any:
        if self.text_leads:
            assert streams.text is not None
            return torch.cat([streams.text, streams.image], dim=1)
        if len(self.outputs) == 1:
            return streams.image
        return tuple(getattr(streams, name) for name in self.outputs)


def key_sites(path: str, layer: int, attention: Any, text_leads: bool = False) -> list[Site]:
    """The projections of an attention over image tokens to their keys and values; none where they are fused."""
    if getattr(attention, "fused_projections", False):
        return []
    modules = [(f"{path}.{name}", getattr(attention, name)) for name in ("to_k", "to_v")]
    return [
        Site(name, "keys", layer, module, image=parameter_names(module)[0], text_leads=text_leads)
        for name, module in modules
    ]


class Surroundings(NamedTuple):
    """What a transformer's own arguments say of a call."""

    grid: tuple[int, int]
    timestep: Tensor
    """In the scheduler's units, 0 to 1000."""
    text_tokens: int


class Signals(NamedTuple):
    """The backbone's own global embeddings, which the router reads."""

    time: Tensor  # (B, Dt)
    prompt: Tensor  # (B, Dp)


class Backbone:
    """One architecture. A subclass is one file; `register` makes it known."""

    transformers: ClassVar[tuple[str, ...]] = ()
    """Class names of the transformers it handles."""
    latents: ClassVar[str] = "hidden_states"
    """The transformer's argument with the noisy latents."""
    conditional_half: ClassVar[int] = 1
    """Which half of a batch under classifier-free guidance the pipeline gives the prompt, 0 or 1."""

    def blocks(self, transformer: Any) -> list[nn.Module]:
        return list(transformer.transformer_blocks)

    def sites(self, transformer: Any) -> list[Site]:
        raise NotImplementedError

    def whole_keys(self, transformer: Any, layers: Collection[int]) -> contextlib.AbstractContextManager[Any]:
        """A context in which attention of these layers takes more keys than queries; most do anyway."""
        return contextlib.nullcontext()

    def spec(self, transformer: Any) -> BackboneSpec:
        raise NotImplementedError

    def surroundings(self, transformer: Any, call: Call) -> Surroundings:
        raise NotImplementedError

    def signals(self, transformer: Any, call: Call) -> Signals:
        raise NotImplementedError

    def is_extra(self, call: Call) -> bool:
        """Whether a call is beside a step's own, on other blocks: it runs dense and is not counted."""
        return False


_REGISTRY: dict[str, Backbone] = {}

REFUSED = {
    "SanaTransformer2DModel": "its blocks mix neighbouring tokens by 3x3 convolutions, so none can be left out",
}


def register(backbone: Backbone) -> Backbone:
    """Make an architecture known to `shiva.attach`; also for backbones outside this package."""
    for name in backbone.transformers:
        _REGISTRY[name] = backbone
    return backbone


def backbone_of(transformer: nn.Module) -> Backbone:
    """The registered backbone of a transformer, found by its class or a base of it."""
    for cls in type(transformer).__mro__:
        if cls.__name__ in REFUSED:
            raise ValueError(f"{cls.__name__} cannot be reduced: {REFUSED[cls.__name__]}")
        if cls.__name__ in _REGISTRY:
            return _REGISTRY[cls.__name__]
    raise ValueError(
        f"{type(transformer).__name__} is not a supported transformer ({', '.join(sorted(_REGISTRY))}); "
        "add it with shiva.register_backbone, see CONTRIBUTING.md"
    )
