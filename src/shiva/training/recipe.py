"""A training run as data: a YAML file, perhaps over another one, to a `Recipe` whose every value is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shiva.methods  # noqa: F401  (a recipe names its method: each registers its config)
from shiva.core import options
from shiva.core.method import MethodConfig
from shiva.core.options import NotNegative, build, conform, fitted, merge
from shiva.files import from_yaml, read_yaml
from shiva.training import sections
from shiva.training.sections import STAGES, WEIGHTS, Stage

OWN_LOSSES = ("flops",)
"""Losses that methods add to `WEIGHTS`."""


@dataclass(frozen=True)
class Recipe:
    """All of a training run."""

    model: sections.Model = field(default_factory=sections.Model)
    method: dict[str, Any] = field(default_factory=dict)
    """`name` of the method (Shiva), `preset` (official or paper) and its options, such as `budget`."""
    data: sections.Data = field(default_factory=sections.Data)
    stages: tuple[Stage, ...] = STAGES
    """A mapping changes fields of the three stages by name; a list replaces them."""
    temperatures: sections.Temperatures = field(default_factory=sections.Temperatures)
    sampling: sections.Sampling = field(default_factory=sections.Sampling)
    reuse: sections.Reuse = field(default_factory=sections.Reuse)
    optimizer: sections.Optimizer = field(default_factory=sections.Optimizer)
    weights: dict[str, NotNegative] = field(default_factory=dict)
    """Weight by objective, over `WEIGHTS`; the paper names lambda_b and lambda_d without values."""
    distill: sections.Distill = field(default_factory=sections.Distill)
    adapter: sections.Adapter = field(default_factory=sections.Adapter)
    compute: sections.Compute = field(default_factory=sections.Compute)
    checkpoints: sections.Checkpoints = field(default_factory=sections.Checkpoints)
    validation: sections.Validation = field(default_factory=sections.Validation)
    logging: sections.Logging = field(default_factory=sections.Logging)
    start: str | None = None
    """Folder of another run whose newest weights this one begins with, so that one warm-up serves several budgets; or
    folder or hub id of a checkpoint, such as `shiva fit` writes. A policy for another budget starts anew."""
    seed: int = 0
    """All randomness derives from it and the step."""

    def __post_init__(self) -> None:
        conform(self)
        if not self.model.path:
            raise ValueError("model.path is missing; give a pipeline's folder or hub id")
        if not self.stages:
            raise ValueError("stages=[] trains nothing; leave stages out for the usual three, or list some")
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise ValueError(f"stages={[stage.name for stage in self.stages]}: two have one name; name each its own")
        for check in (self.data.check, self.sampling.check, self.reuse.check, *(s.check for s in self.stages)):
            check()
        known = (*WEIGHTS, *OWN_LOSSES)
        for name, weight in self.weights.items():
            if name not in known:
                raise ValueError(f"weights.{name}={weight:g}: {options.unknown_key(name, known, 'weights')}")
        method = self.method_config()
        weighs_itself = {"budget": 1.0} if hasattr(method, "budget_weight") else {}
        object.__setattr__(self, "weights", {**WEIGHTS, **weighs_itself, **self.weights})
        if not any(self.weights.values()):
            raise ValueError("weights are all 0, so nothing is learned; set one above 0, such as weights.diffusion")
        self._check_run(method)

    def _check_run(self, method: MethodConfig) -> None:
        """Refuse what does not go with training along a run."""
        sampling, weights = self.sampling, self.weights
        if sampling.follow and (weights["diffusion"] or weights["distill"] or not weights["output"]):
            raise ValueError(
                f"sampling.follow={sampling.follow} leads samples to the dense run, which is the target of the output "
                "loss alone; set weights: {diffusion: 0, distill: 0, output: 1}"
            )
        if sampling.rollout and not weights["output"] and not (weights["distill"] and self.distill.every):
            raise ValueError(
                f"sampling.rollout={sampling.rollout} has no target but the dense model; set weights.output, or "
                "weights.distill, above 0"
            )
        if sampling.rollout and getattr(method, "may_cache", False):
            raise ValueError(
                f"sampling.rollout={sampling.rollout} goes along a run that keeps no updates; set method.fill to "
                "shortcut, near or identity, or rollout: 0"
            )
        for name in ("recall", "steady"):
            share = getattr(method, name, 0)
            if share and sampling.rollout < 1:
                raise ValueError(
                    f"method.{name}={share} carries on from step to step, which only runs have; set sampling: "
                    f"{{density: run, steps: ..., rollout: 1}}, or {name}: 0 and pass it to attach"
                )
        by_policy = [stage.name for stage in self.stages if stage.ratios == "policy" and stage.steps]
        if sampling.density == "run" and getattr(method, "dense_steps", None) and by_policy:
            raise ValueError(
                f"stage {by_policy[0]!r} learns ratios, and method.dense_steps has steps without any; set its ratios: "
                "stratified, or leave dense_steps out and pass it to attach"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def method_config(self) -> MethodConfig:
        return method_config(self.method)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def method_config(method: Mapping[str, Any]) -> MethodConfig:
    """The config that a recipe's `method` names."""
    values = dict(method)
    name, preset = values.pop("name", "Shiva"), values.pop("preset", "official")
    if name not in MethodConfig.known:
        raise ValueError(options.unknown_key(str(name), MethodConfig.known, "method.name"))
    cls = MethodConfig.known[name]
    known = {"official": {}, **cls.presets}
    options.choice("method.preset", preset, known)
    return build(cls, {**known[preset], **values}, "method", text=True)


RATES = {"warmup": 200, "cooldown": 0.0}
PRESETS: dict[str, dict[str, Any]] = {
    "shiva": {},
    "paper": {
        "method": {"name": "Shiva", "preset": "paper"},
        "stages": {
            "warmup": {"ratios": "stratified", **RATES},
            "policy": {"ratios": "policy", "logit_noise": 1.0, **RATES},
            "joint": {"trains": ["router", "policy", "adapter"], "ratios": "policy", "logit_noise": 0.0, **RATES},
        },
        "temperatures": {"rank_start": 0.2, "rank_end": 0.1, "select_start": 0.1},
        "sampling": {"batch": 16, "micro_batch": 1, "density": "uniform", "caption_dropout": 0.1},
        "optimizer": {"rates": {"router": 3e-4, "policy": 1e-4}},
        "distill": {"every": 4},
        "adapter": {"rank": 32, "dora": True},
    },
}
"""`paper` holds every value the paper gives; what it does not give is the default of the field."""


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """A recipe from nested mappings; `preset` names the values they change."""
    values = dict(values)
    preset = values.pop("preset", "shiva")
    options.choice("preset", preset, PRESETS)
    if values.get("stages") == {}:
        raise ValueError("stages={} changes no stage; leave it out for the usual three, or name what to change")
    merged = merge(PRESETS[preset], values)
    if isinstance(merged.get("stages"), Mapping):
        merged["stages"] = change_stages([dataclasses.asdict(stage) for stage in STAGES], merged["stages"])
    optimizer = merged.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get("rates"), Mapping):
        optimizer["rates"] = {**sections.Optimizer().rates, **optimizer["rates"]}
    return build(Recipe, merged, text=True)


def change_stages(stages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A list of stages with fields changed by the stage's name."""
    names = [stage.get("name", "") for stage in stages]
    for name, changes in given.items():
        if name not in names:
            raise ValueError(options.unknown_key(str(name), names, "stages"))
        if not isinstance(changes, Mapping):
            raise ValueError(f"stages.{name} is {changes!r}; give a mapping of options, such as {{steps: 100}}")
    return [{**stage, **given.get(stage.get("name", ""), {})} for stage in stages]


# -- files -------------------------------------------------------------------------------------------


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; each change is `section.option=value`, the value in YAML."""
    values = read_recipe(path)
    try:
        for change in changes:
            key, equals, text = change.partition("=")
            if not equals:
                raise ValueError(f"--set {change!r} has no value; write section.option=value")
            nested: Any = from_yaml(text, f"--set {change!r}")
            for part in reversed(key.split(".")):
                nested = {part: nested}
            values = lay_over(values, nested)
        return recipe_from(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe file, laid over those of the file that `extends` names, relative to its own folder.

    Mappings are merged and all else is replaced; a `method` with a name replaces the other's with all its options. One
    level only: what is extended is whole in itself.
    """
    values = read_mapping(path)
    if "extends" not in values:
        return values
    extended = fitted(str, values.pop("extends"), f"{path}: extends")
    base_path = path.parent / extended
    if not base_path.is_file():
        raise FileNotFoundError(f"{path}: extends={extended!r}, and there is no recipe at {base_path}; mend the path")
    base = read_mapping(base_path)
    if "extends" in base:
        raise ValueError(
            f"{path} extends {base_path}, which extends {base['extends']!r}; extend a recipe that is whole in itself"
        )
    method = values.get("method")
    if isinstance(method, Mapping) and "name" in method:
        base.pop("method", None)
    try:
        return lay_over(base, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe at {path}; see the recipes/ folder for examples")
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; a recipe is a mapping")
    return values


def lay_over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes merged in; a mapping of stages changes those of a list by their names."""
    stages, given = values.get("stages"), changes.get("stages")
    if isinstance(stages, list) and isinstance(given, Mapping):
        changes = {**changes, "stages": change_stages(stages, given)}
    return merge(values, changes)
