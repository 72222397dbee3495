"""What a run begins with, where it does not begin anew: what another run has learned, or a checkpoint holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shiva.adapter import LoraOptions
from shiva.checkpoint import CONFIG_FILE, ShivaCheckpoint, may_be_hub_id
from shiva.core.method import MethodConfig, Trainable
from shiva.core.options import build
from shiva.training.recipe import method_config
from shiva.training.sections import Adapter
from shiva.training.state import newest_state


@dataclass(frozen=True)
class Start:
    """What was learned before."""

    source: str
    """Folder or hub id."""
    config: MethodConfig
    weights: dict[str, Tensor]
    base_model: str | None = None
    """Whose weights the adapter was trained on."""
    adapter: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    adapter_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """As in a recipe."""

    def weights_for(self, method: Trainable) -> dict[str, Tensor]:
        """Its weights of each part that the method has too, such as the routers: the whole part or none of it.

        A policy that was meant for another budget stays behind, and the budget's moving average is each run's own.
        """
        mine, theirs = (getattr(config, "span", 1) for config in (method.config, self.config))
        if mine != theirs:
            raise ValueError(
                f"start: {self.source} was made for spans of {theirs}, and method.span is {mine}; make it again, such "
                f"as by `shiva fit --span {mine}`, or set method.span={theirs}"
            )
        costs = {str(method.config.knob), *method.config.either}
        same_budget = all(getattr(self.config, name, None) == getattr(method.config, name, None) for name in costs)
        other = [] if same_budget else [id(parameter) for parameter in method.groups().get("policy", [])]
        own = {name: weight for name, weight in method.named_parameters() if id(weight) not in other}
        left, shared = method.state_dict().keys() - own.keys(), dict[str, Tensor]()
        for part in {part_of(name) for name in own} & {part_of(name) for name in self.weights}:
            expected = {name: weight.shape for name, weight in own.items() if part_of(name) == part}
            found = {n: weight for n, weight in self.weights.items() if part_of(n) == part and n not in left}
            for name in sorted(expected.keys() | found.keys()):
                shape = found[name].shape if name in found else None
                if shape != expected.get(name):
                    told = "no such" if shape is None else f"a {tuple(shape)}"
                    raise ValueError(
                        f"start: {self.source} has {told} {name}, which {method} wants otherwise; it was trained with "
                        f"other options of {type(self.config).__name__}, make them the same"
                    )
            shared |= found
        if not shared and not self.adapter:
            raise ValueError(f"start: {self.source} has no weight for {method}; give one of the same method and sizes")
        return shared

    def adapter_for(self, options: Adapter) -> dict[str, Tensor]:
        """Its adapter, which goes on only as it was."""
        for name, wanted in dataclasses.asdict(options).items() if self.adapter else ():
            if self.adapter_options.get(name) != wanted:
                raise ValueError(
                    f"start: {self.source} has an adapter of {name}={self.adapter_options.get(name)}, and "
                    f"adapter.{name} is {wanted}; make it the same, or start from a copy of the checkpoint without "
                    "its adapter folder"
                )
        return self.adapter


def part_of(name: str) -> str:
    return name.partition(".")[0]


def read_start(source: str, say: Callable[[str], None]) -> Start:
    """Of a run's folder the newest state; else a checkpoint, from a folder or the hub."""
    found = newest_state(Path(source), say)
    if found is not None:
        folder, state = found
        config = method_config(state.recipe["method"])
        model = state.recipe["model"]["path"]
        return Start(str(folder), config, state.method, model, state.adapter, state.recipe["adapter"])
    if not (Path(source) / CONFIG_FILE).is_file() and not may_be_hub_id(source):
        raise FileNotFoundError(
            f"start: {source} holds neither states/step-* nor {CONFIG_FILE}; give the folder of a `shiva train` run, "
            "or the folder or hub id of a checkpoint or of a `shiva fit`"
        )
    checkpoint = ShivaCheckpoint.from_pretrained(source)
    if checkpoint.adapter_config is None or checkpoint.adapter_weights is None:
        return Start(source, checkpoint.method_config, checkpoint.weights)
    model = checkpoint.origin.base_model
    lora = build(LoraOptions, checkpoint.adapter_config, "the adapter's config")
    options = {"rank": lora.r, "alpha": lora.lora_alpha, "dora": lora.use_dora}
    return Start(source, checkpoint.method_config, checkpoint.weights, model, checkpoint.adapter_weights, options)
