"""Tables that the protocols are made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shiva.measure.evaluation.evaluation import Evaluation
from shiva.measure.evaluation.lineup import DENSE
from shiva.measure.evaluation.paired import Paired
from shiva.measure.evaluation.paper import MAIN
from shiva.measure.evaluation.run import Run
from shiva.measure.quality import METRICS, Metric, Score
from shiva.measure.sheet import Sheet

Scores = dict[str, Score]


def heading(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    return f"{metric.title}{unit} {'↑' if metric.higher else '↓'}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def told(evaluation: Evaluation, run: Run) -> list[Metric]:
    """The metrics that could be measured, in their order; known once the first scores are."""
    return [metric for metric in evaluation.metrics if metric.name not in evaluation.missing(run)]


def quality(
    evaluation: Evaluation, run: Run, names: Sequence[str], seeds: Sequence[int], title: str
) -> tuple[Sheet, dict[str, Any]]:
    """Every metric of every contender."""
    found = {name: evaluation.means(run, name, seeds) for name in names}
    metrics = told(evaluation, run)
    rows = [(name, *(number(found[name].get(metric.name)) for metric in metrics)) for name in names]
    how = f"{len(run.prompts)} prompts ({run.prompts.name}), seed{'s' if len(seeds) > 1 else ''} "
    how += f"{', '.join(map(str, seeds))}, {run.settings.steps} steps, guidance {run.settings.guidance:g}"
    return Sheet(title, ("method", *map(heading, metrics)), rows, how + left_out(evaluation, run)), found


def left_out(evaluation: Evaluation, run: Run) -> str:
    """Who and what is not in a table, and why."""
    reasons = [*run.skipped.items(), *((METRICS[name].title, why) for name, why in evaluation.missing(run).items())]
    return "".join(f"; {name} left out: {why}" for name, why in reasons)


def costs(evaluation: Evaluation, run: Run, names: Sequence[str]) -> tuple[Sheet, dict[str, Any]]:
    """FLOPs, one-step error and speed-up, the paper's beside them."""
    ratios = evaluation.ratios(run, names)
    rows, found = [], {}
    for name in names:
        cost, paper = evaluation.cost(run, name), MAIN.get(run.contenders[name].paper)
        speedup = 1 / ratios[name] if name in ratios else None
        found[name] = {**asdict(cost), "speedup": speedup, "limit": 1 / cost.share}
        rows.append(
            (
                name,
                f"{cost.gflops:.3f}",
                f"{cost.gflops_paper:.3f}",
                f"{1 - cost.share:.1%}",
                f"{1 - cost.share_paper:.1%}",
                "" if paper is None else f"{paper.saved:.1f}%",
                "" if speedup is None else f"{speedup:.2f}x",
                f"{1 / cost.share:.2f}x",
                "" if paper is None else f"{paper.speedup:.2f}x",
                f"{cost.one_step_mse:.3g}",
                f"{cost.one_step_cosine:.4f}",
            )
        )
    flops = ("GFLOPs", "paper's count", "saved", "saved, paper's count", "paper's")
    speed = ("speed-up", "limit", "paper's")
    return Sheet(
        "Cost of a step",
        ("method", *flops, *speed, "one-step MSE ↓", "one-step cosine ↑"),
        rows,
        "GFLOPs: true ones of a transformer call, the method's own not counted; limit: the speed-up they alone allow; "
        "speed-up: medians of whole images in turns; one-step: the prediction against dense at dense's noisy latents",
    ), found


def paired(
    evaluation: Evaluation, run: Run, names: Sequence[str], seeds: Sequence[int], title: str
) -> tuple[Sheet, dict[str, Any]]:
    """Per-image differences to the first contender, over all seeds; metrics of a whole set as a plain difference."""
    reference, others = names[0], names[1:]
    scores = {name: [evaluation.scores(run, name, seed) for seed in seeds] for name in names}
    metrics = comparable(evaluation, run)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name in others:
        cells, found[name] = [], {}
        for metric in metrics:
            pair = difference(metric, scores[name], scores[reference])
            found[name][metric.name] = pair.to_dict()
            cells.append(f"{pair} ({pair.wins:.0%})" if metric.each else f"{pair.mean:+.3g}")
        rows.append((name, *cells))
    caption = f"mean ± standard error of {len(run.prompts) * len(seeds)} pairs of the same prompt and noise "
    caption += "(share of pairs that are better; ties count half)" + left_out(evaluation, run)
    return Sheet(title, (f"minus {reference}", *map(heading, metrics)), rows, caption), found


def comparable(evaluation: Evaluation, run: Run) -> list[Metric]:
    """Metrics that mean the same for the reference and the others: not those that measure distance to dense."""
    return [metric for metric in told(evaluation, run) if metric.needs != "dense"]


def difference(metric: Metric, scores: list[Scores], reference: list[Scores]) -> Paired:
    def values(of: list[Scores]) -> list[float]:
        return [v for s in of for v in (each(s[metric.name]) if metric.each else [s[metric.name].value])]

    return Paired.of(values(scores), values(reference), metric.higher)


def each(score: Score) -> list[float]:
    assert score.each is not None
    return score.each


def by_category(
    evaluation: Evaluation, run: Run, name: str, reference: str, seeds: Sequence[int]
) -> tuple[Sheet, dict[str, Any]]:
    """Per-image differences in each category, worst first by the first metric."""
    mine, theirs = ([evaluation.scores(run, n, seed) for seed in seeds] for n in (name, reference))
    metrics = [metric for metric in comparable(evaluation, run) if metric.each]
    categories = [prompt.category or "all" for prompt in run.prompts.prompts]
    groups: dict[str, list[int]] = {
        category: [i for i, c in enumerate(categories) if c == category] for category in dict.fromkeys(categories)
    }
    groups["all categories"] = list(range(len(categories)))
    found: dict[str, Any] = {}
    for group, places in groups.items():
        found[group] = {}
        for metric in metrics:
            a, b = ([each(s[metric.name])[i] for s in scores for i in places] for scores in (mine, theirs))
            found[group][metric.name] = Paired.of(a, b, metric.higher)
    lead = metrics[0] if metrics else None
    ordered = sorted(groups, key=lambda g: worth(found[g][lead.name], lead)) if lead else list(groups)
    ordered.sort(key=lambda group: group == "all categories")
    rows = [
        (group, str(len(groups[group]) * len(seeds)), *(str(found[group][m.name]) for m in metrics))
        for group in ordered
    ]
    told_dicts = {g: {m: pair.to_dict() for m, pair in pairs.items()} for g, pairs in found.items()}
    caption = "mean ± standard error; worst first" + left_out(evaluation, run)
    return Sheet(
        f"{name} minus {reference}, by category", ("category", "n", *map(heading, metrics)), rows, caption
    ), told_dicts


def worth(pair: Paired, metric: Metric) -> float:
    return pair.mean if metric.higher else -pair.mean


def by_seed(
    evaluation: Evaluation, run: Run, names: Sequence[str], seeds: Sequence[int]
) -> tuple[list[Sheet], dict[str, Any]]:
    """The difference of each seed's mean, its deviation, and how far a contender's own mean strays between seeds."""
    reference, sheets = names[0], []
    found: dict[str, Any] = {}
    scores = {name: {seed: evaluation.scores(run, name, seed) for seed in seeds} for name in names}
    for name in names[1:]:
        rows, found[name] = [], {}
        for metric in comparable(evaluation, run):
            own, other = ([scores[n][seed][metric.name].value for seed in seeds] for n in (name, reference))
            pair, stray = Paired.of(own, other, metric.higher), statistics.stdev(own)
            found[name][metric.name] = {**pair.to_dict(), "each": [a - b for a, b in zip(own, other, strict=True)]}
            found[name][metric.name]["own_deviation"] = stray
            gaps = [f"{a - b:+.3g}" for a, b in zip(own, other, strict=True)]
            ends = (f"{pair.mean:+.3g}", f"{pair.deviation:.2g}", f"{stray:.2g}", f"{pair.wins:.0%}")
            rows.append((heading(metric), *gaps, *ends))
        columns = ("metric", *(f"seed {seed}" for seed in seeds), "mean", "deviation", "own deviation", "ahead")
        caption = f"{len(run.prompts)} prompts a seed; deviation: of the differences; own: of {name}'s value"
        sheets.append(Sheet(f"{name} minus {reference}, seed by seed", columns, rows, caption))
    return sheets, found


def with_dense(run: Run, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*([DENSE] if DENSE in run.contenders else []), *names]))
