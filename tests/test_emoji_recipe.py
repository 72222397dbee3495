"""The embedded model's recipe, from data to scores, with tiny untrained components and no network."""

from __future__ import annotations

import argparse
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open

from recipes.emoji import card
from recipes.emoji import data as emoji_data
from recipes.emoji.assemble import assemble, load_pipeline, verify
from recipes.emoji.autoencoder import make_autoencoder, psnr, save_folder
from recipes.emoji.captions import build_tokenizer, captions_of, own_tags, paraphrases_of
from recipes.emoji.common import load_data, parquet
from recipes.emoji.conditioning import TextEncoder
from recipes.emoji.flow import (
    flow_loss,
    half_of_cells,
    logit_normal,
    make_transformer,
    only_tokens,
    sample,
    start_from,
    start_gently,
)
from recipes.emoji.optim import Optimizers, orthogonalize
from recipes.emoji.score import asked_otherwise, beside_the_true, generate, score_images
from recipes.emoji.sitting import Clock, add_arguments, load_state, rate_factor, save_state, sit, update_ema
from recipes.emoji.towers import make_text_tower
from recipes.emoji.vision import distort, make_vision_tower
from reproduce.metrics.distances import frechet_distance, retrieval
from reproduce.metrics.text import TextImageScore
from shiva.evaluate.drawing import load_with_arguments


def tiny_run(channels: int = 4) -> tuple:
    torch.manual_seed(0)
    model = make_transformer(channels, width=32, layers=2, text=32)
    start_gently(model)
    ema = make_transformer(channels, width=32, layers=2, text=32).requires_grad_(False)
    ema.load_state_dict(model.state_dict())
    return model, ema, Optimizers(model, 1e-3, 1e-3, 0.01), torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder as the training steps leave it, untrained."""
    folder = tmp_path_factory.mktemp("state")
    torch.manual_seed(0)
    tokenizer = build_tokenizer(["a slice of pizza", "red apple", "fox", "grinning face"] * 3, 600)
    tokenizer.save_pretrained(folder / "tokenizer")
    for name in ("text_encoder", "text_encoder_2"):
        save_folder(make_text_tower(len(tokenizer), width=16, layers=2), folder / name)
    autoencoder = make_autoencoder(channels=4, widths=(8, 8, 8))
    autoencoder.register_to_config(shift_factor=0.1, scaling_factor=0.7)
    save_folder(autoencoder, folder / "autoencoder")
    save_folder(make_vision_tower(16, (8, 8)), folder / "score")
    model, ema, optimizers, generator = tiny_run()
    clock = Clock(step=7, seconds=3.0, images=56)
    save_state(folder / "transformer.safetensors", model, ema, optimizers, generator, clock)
    return folder


@pytest.fixture(scope="module")
def folder(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "emoji"
    assemble(state, out)
    return out


@pytest.mark.parametrize("size", [64, 128])
def test_parquet_is_what_the_issue_asks_for(size: int) -> None:
    rows = emoji_data.read_parquet(parquet(size))
    columns = {"pixels", "label", "tags", "group", "subgroup", "codepoint", "style", "split", "core"}
    assert set(rows[0]) == columns
    assert parquet(size).stat().st_size < 30e6
    assert all(row["pixels"].shape == (size, size, 3) for row in rows)
    assert len({row["codepoint"] for row in rows}) == len(rows) > 1500
    groups = {row["group"] for row in rows}
    assert len(groups) == 8
    assert "flags" not in groups
    for group in groups:
        core = [row["split"] for row in rows if row["group"] == group and row["core"]]
        assert 0.05 < core.count("validation") / len(core) < 0.12


def test_both_sizes_have_the_same_rows() -> None:
    small, large = (emoji_data.read_parquet(parquet(size)) for size in (64, 128))
    for row, other in zip(small, large, strict=True):
        assert {k: v for k, v in row.items() if k != "pixels"} == {k: v for k, v in other.items() if k != "pixels"}


def test_datasets_reads_the_parquet(tmp_path: Path) -> None:
    import datasets

    table = datasets.load_dataset("parquet", data_files=str(parquet()), split="train", cache_dir=str(tmp_path))
    assert table[0]["image"].size == (64, 64)
    assert isinstance(table[0]["tags"], list)


def test_split_and_hash_do_not_depend_on_row_order() -> None:
    rows = emoji_data.read_parquet(parquet())
    digest, splits = emoji_data.content_hash(rows), {row["codepoint"]: row["split"] for row in rows}
    random.Random(0).shuffle(rows)
    emoji_data.mark_split(rows)
    assert {row["codepoint"]: row["split"] for row in rows} == splits
    assert emoji_data.content_hash(rows) == digest
    rows[0]["pixels"] = rows[0]["pixels"] // 2
    assert emoji_data.content_hash(rows) != digest


def test_missing_data_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"recipes\.emoji\.data"):
        load_data(tmp_path / "nothing.parquet")


def test_a_sitting_that_is_stopped_while_it_probes_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr("recipes.emoji.sitting.signal.signal", handlers.__setitem__)
    parser = argparse.ArgumentParser()
    add_arguments(parser, name="run", batch=1, rate=1e-3, muon=1e-3, ema=0.9)
    model, ema, *_ = tiny_run()

    def probe() -> dict[str, float]:
        handlers[signal.SIGTERM]()
        return {}

    sit(
        parser.parse_args(["--probe-minutes", "0"]),
        tmp_path,
        model,
        ema,
        lambda generator: (sum(p.square().sum() for p in model.parameters()), 1),
        probe,
        lambda path: None,
    )
    with safe_open(tmp_path / "run.safetensors", "pt") as file:
        assert json.loads(file.metadata()["clock"])["step"] == 1


def test_captions_start_with_the_label() -> None:
    captions = captions_of("Red Apple", ["fruit", "red"], 8, random.Random(0))
    assert len(captions) == 8
    assert captions[0] == "red apple"


def test_tokenizer_spells_words_it_never_saw(state: Path) -> None:
    tokenizer = TextEncoder(state).tokenizer
    ids = tokenizer("quokka 漢!", add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.model_max_length == 16


@pytest.mark.parametrize(("zero_tokens", "t5"), [(0, None), (256, None), (256, "silent"), (1, "silent")])
def test_conditioning_is_the_pipelines(state: Path, zero_tokens: int, t5: str | None) -> None:
    pipe, _ = load_pipeline(state)
    if t5 is None:
        pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
    prompts = ["a slice of pizza", "an unheard-of thing"]
    hidden, empty_hidden, pooled, empty_pooled = pipe.encode_prompt(
        prompts, None, None, max_sequence_length=zero_tokens
    )
    encoder = TextEncoder(state)
    ours, empty = encoder(prompts).with_zero_tokens(zero_tokens), encoder([""]).with_zero_tokens(zero_tokens)
    torch.testing.assert_close(ours.hidden, hidden)
    torch.testing.assert_close(ours.pooled, pooled)
    torch.testing.assert_close(empty.hidden, empty_hidden[:1])
    torch.testing.assert_close(empty.pooled, empty_pooled[:1])


def test_sampler_is_the_pipelines(state: Path) -> None:
    pipe, _ = load_pipeline(state)
    pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.1)
    encoder, noise = TextEncoder(state), torch.randn(2, 4, 16, 16)
    ours = sample(pipe.transformer, noise, encoder(["fox", "red apple"]), encoder([""]), steps=3, guidance=2.0)
    theirs = pipe(
        ["fox", "red apple"],
        latents=noise,
        num_inference_steps=3,
        guidance_scale=2.0,
        max_sequence_length=0,
        output_type="latent",
    ).images
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_assembled_folder_works_in_stock_diffusers(folder: Path) -> None:
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    images = [
        pipe("a slice of pizza", num_inference_steps=2, generator=torch.Generator().manual_seed(3)).images[0]
        for _ in range(2)
    ]
    assert images[0].size == (64, 64)
    assert images[0].tobytes() == images[1].tobytes()
    assert json.loads((folder / "manifest.json").read_text())["training"]["step"] == 7


def test_broken_model_files_are_named(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "emoji"
    shutil.copytree(folder, copy)
    verify(copy)
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\0\1\2\3\4\5\6\7")
    with pytest.raises(ValueError, match=r"transformer/diffusion_pytorch_model.safetensors .*git checkout"):
        verify(copy)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"transformer/diffusion_pytorch_model.safetensors is missing"):
        verify(copy)


def test_half_of_the_tokens_are_seen_and_judged_and_the_rest_is_left_alone() -> None:
    from recipes.emoji.conditioning import Text

    generator = torch.Generator().manual_seed(0)
    places = half_of_cells(3, 16, generator)
    assert places.shape == (3, 128)
    cells = places // 32 * 8 + places % 16 // 2
    assert all((torch.bincount(row, minlength=64) == 2).all() for row in cells)
    assert all(len(set(row.tolist())) == 128 for row in places)

    model = make_transformer(4, width=32, layers=2, text=32)
    clean, noise = torch.randn(2, 3, 4, 16, 16, generator=generator)
    sigma, text = torch.full((3,), 0.5), Text(torch.ones(3, 3, 32), torch.ones(3, 32))
    seen = torch.zeros(3, 256, dtype=torch.bool).scatter(1, places, value=True).view(3, 1, 16, 16)
    elsewhere = torch.where(seen, clean, torch.randn(clean.shape, generator=generator))
    halved = flow_loss(model, clean, noise, sigma, text, places)
    assert torch.equal(halved, flow_loss(model, elsewhere, noise, sigma, text, places))
    assert not torch.equal(halved, flow_loss(model, clean, noise, sigma, text))
    with only_tokens(model, places):
        assert (model(clean, text.hidden, text.pooled, sigma, return_dict=False)[0] == 0).eq(~seen).all()


def train(
    model: torch.nn.Module, ema: torch.nn.Module, optimizers: Optimizers, generator: torch.Generator, steps: int
):
    from recipes.emoji.conditioning import Text

    losses = []
    for _ in range(steps):
        noise = torch.randn(4, 4, 16, 16, generator=generator)
        text = Text(torch.ones(4, 3, 32), torch.ones(4, 32))
        loss = flow_loss(model, torch.ones(4, 4, 16, 16), noise, logit_normal(4, generator), text).mean()
        loss.backward()
        optimizers.step(1.0)
        update_ema(ema, model, 0.9)
        losses.append(loss.item())
    return losses


def test_resuming_gives_the_same_run(tmp_path: Path) -> None:
    straight = tiny_run()
    losses = train(*straight, 6)
    first, second = tiny_run(), tiny_run()
    train(*first, 3)
    save_state(tmp_path / "run.safetensors", *first, Clock(step=3, curve=[{"loss": 1.0}]))
    train(*second, 1)
    clock = load_state(tmp_path / "run.safetensors", *second)
    assert (clock.step, clock.curve) == (3, [{"loss": 1.0}])
    assert train(*second, 3) == losses[3:]
    for a, b in zip(straight[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert losses[-1] < losses[0]


def test_rate_warms_up_stays_and_decays() -> None:
    assert rate_factor(Clock(step=0), 60) == 0.01
    assert rate_factor(Clock(step=500, seconds=1e6), 60) == 1
    assert rate_factor(Clock(step=500, fresh=500), 60) == 0.01
    assert rate_factor(Clock(step=500, seconds=130, decay_start=100), 60) == 0.5
    assert rate_factor(Clock(step=500, seconds=170, decay_start=100), 60) == 0


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_orthogonalize_evens_the_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_larger_model_starts_from_the_smaller_ones_weights_and_places() -> None:
    small, large = make_transformer(4, width=32, layers=1, text=32), make_transformer(4, 32, 1, 32, side=32)
    start_from(large, small)
    places = large.pos_embed.pos_embed.reshape(32, 32, -1)
    torch.testing.assert_close(places[::2, ::2], small.pos_embed.pos_embed.reshape(16, 16, -1))
    assert torch.equal(large.proj_out.weight, small.proj_out.weight)


def test_paraphrases_use_what_only_this_label_has() -> None:
    synonyms = own_tags(["Hamburger", "Pizza"], [["burger", "food"], ["food", "hamburger", "slice"]])
    assert synonyms == [["burger"], ["slice"]]
    said = paraphrases_of("Hamburger", "food-drink", synonyms[0], 64, random.Random(0))
    assert {"a hamburger", "a slice of hamburger", "hamburgers", "a burger"} < set(said)


def test_noise_levels_cover_each_batch_evenly() -> None:
    levels = logit_normal(64, torch.Generator().manual_seed(0))
    assert torch.equal(levels, levels.sort().values)
    assert 0 < levels[0] < 0.12
    assert abs(levels.mean() - 0.5) < 0.01


def test_frechet_distance_matches_the_matrix_square_root() -> None:
    scipy = pytest.importorskip("scipy.linalg")
    torch.manual_seed(0)
    first, second = torch.randn(200, 6).double(), (torch.randn(150, 6) * 2 + 1).double()
    s1, s2 = torch.cov(first.T), torch.cov(second.T)
    root = scipy.sqrtm((s1 @ s2).numpy()).real
    expected = (first.mean(0) - second.mean(0)).square().sum() + s1.trace() + s2.trace() - 2 * root.trace()
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-9)


def test_retrieval_counts_ranks() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.2], [0.5, 0.4, 0.3]])
    found = retrieval(scores, torch.tensor([0, 2]))
    assert found["top1"] == 0.5
    assert found["top5"] == 1


def test_distort_keeps_white_white_and_is_seeded() -> None:
    images = torch.ones(2, 3, 64, 64)
    images[:, :, 20:40, 20:40] = -1
    first, second = (distort(images, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert first[:, :, :4, :4].mean() > 0.8
    assert first.min() >= -1
    assert first.max() <= 1


def test_scores_of_generated_images(folder: Path) -> None:
    from transformers import ResNetForImageClassification

    data, (pipe, _) = load_data(), load_with_arguments(folder)
    score = TextImageScore(pipe, ResNetForImageClassification.from_pretrained(folder / "score"), data.labels)
    rows = data.rows("validation")[:3]
    images = generate(pipe, [data.labels[r] for r in rows.tolist()], steps=1, guidance=2.0, batch=2)
    again = generate(pipe, [data.labels[r] for r in rows.tolist()], steps=1, guidance=2.0, batch=3)
    torch.testing.assert_close(images, again, atol=1e-2, rtol=0)
    result = score_images(images, data, rows, score, None)
    assert 0 <= result["top1"] <= result["top5"] <= 1


def test_a_paraphrase_asks_for_its_label_in_other_words() -> None:
    data = load_data()
    rows = range(len(data.labels))
    asked = [asked_otherwise(data, row) for row in rows]
    assert asked == [asked_otherwise(data, row) for row in rows]
    for row, words in enumerate(asked):
        assert data.labels[row].lower().rstrip("y") in words
    assert sum(words != data.labels[row].lower() for row, words in enumerate(asked)) > len(asked) // 2


def test_a_grid_has_what_was_drawn_below_the_true_pictures() -> None:
    true = torch.arange(64.0)[:, None, None, None]
    columns = beside_the_true(true, -true).reshape(4, 16)
    assert torch.equal(columns[0], -columns[1])
    assert torch.equal(columns[2], -columns[3])
    assert columns[0, 0] == 0
    assert columns[2, -1] == 63


def test_psnr_of_a_known_error() -> None:
    assert psnr(torch.full((1, 3, 2, 2), 0.2), torch.zeros(1, 3, 2, 2)).item() == pytest.approx(20, abs=1e-4)


def test_the_cards_are_what_their_commands_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    written: dict[Path, str] = {}
    monkeypatch.setattr(card, "write_atomically", lambda path, data: written.update({path: data.decode()}))
    for command in (card.__doc__ or "").replace("\\\n", "").split("python -m recipes.emoji.card ")[1:]:
        monkeypatch.setattr("sys.argv", ["card", *command.split()])
        card.main()
    assert [path.parent.name for path in written] == list(card.KINDS)
    assert written == {path: path.read_text() for path in written}


def test_card_shows_the_measured_figures() -> None:
    part = {"top1": 0.5, "top5": 0.75, "text_image_score": 0.6, "images": 8}
    scores = {
        "train": {**part, "real_images": {**part, "top1": 1.0}},
        "validation": part,
        "training": {"seconds": 7200.0, "step": 100, "images": 1428},
        "steps": 20,
        "guidance": 3.0,
        "environment": {"date": "2026-01-01"},
        "autoencoder_psnr": {"train": 33.0, "validation": 32.0},
    }
    text = card.render(scores)
    assert "2.0 hours on one to two CPU cores, 100 steps, 1428 images (2 per label)" in text
    assert "| retrieval, top 1 of 1 563 | 50.0% | 50.0% | 100.0% |" in text
    turbo = {**scores, "model": "emoji-128-turbo", "size": [128, 128], "steps": 4, "guidance": 0.0}
    base = {**scores, "model": "emoji-128", "steps": 16}
    distance = {"efficientnet_lite0_frechet_distance": 12.0}
    few = {**base, "paraphrased": True, "train": {**part, **distance, "images": 4}}
    text = card.render(turbo, [base, {**base, "steps": 8, "train": {**part, **distance}}, few])
    assert "num_inference_steps=4, guidance_scale=0" in text
    assert "results/emoji/train-128-turbo.png" in text
    assert "| emoji-128-turbo, 4 steps, guidance 0 | 50.0% | 75.0% | – |" in text
    assert "| emoji-128, 16 steps, guidance 3 | 50.0% | 75.0% | – |" in text
    assert "| emoji-128, 8 steps, guidance 3 | 50.0% | 75.0% | 12.00 |" in text
    assert "guidance 3, asked for in other words (4 labels) | 50.0% | 75.0% | – |" in text
