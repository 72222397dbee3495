"""Figures router_viz and router_comparison_grid: where a router's scores are high, and how they are spread.

    python -m reproduce.claims.router_maps [--seeds 3] [--steps 120] [--prompts 8]

The paper shows masks that "concentrate active tokens on semantic regions and texture-rich areas", and heatmaps and
histograms of routers warmed up at stratified and at fixed ratios. Here: routers of training_strategy.py along a dense
run of 25 steps, guidance 3. An emoji stands on white, so the dense run's final image says which tokens show
something (any pixel of the 4x4 patch off white) and how much texture each has (its pixels' deviation). *Foreground*:
the chance that a token of the emoji is scored above one of the background, 0.5 where scores know nothing.
*Texture*: the rank correlation of score and texture among the emoji's own tokens. Both over all steps, layers and
images; the halves of guidance are joined by the maximum, as at inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shiva
from reproduce.claims.common import FIRST, Claim, Result, judge, main, ordered, progress, shown, spread, weakest
from reproduce.claims.embedded import KEEP, Stats, arguments, bench_of, over_seeds, table
from reproduce.claims.selection import PROMPTS, DenseRun, Task
from reproduce.claims.trained_block import load
from reproduce.claims.training_strategy import VARIANTS

PATCH, WHITE = 4, 250
FIFTHS = ("early", "late")
COLUMNS = {
    "foreground": "foreground",
    "texture": "texture",
    **{f"foreground, {part}": f"foreground, {part} steps" for part in FIFTHS},
    "deviation": "score deviation",
}


def patches(image: Any) -> Tensor:
    """Grey values (tokens, pixels of a patch) of a picture, a token for every 4x4 pixels."""
    grey = torch.from_numpy(np.asarray(image.convert("L"))).float()
    return grey.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).flatten(2).flatten(0, 1)


def shown_by(pixels: Tensor) -> Tensor:
    """Which tokens (N) show something."""
    return (pixels < WHITE).any(1)


def ranks(values: Tensor) -> Tensor:
    """Ranks along the last axis; equal values share their mean rank."""
    less = (values[..., :, None] > values[..., None, :]).sum(-1)
    equal = (values[..., :, None] == values[..., None, :]).sum(-1)
    return less + (equal - 1) / 2


def above(scores: Tensor, mask: Tensor) -> float:
    """The chance that a token in the mask is scored above one outside, from scores (..., N) and mask (N)."""
    inside, outside = int(mask.sum()), int((~mask).sum())
    total = ranks(scores)[..., mask].sum(-1) - inside * (inside - 1) / 2
    return float((total / (inside * outside)).mean())


def rank_correlation(scores: Tensor, values: Tensor) -> float:
    a, b = ranks(scores), ranks(values)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean()
    return float(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm())).mean())


@torch.no_grad()
def scores_along(pipe: Any, dense: DenseRun, checkpoint: Path) -> Tensor:
    """Scores (steps, layers, images, N) of a router on the dense run's own inputs."""
    seen: list[Tensor] = []
    with shiva.attach(pipe, checkpoint, budget=KEEP) as session:
        method: Any = session.method
        watch = method.routers.register_forward_hook(lambda module, args, scores: seen.append(scores))
        steps = []
        for call in dense.calls:
            seen.clear()
            pipe.transformer(**call)
            first, second = torch.stack(seen).chunk(2, dim=1)
            steps.append(torch.maximum(first, second))
        watch.remove()
    return torch.stack(steps)


def measure(scores: Tensor, images: Sequence[Any]) -> dict[str, float]:
    def over_images(part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(part.unbind(2), map(patches, images), strict=True)

    def foreground(part: Tensor) -> float:
        return float(np.mean([above(s, shown_by(p)) for s, p in over_images(part)]))

    def of_texture(part: Tensor, pixels: Tensor) -> float:
        mask = shown_by(pixels)
        return rank_correlation(part[..., mask], pixels.std(1)[mask])

    fifth = max(1, len(scores) // 5)
    return {
        "foreground": foreground(scores),
        "texture": float(np.mean([of_texture(s, p) for s, p in over_images(scores)])),
        "foreground, early": foreground(scores[:fifth]),
        "foreground, late": foreground(scores[-fifth:]),
        "deviation": float(scores.std(-1).mean()),
    }


def run(
    seeds: Sequence[int] = range(3),
    quick: bool = False,
    prompts: int = 8,
    model: Path = FIRST,
    **where: Any,
) -> Result:
    bench = bench_of(quick, seeds, model, **where)
    task = Task(load(model), PROMPTS[: 2 if quick else prompts], 3 if quick else 25, 3.0)
    dense = task.dense()
    rows, histograms = {}, {}
    for name, variant in VARIANTS.items():
        found = []
        for seed in progress(list(bench.seeds), f"router maps, {name}"):
            scores = scores_along(task.pipe, dense, bench.checkpoint(variant, seed))
            found.append(measure(scores, dense.images))
            if seed == bench.seeds[0]:
                histograms[name] = histogram(scores)
        rows[name] = {key: over_seeds([row[key] for row in found]) for key in COLUMNS}
    table("Where scores are high", rows, COLUMNS)
    details = {**bench.details(rows), "histograms": histograms, "prompts": list(task.prompts)}
    return Result("router_maps", "Where a router's scores are high", claims_of(rows, bench.seen), details)


def histogram(scores: Tensor) -> dict[str, list[float]]:
    """Density of scores about their image's mean."""
    about = (scores - scores.mean(-1, keepdim=True)).flatten()
    density, edges = np.histogram(about.numpy(), bins=60, range=(-1.0, 1.0), density=True)
    return {"density": density.round(4).tolist(), "edges": edges.round(4).tolist()}


def claims_of(rows: Mapping[str, Mapping[str, Stats]], seen: str) -> tuple[Claim, ...]:
    ours, fixed = rows["stratified"], rows["fixed"]
    both = [[value - 0.5 for value in ours["foreground"]["values"]], ours["texture"]["values"]]
    sure = all(len(values) >= 3 and spread(values)["positive"] == 1 for values in both)
    masks = Claim(
        "active tokens concentrate on semantic regions and texture-rich areas",
        "in pictures; no figure",
        f"a token of the emoji is above one of the background with chance {shown(ours['foreground'])}; rank "
        f"correlation with texture {shown(ours['texture'])}",
        judge(sure, all(spread(values)["mean"] > 0 for values in both)),
        f"Reproduced if both are above chance in every seed, and at least three; {seen}. In the noisiest fifth of "
        f"the steps {shown(ours['foreground, early'])}, in the cleanest {shown(ours['foreground, late'])}.",
    )
    told_apart = {key: ordered(ours[key]["values"], fixed[key]["values"]) for key in ("foreground", "texture")}
    strategy = Claim(
        "stratified ratios make a router tell informative tokens apart better than a fixed one",
        "in heatmaps; no figure",
        ", ".join(f"{key} {shown(ours[key])} against {shown(fixed[key])}" for key in told_apart),
        weakest(*told_apart.values()),
        f"The histograms' deviations are {shown(ours['deviation'])} and {shown(fixed['deviation'])}.",
    )
    return masks, strategy


def draw(result: Result, axes: Any) -> None:
    for name, bars in result.details["histograms"].items():
        axes.stairs(bars["density"], bars["edges"], fill=True, alpha=0.5, label=name)
    axes.set(xlabel="score, less its image's mean", ylabel="density", yscale="log")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help=f"images of a run; at most {len(PROMPTS)}")
    main("router_maps", parser)
