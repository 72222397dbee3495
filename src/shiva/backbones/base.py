"""What the session must know of an architecture: where image tokens go in, and where they come out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from shiva.backbones.per_token import Chosen, PerTokens
from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Place, SiteKind
from shiva.core.reduction import Reduction, Streams

TextPlace = Literal["apart", "leads", "trails"]
Call = dict[str, Any]
"""The arguments of a module's call, by name."""


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's positional parameters, as its class has them: an instance's forward may be wrapped."""
    skip = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in skip)


def bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    return {**dict(zip(names, args, strict=False)), **kwargs}


@dataclass(frozen=True)
class Site(Place):
    """One place where image tokens may be reduced: a block, an attention or an FFN."""

    outputs: tuple[str, ...] = ("image",)
    """The streams the module returns, in its order; a lone stream comes without a tuple."""
    image: str = "hidden_states"
    """The argument that carries image tokens."""
    text: TextPlace = "apart"
    """Whether the image argument is one sequence with the text, and which comes first."""
    per_token: PerTokens = field(default_factory=dict)
    """Arguments with a row for each token, and how each is cut to the tokens that run."""
    names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", parameter_names(self.module))

    def inside(self, name: str, kind: SiteKind, **changes: Any) -> Site:
        """A sub-layer of this block, by its name there."""
        alone: dict[str, Any] = {"outputs": ("image",), "per_token": {}}
        module = getattr(self.module, name)
        return replace(self, name=f"{self.name}.{name}", kind=kind, module=module, **{**alone, **changes})

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return bind(self.names, args, kwargs)

    def start(self, layout: Layout) -> int:
        """Where the image's own tokens begin in their argument."""
        return layout.before + (layout.text if self.text == "leads" else 0)

    def rest(self, layout: Layout) -> int:
        """Tokens of the image argument that are not the image's own."""
        return layout.reference + (0 if self.text == "apart" else layout.text)

    def split(self, sequence: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """The image's own tokens of a sequence, and the others in one piece."""
        start, rest = self.start(layout), self.rest(layout)
        if not rest:
            return sequence, None
        stop = sequence.shape[1] - (rest - start)
        head, tail = sequence[:, :start], sequence[:, stop:]
        others = tail if not start else head if stop == sequence.shape[1] else torch.cat([head, tail], dim=1)
        return sequence[:, start:stop], others

    def references(self, rest: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Of what `split` leaves (B, R, D), the reference tokens before and after the image."""
        references, _ = self.split(rest, layout.alone())
        before, after = references.tensor_split([layout.before], dim=1)
        return before, after

    def join(self, image: Tensor, rest: Tensor | None, layout: Layout) -> Tensor:
        """The reverse of `split`."""
        if rest is None:
            return image
        if image.shape[0] != rest.shape[0]:
            raise ValueError(
                f"{self.name} is given text or reference tokens of each sample beside the image, and cannot run on a "
                "number of tokens that differs from sample to sample (DyDiT); use a method with static counts"
            )
        head, tail = rest.tensor_split([self.start(layout)], dim=1)
        return torch.cat([head, image, tail], dim=1)

    def image_of(self, call: Call, ctx: StepContext) -> Tensor:
        return self.split(call[self.image], ctx.layout)[0]

    def run(
        self,
        forward: Callable[..., Any],
        call: Call,
        image: Tensor,
        reduction: Reduction | None,
        ctx: StepContext,
    ) -> Streams:
        """Call the module on image tokens (B, K, D), with everything per-token gathered alike."""
        call, layout = dict(call), ctx.layout
        frozen, references = ctx.frozen and self.kind == "block", None
        inside = layout.alone() if frozen else layout
        rest = self.split(call[self.image], layout)[1]
        if frozen and rest is not None:
            references, rest = self.split(rest, inside)
        call[self.image] = self.join(image, rest, inside)
        if (reduction is not None or frozen) and self.per_token:
            whole_keys = reduction is not None and reduction.whole_keys
            chosen = Chosen(positions_of(reduction, image), layout, whole_keys, frozen)
            with ctx.phase("rope"):
                for name, gather in self.per_token.items():
                    if call.get(name) is not None:
                        call[name] = gather(call[name], chosen)
        ctx.layout = inside
        try:
            streams = self.unpack(forward(**call), inside)
        finally:
            ctx.layout = layout
        return streams if references is None else streams._replace(rest=self.join(references, streams.rest, inside))

    def unpack(self, output: Any, layout: Layout) -> Streams:
        if len(self.outputs) == 1:
            image, rest = self.split(output, layout)
            return Streams(image, None, rest)
        if len(output) != len(self.outputs):
            raise ValueError(
                f"{self.name} returned {len(output)} streams where {len(self.outputs)} are known; "
                "detach image prompt adapters, or reduce whole blocks instead"
            )
        named = dict(zip(self.outputs, output, strict=True))
        image, rest = self.split(named["image"], layout)
        return Streams(image, named["text"], rest)

    def pack(self, streams: Streams, layout: Layout) -> Any:
        image = self.join(streams.image, streams.rest, layout)
        if len(self.outputs) == 1:
            return image
        return tuple(image if name == "image" else streams.text for name in self.outputs)


def positions_of(reduction: Reduction | None, image: Tensor) -> Tensor:
    """Where on the grid the tokens of image (B, K, D) are: (B, K)."""
    if reduction is not None:
        return reduction.positions
    return torch.arange(image.shape[1], device=image.device).expand(image.shape[0], -1)


def is_fused(attention: Any) -> bool:
    """Whether an attention projects queries, keys and values at once; the older class tells by its processor alone."""
    if isinstance(attention, Attention):
        return type(attention.processor).__name__.startswith("Fused")
    return getattr(attention, "fused_projections", False)


def key_sites(attention: Site, text: TextPlace | None = None) -> list[Site]:
    """The projections of an attention over image tokens to their keys and values; none where they are fused.

    `text` says where the text is in what they are given, if elsewhere than in the attention's own argument.
    """
    if is_fused(attention.module):
        return []
    return [
        attention.inside(
            name, "keys", image=parameter_names(getattr(attention.module, name))[0], text=text or attention.text
        )
        for name in ("to_k", "to_v")
    ]


class Signals(NamedTuple):
    """The backbone's own global embeddings, which the router reads."""

    time: Tensor  # (B, Dt)
    prompt: Tensor  # (B, Dp)


class Backbone:
    """One architecture; `register` makes it known. Most are entries of a table (`patterns.PatternBackbone`)."""

    transformers: tuple[str, ...] = ()
    """Class names of the transformers it handles."""
    latents: str = "hidden_states"
    """The transformer's argument with the noisy latents."""
    channel_axis: int | None = None
    """Of the latents, where channels do not come second, or last in tokens (B, N, C)."""
    conditional_half: int = 1
    """Which half of a batch under classifier-free guidance the pipeline gives the prompt, 0 or 1."""
    layout_reads: tuple[str, ...] = ()
    """Arguments whose values, not only shapes, `layout` reads; a session reads them once as long as they stay."""

    toward: Literal[1, 0, -1] = 1
    """What it predicts: 1, noise - clean, as most flows; -1, clean - noise; 0, nothing of a flow."""
    rises: bool = False
    """Whether timesteps rise from noise to image, with the scheduler's own."""
    priced_by_running: bool = False
    """Whether its calls depend on values, so that FLOPs are counted on a real call, not on the meta device."""
    lets_hold: bool = True
    """Whether several blocks in a row may run on fewer tokens: it counts none of them in between."""
    unpriced: tuple[str, ...] = ()
    """Arguments without which a call is priced: a cache of keys, which is gone when the run is over."""
    notes: str = ""
    """What a user should know of it."""

    def sites(self, transformer: Any) -> list[Site]:
        raise NotImplementedError

    def latents_of(self, call: Call) -> Tensor:
        """The noisy latents of a call; two calls of one step may give the very same tensor."""
        return call[self.latents]

    def channels_second(self, latents: Any) -> Tensor:
        """Latents or a prediction as methods see them: (B, C, H, W), of clips (B, C, F, H, W), or tokens (B, N, C)."""
        found = torch.stack(latents) if isinstance(latents, list) else latents
        return found if self.channel_axis is None else found.movedim(self.channel_axis, 1)

    def in_place_of(self, prediction: Tensor, given: Any) -> Any:
        """The reverse of `channels_second`, in the form of what the transformer gave."""
        found = prediction if self.channel_axis is None else prediction.movedim(1, self.channel_axis)
        return list(found) if isinstance(given, list) else found

    def spec(self, transformer: Any) -> BackboneSpec:
        raise NotImplementedError

    def layout(self, transformer: Any, call: Call) -> Layout:
        """Where the image tokens of a call lie."""
        raise NotImplementedError

    def timestep(self, call: Call) -> Tensor:
        """In the scheduler's units, 0 to 1000."""
        return call["timestep"]

    def signals(self, transformer: Any, call: Call) -> Signals:
        raise NotImplementedError

    def priced(self, call: Call) -> Call:
        """What is kept of a call to price it by, after its run."""
        return {name: value for name, value in call.items() if name not in self.unpriced}

    def is_extra(self, call: Call) -> bool:
        """Whether a call is beside a step's own, on other blocks: it runs dense and is not counted."""
        return False


_REGISTRY: dict[str, Backbone] = {}

CONVOLVES = "its blocks mix neighbouring tokens by 3x3 convolutions, so none can be left out"
REFUSED = {
    "SanaTransformer2DModel": CONVOLVES,
    "SanaVideoTransformer3DModel": CONVOLVES,
    "SanaWMTransformer3DModel": CONVOLVES,
    "NucleusMoEImageTransformer2DModel": "its experts choose among the tokens of a sequence, so fewer are routed anew",
    "Cosmos3OmniTransformer": "it packs samples into one sequence without a batch axis",
    "Ideogram4Transformer2DModel": "guidance runs two transformers on other sequences, which cannot agree on tokens",
    "Kandinsky6SRTransformer3DModel": "its attention is over tiles of the whole grid",
}


def register(backbone: Backbone) -> Backbone:
    """Make an architecture known to `shiva.attach`; also for backbones outside this package."""
    for name in backbone.transformers:
        _REGISTRY[name] = backbone
    return backbone


def registered() -> dict[str, Backbone]:
    """Every known transformer class, by name."""
    return dict(sorted(_REGISTRY.items()))


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
