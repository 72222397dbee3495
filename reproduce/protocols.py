"""The paper's protocols for `shiva eval`, each one function, its figures beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from reproduce import paper
from shiva.bench.table import Table
from shiva.evaluate import protocols, tables
from shiva.evaluate.evaluation import Comparison, Evaluation
from shiva.evaluate.images import Run
from shiva.evaluate.metrics import Metric
from shiva.evaluate.protocols import Found, Protocol, compared
from shiva.evaluate.tables import Paired, averaged, difference, gain, heading, left_out, measured, scores_of, values

FIVE = (0, 1, 2, 3, 4)
LEADS = ("clip", "text_image")
"""Metrics that categories are ordered by, as the paper orders them by CLIP; the first that was measured."""
COUNTERPARTS = {"symbols": "symbols (the paper's logo)"}
"""Categories of the emoji set as tables name them."""


def main(evaluation: Evaluation) -> Found | None:
    """All methods: quality, FLOPs, latency, speed-up."""
    return beside_the_paper(evaluation, "main", "Quality of every method", evaluation.rivals)


def points(evaluation: Evaluation) -> Found | None:
    """Operating points of a few checkpoints, most of them by shifting a table to another budget."""
    return beside_the_paper(evaluation, "points", "Operating points")


def beside_the_paper(evaluation: Evaluation, protocol: str, title: str, rivals: bool = False) -> Found | None:
    found = protocols.overview(evaluation, protocol, title, rivals)
    if found is not None:
        candidates = evaluation.run().candidates
        theirs = paper.main_table([candidates[name].paper for name in found.figures["quality"]])
        found.tables.extend([theirs] if theirs.rows else [])
    return found


def transfer(evaluation: Evaluation) -> Found | None:
    """A table shifted to another budget against a checkpoint trained for it, paired."""
    return in_pairs(evaluation, "transfer", "Transfer against direct training", paper.transfer_table())


def ratio(evaluation: Evaluation) -> Found | None:
    """One ratio everywhere against the learned table, at the same mean keep."""
    return in_pairs(evaluation, "ratio", "Fixed against adaptive ratio", paper.ratio_table())


def int8(evaluation: Evaluation) -> Found | None:
    """INT8 feed-forward layers in some blocks."""
    return in_pairs(evaluation, "int8", "INT8 by its scope", paper.int8_table())


def in_pairs(evaluation: Evaluation, protocol: str, title: str, theirs: Table) -> Found | None:
    shown = compared(evaluation, protocol, evaluation.run(), evaluation.seeds, least=2)
    if not evaluation.workers.main:
        return None
    quality, figures = tables.quality(evaluation, shown, title)
    pairs, differences = paired(evaluation, shown, f"{title}, paired")
    return Found([quality, pairs, theirs], {"quality": figures, "paired": differences})


def seeds(evaluation: Evaluation) -> Found | None:
    """Five matched seeds: differences seed by seed."""
    chosen = evaluation.seeds if len(evaluation.seeds) > 1 else FIVE
    shown = compared(evaluation, "seeds", evaluation.run(), chosen, least=2)
    if not evaluation.workers.main:
        return None
    filled, figures = by_seed(evaluation, shown)
    found = {"reference": shown.names[0], "seeds": list(chosen), "paired": figures}
    return Found([*filled, paper.seeds_table()], found)


def categories(evaluation: Evaluation) -> Found | None:
    """Paired differences in each category; our symbols are the paper's logo."""
    shown = compared(evaluation, "categories", evaluation.run(), evaluation.seeds, least=2)
    if not evaluation.workers.main:
        return None
    found = {name: by_category(evaluation, shown, name) for name in shown.names[1:]}
    filled = [table for table, _ in found.values()]
    figures = {name: figures for name, (_, figures) in found.items()}
    return Found([*filled, paper.categories_table()], {"reference": shown.names[0], "paired": figures})


def heldout(evaluation: Evaluation) -> Found | None:
    """Prompts that were not trained on, and other resolutions, without training again."""
    variants: dict[str, Run] = {}
    if evaluation.held_out is not None:
        variants["held-out prompts"] = evaluation.run("held-out", evaluation.held_out)
    for height, width in evaluation.candidates.sizes:
        variants[f"{height} x {width}"] = evaluation.run(f"{height}x{width}", height=height, width=width)
    if not variants:
        raise ValueError("--protocol heldout needs --held-out FILE, or `sizes` in the file of candidates")
    filled: list[Table] = []
    figures: dict[str, Any] = {}
    for title, run in variants.items():
        shown = compared(evaluation, "heldout", run, evaluation.seeds)
        if evaluation.workers.main:
            table, figures[title] = tables.quality(evaluation, shown, title)
            filled.append(table)
    return Found([*filled, paper.generalization_table()], figures) if evaluation.workers.main else None


def comparable(evaluation: Evaluation, run: Run) -> list[Metric]:
    """Metrics that mean the same for dense and the others: not those that measure distance to dense."""
    return [metric for metric in measured(evaluation, run) if metric.needs != "dense"]


def paired(evaluation: Evaluation, shown: Comparison, title: str) -> tuple[Table, dict[str, Any]]:
    """Per-prompt differences to the first candidate; metrics of a whole set as a plain difference."""
    reference, *others = shown.names
    scores = scores_of(evaluation, shown)
    metrics = comparable(evaluation, shown.run)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name in others:
        pairs = {metric: difference(metric, scores[name], scores[reference]) for metric in metrics}
        found[name] = {metric.name: pair.to_dict() for metric, pair in pairs.items()}
        rows.append((name, *(f"{p} ({p.wins:.0%})" if m.each else f"{p.mean:+.3g}" for m, p in pairs.items())))
    caption = f"mean ± standard error over {len(shown.run.prompts)} prompts{averaged(shown)} "
    caption += "(share of prompts that are better; ties count half)" + left_out(evaluation, shown)
    return Table(title, (f"minus {reference}", *map(heading, metrics)), rows, caption), found


def by_category(evaluation: Evaluation, shown: Comparison, name: str) -> tuple[Table, dict[str, Any]]:
    """Per-prompt differences of a candidate to the first one in each category, worst first."""
    reference = shown.names[0]
    mine, theirs = ([evaluation.scores(shown.run, n, seed) for seed in shown.seeds] for n in (name, reference))
    metrics = leading_first([metric for metric in comparable(evaluation, shown.run) if metric.each])
    categories = [prompt.category or "all" for prompt in shown.run.prompts.prompts]
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
        groups, key=lambda group: (group == "all categories", *(gain(found[group][m.name], m) for m in metrics[:1]))
    )
    rows = [
        (COUNTERPARTS.get(group, group), str(len(groups[group])), *(str(found[group][m.name]) for m in metrics))
        for group in ordered
    ]
    order = f"; worst first by {metrics[0].title}" if metrics else ""
    caption = f"mean ± standard error over n prompts{averaged(shown)}{order}" + left_out(evaluation, shown)
    columns = ("category", "n", *map(heading, metrics))
    figures = {group: {m: pair.to_dict() for m, pair in pairs.items()} for group, pairs in found.items()}
    return Table(f"{name} minus {reference}, by category", columns, rows, caption), figures


def leading_first(metrics: Sequence[Metric]) -> list[Metric]:
    lead = next((metric for name in LEADS for metric in metrics if metric.name == name), None)
    return sorted(metrics, key=lambda metric: metric is not lead)


def by_seed(evaluation: Evaluation, shown: Comparison) -> tuple[list[Table], dict[str, Any]]:
    """The difference of each seed's mean, its deviation, and how far each side's own mean strays between seeds."""
    reference, *others = shown.names
    filled: list[Table] = []
    found: dict[str, Any] = {}
    scores = scores_of(evaluation, shown)
    for name in others:
        rows, found[name] = [], {}
        for metric in comparable(evaluation, shown.run):
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
        columns = ("metric", *(f"seed {seed}" for seed in shown.seeds), "mean", "deviation")
        columns = (*columns, f"deviation of {name}", f"deviation of {reference}", "ahead")
        caption = (
            f"{len(shown.run.prompts)} prompts a seed; deviation: of the differences, and of each side's own value"
        )
        caption += left_out(evaluation, shown)
        filled.append(Table(f"{name} minus {reference}, seed by seed", columns, rows, caption))
    return filled, found


PROTOCOLS: dict[str, Protocol] = {
    "main": main,
    "points": points,
    "transfer": transfer,
    "seeds": seeds,
    "categories": categories,
    "heldout": heldout,
    "ratio": ratio,
    "int8": int8,
    "matched": protocols.match,
    "floor": protocols.floor,
}
