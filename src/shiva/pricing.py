"""What a module costs in FLOPs, from its real forward on the meta device: shapes only, nothing computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from shiva.backbones.base import Call, Site
from shiva.core.context import StepContext
from shiva.core.cost import Flops, SiteCost, count
from shiva.core.reduction import Reduction


def tensor_bytes(values: dict[Any, Any]) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def to_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def meta_call(module: nn.Module, **call: Any) -> Any:
    """Call a module with its weights and arguments on the meta device."""
    weights = {name: to_meta(p) for name, p in [*module.named_parameters(), *module.named_buffers()]}
    with torch.device("meta"):
        return functional_call(module, weights, kwargs=call)


@contextlib.contextmanager
def lengthened(sites: Sequence[Site], shapes: StepContext) -> Iterator[None]:
    """Inside this context the sites return all image tokens, however few they got."""

    def lengthen(site: Site, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        tokens = shapes.tokens + (shapes.text_tokens if site.text_leads else 0)
        return output.new_empty(output.shape[0], tokens, output.shape[2])

    handles = [site.module.register_forward_hook(functools.partial(lengthen, site)) for site in sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def site_cost(site: Site, call: Call, shapes: StepContext, whole: Sequence[Site] = ()) -> SiteCost:
    """The FLOPs of a site as a function of its image tokens, from three lengths on the meta device.

    `whole` are projections inside it whose results attention sees of all tokens of the grid.
    """
    batch, _, width = site.image_of(call, shapes).shape

    def flops_at(tokens: int) -> Flops:
        image = torch.empty(batch, tokens, width, device="meta", dtype=call[site.image].dtype)
        positions = torch.empty(batch, tokens, device="meta", dtype=torch.long)
        same = Reduction(lambda x: x, lambda x, base: x, positions, whole_keys=bool(whole))
        with lengthened(whole, shapes):
            return count(lambda: site.run(functools.partial(meta_call, site.module), call, image, same, shapes))

    return SiteCost.fit(flops_at)


def what_prices(site: Site, call: Call, whole: Sequence[Site]) -> Hashable:
    """Sites that agree in this cost the same: the modules inside, their sizes, and the shapes they are called with."""
    processors = tuple(type(getattr(module, "processor", None)) for module in site.module.modules())
    weights = tuple((name, p.shape, p.dtype) for name, p in site.module.named_parameters())
    shapes = tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf), call)
    inside = tuple(other.name.removeprefix(site.name) for other in whole)
    return (site.kind, site.outputs, site.text_leads, repr(site.module), processors, weights, repr(shapes), inside)


def site_costs(
    sites: Sequence[Site], calls: Mapping[str, Call], shapes: StepContext, keys: Sequence[Site] = ()
) -> dict[str, SiteCost]:
    """The cost of every site by name; those of one make are counted once."""
    known: dict[Hashable, SiteCost] = {}
    costs = {}
    for site in sites:
        call, whole = calls[site.name], [s for s in keys if s.name.startswith(f"{site.name}.")]
        make = what_prices(site, call, whole)
        if make not in known:
            known[make] = site_cost(site, call, shapes, whole)
        costs[site.name] = known[make]
    return costs
