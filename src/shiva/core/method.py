"""The seam every method is written against.

A transformer call meets a method at these places, in this order; a method overrides what it needs:

    method.plan(ctx, timesteps)                  # how many tokens each layer keeps, before anything runs
    method.begin_step(ctx)                       # timestep, prompt, layout, counts are known
    for block in transformer:
        model:               x -> reduce -> all blocks -> restore -> x', from the first's input to the last's output
          around block:          x -> reduce -> block      -> restore -> x'
            around attention:        normed x -> reduce -> attention -> restore -> update
              around keys:               the projections to keys and values, which may return more tokens than they got
            around ffn:              normed x -> reduce -> ffn       -> restore -> update
    method.end_step(output, ctx)                 # the model's prediction, which it may replace

`around` is entered only at the sites that the method `selects`; around the model only its `reduction` is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from shiva.core import options
from shiva.core.context import Exploration, StepContext
from shiva.core.layout import Layout
from shiva.core.reduction import Reduction, Streams

SiteKind = Literal["model", "block", "attention", "keys", "cross_attention", "ffn"]
GuidancePolicy = Literal["shared", "per-sample", "max"]
Config = TypeVar("Config", bound="MethodConfig")

RunSite: TypeAlias = Callable[[Tensor, "Reduction | None"], Streams]
"""Runs the site on image tokens (B, K, D); None for the reduction means all of them, in order."""


@dataclass(frozen=True)
class Place:
    """Where in the network a method is being asked; a backbone's `Site` also knows how to run it."""

    name: str
    """Path of the module inside the transformer."""
    kind: SiteKind
    layer: int
    """Number of its block, counted over all stacks."""
    module: nn.Module
    _: KW_ONLY
    stack: str = "transformer_blocks"
    """The list of alike blocks it is in."""
    index: int = 0
    """Its block's place in the stack."""
    single_stream: bool = False
    """Its block fuses text with image, and attention with the FFN."""
    rotary: bool = False
    """Positions enter at every attention, as rows of a rotary table."""

    def references(self, rest: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Reference tokens before and after the image, of what its argument holds beside it, (B, R, D)."""
        raise NotImplementedError


@dataclass(frozen=True)
class BackboneSpec:
    """The sizes of a backbone that a method is built for."""

    name: str
    """The transformer's class name."""
    layers: options.Size
    width: options.Size
    time_width: options.Size
    prompt_width: options.Size
    heads: options.Size = 1
    variant: str = ""
    """What tells apart models of the same class and sizes."""


class Method(nn.Module):
    """Decides, at each site, which image tokens are computed and what the others receive.

    Start with `reduction`: most methods need nothing else. `selects`, `plan`, `begin_step` and `end_step` are for what
    depends on layer, step or output; `new_run` and `new_step` give it state; `around` is for a site that runs other
    than once on reduced tokens. What only training needs is in `Trainable`.
    """

    sites: frozenset[SiteKind] = frozenset({"block"})
    """Kinds of site at which it may act."""
    requires: frozenset[SiteKind] = frozenset()
    """Kinds of site it cannot do without."""
    guidance: GuidancePolicy = "per-sample"
    static: ClassVar[bool] = True
    """Whether every count of tokens is known before a step starts."""
    recordable: bool = False
    """Whether nothing is carried between steps, so that a recorded graph of a step can be replayed."""
    leading: int = 0
    """Blocks before the model site, which see all tokens, in a method that acts there."""
    whole_keys: bool = False
    """Whether tokens that are computed attend to all others, in the layers whose keys it selects."""
    fresh_keys: bool = False
    """Whether those keys are made anew of all tokens at every step, not kept from earlier ones."""
    needs_guidance: ClassVar[bool] = False
    """Whether it compares the two predictions of classifier-free guidance."""
    needs_signals: bool = False
    """Whether `ctx.time_embedding` and `ctx.prompt` must be filled in."""
    needs_sigma: bool = False
    """Whether `ctx.sigma` must be filled in."""

    new_run: ClassVar[type] = type(None)
    """State that lives from step to step of one sampling run: a dataclass of the method's own."""
    new_step: ClassVar[type] = type(None)
    """State that lives for one step, over all its sites and guidance calls: a dataclass of the method's own."""

    def __init__(self, config: MethodConfig, spec: BackboneSpec):
        super().__init__()
        self.config: Any = config
        self.spec = spec
        self.guidance = getattr(config, "guidance", self.guidance)
        self.eval()

    @property
    def holds(self) -> bool:
        """Whether several blocks in a row run on tokens that it gathered once."""
        return "model" in self.sites

    def __repr__(self) -> str:
        return f"{type(self.config).__name__} on {self.spec.name} ({self.spec.layers} layers of {self.spec.width})"

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        """How the site's tokens x (B, N, D) are reduced; None runs the site dense."""
        raise NotImplementedError

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        """Run a site on reduced tokens; `base` (B, N, D) is what a token holds if the site adds nothing to it."""
        reduction = self.reduction(x, site, ctx)
        return run(x, None) if reduction is None else run_reduced(run, reduction, x, base, ctx)

    def _sees_all(self, ctx: StepContext) -> bool:
        """Whether, in this run, tokens that are computed attend to all others."""
        return self.whole_keys

    def selects(self, site: Place) -> bool:
        """Whether the method acts at this site at all; asked again at the start of every run."""
        return site.kind in self.sites

    def plan(self, ctx: StepContext, timesteps: list[float] | None) -> tuple[int, ...]:
        """Tokens to keep per layer at this step, where that is known beforehand; () otherwise."""
        return ()

    def begin_step(self, ctx: StepContext) -> None:
        """Once a call, before the transformer runs."""

    def end_step(self, output: Tensor, ctx: StepContext) -> Tensor | None:
        """Once a call, with the model's prediction; what it returns takes the prediction's place."""

    def _forget(self) -> None:
        """Let go of what it keeps from run to run: its session ends."""

    def own_flops(self, ctx: StepContext, counts: Sequence[float]) -> float:
        """FLOPs a sample that it spends itself, beside the sites, at a step whose layers run on so many tokens."""
        return 0.0


def run_reduced(run: RunSite, reduction: Reduction, x: Tensor, base: Tensor, ctx: StepContext) -> Streams:
    """A site on the reduced tokens of x (B, N, D), its results at all places again."""
    with ctx.phase("gather"):
        reduced = reduction.reduce(x)
    out = run(reduced, reduction)
    with ctx.phase("scatter"):
        return out._replace(image=reduction.restore(out.image, base))


class MethodConfig:
    """Base of the config dataclasses; the config's type picks the method, as in torchao.

    A subclass is a frozen dataclass with one line of docstring per field, and builds its method.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}}
    """Named sets of values beside `official`, which is the default everywhere; where none are named, so is `paper`."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields that shape the weights or say how to train them; a trained checkpoint cannot change them."""
    knob: ClassVar[str | None] = None
    """The field that changes what it costs, without training again."""
    steps_differ: ClassVar[bool] = False
    """Whether how many tokens run depends on the step, beyond the first."""
    either: ClassVar[frozenset[str]] = frozenset()
    """Fields of which one at most may be set: changing one clears the others."""
    known: ClassVar[dict[str, type[MethodConfig]]] = {}
    """Every method by its config's name: a checkpoint names the one it was trained with."""

    def __init_subclass__(cls) -> None:
        if "build" in cls.__dict__:
            MethodConfig.known[cls.__name__] = cls

    def __post_init__(self) -> None:
        """Hold the options to their annotations; a part with more to check calls this first."""
        options.conform(self)

    def __str__(self) -> str:
        """The call that makes it: its name, and the options that are not the default."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [(field.name, getattr(self, field.name), field.default) for field in fields]
        told = ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
        return f"{type(self).__name__}({told})"

    def build(self, spec: BackboneSpec) -> Method:
        raise NotImplementedError

    def turned(self, at: float) -> dict[str, Any] | None:
        """Options that make it cost less without training again: 0 as gentle as can be, 1 as strong; None for none.

        A method with a `flops` option needs no such knob: it meets a share by itself.
        """
        return None

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


Self = TypeVar("Self", bound="Trainable")


class Trainable(Method):
    """A method whose weights, or whose adapter, are learned."""

    needs_updates: bool = False
    """Whether training must provide the dense pass's updates, in `ctx.teacher`."""
    needs_earlier: bool = False
    """Whether training must provide those of an earlier step too, in `ctx.teacher.earlier`."""
    trained: bool = False
    """Whether its weights were loaded, or are being trained."""
    untrained: ClassVar[str] = (
        "chooses tokens by untrained weights; attach a trained checkpoint, or shiva.Sweep, which needs no training"
    )
    """What a user should know who attached it without any."""

    def train(self: Self, mode: bool = True) -> Self:
        self.trained = self.trained or mode
        return super().train(mode)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.trained = True
        return super().load_state_dict(*args, **kwargs)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """What a stage of training may choose to train, by name."""
        return {"router": list(self.parameters())} if any(True for _ in self.parameters()) else {}

    def begin_batch(self, timesteps: Sequence[float], explore: Exploration) -> None:
        """The timestep of each micro-batch of the global batch, before the first of them runs.

        Every rank is told all of them, so what depends on time alone needs no communication.
        """

    def losses(self, ctx: StepContext) -> dict[str, Tensor]:
        """The method's own objectives of a call, by name."""
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
        """The reverse of `tables`."""
