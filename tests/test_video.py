"""Videos: bands and lattices over frames, fills between them, two calls of guidance, FLOPs at real shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shiva
from pipelines_reach import REACH as PIPELINES
from reproduce.bench.reach import REACH
from shiva.core.layout import Layout
from shiva.methods.scores import Band, Lattice
from shiva.ops.fill import spatially_nearest
from tiny_videos import FRAMES, VIDEOS

CLIP = Layout(4, 6, frames=3)


def chosen(scores: torch.Tensor, keep: float) -> torch.Tensor:
    """Frame, row and column (k, 3) of the best tokens of a clip."""
    best = scores.topk(round(keep * CLIP.tokens)).indices.sort().values
    return CLIP.places(torch.device("cpu"))[best]


def test_a_band_sweeps_over_the_rows_of_all_frames() -> None:
    """Whole rows but for its two ends, one frame after another, and every row of every frame in a few steps."""
    seen = set()
    for step in range(5):
        places = chosen(Band().draw(CLIP, step, 1)[0], 0.5)
        rows = [tuple(map(int, place[:2])) for place in places]
        cut = [row for row in set(rows) if rows.count(row) < CLIP.columns]
        assert len(cut) <= 2
        seen |= set(rows) - set(cut)
    assert seen == {(frame, row) for frame in range(3) for row in range(4)}


def test_a_lattice_covers_frames_rows_and_columns_alike() -> None:
    layout = Layout(4, 4, frames=4)
    places = layout.places(torch.device("cpu"))
    for layer in range(3):
        best = Lattice().draw(layout, 0, 3)[layer].topk(16).indices
        cells = (places[best] // 2).long()
        counts = torch.zeros(2, 2, 2).index_put(tuple(cells.T), torch.ones(16), accumulate=True)
        assert counts.tolist() == [[[2.0] * 2] * 2] * 2, "a quarter of the tokens is two of each 2x2x2 cell"


def test_the_nearest_token_may_be_in_the_next_frame() -> None:
    selected = torch.tensor([[0, CLIP.rows * CLIP.columns + 9]])  # a corner of frame 0, the middle of frame 1
    nearest = spatially_nearest(selected, CLIP)[0].view(CLIP.shape)
    assert nearest[0, 1, 3] == 1, "one frame on is nearer than the corner"
    assert nearest[0, 0, 1] == 0
    assert nearest[2, 1, 3] == 1


@pytest.mark.parametrize("config", [shiva.Lattice(budget=0.5), shiva.Sweep(budget=0.5), shiva.ToMeSD()])
@pytest.mark.filterwarnings("ignore:.*was not fitted")
def test_frames_run_together(config: Any) -> None:
    model, tiny = VIDEOS["wan"].make(), VIDEOS["wan"]
    with shiva.attach(model, config) as session, session.trace() as trace, torch.no_grad():
        for timestep in (900.0, 600.0):
            model(**tiny.call(1, 4, 6, timestep=timestep))
        assert session.layout == Layout(4, 6, FRAMES, 5)
    masks = trace.masks()
    assert masks.shape[-2:] == (FRAMES * 4, 6)


@pytest.mark.parametrize("config", [shiva.Sweep(budget=0.6), shiva.Lattice(budget=0.5)], ids=["sweep", "lattice"])
@pytest.mark.filterwarnings("ignore:.*was not fitted")
def test_guidance_in_two_calls_chooses_once(config: Any, tmp_path: Path) -> None:
    tiny = PIPELINES["hunyuan-video"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, config) as session, session.trace() as trace:
        tiny.draw(pipe)
        assert session.ctx is not None
        assert session.ctx.branch == 1
        assert len(session.stats) == 6
        pairs = [session.stats[place : place + 2] for place in range(0, 6, 2)]
        assert all(first.kept == second.kept for first, second in pairs)
    assert trace.positions


@pytest.mark.parametrize("name", [name for name, real in REACH.items() if real.size[0] > 1])
def test_a_budget_of_flops_is_met_at_a_videos_real_shape(name: str) -> None:
    """At all frames and pixels that its pipeline draws, on the meta device: 32,760 tokens for Wan."""
    real = REACH[name]
    with torch.device("meta"):
        model, call = real.build(4), real.call(real)
    with shiva.attach(model, shiva.Shiva(flops=0.7), cfg="batched" if real.batch == 2 else "none") as session:
        with torch.no_grad():
            model(**call)
        assert session.stats[0].tokens == real.tokens
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.005)


@pytest.mark.parametrize("name", [name for name, real in REACH.items() if real.size[0] == 1 and name != "z-image"])
def test_the_calls_of_the_speed_table_fit_their_classes(name: str) -> None:
    """Z-Image makes its positions on the CPU, and has no meta call."""
    real = REACH[name]
    with torch.device("meta"):
        model, call = real.build(2), real.call(real)
    assert model(**call)[0].is_meta
    assert real.within(100).tokens <= 121


def test_a_video_loses_frames_before_it_loses_pixels() -> None:
    wan = REACH["wan-2.1-1.3b"]
    assert wan.grid == (21, 30, 52)
    assert wan.within(8000).grid == (5, 30, 52)
    assert wan.within(100).grid[0] == 1
