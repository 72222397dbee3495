"""Tables of candidates: quality and cost by row, and differences on the same prompts and noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shiva.bench.table import Table
from shiva.evaluate.candidates import DENSE
from shiva.evaluate.evaluation import Comparison, Evaluation
from shiva.evaluate.images import Run
from shiva.evaluate.metrics import METRICS, Metric, Score

BySeed = list[dict[str, Score]]
"""Every metric of a candidate, at each seed."""


def heading(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    return f"{metric.title}{unit} {'↑' if metric.higher else '↓'}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def measured(evaluation: Evaluation, run: Run) -> list[Metric]:
    """The metrics that could be measured, in their order; known once the first scores are."""
    return [metric for metric in evaluation.metrics if metric.name not in evaluation.missing(run)]


def left_out(evaluation: Evaluation, shown: Comparison) -> str:
    """Who and what is not in a table, and why."""
    missing = {METRICS[name].title: why for name, why in evaluation.missing(shown.run).items()}
    return "".join(f"; {name} left out: {why}" for name, why in {**shown.absent, **missing}.items())


# -- one candidate a row ---------------------------------------------------------------------------------


def quality(evaluation: Evaluation, shown: Comparison, title: str) -> tuple[Table, dict[str, Any]]:
    """Every metric of every candidate."""
    run, seeds = shown.run, shown.seeds
    found = {name: evaluation.means(run, name, seeds) for name in shown.names}
    metrics = measured(evaluation, run)
    rows = [(name, *(number(found[name].get(metric.name)) for metric in metrics)) for name in shown.names]
    how = f"{len(run.prompts)} prompts ({run.prompts.name}), seed{'s' if len(seeds) > 1 else ''} "
    how += f"{', '.join(map(str, seeds))}, {run.settings.steps} steps, guidance {run.settings.guidance:g}"
    if run.manifest.get("earlier_environments"):
        how += "; images were made in several environments, which run.json lists"
    return Table(title, ("method", *map(heading, metrics)), rows, how + left_out(evaluation, shown)), found


def costs(evaluation: Evaluation, shown: Comparison) -> tuple[Table, dict[str, Any]]:
    """FLOPs, one-step error, latency and speed-up; the paper's beside them where it is known."""
    seconds, untimed = evaluation.latencies(shown.run, shown.names)
    rows: list[dict[str, str]] = []
    found = {}
    for name in shown.names:
        cost, time = evaluation.cost(shown.run, name), seconds.get(name)
        speedup = seconds[DENSE].median / time.median if time else None
        found[name] = {
            **asdict(cost),
            "latency": asdict(time) if time else None,
            "speedup": speedup,
            "limit": 1 / cost.share,
        }
        row = {
            "method": name,
            "GFLOPs": f"{cost.gflops:.3f}",
            "GFLOPs, MACs counted once": f"{cost.gflops_paper:.3f}",
            "saved": f"{1 - cost.share:.1%}",
            "saved, MACs counted once": f"{1 - cost.share_paper:.1%}",
            "paper: saved": "",
            "latency, s": "" if time is None else str(time),
            "speed-up": "" if speedup is None else f"{speedup:.2f}x",
            "limit": f"{1 / cost.share:.2f}x",
            "paper: speed-up": "",
            "one-step MSE ↓": "" if cost.one_step_mse is None else f"{cost.one_step_mse:.3g}",
            "one-step cosine ↑": "" if cost.one_step_cosine is None else f"{cost.one_step_cosine:.4f}",
        }
        paper = evaluation.paper.get(shown.run.candidates[name].paper)
        if paper is not None:
            row |= {"paper: saved": f"{paper.saved:.1f}%", "paper: speed-up": f"{paper.speedup:.2f}x"}
        rows.append(row)
    return Table.of(
        "Cost of a step",
        rows,
        "GFLOPs: true ones of a transformer call, by the tokens that ran and a fill's own, a router's or a matching's "
        "not counted; of fewer steps, other solvers and step caches, every matrix product of a whole run, a method's "
        "own included, over dense's steps; MACs counted once: as the paper counts, in linear layers; latency: of a "
        "whole image, --batch of them a call, median ± half the distance of the quartiles over turns that all take; "
        "speed-up: dense's latency over the method's; limit: the speed-up that true FLOPs alone allow; one-step: the "
        "prediction against dense at dense's noisy latents" + (untimed and f"; not timed: {untimed}"),
    ), found


# -- differences -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """Differences of a candidate to a reference, one a pair; positive where the candidate's value is larger."""

    count: int
    mean: float
    deviation: float
    """Of the single differences; NaN for a single one."""
    wins: float
    """Share of pairs in which the candidate is better than the reference; ties count half."""

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.count)

    @classmethod
    def of(cls, values: Sequence[float], reference: Sequence[float], higher: bool) -> Paired:
        """Of values against the reference's, in the same order; `higher` says which direction is better."""
        gaps = [a - b for a, b in zip(values, reference, strict=True)]
        better = [gap if higher else -gap for gap in gaps]
        wins = sum((gap > 0) + 0.5 * (gap == 0) for gap in better) / len(gaps)
        return cls(len(gaps), statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else math.nan, wins)

    def to_dict(self) -> dict[str, float | None]:
        values = {"count": self.count, "mean": self.mean, "deviation": self.deviation, "error": self.error}
        return {name: None if math.isnan(value) else value for name, value in {**values, "wins": self.wins}.items()}

    def __str__(self) -> str:
        return f"{self.mean:+.3g}" if math.isnan(self.error) else f"{self.mean:+.3g} ± {self.error:.2g}"


def scores_of(evaluation: Evaluation, shown: Comparison) -> dict[str, BySeed]:
    return {name: [evaluation.scores(shown.run, name, seed) for seed in shown.seeds] for name in shown.names}


def values(metric: Metric, scores: BySeed) -> list[float]:
    """One a prompt, its mean over the seeds, as seeds of a prompt are no independent pairs; of a set, one a seed."""
    if not metric.each:
        return [seed[metric.name].value for seed in scores]
    return [
        statistics.fmean(prompt) for prompt in zip(*(seed[metric.name].each or () for seed in scores), strict=True)
    ]


def difference(metric: Metric, scores: BySeed, reference: BySeed) -> Paired:
    return Paired.of(values(metric, scores), values(metric, reference), metric.higher)


def gain(pair: Paired, metric: Metric) -> float:
    """A mean difference, positive where the candidate is better."""
    return pair.mean if metric.higher else -pair.mean


def averaged(shown: Comparison) -> str:
    return f", each a mean of {len(shown.seeds)} seeds" if len(shown.seeds) > 1 else ""


def verdict(evaluation: Evaluation, shown: Comparison) -> tuple[Table, dict[str, Any]]:
    """Where the first candidate stands against each other one, metric by metric: ahead, behind or level."""
    first, *others = shown.names
    scores = scores_of(evaluation, shown)
    metrics = measured(evaluation, shown.run)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name in others:
        pairs = {metric: difference(metric, scores[first], scores[name]) for metric in metrics}
        words = {metric: rank_word(pair, metric) for metric, pair in pairs.items()}
        short = [metric for metric in metrics if words[metric] != "ahead"]
        found[name] = {
            "metrics": {m.name: {**pair.to_dict(), "stands": words[m]} for m, pair in pairs.items()},
            "not_ahead_on": [metric.name for metric in short],
        }
        cells = (f"{words[m]} {pair if m.each else f'{pair.mean:+.3g}'}" for m, pair in pairs.items())
        rows.append((name, *cells, ", ".join(metric.title for metric in short) or "nothing"))
    caption = f"{first} minus the method of the row, mean ± standard error over {len(shown.run.prompts)} prompts"
    caption += f"{averaged(shown)}; ahead or behind beyond two standard errors, level within; "
    caption += "distances of whole sets have no such error and go by their value"
    columns = (f"{first} against", *map(heading, metrics), "not ahead on")
    return Table(f"Where {first} stands at matched FLOPs", columns, rows, caption), found


# -- against fewer steps ---------------------------------------------------------------------------------


def above_the_line(evaluation: Evaluation, shown: Comparison) -> tuple[Table, dict[str, Any]]:
    """How far each candidate is from the line of dense runs of fewer steps, at its own FLOPs, prompt by prompt."""
    run, scores = shown.run, scores_of(evaluation, shown)
    shares = {name: evaluation.cost(run, name).share for name in shown.names}
    fewer = sorted((name for name in shown.names if run.candidates[name].only_steps), key=shares.__getitem__)
    if not fewer:
        raise ValueError("no candidate takes fewer steps; name some, such as `3 steps: {steps: 3}`")
    metrics = measured(evaluation, run)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name in (name for name in shown.names if name != DENSE and name not in fewer):
        below = [other for other in fewer if shares[other] <= shares[name]]
        above = [other for other in fewer if shares[other] > shares[name]]
        if not above:
            continue  # between fewer steps and dense itself, to which distances have no end
        low, high = (below or above)[-1 if below else 0], above[0]
        weight = (shares[name] - shares[low]) / (shares[high] - shares[low]) if high != low else 0.0
        pairs = {}
        for metric in metrics:
            ends = (values(metric, scores[end]) for end in (low, high))
            line = [a + weight * (b - a) for a, b in zip(*ends, strict=True)]
            pairs[metric] = Paired.of(values(metric, scores[name]), line, metric.higher)
        found[name] = {metric.name: pair.to_dict() for metric, pair in pairs.items()}
        cells = (f"{p} ({p.wins:.0%})" if m.each else f"{p.mean:+.3g}" for m, p in pairs.items())
        rows.append((name, f"{shares[name]:.1%}", low if low == high else f"{low} to {high}", *cells))
    caption = "candidate minus line, mean ± standard error over prompts (share of prompts that are better); the line "
    caption += f"joins {', '.join(fewer)}, and below the cheapest of them it stays at its value"
    columns = ("method", "FLOPs", "line between", *map(heading, metrics))
    return Table("Above the line of fewer steps", columns, rows, caption + left_out(evaluation, shown)), found


def rank_word(pair: Paired, metric: Metric) -> str:
    """Ahead, behind or level: beyond two standard errors or within."""
    better = gain(pair, metric)
    sure = abs(better) > 2 * pair.error if metric.each else better != 0
    return "level" if not sure else "ahead" if better > 0 else "behind"
