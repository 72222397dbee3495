"""The seam every method is written against.

A transformer call meets a method at these places, in this order; a method overrides what it needs:

    method.begin_step(ctx)                       # timestep, prompt, grid, counts are known
    for block in transformer:
        method.observe(x, site, ctx)             # the block's input, before any sub-layer
        around block:        x -> reduce -> block      -> restore -> x'
          around attention:      normed x -> reduce -> attention -> restore -> update
            around keys:             the projections to keys and values, which may return more tokens than they got
          around ffn:            normed x -> reduce -> ffn       -> restore -> update
    method.end_step(output, ctx)                 # the model's prediction

`around` is entered only at the kinds of site named in `sites`. A pruner or a merger implements
`reduction` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import StepContext
from shiva.core.reduction import Reduction, Streams

SiteKind = Literal["block", "attention", "keys", "cross_attention", "ffn"]
GuidancePolicy = Literal["shared", "per-sample", "max"]
Config = TypeVar("Config", bound="MethodConfig")
Self = TypeVar("Self", bound="Method")

Run: TypeAlias = Callable[[Tensor, "Reduction | None"], Streams]
"""Runs the site on image tokens (B, K, D); None for the reduction means all of them, in order."""


class Place(Protocol):
    """Where in the network a method is being asked: a `Site` of a backbone."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> SiteKind: ...
    @property
    def layer(self) -> int: ...
    @property
    def module(self) -> nn.Module: ...


@dataclass(frozen=True)
class BackboneSpec:
    """The sizes of a backbone that a method is built for."""

    name: str
    """The transformer's class name."""
    layers: int
    width: int
    time_width: int
    prompt_width: int
    heads: int = 1
    variant: str = ""
    """What tells apart models of the same class and sizes."""


@dataclass
class Exploration:
    """How a training step departs from inference; a stage of training sets it before each micro-batch."""

    ratio: float | None = None
    """Keep ratio of every reduced layer; None asks the method's own policy."""
    logit_noise: float = 0.0
    """Deviation of the noise on the policy's logits."""
    score_noise: float = 0.0
    """Deviation of the noise on the router's scores."""
    tau_rank: float = 0.2
    """Temperature of the soft rank."""
    tau_sel: float = 0.1
    """Temperature of the inclusion, as a share of N."""
    step: int = 0
    """Optimizer steps taken so far, in all stages."""
    index: int = 0
    """Which micro-batch of the global batch this is, counted over ranks and accumulation steps."""


class Method(nn.Module):
    """Decides, at each site, which image tokens are computed and what the others receive."""

    sites: frozenset[SiteKind] = frozenset({"block"})
    guidance: GuidancePolicy = "per-sample"
    static: ClassVar[bool] = True
    """Whether every count of tokens is known before a step starts."""
    needs_guidance: ClassVar[bool] = False
    """Whether it compares the two predictions of classifier-free guidance."""
    needs_signals: ClassVar[bool] = False
    """Whether `ctx.time_embedding` and `ctx.prompt` must be filled in."""
    needs_updates: bool = False
    """Whether training must provide the dense pass's updates, in `ctx.teacher`."""
    needs_earlier: bool = False
    """Whether training must provide those of an earlier step too, in `ctx.teacher.earlier`."""

    trained: bool = False
    """Whether its weights were loaded, or are being trained."""

    def __init__(self, config: MethodConfig, spec: BackboneSpec):
        super().__init__()
        self.config: Any = config
        self.spec = spec
        self.exploration = Exploration()
        self.eval()

    def train(self: Self, mode: bool = True) -> Self:
        self.trained = self.trained or mode
        return super().train(mode)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.trained = True
        return super().load_state_dict(*args, **kwargs)

    @property
    def needs_training(self) -> bool:
        """Whether trained weights decide at inference."""
        return bool(self.groups())

    def __repr__(self) -> str:
        return f"{type(self.config).__name__} on {self.spec.name} ({self.spec.layers} layers of {self.spec.width})"

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        """How the site's tokens x (B, N, D) are reduced; None runs the site dense."""
        raise NotImplementedError

    def around(self, run: Run, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        """Run a site on reduced tokens. DiffCR overrides this to run twice."""
        reduction = self.reduction(x, site, ctx)
        if reduction is None:
            return run(x, None)
        with ctx.phase("gather"):
            reduced = reduction.reduce(x)
        out = run(reduced, reduction)
        with ctx.phase("scatter"):
            return out._replace(image=reduction.restore(out.image, base))

    def selects(self, site: Place) -> bool:
        """Whether the method acts at this site at all."""
        return site.kind in self.sites

    def whole_keys(self, layer: int) -> bool:
        """Whether a layer's tokens, however few, attend to all others."""
        return False

    def check_sites(self, sites: Sequence[Place]) -> None:
        """Refuse a transformer that lacks sites the method cannot do without; `sites` are those it selects."""

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        """Tokens to keep per layer at this step, where that is known beforehand; () otherwise."""
        return ()

    def begin_step(self, ctx: StepContext) -> None:
        pass

    def observe(self, x: Tensor, site: Place, ctx: StepContext) -> None:
        pass

    def end_step(self, output: Tensor, ctx: StepContext) -> None:
        pass

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """What a stage of training may choose to train, by name."""
        return {"router": list(self.parameters())} if any(True for _ in self.parameters()) else {}

    def begin_batch(self, timesteps: Sequence[float]) -> None:
        """Training: the timestep of each micro-batch of the global batch, before the first of them runs.

        Every rank is told all of them, so what depends on time alone needs no communication.
        """

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        """The method's own training objectives of the last call, by name."""
        return {}

    def readings(self) -> dict[str, float]:
        """Numbers of its state that a training log should show."""
        return {}

    def at_keep(self, keep: float) -> contextlib.AbstractContextManager[None] | None:
        """A context that keeps this share everywhere, for measuring; None where the method has no such knob."""
        return None

    def finish(self) -> None:
        """Turn what was learned so far into what inference reads, such as a policy into its table."""

    def tables(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside the weights, such as a compiled schedule."""
        return {}

    def load_tables(self, tables: dict[str, Tensor]) -> None:
        pass


class MethodConfig:
    """Base of the config dataclasses; the config's type picks the method, as in torchao.

    A subclass is a frozen dataclass with one line of docstring per field, and builds its method.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields that shape the weights or say how to train them; a trained checkpoint cannot change them."""
    knob: ClassVar[str | None] = None
    """The field that changes what a trained checkpoint costs, where one does."""
    either: ClassVar[frozenset[str]] = frozenset()
    """Fields of which one at most may be set: changing one clears the others."""
    known: ClassVar[dict[str, type[MethodConfig]]] = {}
    """Every config class by name: a checkpoint names the one it was trained with."""

    def __init_subclass__(cls) -> None:
        MethodConfig.known[cls.__name__] = cls

    def build(self, spec: BackboneSpec) -> Method:
        raise NotImplementedError

    @classmethod
    def preset(cls: type[Config], name: str, **changes: Any) -> Config:
        """The config under a named set of values: `official` (the default), `paper`, or another of the class."""
        known = {"official": {}, **cls.presets}
        if name not in known:
            raise ValueError(f"{cls.__name__} has no preset {name!r}; pass one of {', '.join(map(repr, known))}")
        return cls(**known[name]).changed(changes)

    def changed(self: Config, changes: Mapping[str, Any]) -> Config:
        """A copy with some fields changed, refusing unknown ones by name."""
        named = {name for name in self.either if changes.get(name) is not None}
        cleared = dict.fromkeys(self.either - named) if named else {}
        return options.replace(self, {**cleared, **changes})


def unify_guidance(scores: Tensor, policy: GuidancePolicy, ctx: StepContext) -> Tensor:
    """Make the two guidance halves of scores (B, N) agree under the policy, so they keep the same tokens."""
    if policy == "per-sample" or not ctx.guidance_pairs:
        return scores
    first, second = scores.chunk(2)
    joint = torch.maximum(first, second) if policy == "max" else first
    return torch.cat([joint, joint])
