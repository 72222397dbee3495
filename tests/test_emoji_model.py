"""The committed model: loads in stock diffusers, is whole, deterministic, and draws what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from transformers import ResNetForImageClassification

from recipes.emoji.assemble import LIMIT, verify
from recipes.emoji.common import load_data
from recipes.emoji.score import autoencoder_psnr, generate
from reproduce.metrics.distances import retrieval
from reproduce.metrics.text import TextImageScore
from shiva.evaluate.drawing import load_with_arguments

MODEL = Path(__file__).parents[1] / "models" / "emoji"
pytestmark = pytest.mark.skipif(not (MODEL / "model_index.json").exists(), reason="models/emoji is not committed yet")


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    return load_with_arguments(MODEL)[0]


def test_files_are_whole_and_small() -> None:
    verify(MODEL)
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= LIMIT


def test_plain_call_is_deterministic() -> None:
    plain = StableDiffusion3Pipeline.from_pretrained(MODEL)
    plain.set_progress_bar_config(disable=True)
    first, second = (
        plain("a slice of pizza", num_inference_steps=3, generator=torch.Generator().manual_seed(1)).images[0]
        for _ in range(2)
    )
    assert first.size == (64, 64)
    assert first.tobytes() == second.tobytes()


def test_autoencoder_reconstructs_at_30_db(pipe: StableDiffusion3Pipeline) -> None:
    data = load_data()
    assert autoencoder_psnr(pipe, data.images[data.rows("validation", core_only=False)]) >= 30


def test_images_are_near_their_label(pipe: StableDiffusion3Pipeline) -> None:
    data = load_data()
    score = TextImageScore(pipe, ResNetForImageClassification.from_pretrained(MODEL / "score"), data.labels)
    rows = data.rows("train")[::60]
    images = generate(pipe, [data.labels[row].lower() for row in rows.tolist()], steps=12, guidance=3.0)
    assert retrieval(score(images), rows)["top5"] >= 0.7


def test_card_reports_the_model_that_is_there() -> None:
    card, manifest = (MODEL / "README.md").read_text(), json.loads((MODEL / "manifest.json").read_text())
    assert f"{manifest['training']['step']} steps" in card
