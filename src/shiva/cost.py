"""What a run costs in FLOPs: prices from the real forward on the meta device, and the summary that adds them up."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from shiva.backbones.base import Call, Site
from shiva.compat import caches_off, native_attention, offloading_off, plain_linears
from shiva.core.context import StepContext
from shiva.core.cost import ZERO, Flops, SiteCost, count, total
from shiva.core.reduction import Reduction


def to_meta(value: Any) -> Any:
    """A tensor's shape and precision alone, without what else a kind of tensor may hold."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def meta_call(module: nn.Module, **call: Any) -> Any:
    """Call a module with its weights and arguments on the meta device: shapes only, nothing computed.

    Where the arguments are real, as for a transformer whose calls depend on values, it is called as it is.
    """
    if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(call)):
        return module(**call)
    weights = {name: to_meta(p) for name, p in [*module.named_parameters(), *module.named_buffers()]}
    with torch.device("meta"):
        return functional_call(module, weights, kwargs=call)


@dataclass(frozen=True)
class Keys:
    """Projections to keys and values where attention has more of them than queries."""

    sites: Sequence[Site] = ()
    whole: bool = False
    """Of all tokens of the image, not only of frozen references."""
    fresh: bool = False
    """They are made anew, not kept."""


@contextlib.contextmanager
def lengthened(sites: Sequence[Site], shapes: StepContext, keys: Keys) -> Iterator[None]:
    """Inside this context projections to keys return more tokens than they got, or get them, as the method has it."""
    frozen = shapes.layout.reference if shapes.frozen else 0

    def whole(site: Site, tokens: Tensor) -> Tensor:
        length = shapes.tokens + site.rest(shapes.layout) if keys.whole else tokens.shape[1]
        return tokens.new_empty(tokens.shape[0], length + frozen, tokens.shape[2])

    def lengthen(site: Site, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return whole(site, output)

    def give_all(site: Site, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], Call]:
        call = site.bind(args, kwargs)
        return (), {**call, site.image: whole(site, call[site.image])}

    handles = [site.module.register_forward_hook(functools.partial(lengthen, site)) for site in sites]
    if keys.fresh:
        given = (functools.partial(give_all, site) for site in sites)
        handles += [
            site.module.register_forward_pre_hook(give, with_kwargs=True)
            for site, give in zip(sites, given, strict=True)
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def site_cost(site: Site, call: Call, shapes: StepContext, keys: Keys, inside: Sequence[Site] = ()) -> SiteCost:
    """The FLOPs of a site as a function of its image tokens, from three lengths on the meta device.

    `inside` are its projections to keys, where attention sees more of them than it has queries.
    """
    batch, _, width = site.image_of(call, shapes).shape

    def flops_at(tokens: int) -> Flops:
        image = call[site.image].new_zeros(batch, tokens, width)
        positions = torch.zeros(batch, tokens, device=image.device, dtype=torch.long)
        same = Reduction(lambda x: x, lambda x, base: x, positions, whole_keys=keys.whole and bool(inside))
        with lengthened(inside, shapes, keys):
            return count(lambda: site.run(functools.partial(meta_call, site.module), call, image, same, shapes))

    return SiteCost.fit(flops_at)


def what_prices(site: Site, call: Call, whole: Sequence[Site]) -> Hashable:
    """Sites that agree in this cost the same: the modules inside, their sizes, and the shapes they are called with."""
    processors = tuple(type(getattr(module, "processor", None)) for module in site.module.modules())
    weights = tuple((name, p.shape, p.dtype) for name, p in site.module.named_parameters())
    shapes = tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf), call)
    inside = tuple(other.name.removeprefix(site.name) for other in whole)
    return (site.kind, site.outputs, site.text, repr(site.module), processors, weights, repr(shapes), inside)


def site_costs(
    sites: Sequence[Site],
    calls: Mapping[str, Call],
    shapes: StepContext,
    keys: Keys,
) -> dict[str, SiteCost]:
    """The cost of every site by name; those of one make are counted once."""
    known: dict[Hashable, SiteCost] = {}
    costs = {}
    for site in sites:
        call = calls[site.name]
        inside = [projection for projection in keys.sites if projection.name.startswith(f"{site.name}.")]
        make = what_prices(site, call, inside)
        if make not in known:
            known[make] = site_cost(site, call, shapes, keys, inside)
        costs[site.name] = known[make]
    return costs


def price(
    transformer: nn.Module,
    example: Call,
    sites: Sequence[Site],
    shapes: StepContext,
    keys: Keys,
    probed: AbstractContextManager[Mapping[str, Call]],
) -> tuple[Flops, dict[str, SiteCost]]:
    """FLOPs of a call run dense, and of each site in it; inside `probed` the sites' own calls are collected."""
    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(probed)
        for aside in (caches_off, offloading_off, plain_linears, native_attention):
            stack.enter_context(aside(transformer))
        dense = count(lambda: meta_call(transformer, **example))
        return dense, site_costs(sites, calls, shapes, keys)


# -- a run -------------------------------------------------------------------------------------------


def tensor_bytes(state: Any) -> int:
    """Memory of the tensors that a method's state holds."""
    if dataclasses.is_dataclass(state):
        return sum(tensor_bytes(getattr(state, f.name)) for f in dataclasses.fields(state))
    if isinstance(state, dict):
        return sum(map(tensor_bytes, state.values()))
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class StepRecord:
    """One transformer call: how many of its tokens each site ran on."""

    timestep: float
    tokens: int
    kept: dict[str, int]
    skipped: tuple[str, ...] = ()
    """Blocks that were not called, because a cache over them answered."""
    own: Flops = ZERO
    """What the method itself spent."""
    frozen: bool = False
    """Whether reference tokens did not run."""


@dataclass(frozen=True)
class Summary:
    """Layers, steps, totals and overhead of one sampling run; `str()` draws it, `to_dict()` is for programs."""

    method: str
    places: list[tuple[str, str, int]]
    """(name, kind, layer) of each site that is reduced, and of every block."""
    steps: list[StepRecord]
    costs: dict[str, SiteCost]
    dense: Flops
    """FLOPs of one dense call."""
    seconds: dict[str, float]
    frozen: dict[str, SiteCost] = field(default_factory=dict)
    """Costs of blocks in calls whose reference tokens do not run."""
    cached_bytes: int = 0
    """Memory of what the method carries from step to step."""

    def _saved(self, step: StepRecord) -> Flops:
        """FLOPs a call did not spend; a block that is reduced inside is priced at its inner sites."""
        prices = self.frozen if step.frozen else self.costs
        reduced = (
            self.costs[name](step.tokens) - prices[name](step.kept[name])
            for name, _, _ in self.places
            if name in step.kept
        )
        return total(reduced) + total(self.costs[name](step.tokens) for name in step.skipped)

    def step_flops(self) -> list[Flops]:
        return [self.dense - self._saved(step) + step.own for step in self.steps]

    @property
    def flops(self) -> Flops:
        return total(self.step_flops())

    @property
    def flops_share(self) -> float:
        """True FLOPs of the run as a share of the dense run's; of the method's own, the fill's are counted."""
        return self.flops.true / (self.dense.true * len(self.steps)) if self.steps else 1.0

    def layers(self) -> list[dict[str, Any]]:
        """Mean kept tokens, keep ratio and FLOPs of each reduced site over the run."""
        rows = []
        for name, kind, layer in self.places:
            seen = [(step.kept[name], step.tokens) for step in self.steps if name in step.kept]
            if not seen:
                continue
            kept = sum(k for k, _ in seen) / len(seen)
            tokens = sum(n for _, n in seen) / len(seen)
            rows.append(
                {
                    "layer": layer,
                    "site": name,
                    "kind": kind,
                    "kept": kept,
                    "tokens": tokens,
                    "keep": kept / tokens,
                    "tflops": sum(self.costs[name](k).true for k, _ in seen) / len(seen) / 1e12,
                }
            )
        return rows

    @property
    def keep(self) -> float:
        """Mean share of tokens kept over the sites and steps that were reduced at some step."""
        shares = [row["keep"] for row in self.layers()]
        reduced = [share for share in shares if share < 1.0]
        return sum(reduced) / len(reduced) if reduced else 1.0

    def to_dict(self) -> dict[str, Any]:
        per_step = self.step_flops()
        return {
            "method": self.method,
            "keep": self.keep,
            "flops_share": self.flops_share,
            "tflops": self.flops.true / 1e12,
            "tflops_paper_convention": self.flops.paper / 1e12,
            "dense_tflops_per_step": self.dense.true / 1e12,
            "layers": self.layers(),
            "steps": [
                {"timestep": step.timestep, "kept": step.kept, "tflops": flops.true / 1e12}
                for step, flops in zip(self.steps, per_step, strict=True)
            ],
            "seconds": self.seconds,
            "cached_bytes": self.cached_bytes,
        }

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.method}: nothing has run yet"
        table = Table(title=f"{self.method}, {len(self.steps)} calls of {self.steps[0].tokens} image tokens")
        for heading in ("layer", "site", "kept", "keep", "GFLOPs a call"):
            table.add_column(heading, justify="left" if heading == "site" else "right")
        for row in self.layers():
            table.add_row(
                str(row["layer"]),
                row["site"],
                f"{row['kept']:.0f}",
                f"{row['keep']:.3f}",
                f"{row['tflops'] * 1e3:.3g}",
            )
        table.add_section()
        table.add_row("", "whole run", "", f"{self.keep:.3f}", f"{self.flops_share:.1%} of dense")
        text = io.StringIO()
        console = Console(file=text, width=100, force_jupyter=False, force_terminal=False, color_system=None)
        console.print(table)
        if self.seconds:
            spent = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in self.seconds.items())
            console.print(f"milliseconds in the reduction path: {spent}")
        if self.cached_bytes:
            console.print(f"carried from step to step: {self.cached_bytes / 2**20:.1f} MiB")
        return text.getvalue()
