"""Tables of differences between contenders on the same prompts and noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from shiva.measure.evaluation.evaluation import Cast, Evaluation
from shiva.measure.evaluation.paired import Paired
from shiva.measure.evaluation.run import Run
from shiva.measure.evaluation.tables import heading, left_out, told
from shiva.measure.quality import Metric, Score
from shiva.measure.sheet import Sheet

BySeed = list[dict[str, Score]]
"""Every metric of a contender, at each seed."""
LEADS = ("clip", "text_image")
"""Metrics that categories are ordered by, as the paper orders them by CLIP; the first that was measured."""
COUNTERPARTS = {"symbols": "symbols (the paper's logo)"}
"""Categories of the emoji set as tables name them."""


def comparable(evaluation: Evaluation, run: Run) -> list[Metric]:
    """Metrics that mean the same for dense and the others: not those that measure distance to dense."""
    return [metric for metric in told(evaluation, run) if metric.needs != "dense"]


def scores_of(evaluation: Evaluation, cast: Cast) -> dict[str, BySeed]:
    return {name: [evaluation.scores(cast.run, name, seed) for seed in cast.seeds] for name in cast.names}


def values(metric: Metric, scores: BySeed) -> list[float]:
    """One a prompt, its mean over the seeds, as seeds of a prompt are no independent pairs; of a set, one a seed."""
    if not metric.each:
        return [seed[metric.name].value for seed in scores]
    return [
        statistics.fmean(prompt) for prompt in zip(*(seed[metric.name].each or () for seed in scores), strict=True)
    ]


def difference(metric: Metric, scores: BySeed, reference: BySeed) -> Paired:
    return Paired.of(values(metric, scores), values(metric, reference), metric.higher)


def worth(pair: Paired, metric: Metric) -> float:
    return pair.mean if metric.higher else -pair.mean


def averaged(cast: Cast) -> str:
    return f", each a mean of {len(cast.seeds)} seeds" if len(cast.seeds) > 1 else ""


def paired(evaluation: Evaluation, cast: Cast, title: str) -> tuple[Sheet, dict[str, Any]]:
    """Per-prompt differences to the first contender; metrics of a whole set as a plain difference."""
    reference, *others = cast.names
    scores = scores_of(evaluation, cast)
    metrics = comparable(evaluation, cast.run)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name in others:
        cells, found[name] = [], {}
        for metric in metrics:
            pair = difference(metric, scores[name], scores[reference])
            found[name][metric.name] = pair.to_dict()
            cells.append(f"{pair} ({pair.wins:.0%})" if metric.each else f"{pair.mean:+.3g}")
        rows.append((name, *cells))
    caption = f"mean ± standard error over {len(cast.run.prompts)} prompts{averaged(cast)} "
    caption += "(share of prompts that are better; ties count half)" + left_out(evaluation, cast)
    return Sheet(title, (f"minus {reference}", *map(heading, metrics)), rows, caption), found


def verdict(evaluation: Evaluation, cast: Cast) -> tuple[Sheet, dict[str, Any]]:
    """Where the first contender stands against each other one, metric by metric: ahead, behind or level."""
    first, *others = cast.names
    scores = scores_of(evaluation, cast)
    metrics = told(evaluation, cast.run)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name in others:
        pairs = {metric: difference(metric, scores[first], scores[name]) for metric in metrics}
        words = {metric: stands(pair, metric) for metric, pair in pairs.items()}
        short = [metric for metric in metrics if words[metric] != "ahead"]
        found[name] = {
            "metrics": {m.name: {**pair.to_dict(), "stands": words[m]} for m, pair in pairs.items()},
            "not_ahead_on": [metric.name for metric in short],
        }
        cells = (f"{words[m]} {pair if m.each else f'{pair.mean:+.3g}'}" for m, pair in pairs.items())
        rows.append((name, *cells, ", ".join(metric.title for metric in short) or "nothing"))
    caption = f"{first} minus the method of the row, mean ± standard error over {len(cast.run.prompts)} prompts"
    caption += f"{averaged(cast)}; ahead or behind beyond two standard errors, level within; "
    caption += "distances of whole sets have no such error and go by their value"
    columns = (f"{first} against", *map(heading, metrics), "not ahead on")
    return Sheet(f"Where {first} stands at matched FLOPs", columns, rows, caption), found


def stands(pair: Paired, metric: Metric) -> str:
    gain = worth(pair, metric)
    sure = abs(gain) > 2 * pair.error if metric.each else gain != 0
    return "level" if not sure else "ahead" if gain > 0 else "behind"


def by_category(evaluation: Evaluation, cast: Cast, name: str) -> tuple[Sheet, dict[str, Any]]:
    """Per-prompt differences of a contender to the first one in each category, worst first."""
    reference = cast.names[0]
    mine, theirs = ([evaluation.scores(cast.run, n, seed) for seed in cast.seeds] for n in (name, reference))
    metrics = leading_first([metric for metric in comparable(evaluation, cast.run) if metric.each])
    categories = [prompt.category or "all" for prompt in cast.run.prompts.prompts]
    groups: dict[str, list[int]] = {
        category: [i for i, c in enumerate(categories) if c == category] for category in dict.fromkeys(categories)
    }
    groups["all categories"] = list(range(len(categories)))
    found: dict[str, dict[str, Paired]] = {group: {} for group in groups}
    for metric in metrics:
        a, b = values(metric, mine), values(metric, theirs)
        for group, places in groups.items():
            found[group][metric.name] = Paired.of([a[i] for i in places], [b[i] for i in places], metric.higher)
    ordered = sorted(
        groups, key=lambda group: (group == "all categories", *(worth(found[group][m.name], m) for m in metrics[:1]))
    )
    rows = [
        (COUNTERPARTS.get(group, group), str(len(groups[group])), *(str(found[group][m.name]) for m in metrics))
        for group in ordered
    ]
    order = f"; worst first by {metrics[0].title}" if metrics else ""
    caption = f"mean ± standard error over n prompts{averaged(cast)}{order}" + left_out(evaluation, cast)
    columns = ("category", "n", *map(heading, metrics))
    figures = {group: {m: pair.to_dict() for m, pair in pairs.items()} for group, pairs in found.items()}
    return Sheet(f"{name} minus {reference}, by category", columns, rows, caption), figures


def leading_first(metrics: Sequence[Metric]) -> list[Metric]:
    lead = next((metric for name in LEADS for metric in metrics if metric.name == name), None)
    return sorted(metrics, key=lambda metric: metric is not lead)


def by_seed(evaluation: Evaluation, cast: Cast) -> tuple[list[Sheet], dict[str, Any]]:
    """The difference of each seed's mean, its deviation, and how far each side's own mean strays between seeds."""
    reference, *others = cast.names
    sheets: list[Sheet] = []
    found: dict[str, Any] = {}
    scores = scores_of(evaluation, cast)
    for name in others:
        rows, found[name] = [], {}
        for metric in comparable(evaluation, cast.run):
            own, other = ([seed[metric.name].value for seed in scores[n]] for n in (name, reference))
            pair, gaps = Paired.of(own, other, metric.higher), [a - b for a, b in zip(own, other, strict=True)]
            strays = statistics.stdev(own), statistics.stdev(other)
            found[name][metric.name] = {
                **pair.to_dict(),
                "each": gaps,
                "own_deviation": strays[0],
                "reference_deviation": strays[1],
            }
            ends = (f"{pair.mean:+.3g}", *(f"{value:.2g}" for value in (pair.deviation, *strays)), f"{pair.wins:.0%}")
            rows.append((heading(metric), *(f"{gap:+.3g}" for gap in gaps), *ends))
        columns = ("metric", *(f"seed {seed}" for seed in cast.seeds), "mean", "deviation")
        columns = (*columns, f"deviation of {name}", f"deviation of {reference}", "ahead")
        caption = (
            f"{len(cast.run.prompts)} prompts a seed; deviation: of the differences, and of each side's own value"
        )
        caption += left_out(evaluation, cast)
        sheets.append(Sheet(f"{name} minus {reference}, seed by seed", columns, rows, caption))
    return sheets, found
