"""The sections of a recipe: every option of training with its default, what it may be, and a line on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from shiva.core.options import Count, NotNegative, Positive, Ratio, Share, Whole

STREAMED = ("parquet", "imagefolder", "webdataset", "hub")
WEIGHTS = {"diffusion": 1.0, "distill": 1.0, "output": 1.0, "complete": 0.0, "budget": 50.0}
"""Diffusion loss of the reduced model; its features' and its output's distance to dense; the diffusion loss of
the model with nothing reduced (DyDiT); the budget, whose controller holds the target the faster the more it weighs,
1 where a method has a `budget_weight` of its own. A method's other losses weigh 1."""


@dataclass(frozen=True)
class Model:
    """The pipeline whose transformer is made faster."""

    path: str = ""
    """Folder or hub id of the pipeline."""
    revision: str | None = None
    """Branch or commit on the hub."""
    without: tuple[str, ...] = ()
    """Parts not to load, such as text_encoder_3 and tokenizer_3 for SD3 without T5."""
    text_length: Whole | None = None
    """The pipeline's `max_sequence_length`; None takes the pipeline's own default."""
    guidance: NotNegative = 3.5
    """Embedded guidance of a guidance-distilled transformer (Flux.1-dev); others ignore it."""
    frames: Count = 1
    """Latent frames of the clips that a video model draws from prompts; captioned pictures are clips of one."""


@dataclass(frozen=True)
class Generate:
    """How the pipeline makes its own training latents from prompts."""

    steps: Count = 28
    """Sampling steps."""
    guidance: NotNegative = 5.0
    """Guidance scale."""
    batch: Count = 4
    """Prompts at once."""


@dataclass(frozen=True)
class Data:
    """Captioned images, latents made beforehand, or prompts alone."""

    kind: Literal["parquet", "imagefolder", "webdataset", "hub", "mjhq", "prompts", "latents"] = "parquet"
    """`prompts` has no images: the pipeline makes them; `latents` is a folder that an earlier run prepared."""
    path: str = ""
    """File, glob or folder; for `hub` the data set's id."""
    split: str = "train"
    """Split of a hub data set."""
    config: str | None = None
    """Configuration of a hub data set, where it has several."""
    image: str = "image"
    """Column of the image."""
    caption: str = "caption"
    """Column of the caption; a list of captions means its first."""
    where: dict[str, Any] = field(default_factory=dict)
    """Only rows whose columns have these values; of kinds with columns."""
    limit: Count | None = None
    """Only the first so many rows; not of `latents`."""
    streaming: bool = False
    """Read as a stream, without random access; for sets that do not fit on disk."""
    shuffle_buffer: Count = 1000
    """Rows among which a stream is shuffled."""
    resolution: Count = 1024
    """Images are resized and cropped to this side, or to a bucket of this area."""
    buckets: bool = False
    """Keep the aspect ratio roughly: crop to the nearest of several shapes of equal area."""
    cache: str | None = "auto"
    """Folder for latents and text embeddings, made once; `auto` is inside the output, null encodes at each step."""
    generate: Generate = field(default_factory=Generate)
    """For `prompts`: how their latents are made."""

    def __post_init__(self) -> None:
        if self.streaming and self.cache == "auto":
            object.__setattr__(self, "cache", None)

    def check(self) -> None:
        if not self.path:
            raise ValueError("data.path is missing; give a file, folder or data set id")
        if self.kind == "prompts" and self.cache is None:
            raise ValueError("data.kind='prompts' needs data.cache: latents are made once; pass a folder or 'auto'")
        if self.streaming and self.kind not in STREAMED:
            raise ValueError(f"data.kind={self.kind!r} cannot be streamed; leave data.streaming out")
        if self.streaming and self.cache is not None:
            raise ValueError(
                f"data.cache={self.cache!r} is not filled from a stream, which is encoded at each step; leave "
                "data.cache or data.streaming out"
            )
        if self.where and self.kind not in STREAMED:
            raise ValueError(f"data.kind={self.kind!r} has no columns that data.where could name; leave it out")
        for column, value in self.where.items():
            if not isinstance(value, (str, int, float, NoneType)):
                raise ValueError(f"data.where.{column} is a {type(value).__name__}; give a text, a number or null")
        if self.config is not None and self.kind != "hub":
            raise ValueError(f"data.kind={self.kind!r} has no configurations; leave data.config out")
        if self.limit and self.kind == "latents":
            raise ValueError(f"data.limit={self.limit}, and data.kind='latents' reads them all; leave it out")


@dataclass(frozen=True)
class Stage:
    """One stretch of training with its own optimizer."""

    name: str
    """How logs and checkpoints call it."""
    steps: Whole
    """Optimizer steps, 0 to leave the stage out; the paper does not give them."""
    trains: tuple[str, ...]
    """Groups that train: those the method names (router, policy, ...) and `adapter`; all else is frozen."""
    ratios: Literal["stratified", "policy"] = "policy"
    """Where keep ratios come from: `stratified` (drawn, the policy is bypassed) or `policy` (the method's own)."""
    logit_noise: NotNegative = 0.0
    """Deviation of the noise on the policy's logits."""
    score_noise: NotNegative = 0.0
    """Deviation of the noise on the router's scores."""
    warmup: Whole = 200
    """Steps over which learning rates rise linearly from zero."""
    cooldown: Share = 0.25
    """Share of the steps, at the end, over which they fall linearly to zero, and the budget settles; our choice."""

    def check(self) -> None:
        if not self.trains:
            raise ValueError(f"stage {self.name!r} trains nothing; name groups such as router, policy, adapter")

    def rate_factor(self, step: int) -> float:
        """What learning rates are multiplied by at a step of this stage."""
        rise = (step + 1) / self.warmup if self.warmup > 0 else 1.0
        fall = (self.steps - step) / (self.cooldown * self.steps) if self.cooldown > 0 else 1.0
        return min(1.0, rise, fall)


STAGES = (
    Stage("warmup", 10_000, ("router",), ratios="stratified"),
    Stage("policy", 10_000, ("policy",), logit_noise=1.0),
    Stage("joint", 20_000, ("router", "policy", "adapter")),
)
"""The paper's three: router warm-up, policy learning, joint tuning (app. Training Details)."""


@dataclass(frozen=True)
class Temperatures:
    """Softness of rank and inclusion, annealed over the whole of training; the paper gives only the starts."""

    rank_start: Positive = 0.1
    """Temperature of the soft rank at the first step; the paper's 0.2 measured worse (docs/paper-claims.md)."""
    rank_end: Positive = 0.05
    """The same at the last step; our choice, the paper is silent."""
    select_start: Positive = 0.1
    """Temperature of the inclusion, as a share of N, at the first step."""
    select_end: Positive = 0.05
    """The same at the last step; our choice, the paper is silent."""
    shape: Literal["exponential", "linear", "constant"] = "exponential"
    """How they move in between; our choice, the paper is silent."""

    def at(self, progress: float) -> tuple[float, float]:
        """(tau_rank, tau_sel) at a share of all steps."""
        rank = self._between(self.rank_start, self.rank_end, progress)
        return rank, self._between(self.select_start, self.select_end, progress)

    def _between(self, start: float, end: float, progress: float) -> float:
        if self.shape == "constant":
            return start
        if self.shape == "linear":
            return start + (end - start) * progress
        return start * math.exp(math.log(end / start) * progress)


@dataclass(frozen=True)
class Sampling:
    """How a global batch is drawn."""

    batch: Count = 16
    """Samples in a global batch, over all ranks and accumulation steps."""
    micro_batch: Count = 1
    """Samples in one forward pass; they share a timestep, and so their token counts."""
    density: Literal["uniform", "scheduler", "logit-normal", "run"] = "scheduler"
    """Timesteps are uniform in t (as in the paper), spaced as the scheduler's steps, logit-normal, or just those at
    which a run of `steps` stands: for distilled models, which are used at no others."""
    steps: Count | None = None
    """Steps of that run."""
    rollout: Share = 0.0
    """With `density: run`, the share of micro-batches that stand where the reduced model's own run from noise, without
    guidance, brings them: errors of earlier steps are learned too. The dense prediction is their target. Validation
    goes along every run of its own."""
    follow: Count | None = None
    """With rollouts, their target is instead the way back: to where the dense model's own run of so many steps, from
    the same noise, stands at the next noise level. More steps than `steps` teach to do with fewer at once."""
    ratio_min: Ratio = 0.2
    """Smallest ratio of router warm-up; the paper gives no value."""
    ratio_max: Ratio = 0.9
    """Largest ratio of router warm-up; the paper gives no value."""
    ratio_groups: Count = 4
    """K, the disjoint intervals between them; the paper gives no value."""
    caption_dropout: Share = 0.1
    """Share of captions replaced by the empty prompt."""

    def check(self) -> None:
        if (self.density == "run") != (self.steps is not None):
            raise ValueError(f"sampling.density={self.density} with steps={self.steps}; give both `run` and `steps`")
        if self.rollout and self.density != "run":
            raise ValueError(f"sampling.rollout={self.rollout} goes along a run; set density: run, and its steps")
        if self.follow and self.rollout < 1:
            raise ValueError(f"sampling.follow={self.follow} aims rollouts, and others have no aim; set rollout: 1")
        if self.ratio_min > self.ratio_max:
            raise ValueError(f"sampling.ratio_min={self.ratio_min} is above ratio_max={self.ratio_max}; exchange them")
        if self.batch % self.micro_batch:
            raise ValueError(
                f"sampling.batch={self.batch} is not a multiple of micro_batch={self.micro_batch}; fit it"
            )

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro_batch


@dataclass(frozen=True)
class Reuse:
    """How training simulates reused updates (`method.fill: cached`); the paper has none."""

    steps: Count = 25
    """Steps of the sampler whose cache is simulated."""
    oldest: Count = 4
    """The noisier pass that stands in for the cache lies 1 to this many of those steps earlier, drawn each time."""

    def check(self) -> None:
        if self.oldest > self.steps:
            raise ValueError(f"reuse.oldest={self.oldest} is above reuse.steps={self.steps}; lower it")


@dataclass(frozen=True)
class Optimizer:
    """AdamW over the groups of a stage."""

    rates: dict[str, NotNegative] = field(default_factory=lambda: {"router": 3e-4, "policy": 1e-4, "adapter": 1e-4})
    """Learning rate by group; the paper gives router and policy, the adapter's is our choice."""
    default_rate: NotNegative = 1e-4
    """Learning rate of groups not named above."""
    weight_decay: NotNegative = 0.01
    """AdamW's; the paper gives no value."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's; the paper gives no values."""
    clip: NotNegative = 1.0
    """Largest norm of the gradient, 0 for none; the paper gives no value."""

    def rate(self, group: str) -> float:
        return self.rates.get(group, self.default_rate)


@dataclass(frozen=True)
class Distill:
    """Which features follow the dense model's."""

    every: Whole = 4
    """Align the tokens after every so many blocks; 0 aligns none."""


@dataclass(frozen=True)
class Adapter:
    """PEFT adapter on all attention and FFN linears of the blocks."""

    rank: Count = 32
    """Rank."""
    alpha: Count = 32
    """Scale times rank; the paper gives no value."""
    dora: bool = True
    """DoRA (the paper's), or plain LoRA."""


@dataclass(frozen=True)
class Compute:
    """Precision and memory."""

    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """`auto` is bf16 where the device has it."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class Checkpoints:
    """States a killed run continues from."""

    every: Count = 500
    """Steps between them; one is also written at the end of a stage."""
    keep: Count = 3
    """How many of the newest stay on disk."""


@dataclass(frozen=True)
class Validation:
    """Distance to the target, which the dense model gives, on samples that are not trained on."""

    every: Whole = 1000
    """Steps between passes, 0 for only the end of each stage."""
    samples: Count = 16
    """Samples held out of training."""
    keeps: tuple[Ratio, ...] = (0.3, 0.5, 0.6, 0.8)
    """Uniform ratios to measure, beside the learned schedule."""
    images: Whole = 4
    """Prompts drawn, dense and reduced side by side; 0 draws none."""
    image_steps: Count = 28
    """Sampling steps of those."""
    image_guidance: NotNegative = 5.0
    """Their guidance scale."""


@dataclass(frozen=True)
class Logging:
    """Where numbers go besides TensorBoard and metrics.jsonl."""

    every: Count = 10
    """Steps between records."""
    wandb: str | None = None
    """Project on Weights & Biases; needs the wandb package."""
