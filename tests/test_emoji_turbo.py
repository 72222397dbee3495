"""The turbo: the teacher's way, the student's own states, and a folder that stock diffusers runs in four steps."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("datasets")

import torch
from diffusers import StableDiffusion3Pipeline

from recipes.emoji.assemble import SHIFT, TERMINAL, assemble, load_transformer, verify
from recipes.emoji.conditioning import Text
from recipes.emoji.flow import scheduler_sigmas
from recipes.emoji.restore import restore
from recipes.emoji.turbo import SHARES, SUBSTEPS, School, few_steps, way_of_teacher
from test_emoji_recipe import state  # noqa: F401  (a fixture)

TEXT = Text(torch.zeros(2, 4, 8), torch.zeros(2, 8))
EMPTY = Text(torch.zeros(1, 4, 8), torch.zeros(1, 8))


class Growth:
    """A field whose way is known: dx / dsigma = x, so x grows by exp of the way."""

    def __call__(self, latents: torch.Tensor, *_: object, return_dict: bool) -> tuple[torch.Tensor]:
        return (latents,)


def test_the_teachers_way_is_of_second_order() -> None:
    start, end = torch.tensor([1.0, 0.6]), torch.tensor([0.6, 0.2])
    latents = torch.ones(2, 1, 2, 2)
    exact = (torch.exp(end - start) - 1) / (end - start)

    def error(substeps: int) -> float:
        made = way_of_teacher(Growth(), latents, start, end, TEXT, EMPTY, 3.0, substeps)  # type: ignore[arg-type]
        return float((made[:, 0, 0, 0] - exact).abs().max())

    assert error(16) < 1e-3
    assert error(8) / error(16) == pytest.approx(4, rel=0.25)


def test_every_step_of_a_turbo_run_has_work_to_do() -> None:
    """The stock scheduler's last step begins at .002; here all runs share a last step that does not."""
    for steps in SHARES:
        sigmas = scheduler_sigmas(steps, SHIFT, TERMINAL)
        assert sigmas[-2] == pytest.approx(TERMINAL)
        assert bool((sigmas[:-1] - sigmas[1:] > 0.05).all())
    assert set(SHARES) == set(SUBSTEPS)
    assert sum(SHARES.values()) == pytest.approx(1)


def test_a_lesson_begins_on_the_students_own_path_and_is_used_again(state: Path) -> None:  # noqa: F811
    teacher = load_transformer(state / "transformer.safetensors")[0]
    torch.manual_seed(0)
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    text = Text(torch.randn(3, 2, 16, 32), torch.randn(3, 2, 32))
    prepared = SimpleNamespace(latents={"train": torch.randn(3, 4, 16, 16)}, texts={"train": text})
    prepared.empty = Text(torch.randn(1, 16, 32), torch.randn(1, 32))
    options = argparse.Namespace(batch=2, zero_tokens=0.5, noised=0.0, guidance=3.0)
    school = School(teacher, copy.deepcopy(teacher), prepared, options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    lessons = [school.draw(generator) for _ in range(6)]
    assert len(school.kept) == 3
    assert lessons[0] is lessons[1], "the only one there is"
    known = {round(float(s), 4) for steps in SHARES for s in scheduler_sigmas(steps, SHIFT, TERMINAL)[:-1]}
    for lesson in lessons:
        assert round(float(lesson.sigma[0]), 4) in known
        assert lesson.target.shape == lesson.latents.shape
        assert bool(lesson.target.isfinite().all())


def test_stock_diffusers_runs_the_turbo_in_four_steps(state: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its towers are links to the other pipeline's; its scheduler has the levels it was trained at."""
    assemble(state, tmp_path / "emoji")
    assemble(state, tmp_path / "turbo", shares=tmp_path / "emoji", turbo=True)
    verify(tmp_path / "turbo")
    assert (tmp_path / "turbo" / "text_encoder").is_symlink()
    assert not (tmp_path / "turbo" / "transformer").is_symlink()
    pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path / "turbo", text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.1)
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 4, "guidance_scale": 0.0, "max_sequence_length": 0, "output_type": "latent"}
    drawn = pipe("fox", latents=noise, **call).images
    hidden, _, pooled, _ = pipe.encode_prompt(
        "fox", None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    sigmas = scheduler_sigmas(4, SHIFT, TERMINAL)
    torch.testing.assert_close(drawn, few_steps(pipe.transformer, noise, Text(hidden, pooled), sigmas))


def test_a_pipeline_that_links_is_restored_and_trained_on(state: Path, tmp_path: Path) -> None:  # noqa: F811
    """Another machine has the committed folders alone."""
    assemble(state, tmp_path / "emoji")
    assemble(state, tmp_path / "turbo", shares=tmp_path / "emoji", turbo=True)
    (tmp_path / "state" / "tokenizer").mkdir(parents=True)
    clock = restore(tmp_path / "turbo", tmp_path / "state", "turbo")
    assert not any((tmp_path / "state" / "tokenizer").iterdir()), "what is there stays"
    assert clock.fresh == clock.step
    assert (clock.step, clock.images) == (7, 56)
    again, known = load_transformer(tmp_path / "state" / "turbo.safetensors")
    before = load_transformer(state / "transformer.safetensors")[0]
    assert known["step"] == 7
    for name, value in before.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value.half().float())
    assert not (tmp_path / "state" / "text_encoder").is_symlink()
    assert (tmp_path / "state" / "text_encoder" / "config.json").is_file()
    with pytest.raises(FileExistsError, match="resumes from it"):
        restore(tmp_path / "turbo", tmp_path / "state", "turbo")
