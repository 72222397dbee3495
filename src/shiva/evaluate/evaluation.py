"""An evaluation at work: runs, their scores and costs, each measured once and kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shiva.evaluate.candidates import DENSE, Candidates, fingerprint, slug
from shiva.evaluate.costs import Cost, Latency, Prices, latency, read_cache, write_cache
from shiva.evaluate.drawing import Workers, check_device, hints, load_pipeline
from shiva.evaluate.images import Run, Settings
from shiva.evaluate.metrics import METRICS, Metric, Score, Subject, Tools, measure
from shiva.evaluate.prompts import PromptSet


@dataclass(frozen=True)
class Comparison:
    """The rows of a protocol's tables: candidates that have all their images, and why others are absent."""

    run: Run
    names: list[str]
    """The first is what the others are held against."""
    seeds: tuple[int, ...]
    absent: dict[str, str]


@dataclass
class Evaluation:
    """What the protocols share."""

    candidates: Candidates
    folder: Path
    settings: Settings
    prompts: PromptSet
    held_out: PromptSet | None
    """Prompts that were not trained on."""
    metrics: list[Metric]
    tools: Tools
    workers: Workers
    pipe: Callable[[], Any]
    seeds: tuple[int, ...] = (0,)
    rounds: int = 5
    """Turns of the latency measurement; 0 leaves it out."""
    probes: int = 4
    """Prompts on whose dense runs FLOPs and one-step errors are measured."""
    target: float | None = None
    """Share of dense FLOPs that `matched` aims at; None takes its first candidate's."""
    rivals: bool = False
    """Whether the main table also has fewer steps at the FLOPs of its methods, and the step caches."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Rows of the paper's main table, with `saved` and `speedup`, by their names."""
    progress: Callable[[str], None] = lambda text: None
    _missing: dict[Path, dict[str, str]] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)
    _prices: dict[tuple[Path, int], Prices] = field(default_factory=dict)

    # -- runs ----------------------------------------------------------------------------------------

    def run(self, variant: str = "", prompts: PromptSet | None = None, **changes: Any) -> Run:
        """The main run, or one under other prompts or settings in a folder of its own."""
        if variant not in self._runs:
            folder = self.folder / "runs" / variant if variant else self.folder
            settings = dataclasses.replace(self.settings, **changes)
            self._runs[variant] = Run(folder, settings, prompts or self.prompts, self.candidates.candidates, self.pipe)
        return self._runs[variant]

    def complete(self, run: Run, names: Sequence[str], seeds: Sequence[int]) -> list[str]:
        """Make what is missing of these candidates and of dense; those that are whole, in their order."""

        def tell(name: str, done: int, total: int) -> None:
            self.progress(f"{name}: image {done} of {total}")

        wanted = list(dict.fromkeys([*([DENSE] if DENSE in run.candidates else []), *names]))
        whole = run.complete(wanted, seeds, self.workers, tell)
        return [name for name in names if name in whole]

    # -- scores --------------------------------------------------------------------------------------

    def scores(self, run: Run, name: str, seed: int) -> dict[str, Score]:
        """Every metric of a candidate's images at a seed; measured once, then read."""
        has_dense = DENSE in run.candidates and not run.missing(DENSE, seed)
        against = DENSE if has_dense and name != DENSE else None
        path = run.folder / "scores" / slug(name) / f"{seed}.json"
        key = run.key(name, *([DENSE] if has_dense else []))
        known: dict[str, Any] = read_cache(path, key) or {}
        if not has_dense:
            needing = [m for m in self.metrics if m.needs == "dense"]
            self.missing(run).update({m.name: f"no candidate called {DENSE} has its images" for m in needing})
        wanted = [m for m in self.metrics if m.needs != "dense" or against]
        fresh = [m for m in wanted if known.get(m.name, {}).get("source", "absent") != self._source(m)]
        if fresh:
            self.progress(f"{name}: measuring at seed {seed}")
            subject = Subject(
                images=run.pictures(name, seed),
                prompts=run.prompts.texts,
                labels=run.prompts.labels,
                dense=run.pictures(against, seed) if against else None,
                reference=run.reference,
            )
            found, missing = measure(fresh, subject, self.tools)
            self.missing(run).update(missing)
            if found:
                known |= {n: {**asdict(score), "source": self._source(METRICS[n])} for n, score in found.items()}
                write_cache(path, key, known)
        names = [m.name for m in wanted if m.name in known and m.name not in self.missing(run)]
        return {n: Score(known[n]["value"], known[n]["each"]) for n in names}

    def missing(self, run: Run) -> dict[str, str]:
        """Metrics that could not be measured on a run's images, and why."""
        return self._missing.setdefault(run.folder, {})

    def _source(self, metric: Metric) -> str | None:
        """The weights that a figure rests on, where the user chose them."""
        chosen = {"clip": self.tools.clip, "clip_iqa": self.tools.clip, "fid": self.tools.inception}
        found = (chosen | {"image_reward": self.tools.reward}).get(metric.name)
        return None if found is None else str(found)

    def means(self, run: Run, name: str, seeds: Sequence[int]) -> dict[str, float]:
        """Every metric, as the mean over seeds."""
        every = [self.scores(run, name, seed) for seed in seeds]
        measured = [name for name in every[0] if all(name in scores for scores in every)]
        return {name: sum(scores[name].value for scores in every) / len(every) for name in measured}

    # -- costs ---------------------------------------------------------------------------------------

    def prices(self, run: Run, probes: int | None = None) -> Prices:
        key = (run.folder, probes or self.probes)
        if key not in self._prices:
            self._prices[key] = Prices(run, key[1], self.seeds[0])
        return self._prices[key]

    def cost(self, run: Run, name: str) -> Cost:
        self.progress(f"{name}: FLOPs and one-step error")
        return self.prices(run).of(name)

    def latencies(self, run: Run, names: Sequence[str]) -> tuple[dict[str, Latency], str]:
        """Time of an image of dense and of each candidate; where it cannot be measured, none of them and why."""
        if self.rounds < 1:
            return {}, "--rounds is 0"
        if DENSE not in run.candidates:
            return {}, f"no candidate is called {DENSE}"

        def tell(name: str) -> None:
            self.progress(f"timing in turns: {name}")

        try:
            return latency(run, list(dict.fromkeys([DENSE, *names])), self.rounds, self.workers.device, tell), ""
        except Exception as error:  # hours of images are behind it: their tables are written without it
            return {}, f"{type(error).__name__}: {error}"


def prepare(
    model: str,
    device: str,
    dtype: str,
    candidates: Candidates | None = None,
    weights: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Of an `Evaluation`: the pipeline, loaded when first asked for, its settings, processes and tools."""
    workers, (without, arguments) = Workers(check_device(device)), hints(model, candidates)
    pipe = functools.cache(lambda: load_pipeline(model, dtype, without).to(workers.device))
    of_model: Any = {"model": model, "weights": fingerprint(Path(model)), "dtype": dtype}
    return {
        "pipe": pipe,
        "settings": Settings(**of_model, without=without, arguments=arguments, **settings),
        "workers": workers,
        "tools": Tools(pipe=pipe, score=Path(model) / "score", device=workers.device, **(weights or {})),
    }
