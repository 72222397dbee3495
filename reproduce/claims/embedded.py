"""Short trainings of routers and policies on the frozen embedded model: what the ablations have in common.

A variant is recipes/emoji.yaml with some values changed, trained by the library's own loop: router warm-up, or policy
learning over a router that an earlier variant trained. Nothing of the backbone trains. To be affordable on a CPU, a
step has 8 samples at 4 timesteps, and what the dense model makes of a batch is kept in memory: all variants of a seed
see the same batches, so it is paid once a seed instead of once a variant. Otherwise it is `shiva train`.

Every variant has a folder of its own, named by what it was trained with and on. So a killed run goes on where it was,
tables share the variants they have in common, and another model, recipe or number of steps never meets an old result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from reproduce.claims.common import FIRST, ROOT, Result, shown, spread
from shiva.checkpoint import ShivaCheckpoint, write_atomically
from shiva.core.options import merge
from shiva.evaluate.metrics.pixels import image_psnr
from shiva.files import read_json, to_json
from shiva.training.draws import MicroBatch, seed_of
from shiva.training.objectives import Objectives, Teaching
from shiva.training.recipe import Recipe, read_recipe, recipe_from
from shiva.training.trainer import Trainer

KEEP = 0.6
KEEPS = (0.3, 0.45, 0.6, 0.75, 0.9)
STEPS = 120
TEMPERATURES = {"rank_start": 0.2, "rank_end": 0.1, "select_start": 0.1, "select_end": 0.05}
"""The paper's starts, and half of them at the end, which the paper does not give."""
OF_MODEL: dict[str, dict[str, Any]] = {
    "emoji-128": {
        "data": {"path": "recipes/emoji/data/fluent-emoji-128.parquet", "resolution": 128},
        "compute": {"precision": "bf16"},
    }
}
"""What the recipe of variants has otherwise on another model."""
PATHS = {"model": ("path", "revision"), "data": ("path", "cache")}
"""What a variant's name holds by content instead."""

OF_ROUTER = ("sharing", "bottleneck", "signals", "signal_length", "estimator", "guess")
"""Options that shape a router; the others are the policy's."""

Stats = dict[str, Any]
"""What `spread` gives, and the values of each seed."""
Batch = tuple[int, float, bool]
"""What tells dense passes apart: the batch's seed, its timestep, and whether updates were kept."""


@dataclass(frozen=True)
class Variant:
    """One training: options of the method and the sampling, and which stage."""

    method: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    temperatures: Mapping[str, float] = field(default_factory=dict)
    policy: bool = False
    """Learn the ratio policy over a router trained before, which rests; otherwise train a router."""
    logit_noise: float = 1.0
    """Of policy learning."""

    @property
    def router(self) -> Variant:
        """The training of the router that a policy is learned over."""
        return Variant({name: value for name, value in self.method.items() if name in OF_ROUTER}, self.sampling)


@dataclass
class Dense:
    """What the dense model made for one seed: validation batches of two have the same places and other noise."""

    seed: int | None = None
    passes: dict[Batch, Teaching] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)


@dataclass
class Bench:
    """Where variants are trained: the model, the folder that keeps them, and how long each takes."""

    model: Path = FIRST
    state: Path | None = None
    steps: int = STEPS
    seeds: Sequence[int] = range(3)
    samples: int = 48
    images: int = 8
    base: Mapping[str, Any] = field(default_factory=lambda: read_recipe(ROOT / "recipes" / "emoji.yaml"), repr=False)
    """The recipe that variants change."""
    dense: Dense = field(default_factory=Dense, repr=False)

    def __post_init__(self) -> None:
        if not (self.model / "model_index.json").exists():
            raise FileNotFoundError(f"{self.model} holds no pipeline; pass --model")
        default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shiva" / "ablations"
        self.state = self.state or default
        self.model = self.model.resolve()
        self.base = merge(self.base, OF_MODEL.get(self.model.name, {}))
        self.data = ROOT / self.base["data"]["path"]
        self.digest = digest(self.model / "transformer", "*.safetensors")

    def recipe(self, variant: Variant, seed: int) -> Recipe:
        assert self.state is not None
        values = {**self.base, "method": {"name": "Shiva", "budget": KEEP, **variant.method}}
        router, policy = (0, self.steps) if variant.policy else (self.steps, 0)
        learning = {"steps": policy, "logit_noise": variant.logit_noise}
        changes = {
            "model": {"path": str(self.model)},
            "data": {"path": str(self.data), "cache": str(self.state / f"latents-{self.digest}")},
            "stages": {"warmup": {"steps": router}, "policy": learning, "joint": {"steps": 0}},
            "sampling": {"batch": 8, "micro_batch": 2, **variant.sampling},
            "optimizer": {"rates": {"policy": 1e-3}},  # the paper's 1e-4 only takes longer
            "weights": {"budget": 10.0, **variant.weights},  # weak enough to tell controllers apart
            "temperatures": {**TEMPERATURES, **variant.temperatures},
            "checkpoints": {"every": 50, "keep": 1},
            "validation": {"every": 0, "samples": self.samples, "keeps": list(KEEPS), "images": 0},
            "seed": seed,
        }
        return recipe_from(merge(values, changes))

    def folder(self, variant: Variant, seed: int) -> Path:
        """A variant's place, by all that shapes its result."""
        assert self.state is not None
        recipe = self.recipe(variant, seed)
        shaping = recipe.to_dict()
        for section, paths in PATHS.items():
            shaping[section] = {name: value for name, value in shaping[section].items() if name not in paths}
        del shaping["checkpoints"], shaping["logging"]
        shaping["method"] = asdict(recipe.method_config())  # type: ignore[call-overload]
        described = json.dumps([shaping, digest(self.data), self.images], sort_keys=True).encode()
        return self.state / self.digest / hashlib.blake2b(described, digest_size=8).hexdigest()

    def outcome(self, variant: Variant, seed: int) -> Stats:
        """What a variant measures at, trained now or before."""
        folder = self.folder(variant, seed)
        kept = folder / "outcome.json"
        if not kept.exists():
            router = self.checkpoint(variant.router, seed) if variant.policy else None
            if seed != self.dense.seed:
                self.dense = Dense(seed)
            trainer = Ablation(self.recipe(variant, seed), folder, self.dense, router)
            if not trainer.final.is_dir():
                trainer.run()
            write_atomically(kept, to_json(measure(trainer, self.images)))
        return read_json(kept)

    def checkpoint(self, variant: Variant, seed: int) -> Path:
        """A trained variant, as `shiva.attach` takes it."""
        self.outcome(variant, seed)
        return self.folder(variant, seed) / "checkpoint"

    def compare(self, variants: Mapping[str, Variant]) -> dict[str, dict[str, Stats]]:
        """Every variant at every seed: mean and spread of each measure, by the variant's name."""
        found: dict[str, list[Stats]] = {name: [] for name in variants}
        for seed in self.seeds:
            for name, variant in variants.items():
                found[name].append(self.outcome(variant, seed))
        return {name: {key: over_seeds([row[key] for row in rows]) for key in rows[0]} for name, rows in found.items()}

    @property
    def seen(self) -> str:
        seeds = "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        return f"{seeds}, {self.steps} steps"

    def details(self, rows: Mapping[str, Mapping[str, Stats]]) -> dict[str, Any]:
        """What was found, and what it was found with."""
        return {"rows": rows, "seeds": list(self.seeds), "steps": self.steps, "model": self.digest}


def over_seeds(values: Sequence[float]) -> Stats:
    return {**spread(values), "values": list(values)}


def digest(path: Path, kind: str = "*") -> str:
    """Of a file, or of a folder's files of one kind."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob(kind) if file.is_file())
    return hashlib.blake2b(b"".join(map(Path.read_bytes, files)), digest_size=6).hexdigest()


class RememberedTeacher(Objectives):
    """Objectives whose dense passes are kept: another variant on the same batch need not run them again."""

    dense: Dense

    def teach(self, batch: MicroBatch) -> Teaching:
        key = (batch.seed, batch.timestep, self.session.method.needs_updates)
        if key not in self.dense.passes:
            self.dense.passes[key] = super().teach(batch)
        return self.dense.passes[key]


class Ablation(Trainer):
    """The library's loop with a teacher that remembers, perhaps over a router trained before."""

    def __init__(self, recipe: Recipe, output: Path, dense: Dense, router: Path | None):
        super().__init__(recipe, output)
        self.dense, self.router = dense, router

    def prepare(self) -> None:
        super().prepare()
        self.objectives = RememberedTeacher(**vars(self.objectives))
        self.objectives.dense = self.dense
        self.validator.objectives = self.objectives
        if self.router is not None:
            self.take(ShivaCheckpoint.from_pretrained(self.router), "routers.")

    def take(self, checkpoint: ShivaCheckpoint, prefix: str = "") -> None:
        weights = {name: tensor for name, tensor in checkpoint.weights.items() if name.startswith(prefix)}
        self.method.load_state_dict(weights, strict=not prefix)


@torch.no_grad()
def measure(trainer: Ablation, images: int) -> Stats:
    """A finished variant: distance to dense, spread of scores, mean keep of the policy, and whole runs."""
    if hasattr(trainer, "session"):
        last = (trainer.output / "validation.jsonl").read_text().splitlines()[-1]
        found = {name: value for name, value in json.loads(last).items() if "/" in name}
    else:  # finished before a kill
        trainer.prepare()
        trainer.take(ShivaCheckpoint.from_pretrained(trainer.final))
        found = trainer.validator.measure()
    method: Any = trainer.method
    method.eval()
    method.finish()
    spreads: list[float] = []
    watch = method.routers.register_forward_hook(lambda m, a, scores: spreads.append(float(scores.std(-1).mean())))
    with method.at_keep(KEEP):
        for batch in trainer.validator.batches():
            trainer.objectives.forward(batch)
    watch.remove()
    found["score deviation"] = sum(spreads) / len(spreads)
    found["mean keep"] = mean_keep(trainer)
    found["router parameters"] = float(sum(p.numel() for p in method.routers.parameters()))
    if images:
        found["psnr"] = whole_runs(trainer, images)
    return found


def mean_keep(trainer: Trainer) -> float:
    """The policy's noise-free mean ratio of reduced layers, over the timesteps of training and sampling."""
    points = 256
    method: Any = trainer.method
    process, (height, width) = trainer.objectives.process, trainer.prepared.held_out.grid(0)
    tokens = trainer.family.tokens((height, width))
    times = torch.tensor([process.timestep((i + 0.5) / points, tokens) for i in range(points)], device=trainer.device)
    return float(torch.sigmoid(method.policy.logits(times))[:, method.schedule.reduced].mean())


def whole_runs(trainer: Ablation, images: int) -> float:
    """Mean PSNR, in dB, of final images to the dense run's, at the budget and the learned schedule."""
    validator, session = trainer.validator, trainer.session
    indices, options = validator.indices[:images], trainer.recipe.validation
    latents, text = validator.items.encode(validator.items.read(indices))
    text = {name: tensor.to(trainer.device) for name, tensor in text.items()}
    size = (latents.shape[-2] * trainer.family.factor, latents.shape[-1] * trainer.family.factor)
    seeds = [seed_of(trainer.recipe.seed, "picture", index) for index in indices]

    def draw() -> list[Any]:
        return trainer.family.draw(text, size, options.image_steps, options.image_guidance, seeds, "pil")

    if not trainer.dense.images:
        with session.disabled():
            trainer.dense.images = draw()
    return sum(image_psnr(a, b) for a, b in zip(draw(), trainer.dense.images, strict=True)) / len(indices)


# -- what every table's file does ---------------------------------------------------------------------------


def bench_of(
    quick: bool,
    seeds: Sequence[int],
    model: Path = FIRST,
    state: Path | None = None,
    steps: int | None = None,
    threads: int | None = None,
) -> Bench:
    """A quick run only shows that everything works: one seed, four steps, and little to measure on."""
    if threads is not None:
        torch.set_num_threads(threads)
    if quick:
        return Bench(model, state, steps or 4, list(seeds)[:1], samples=4, images=1)
    return Bench(model, state, steps or STEPS, seeds)


def table(title: str, rows: Mapping[str, Mapping[str, Stats]], columns: Mapping[str, str]) -> None:
    """Print some measures of every variant; `columns` gives their headings."""
    made = Table(title=title)
    made.add_column("variant")
    for heading in columns.values():
        made.add_column(heading, justify="right")
    for name, row in rows.items():
        made.add_row(name, *(shown(row[key]) for key in columns))
    Console().print(made)


def draw_rows(result: Result, axes: Any, measure: str, label: str) -> None:
    """One measure of every variant, with its spread over seeds."""
    rows = {name: row[measure] for name, row in result.details["rows"].items()}
    means, deviations = ([row[key] for row in rows.values()] for key in ("mean", "std"))
    axes.errorbar(means, list(rows), xerr=deviations, fmt="o", capsize=2)
    for name, row in rows.items():
        axes.plot(row["values"], [name] * len(row["values"]), "k.", markersize=3)
    axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel=label)


def draw_by_keep(result: Result, axes: Any) -> None:
    """Each row's error over the keeps it was measured at."""
    for name, row in result.details["rows"].items():
        stats = [row[f"mse/keep_{keep:g}"] for keep in KEEPS]
        axes.errorbar(KEEPS, [s["mean"] for s in stats], [s["std"] for s in stats], marker="o", capsize=2, label=name)
    axes.set(xlabel="keep", ylabel="MSE to dense", yscale="log")
    axes.legend(fontsize=7)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options that every ablation takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FIRST)
    parser.add_argument("--state", type=Path, help="folder of trained variants; default ~/.cache/shiva/ablations")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a variant; default {STEPS}")
    parser.add_argument("--seeds", type=lambda text: range(int(text)), default=range(3), help="how many seeds")
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser
