"""Image quality: every metric by name, and what happens when one's weights are not here."""

from __future__ import annotations

from collections.abc import Iterable

from shiva.core.options import unknown_key
from shiva.evaluate.checkout import reproduce
from shiva.evaluate.metrics import learned, pixels  # noqa: F401  (each registers its metrics)
from shiva.evaluate.metrics.base import METRICS, Metric, MissingWeights, Pictures, Score, Subject, Tools

ORDER = (
    "frechet",
    "kernel",
    "lpips_real",
    "text_image",
    "top1",
    "top5",
    "psnr",
    "ssim",
    "lpips",
    "mse",
    "cosine",
    "fid",
    "clip",
    "clip_iqa",
    "image_reward",
)
"""As tables show them: against the real images, against the text, against dense, and those that need more."""


reproduce("metrics")  # registers those of a checkout


def chosen(names: Iterable[str] | None, tools: Tools) -> list[Metric]:
    """The metrics asked for; without any, all whose weights pip brings, and those whose weights were passed."""
    if names is None:
        given = {
            "fid": tools.inception is not None,
            "clip": tools.clip is not None,
            "clip_iqa": tools.clip is not None,
        }
        known = [METRICS[name] for name in ORDER if name in METRICS]
        return [metric for metric in known if not metric.extra or given.get(metric.name, False)]
    for name in names:
        if name not in METRICS:
            raise ValueError(unknown_key(name, METRICS, "--metrics"))
    return [METRICS[name] for name in names]


def measure(metrics: Iterable[Metric], subject: Subject, tools: Tools) -> tuple[dict[str, Score], dict[str, str]]:
    """Every metric that can be measured, and why the others cannot; one that fails leaves the others alone."""
    scores, missing = {}, {}
    for metric in metrics:
        if not subject.has(metric.needs):
            missing[metric.name] = f"{metric.title} needs {metric.needs}, which this run has not"
            continue
        if not metric.each and len(subject.images) < 2:
            missing[metric.name] = f"{metric.title} compares sets of images, and this run has only one; generate more"
            continue
        try:
            scores[metric.name] = metric(subject, tools)
        except MissingWeights as error:
            missing[metric.name] = str(error)
        except Exception as error:
            missing[metric.name] = f"{type(error).__name__}: {error}"
    return scores, missing


__all__ = ["METRICS", "Metric", "MissingWeights", "Pictures", "Score", "Subject", "Tools", "chosen", "measure"]
