"""The candidates of `reproduce.claims.rejected_tokens`, and whole runs of them that a kill does not lose."""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

import shiva
from reproduce.claims.common import progress
from reproduce.claims.embedded import digest
from reproduce.claims.mag_cache import MagCached
from shiva.checkpoint import write_atomically
from shiva.core.method import MethodConfig
from shiva.evaluate.candidates import Candidate, fingerprint
from shiva.evaluate.drawing import Outcome, generate
from shiva.evaluate.metrics import METRICS, Pictures, Subject, Tools, decode, measure
from shiva.evaluate.prompts import PromptSet
from shiva.evaluate.rivals import magnitude_ratios

MEASURED = ("psnr", "lpips", "text_image", "frechet")
REJECTED: dict[str, dict[str, Any]] = {
    "identity": {"fill": "identity"},
    "near": {"fill": "near"},
    "cached": {"fill": "cached"},
    "cached, attending to all": {"fill": "cached", "attends": "all"},
}
RANKINGS: dict[str, dict[str, Any]] = {
    "random": {"score": "random"},
    "router": {},
    "oldest": {"score": "age"},
    "sweep": {"score": "sweep"},
    "router + age": {"age": 0.5},
}
STATELESS = ("random", "router")
"""Rankings that mean something where no update is kept, so that none grows old."""
FEWER = (0.8, 0.6, 0.5, 0.4)
"""Shares of the steps."""
THRESHOLDS = (0.06, 0.12, 0.24)
"""Of MagCache: its default, and twice and four times that."""


@dataclass(frozen=True)
class Point:
    """One candidate at one number of steps."""

    series: str
    keep: float | None
    candidate: Candidate
    steps: int
    of: int | None = None
    """Steps of the dense run it is held against, if not as many."""

    @property
    def name(self) -> str:
        return self.series if self.keep is None else f"{self.series}, {self.keep:g}"


@dataclass(frozen=True)
class Setting:
    """What all candidates have in common."""

    model: Path
    prompts: PromptSet
    seeds: tuple[int, ...]
    guidance: float
    state: Path
    """Folder of finished candidates."""

    @functools.cached_property
    def weights(self) -> str:
        """Of the transformer's files, read once: they may be replaced while the loaded ones run."""
        return digest(self.model / "transformer", "*.safetensors")

    def key(self, *more: Any) -> str:
        """Of a result: it changes with the weights, the prompts and whatever else the result depends on."""
        what = (self.weights, self.prompts.texts, self.seeds, self.guidance, *more)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


@dataclass
class Runner:
    """Runs candidates, or reads what an earlier call found."""

    pipe: Any
    setting: Setting
    known: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    tools: Tools = field(init=False)

    def __post_init__(self) -> None:
        self.tools = Tools(pipe=lambda: self.pipe, score=self.setting.model / "score")
        chosen = self.setting.prompts
        assert chosen.image is not None
        real = torch.stack([decode(chosen.image(prompt)) for prompt in chosen.prompts])
        self.reference = Pictures.of(torch.cat([real] * len(self.setting.seeds)))

    def dense(self, steps: int) -> dict[str, Tensor]:
        """Images (M, 3, H, W) of the dense model, and MagCache's ratios (steps,)."""
        if steps not in self.known:
            file = self.setting.state / f"dense-{self.setting.key(steps)}.safetensors"
            if not file.is_file():
                with magnitude_ratios(self.pipe.transformer) as ratios:
                    images, _ = self.images(Point("dense", None, Candidate(), steps))
                found = {"images": images, "ratios": torch.tensor(ratios[:steps])}
                write_atomically(file, save(found))
            self.known[steps] = load_file(file)
        return self.known[steps]

    def generate(self, point: Point, seed: int) -> Outcome:
        """One batch of all prompts."""
        setting = self.setting
        return generate(
            self.pipe,
            setting.prompts.texts,
            {"it": point.candidate},
            steps=point.steps,
            guidance=setting.guidance,
            seed=0,
            first=1000 * seed,
            max_sequence_length=0,
        )["it"]

    def images(self, point: Point) -> tuple[Tensor, Any]:
        """Images of all prompts and seeds in [0, 1], and the summary of the last run."""
        made, summary = [], None
        for seed in self.setting.seeds:
            outcome = self.generate(point, seed)
            made += [torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 for image in outcome.images]
            summary = outcome.summary
        return torch.stack(made), summary

    def measure(self, point: Point) -> dict[str, Any]:
        """Scores of one candidate; written before it is returned."""
        whole = point.of or point.steps
        dense = self.dense(whole)
        folder = point.candidate.checkpoint
        weights = [fingerprint(Path(folder))] if isinstance(folder, str) else []
        what = (point.name, point.steps, repr(point.candidate), *weights)
        file = self.setting.state / f"{self.setting.key(*what)}.json"
        if not file.is_file():
            began = time.process_time()
            images, summary = self.images(point)
            found = {
                "name": point.name,
                "series": point.series,
                "keep": point.keep,
                "steps": point.steps,
                "flops_share": (1.0 if summary is None else summary.flops_share) * point.steps / whole,
                "cached_mib": self.held(point.candidate, summary) / 2**20,
                **self.scores(images, dense["images"]),
                "cpu_seconds": time.process_time() - began,
            }
            write_atomically(file, json.dumps(found, indent=1).encode())
        return json.loads(file.read_text())

    def pace(self, points: Sequence[Point], steps: int, rounds: int) -> dict[str, float]:
        """Median time of a run by name, as a share of dense in `steps`; all take turns, finished rounds are kept."""
        runners = [Point("dense", None, Candidate(), steps), *points]
        kept: list[dict[str, float]] = []
        for number in range(rounds):
            file = self.setting.state / f"pace-{self.setting.key(repr(runners), number)}.json"
            if not file.is_file():
                self.generate(runners[0], seed=0)  # the first run of a process is slow, and dense is the measure
                turns = progress(runners, f"time, round {number + 1} of {rounds}")
                taken = {point.name: self.generate(point, seed=0).seconds for point in turns}
                write_atomically(file, json.dumps(taken).encode())
            kept.append(json.loads(file.read_text()))
        medians = {point.name: statistics.median(taken[point.name] for taken in kept) for point in runners}
        return {name: seconds / medians["dense"] for name, seconds in medians.items()}

    def held(self, candidate: Candidate, summary: Any) -> int:
        """Bytes kept from step to step by a method, and by MagCache: one update of all blocks for every sample."""
        residual = 0
        if isinstance(candidate, MagCached):
            model, batch = self.pipe.transformer, 2 * len(self.setting.prompts)  # both halves of guidance
            residual = batch * summary.steps[0].tokens * model.inner_dim * model.dtype.itemsize
        return residual + (0 if summary is None else summary.cached_bytes)

    def scores(self, images: Tensor, dense: Tensor) -> dict[str, Any]:
        chosen = self.setting.prompts
        subject = Subject(
            images=Pictures.of(images),
            prompts=chosen.texts * len(self.setting.seeds),
            labels=chosen.labels,
            dense=Pictures.of(dense),
            reference=self.reference,
        )
        scores, missing = measure([METRICS[name] for name in MEASURED], subject, self.tools)
        return {**{name: score.value for name, score in scores.items()}, "missing": missing, "images": len(images)}


def selectors(checkpoint: Path | None, aged: Path | None, keeps: Sequence[float], steps: int) -> list[Point]:
    """Rejected x ranking at every keep; rankings by a router need a trained one."""
    points = []
    for rejected, gets in REJECTED.items():
        for ranking, options in RANKINGS.items():
            if gets["fill"] != "cached" and ranking not in STATELESS:
                continue
            trained = ranking.startswith("router")
            if trained and checkpoint is None:
                continue
            for keep in keeps:
                chosen = {**options, **gets, "budget": keep}
                found = (
                    Candidate(checkpoint=str(checkpoint), options=chosen)
                    if trained
                    else Candidate(untrained(**chosen))
                )
                points.append(Point(f"{rejected}, {ranking}", keep, found, steps))
    if aged is not None:
        points += [
            Point("cached, trained with it", k, Candidate(checkpoint=str(aged), options={"budget": k}), steps)
            for k in keeps
        ]
    return points


def untrained(score: str, **options: Any) -> MethodConfig:
    return shiva.Sweep(tilt=0.0, **options) if score == "sweep" else shiva.Ranked(score=score, **options)


def short_runs(steps: Sequence[int]) -> list[Point]:
    """What a rejected token gets, at several lengths of run."""
    keep = 0.6
    kinds = [*((kind, "random") for kind in ("identity", "near", "cached")), ("cached, attending to all", "sweep")]
    return [
        Point(f"{kind}, {score}", keep, Candidate(untrained(score, budget=keep, **REJECTED[kind])), n)
        for n in steps
        for kind, score in kinds
    ]


def others(steps: int) -> list[Point]:
    """Merging methods, SDTM with its own cache."""
    points = [Point("ToMeSD", 1 - r, Candidate(shiva.ToMeSD(ratio=r)), steps) for r in (0.25, 0.5)]
    points += [Point("ToMA", 1 - r, Candidate(shiva.ToMA(ratio=r, skip=1)), steps) for r in (0.25, 0.5)]
    return [*points, Point("SDTM, release", None, Candidate(shiva.SDTM()), steps)]


def fewer_steps(steps: int) -> list[Point]:
    """The plainest way to save: the dense model in fewer steps, held against all of them."""
    counts = sorted({round(share * steps) for share in FEWER}, reverse=True)
    return [Point(f"dense in {n} steps", None, Candidate(), n, of=steps) for n in counts]


def whole_step(ratios: Sequence[float], steps: int) -> list[Point]:
    """MagCache alone, which a session of keep 1 only watches, and around cached updates."""
    watched, threshold = shiva.Shiva(budget=1.0), THRESHOLDS[0]
    alone = [
        Point(f"MagCache {threshold:g}", None, MagCached(watched, magnitudes=tuple(ratios), setting=threshold), steps)
        for threshold in THRESHOLDS
    ]
    around = [
        Point(
            f"cached, attending to all, sweep, {keep:g} + MagCache {threshold:g}",
            None,
            MagCached(shiva.Sweep(budget=keep, tilt=0.0), magnitudes=tuple(ratios), setting=threshold),
            steps,
        )
        for keep in (0.8, 0.6)
    ]
    return alone + around


def described(setting: Setting) -> dict[str, Any]:
    values = asdict(setting) | {"prompts": setting.prompts.texts, "model": setting.model.name}
    values.pop("state")
    return values
