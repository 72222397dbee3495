"""What is supported, told from the registry itself."""

from __future__ import annotations

from typing import NamedTuple

import diffusers

from shiva.backbones.base import REFUSED, Backbone, registered
from shiva.backbones.patterns import PatternBackbone

SINCE = {
    "QwenImage21Transformer2DModel": "0.41",
    "SanaWMTransformer3DModel": "0.42",
    "Kandinsky6SRTransformer3DModel": "0.42",
}
"""The release of diffusers that a class came with, where Shiva runs on older ones too."""


class Known(NamedTuple):
    """A transformer class, as a user would ask for it."""

    name: str
    blocks: str
    """Its stacks of blocks, and how image and text go through them."""
    reduced: str
    """Kinds of site at which methods may act."""
    notes: str


def known() -> list[Known]:
    """Every registered transformer class."""
    return [describe(name, backbone) for name, backbone in registered().items()]


def describe(name: str, backbone: Backbone) -> Known:
    if not isinstance(backbone, PatternBackbone):
        return Known(name, "its own code", "blocks, attention, ffn, keys", backbone.notes)
    blocks = ", ".join(f"{stack.path} ({stack.pattern})" for stack in backbone.stacks)
    kinds = [{inner.kind for inner in stack.inner} for stack in backbone.stacks]
    found = [kind for kind in ("attention", "cross_attention", "ffn") if any(kind in inner for inner in kinds)]
    keyed = all(any(inner.keys for inner in stack.inner) for stack in backbone.stacks)
    reduced = ["blocks", *found, *(["keys"] if keyed else [])]
    return Known(name, blocks, ", ".join(reduced).replace("_", " "), backbone.notes)


def absent(name: str) -> str:
    """That the diffusers that is installed is older than a class, or nothing."""
    if name in dir(diffusers) or name not in SINCE:
        return ""
    return f"needs diffusers {SINCE[name]}; {diffusers.__version__} is installed"


def as_markdown() -> str:
    """The tables of docs/compatibility.md."""
    lines = ["| class | blocks | reduced | notes |", "|---|---|---|---|"]
    lines += [f"| `{entry.name}` | {entry.blocks} | {entry.reduced} | {entry.notes} |" for entry in known()]
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"
