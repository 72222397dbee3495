"""Tables of one contender a row: quality, and cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shiva.measure.evaluation.evaluation import Cast, Evaluation
from shiva.measure.evaluation.lineup import DENSE
from shiva.measure.evaluation.paper import MAIN
from shiva.measure.evaluation.run import Run
from shiva.measure.quality import METRICS, Metric
from shiva.measure.sheet import Sheet


def heading(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    return f"{metric.title}{unit} {'↑' if metric.higher else '↓'}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def told(evaluation: Evaluation, run: Run) -> list[Metric]:
    """The metrics that could be measured, in their order; known once the first scores are."""
    return [metric for metric in evaluation.metrics if metric.name not in evaluation.missing(run)]


def left_out(evaluation: Evaluation, cast: Cast) -> str:
    """Who and what is not in a table, and why."""
    missing = {METRICS[name].title: why for name, why in evaluation.missing(cast.run).items()}
    return "".join(f"; {name} left out: {why}" for name, why in {**cast.absent, **missing}.items())


def quality(evaluation: Evaluation, cast: Cast, title: str) -> tuple[Sheet, dict[str, Any]]:
    """Every metric of every contender."""
    run, seeds = cast.run, cast.seeds
    found = {name: evaluation.means(run, name, seeds) for name in cast.names}
    metrics = told(evaluation, run)
    rows = [(name, *(number(found[name].get(metric.name)) for metric in metrics)) for name in cast.names]
    how = f"{len(run.prompts)} prompts ({run.prompts.name}), seed{'s' if len(seeds) > 1 else ''} "
    how += f"{', '.join(map(str, seeds))}, {run.settings.steps} steps, guidance {run.settings.guidance:g}"
    if run.manifest.get("earlier_environments"):
        how += "; images were made in several environments, which run.json lists"
    return Sheet(title, ("method", *map(heading, metrics)), rows, how + left_out(evaluation, cast)), found


def costs(evaluation: Evaluation, cast: Cast) -> tuple[Sheet, dict[str, Any]]:
    """FLOPs, one-step error, latency and speed-up, the paper's beside them."""
    seconds, untimed = evaluation.latencies(cast.run, cast.names)
    rows, found = [], {}
    for name in cast.names:
        cost, paper = evaluation.cost(cast.run, name), MAIN.get(cast.run.contenders[name].paper)
        time = seconds.get(name)
        speedup = seconds[DENSE].median / time.median if time else None
        found[name] = {
            **asdict(cost),
            "latency": asdict(time) if time else None,
            "speedup": speedup,
            "limit": 1 / cost.share,
        }
        rows.append(
            (
                name,
                f"{cost.gflops:.3f}",
                f"{cost.gflops_paper:.3f}",
                f"{1 - cost.share:.1%}",
                f"{1 - cost.share_paper:.1%}",
                "" if paper is None else f"{paper.saved:.1f}%",
                "" if time is None else str(time),
                "" if speedup is None else f"{speedup:.2f}x",
                f"{1 / cost.share:.2f}x",
                "" if paper is None else f"{paper.speedup:.2f}x",
                f"{cost.one_step_mse:.3g}",
                f"{cost.one_step_cosine:.4f}",
            )
        )
    flops = ("GFLOPs", "GFLOPs, MACs counted once", "saved", "saved, MACs counted once", "paper: saved")
    speed = ("latency, s", "speed-up", "limit", "paper: speed-up")
    return Sheet(
        "Cost of a step",
        ("method", *flops, *speed, "one-step MSE ↓", "one-step cosine ↑"),
        rows,
        "GFLOPs: true ones of a transformer call, the method's own not counted; MACs counted once: as the paper "
        "counts, in linear layers; latency: of a whole image, median ± half the distance of the quartiles over turns "
        "that all take; speed-up: dense's latency over the method's; limit: the speed-up that true FLOPs alone allow; "
        "one-step: the prediction against dense at dense's noisy latents" + (untimed and f"; not timed: {untimed}"),
    ), found
