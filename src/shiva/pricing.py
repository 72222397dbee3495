"""What a module costs in FLOPs, from its real forward on the meta device: shapes only, nothing computed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

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


def site_cost(site: Site, call: Call, shapes: StepContext) -> SiteCost:
    """The FLOPs of a site as a function of its image tokens, from three lengths on the meta device."""
    batch, _, width = site.image_of(call, shapes).shape

    def flops_at(tokens: int) -> Flops:
        image = torch.empty(batch, tokens, width, device="meta", dtype=call[site.image].dtype)
        positions = torch.empty(batch, tokens, device="meta", dtype=torch.long)
        same = Reduction(reduce=lambda x: x, restore=lambda x, base: x, positions=positions)
        return count(lambda: site.run(functools.partial(meta_call, site.module), call, image, same, shapes))

    return SiteCost.fit(flops_at)
