"""A training run as data: the tree of options that a recipe file fills in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiva.core import options
from shiva.core.method import MethodConfig
from shiva.training.extends import change_stages, lay_over, read_recipe
from shiva.training.needs import need
from shiva.training.sampling import DENSITIES
from shiva.training.stages import STAGES, Stage, Temperatures
from shiva.training.tree import build_tree, merge


@dataclass(frozen=True)
class Model:
    """The pipeline whose transformer is made faster."""

    path: str = ""
    """Folder or hub id of the pipeline."""
    revision: str | None = None
    """Branch or commit on the hub."""
    without: tuple[str, ...] = ()
    """Parts not to load, such as text_encoder_3 and tokenizer_3 for SD3 without T5."""
    text_length: int | None = None
    """The pipeline's `max_sequence_length`; None takes the pipeline's own default."""
    guidance: float = 3.5
    """Embedded guidance of a guidance-distilled transformer (Flux.1-dev); others ignore it."""


@dataclass(frozen=True)
class Generate:
    """How the pipeline makes its own training latents from prompts."""

    steps: int = 28
    """Sampling steps."""
    guidance: float = 5.0
    """Guidance scale."""
    batch: int = 4
    """Prompts at once."""


@dataclass(frozen=True)
class Data:
    """Captioned images, latents made beforehand, or prompts alone."""

    kind: str = "parquet"
    """parquet, imagefolder, webdataset, hub, mjhq, prompts (no images: the pipeline makes them) or latents."""
    path: str = ""
    """File, glob or folder; for `hub` the data set's id; for `latents` a folder that an earlier run prepared."""
    split: str = "train"
    """Split of a hub data set."""
    image: str = "image"
    """Column of the image."""
    caption: str = "caption"
    """Column of the caption; a list of captions means its first."""
    where: dict[str, Any] = field(default_factory=dict)
    """Only rows whose columns have these values."""
    limit: int | None = None
    """Only the first so many rows."""
    streaming: bool = False
    """Read as a stream, without random access; for sets that do not fit on disk."""
    shuffle_buffer: int = 1000
    """Rows among which a stream is shuffled."""
    resolution: int = 1024
    """Images are resized and cropped to this side, or to a bucket of this area."""
    buckets: bool = False
    """Keep the aspect ratio roughly: crop to the nearest of several shapes of equal area."""
    cache: str | None = "auto"
    """Folder for latents and text embeddings, made once; `auto` is inside the output, null encodes at each step."""
    generate: Generate = field(default_factory=Generate)
    """For `prompts`: how their latents are made."""

    def __post_init__(self) -> None:
        options.choice("data.kind", self.kind, KINDS)
        if self.kind == "prompts" and self.cache is None:
            raise ValueError("data.kind='prompts' needs data.cache: latents are made once; pass a folder or 'auto'")
        if self.streaming and self.kind not in ("parquet", "imagefolder", "webdataset", "hub"):
            raise ValueError(f"data.kind={self.kind!r} cannot be streamed; leave data.streaming out")
        if self.streaming and self.cache == "auto":
            object.__setattr__(self, "cache", None)


KINDS = ("parquet", "imagefolder", "webdataset", "hub", "mjhq", "prompts", "latents")


@dataclass(frozen=True)
class Sampling:
    """How a global batch is drawn."""

    batch: int = 16
    """Samples in a global batch, over all ranks and accumulation steps."""
    micro_batch: int = 1
    """Samples in one forward pass; they share a timestep, and so their token counts."""
    density: str = "scheduler"
    """Timesteps are uniform in t (as in the paper), spaced as the scheduler's steps, or logit-normal."""
    ratio_min: float = 0.2
    """Smallest ratio of router warm-up; the paper gives no value."""
    ratio_max: float = 0.9
    """Largest ratio of router warm-up; the paper gives no value."""
    ratio_groups: int = 4
    """K, the disjoint intervals between them; the paper gives no value."""
    caption_dropout: float = 0.1
    """Share of captions replaced by the empty prompt."""

    def __post_init__(self) -> None:
        options.choice("sampling.density", self.density, DENSITIES)
        options.share("sampling.ratio_min", self.ratio_min)
        options.share("sampling.ratio_max", self.ratio_max)
        options.share("sampling.caption_dropout", self.caption_dropout, zero=True)
        if self.ratio_min > self.ratio_max:
            raise ValueError(f"sampling.ratio_min={self.ratio_min} is above ratio_max={self.ratio_max}")
        if self.micro_batch < 1 or self.batch % self.micro_batch:
            raise ValueError(
                f"sampling.batch={self.batch} is not a multiple of micro_batch={self.micro_batch}; make it one"
            )

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro_batch


@dataclass(frozen=True)
class Reuse:
    """How training simulates reused updates (`method.rejected: cached`); the paper has none."""

    steps: int = 25
    """Steps of the sampler whose cache is simulated."""
    oldest: int = 4
    """The noisier pass that stands in for the cache lies 1 to this many of those steps earlier, drawn each time."""

    def __post_init__(self) -> None:
        if not 1 <= self.oldest <= self.steps:
            raise ValueError(f"reuse.oldest={self.oldest} is not between 1 and reuse.steps={self.steps}")


@dataclass(frozen=True)
class Optimizer:
    """AdamW over the groups of a stage."""

    rates: dict[str, float] = field(default_factory=lambda: {"router": 3e-4, "policy": 1e-4, "adapter": 1e-4})
    """Learning rate by group; the paper gives router and policy, the adapter's is our choice."""
    default_rate: float = 1e-4
    """Learning rate of groups not named above."""
    weight_decay: float = 0.01
    """AdamW's; the paper gives no value."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's; the paper gives no values."""
    clip: float = 1.0
    """Largest norm of the gradient, 0 for none; the paper gives no value."""

    def rate(self, group: str) -> float:
        return self.rates.get(group, self.default_rate)


@dataclass(frozen=True)
class Distill:
    """Which features follow the dense model's."""

    every: int = 4
    """Align the tokens after every so many blocks; 0 aligns none."""


@dataclass(frozen=True)
class Adapter:
    """PEFT adapter on all attention and FFN linears of the blocks."""

    rank: int = 32
    """Rank."""
    alpha: int = 32
    """Scale times rank; the paper gives no value."""
    dora: bool = True
    """DoRA (the paper's), or plain LoRA."""


@dataclass(frozen=True)
class Compute:
    """Precision and memory."""

    precision: str = "auto"
    """bf16, fp16, no, or auto: bf16 where the device has it."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""

    def __post_init__(self) -> None:
        options.choice("compute.precision", self.precision, ("auto", "no", "bf16", "fp16"))


@dataclass(frozen=True)
class Checkpoints:
    """States a killed run continues from."""

    every: int = 500
    """Steps between them; one is also written at the end of a stage."""
    keep: int = 3
    """How many of the newest stay on disk."""


@dataclass(frozen=True)
class Validation:
    """Distance to the dense model on samples that are not trained on."""

    every: int = 1000
    """Steps between passes, 0 for only the end of each stage."""
    samples: int = 16
    """Samples held out of training."""
    keeps: tuple[float, ...] = (0.3, 0.5, 0.6, 0.8)
    """Uniform ratios to measure, beside the learned schedule."""
    images: int = 4
    """Prompts drawn, dense and reduced side by side; 0 draws none."""
    image_steps: int = 28
    """Sampling steps of those."""
    image_guidance: float = 5.0
    """Their guidance scale."""


@dataclass(frozen=True)
class Logging:
    """Where numbers go besides TensorBoard and metrics.jsonl."""

    every: int = 10
    """Steps between records."""
    wandb: str | None = None
    """Project on Weights & Biases; needs the wandb package."""


@dataclass(frozen=True)
class Recipe:
    """All of a training run."""

    model: Model = field(default_factory=Model)
    method: dict[str, Any] = field(default_factory=dict)
    """`name` of the method (Shiva), `preset` (official or paper) and its options, such as `budget`."""
    data: Data = field(default_factory=Data)
    stages: tuple[Stage, ...] = STAGES
    """A mapping changes fields of the three stages by name; a list replaces them."""
    temperatures: Temperatures = field(default_factory=Temperatures)
    sampling: Sampling = field(default_factory=Sampling)
    reuse: Reuse = field(default_factory=Reuse)
    optimizer: Optimizer = field(default_factory=Optimizer)
    weights: dict[str, float] = field(default_factory=dict)
    """Weight by objective, over `WEIGHTS`; the paper names lambda_b and lambda_d without values."""
    distill: Distill = field(default_factory=Distill)
    adapter: Adapter = field(default_factory=Adapter)
    compute: Compute = field(default_factory=Compute)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    validation: Validation = field(default_factory=Validation)
    logging: Logging = field(default_factory=Logging)
    start: str | None = None
    """Folder of another run whose newest weights this one begins with: one warm-up serves several budgets."""
    seed: int = 0
    """All randomness derives from it and the step."""

    def __post_init__(self) -> None:
        if not self.model.path:
            raise ValueError("model.path is missing; give a pipeline's folder or hub id")
        if not self.data.path:
            raise ValueError("data.path is missing; give a file, folder or data set id")
        object.__setattr__(self, "weights", {**WEIGHTS, **self.weights})

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def method_config(self) -> MethodConfig:
        values = dict(self.method)
        name, preset = values.pop("name", "Shiva"), values.pop("preset", "official")
        if name not in MethodConfig.known:
            raise ValueError(options.unknown_key(name, MethodConfig.known, "method.name"))
        cls = MethodConfig.known[name]
        known = {"official": {}, **cls.presets}
        options.choice("method.preset", preset, known)
        return options.build(cls, {**known[preset], **values})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


WEIGHTS = {"diffusion": 1.0, "distill": 1.0, "output": 1.0, "complete": 0.0, "budget": 50.0}
"""Diffusion loss of the reduced model; its features' and its output's distance to dense; the diffusion loss of
the model with nothing reduced (DyDiT); the budget, whose controller holds the target the faster the more it weighs.
A method's other losses weigh 1."""

PRESETS: dict[str, dict[str, Any]] = {
    "shiva": {},
    "paper": {
        "method": {"name": "Shiva", "preset": "paper"},
        "stages": {
            "warmup": {"ratios": "stratified", "warmup": 200, "cooldown": 0.0},
            "policy": {"ratios": "policy", "logit_noise": 1.0, "warmup": 200, "cooldown": 0.0},
            "joint": {
                "trains": ["router", "policy", "adapter"],
                "ratios": "policy",
                "logit_noise": 0.0,
                "warmup": 200,
                "cooldown": 0.0,
            },
        },
        "temperatures": {"rank_start": 0.2, "rank_end": 0.1, "select_start": 0.1},
        "sampling": {"batch": 16, "micro_batch": 1, "density": "uniform", "caption_dropout": 0.1},
        "optimizer": {"rates": {"router": 3e-4, "policy": 1e-4}},
        "distill": {"every": 4},
        "adapter": {"rank": 32, "dora": True},
    },
}
"""`paper` holds every value the paper gives; what it does not give is the default of the field."""


def stages_from(given: Any) -> Any:
    """The three stages with fields changed by name, or a list as it is."""
    return change_stages([dataclasses.asdict(stage) for stage in STAGES], given) if isinstance(given, dict) else given


def recipe_from(values: dict[str, Any]) -> Recipe:
    """A recipe from nested mappings; `preset` names the values they change."""
    values = dict(values)
    preset = values.pop("preset", "shiva")
    options.choice("preset", preset, PRESETS)
    merged = merge(PRESETS[preset], values)
    if "stages" in merged:
        merged["stages"] = stages_from(merged["stages"])
    if "rates" in merged.get("optimizer", {}):
        merged["optimizer"]["rates"] = {**Optimizer().rates, **merged["optimizer"]["rates"]}
    recipe = build_tree(Recipe, merged, "")
    recipe.method_config()
    return recipe


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; each change is `section.option=value`, the value in YAML."""
    values = read_recipe(path)
    try:
        for change in changes:
            key, equals, text = change.partition("=")
            if not equals:
                raise ValueError(f"--set {change!r} has no value; write section.option=value")
            nested: Any = need("yaml").safe_load(text)
            for part in reversed(key.split(".")):
                nested = {part: nested}
            values = lay_over(values, nested)
        return recipe_from(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
