"""Whole sampling runs of the real pipeline classes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Img2ImgPipeline
from torch import Tensor

import shiva
from pipelines import PIPELINES
from shiva.methods.fills import CACHED_FROM, Cached
from shiva.ops.schedule import RatioSchedule

from tiny import call_sd3 as transformer_call
from tiny import make_sd3, noise


def selections(session: shiva.Session) -> dict[int, Tensor]:
    assert session.ctx is not None
    return session.ctx.now.indices


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_run_is_reduced_and_the_pipeline_is_as_before_after_it(name: str, guidance: float, tmp_path: Path) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.load(tmp_path)
    dense = tiny.image(pipe, guidance=guidance)
    with shiva.attach(pipe, shiva.Shiva(budget=1.0)):
        assert torch.equal(tiny.image(pipe, guidance=guidance), dense)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        reduced = tiny.image(pipe, guidance=guidance)
        assert not torch.equal(reduced, dense)
        summary = session.summary()
        calls = 6 if name == "flux" and guidance > 1 else 3
        assert len(summary.steps) == calls
        assert summary.keep == pytest.approx(0.5, abs=0.02)
        assert summary.flops_share < 0.9
        with session.disabled():
            assert torch.equal(tiny.image(pipe, guidance=guidance), dense)
    assert torch.equal(tiny.image(pipe, guidance=guidance), dense)


@pytest.mark.parametrize("name", ["sd3", "pixart", "dit"])
def test_batched_guidance_halves_keep_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Also with several images a prompt, where the halves are [all uncond, all cond]."""
    tiny = PIPELINES[name]
    pipe = tiny.load(tmp_path)
    extra = {"num_images_per_prompt": 2} if name == "pixart" else {}
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        tiny.image(pipe, prompts=2, **extra)
        assert session.ctx is not None
        assert session.ctx.guidance_pairs
        for indices in selections(session).values():
            first, second = indices.chunk(2)
            assert torch.equal(first, second)
            assert not torch.equal(first[0], first[1]), "different images choose for themselves"
        tiny.image(pipe, prompts=2, guidance=1.0)
        assert not session.ctx.guidance_pairs


def test_one_prompt_given_by_its_embeddings_serves_several_images(tmp_path: Path) -> None:
    """Flux broadcasts its text; what a router reads of it is as wide as the batch."""
    tiny, several = PIPELINES["flux"], {"num_images_per_prompt": 2, "guidance": 1.0}
    pipe = tiny.load(tmp_path)
    dense = tiny.image(pipe, **several)
    assert len(dense) == 2
    with shiva.attach(pipe, shiva.Shiva(budget=1.0)):
        assert torch.equal(tiny.image(pipe, **several), dense)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        assert not torch.equal(tiny.image(pipe, **several), dense)
        assert session.summary().keep == pytest.approx(0.5, abs=0.02)


def test_a_transformer_put_in_after_attach_is_told_by_the_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.load(tmp_path)
    session = shiva.attach(pipe, shiva.Sweep(budget=0.5))
    pipe.transformer = tiny.make().transformer
    tiny.image(pipe)
    with pytest.raises(RuntimeError, match=r"pipe\.transformer was replaced after attach.*attach again"):
        session.summary()
    pipe.transformer, other = session.transformer, pipe.transformer
    tiny.image(pipe)
    assert session.summary().keep < 1
    assert "earlier run" not in caplog.text
    pipe.transformer = other
    session.summary()
    assert "a summary of an earlier run: pipe.transformer was replaced" in caplog.text
    session.detach()


def test_the_guidance_maximum_keeps_what_either_half_wants(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        seen = []
        route = session.method.scores
        session.method.scores = lambda *args: seen.append(route(*args)) or seen[-1]  # type: ignore[method-assign]
        tiny.image(pipe, steps=1)
        best = torch.maximum(*seen[0].chunk(2)).topk(session.ctx.counts[1]).indices.sort().values  # type: ignore[union-attr]
        assert torch.equal(selections(session)[1][:1], best)


def test_sequential_guidance_shares_the_first_calls_selection(tmp_path: Path) -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.load(tmp_path)
    routed = []
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        route = session.method.scores
        session.method.scores = lambda *args: routed.append(args[1].layer) or route(*args)  # type: ignore[method-assign]
        tiny.image(pipe, guidance=3.0, steps=2)
        assert session.stats[0].timestep == session.stats[1].timestep
        assert routed == [1, 2, 3] * 2, "the second branch of a step is not routed again"
    with shiva.attach(pipe, shiva.Shiva(budget=0.5, guidance="per-sample")) as session:
        session.method.scores = lambda *args: routed.append(args[1].layer) or route(*args)  # type: ignore[method-assign]
        routed.clear()
        tiny.image(pipe, guidance=3.0, steps=2)
        assert routed == [1, 2, 3] * 4


def test_every_run_starts_afresh(tmp_path: Path) -> None:
    """An aborted run, another step count and another resolution leave nothing behind in the next run."""
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        first = tiny.image(pipe, steps=4)

        def stop(*args: Any) -> dict[str, Any]:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tiny.image(pipe, steps=4, callback_on_step_end=stop)
        assert torch.equal(tiny.image(pipe, steps=4), first)
        assert [round(record.timestep) for record in session.stats] == [
            round(t) for t in pipe.scheduler.timesteps.tolist()
        ]
        tiny.image(pipe, steps=2, height=16, width=16)
        assert [record.tokens for record in session.stats] == [16, 16]
        assert torch.equal(tiny.image(pipe, steps=4), first)


def test_the_budget_is_met_at_the_runs_own_timesteps(tmp_path: Path) -> None:
    """A schedule that varies over time is resampled for the scheduler in use, then shifted to the budget."""
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    rising = RatioSchedule((1000.0, 0.0), torch.tensor([[-2.0] * 4, [2.0] * 4], dtype=torch.float64))
    with shiva.attach(pipe, shiva.Shiva(budget=0.6)) as session:
        session.method.set_schedule(rising)
        for steps in (3, 8):
            tiny.image(pipe, steps=steps)
            kept = [record.kept["transformer_blocks.1"] for record in session.stats]
            assert kept == sorted(kept)
            assert kept[0] < kept[-1]
            exact = rising.resample(pipe.scheduler.timesteps.tolist()).shift(0.6)
            assert exact.mean_keep == pytest.approx(0.6, abs=1e-4)
            assert kept == [row[1] for row in exact.counts(48)]


def cached(**options: Any) -> shiva.Ranked:
    return shiva.Ranked(fill="cached", score="random", **options)


def test_cached_updates_bring_a_run_closer_to_dense(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    dense = tiny.image(pipe, steps=6)
    errors = {}
    for rejected in ("identity", "near", "cached"):
        config = shiva.Ranked(budget=0.5, score="random", fill=rejected, dense_steps=(0,))
        with shiva.attach(pipe, config) as session:
            errors[rejected] = (tiny.image(pipe, steps=6) - dense).square().mean().item()
            summary = session.summary()
            assert summary.keep == pytest.approx(0.5, abs=0.03), "the dense step is paid for by the others"
            assert (summary.cached_bytes > 0) == (rejected == "cached")
    assert errors["cached"] < errors["identity"]


def test_the_cache_is_new_for_every_run_and_apart_for_every_branch(tmp_path: Path) -> None:
    """Also after an abort, at another batch size or resolution, and when two pipelines share a transformer."""
    for name in ("sd3", "flux"):
        tiny = PIPELINES[name]
        pipe = tiny.load(tmp_path / name)
        with shiva.attach(pipe, cached(budget=0.6)) as session:
            branches: set[int] = set()

            def look(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
                branches.update(branch for _, branch in session.ctx.run.updates)  # noqa: B023
                return values

            first = tiny.image(pipe, steps=4, callback_on_step_end=look)
            assert branches == ({0, 1} if name == "flux" else {0})

            def stop(*args: Any) -> dict[str, Any]:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                tiny.image(pipe, steps=4, callback_on_step_end=stop)
            assert torch.equal(tiny.image(pipe, steps=4), first)
            tiny.image(pipe, prompts=2, steps=4)
            tiny.image(pipe, steps=4, height=16, width=16)
            assert torch.equal(tiny.image(pipe, steps=4), first)
            other = type(pipe)(
                **{**pipe.components, "scheduler": type(pipe.scheduler).from_config(pipe.scheduler.config)}
            )
            other.set_progress_bar_config(disable=True)
            tiny.image(other, steps=4)
            assert torch.equal(tiny.image(pipe, steps=4), first)


def test_cached_updates_can_be_smaller(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    sizes = {}
    for options in ({}, {"cache_dtype": "bfloat16"}, {"cache_layers": (1,)}):
        with shiva.attach(pipe, cached(budget=0.6, **options)) as session:
            tiny.image(pipe, steps=3)
            sizes[str(options)] = session.summary().cached_bytes
    whole, half, third = sizes.values()
    assert half == whole / 2
    assert third == whole / 3


RANKINGS: dict[str, Any] = {
    "sweep": shiva.Sweep,
    "router": shiva.Shiva,
    **{score: partial(shiva.Ranked, score=score) for score in ("random", "age", "norm", "update")},
}


@pytest.mark.parametrize("score", RANKINGS)
def test_tokens_can_be_ranked_without_a_router_and_by_age(score: str, tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    oldest = []
    with shiva.attach(pipe, RANKINGS[score](budget=0.6, fill="cached", age=0.5)) as session:

        def look(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            oldest.extend(age.max().item() for age in session.ctx.run.ages.values())
            return values

        image = tiny.image(pipe, steps=5, callback_on_step_end=look)
        assert torch.equal(tiny.image(pipe, steps=5), image), "deterministic"
    assert max(oldest) >= 1
    if score == "age":
        assert max(oldest) <= 3, "no token waits longer than it takes to serve the others"


@pytest.mark.parametrize(("steps", "strength", "left"), [(25, 0.2, 5), (10, 0.3, 3)])
def test_a_run_from_an_image_meets_its_budget_in_the_steps_it_takes(
    steps: int, strength: float, left: int, tmp_path: Path
) -> None:
    tiny = PIPELINES["sd3"]
    pipe = StableDiffusion3Img2ImgPipeline(**tiny.load(tmp_path).components)
    pipe.set_progress_bar_config(disable=True)
    start = {"image": torch.rand(1, 3, 64, 64), "strength": strength, "height": 64, "width": 64}
    with shiva.attach(pipe, shiva.Sweep(budget=0.5, fill="auto", tilt=0.0)) as session:
        tiny.image(pipe, steps=steps, **start)
        summary = session.summary()
        assert len(summary.steps) == left
        assert isinstance(session.method.fill.in_this(session.ctx), Cached) == (left >= CACHED_FROM)
        assert summary.keep == pytest.approx(0.5, abs=0.01)
        kept = [step.kept["transformer_blocks.2"] for step in summary.steps]
        assert (kept[0] == summary.steps[0].tokens) == (left >= CACHED_FROM)
        assert len(set(kept[1:])) == 1


def test_a_flops_budget_is_met_at_each_length_of_the_text() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Shiva(flops=0.7)) as session, torch.no_grad():
        for text in (4, 100):
            model(**{**transformer_call(2, 8, 8), "encoder_hidden_states": noise(2, text, 24)})
            assert session.summary().flops_share == pytest.approx(0.7, abs=0.01)


def test_a_budget_below_its_dense_steps_is_told_and_the_others_are_reduced(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, cached(budget=0.3)) as session:
        with pytest.warns(UserWarning, match="cannot be met in 3 steps"):
            tiny.image(pipe, steps=3)
        assert [step.kept["transformer_blocks.1"] for step in session.stats] == [48, 14, 14]
        for steps in (1, 2):
            tiny.image(pipe, steps=steps)
            assert len(session.stats) == steps


def test_a_budget_with_dense_steps_is_met_where_the_table_is_not_flat(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    rising = RatioSchedule((1000.0, 0.0), torch.tensor([[-2.0] * 4, [2.0] * 4], dtype=torch.float64))
    with shiva.attach(pipe, shiva.Shiva(budget=0.6, dense_steps=(0, 7))) as session:
        session.method.set_schedule(rising)
        tiny.image(pipe, steps=8)
        assert session.summary().keep == pytest.approx(0.6, abs=0.015), "counts are whole"


def test_dense_layers_of_another_schedule_count_from_the_next_run(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        tiny.image(pipe, steps=2)
        session.method.set_schedule(RatioSchedule.flat(0.5, 4, dense=(2,)))
        tiny.image(pipe, steps=2)
        kept = session.stats[-1].kept
        assert {name: tokens for name, tokens in kept.items() if tokens < 48} == dict.fromkeys(
            (f"transformer_blocks.{layer}" for layer in (0, 1, 3)), 24
        )


def test_a_run_is_freed_before_the_autoencoder_decodes(tmp_path: Path) -> None:
    for name in ("sd3", "flux"):
        tiny = PIPELINES[name]
        pipe = tiny.load(tmp_path / name)
        held: list[int] = []
        with shiva.attach(pipe, shiva.Sweep(budget=0.6)) as session:
            decode = pipe.vae.decode

            def decoded(*args: Any, **kwargs: Any) -> Any:
                held.append(sum(len(part or ()) for part in vars(session.ctx.run).values()))  # noqa: B023
                return decode(*args, **kwargs)  # noqa: B023

            pipe.vae.decode = decoded
            tiny.image(pipe, steps=4)
            assert held == [0]
            assert session.summary().cached_bytes > 0, "the summary still knows what it took"


def test_seconds_are_those_of_the_last_run(tmp_path: Path) -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.load(tmp_path)
    with shiva.attach(pipe, shiva.Shiva(budget=0.5)) as session:
        tiny.image(pipe, steps=2)
        session._clock.seconds["router"] += 1000.0
        assert session.summary().seconds["router"] > 1000
        tiny.image(pipe, steps=2)
        assert 0 < session.summary().seconds["router"] < 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_torch_compile_before_and_after_attach(name: str) -> None:
    """Through pipelines: their guidance, schedulers and weak references meet dynamo, not only a bare model's call."""
    tiny = PIPELINES[name]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    transformer, sweep = pipe.transformer, shiva.Sweep(budget=0.7)
    with shiva.attach(pipe, sweep):
        expected = tiny.image(pipe, steps=2)
    torch._dynamo.reset()
    session = shiva.attach(pipe, sweep)
    pipe.transformer = torch.compile(transformer, backend="eager")
    torch.testing.assert_close(tiny.image(pipe, steps=2), expected, rtol=1e-3, atol=1e-3)
    assert session.summary().flops_share < 0.95
    shiva.detach(pipe)
    session = shiva.attach(pipe, sweep)
    torch.testing.assert_close(tiny.image(pipe, steps=2), expected, rtol=1e-3, atol=1e-3)
    assert session.summary().flops_share < 0.95
    session.detach()
    torch._dynamo.reset()
