"""ToFu: Token Fusion, between token pruning and token merging (Kim et al., 2023; arXiv 2312.01026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shiva.core.method import BackboneSpec
from shiva.core.options import Share
from shiva.methods.tomesd import ToMeSD, ToMeSDMethod
from shiva.ops.merging import Combine


@dataclass(frozen=True)
class ToFu(ToMeSD):
    """ToMeSD's matching; early blocks prune the matched tokens, later ones merge them keeping their norm."""

    switch: Share = 0.5
    """Share of the depth that prunes; blocks after it merge."""
    rule: Literal["mlerp", "mean"] = "mlerp"
    """How a group merges: mlerp (its mean at the largest norm of its tokens) or mean."""

    presets: ClassVar = {"paper": {"ratio": 0.25}}

    def build(self, spec: BackboneSpec) -> ToFuMethod:
        return ToFuMethod(self, spec)


class ToFuMethod(ToMeSDMethod):
    """Pruned tokens also receive their best destination's result: the matching knows it."""

    config: ToFu

    def combine(self, layer: int) -> Combine:
        return "prune" if layer < self.config.switch * self.spec.layers else self.config.rule
