"""Readers, buckets, caches and the order of samples; all data is made on the fly."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets.packaged_modules.parquet.parquet import Parquet
from PIL import Image, ImageOps

from shiva.training.cache import LatentCache, Ranks
from shiva.training.data import Example, ImageItems, Rows, digest, read_examples, stream_examples
from shiva.training.families import SD3Family, load_family
from shiva.training.feed import MapFeed, StreamFeed, load_ahead, prepare
from shiva.training.pictures import bucket_sizes, nearest_size, size_of, to_tensor
from shiva.training.recipe import recipe_from
from shiva.training.sections import Data, Model
from training_tiny import CAPTIONS, make_folder, picture, save_folder, tiny_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds after every parquet stream, for the sake of a process that ends with it."""
    monkeypatch.setattr(Parquet, "SLEEP_ON_THREADS_SHUTDOWNS", False, raising=False)


@pytest.fixture
def family(folder: Path) -> SD3Family:
    loaded = load_family(recipe_from(tiny_recipe(folder)).model, torch.float32)
    assert isinstance(loaded, SD3Family)
    return loaded


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "PNG")
    return buffer.getvalue()


def make_parquet(
    folder: Path, broken: dict[int, bytes | None] | None = None, captions: Sequence[str | None] = CAPTIONS
) -> str:
    import datasets

    images = {**{i: png(i) for i in range(6)}, **(broken or {})}
    columns = {
        "image": [None if image is None else {"bytes": image, "path": f"{i}.png"} for i, image in images.items()],
        "label": list(captions),
        "part": ["train", "test"] * 3,
    }
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.Value("string"), "part": datasets.Value("string")}
    )
    path = folder / "data.parquet"
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))
    return str(path)


def make_webdataset(folder: Path) -> str:
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(3):
                for suffix, content in (("png", png(i)), ("txt", CAPTIONS[3 * shard + i].encode())):
                    info = tarfile.TarInfo(f"{shard}{i}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return str(folder / "*.tar")


def make_mjhq(folder: Path) -> str:
    meta = {}
    for i, caption in enumerate(CAPTIONS):
        category = ("animals", "food")[i % 2]
        (folder / "mjhq30k_imgs" / category).mkdir(parents=True, exist_ok=True)
        picture(i).save(folder / "mjhq30k_imgs" / category / f"id{i}.jpg")
        meta[f"id{i}"] = {"category": category, "prompt": caption}
    (folder / "meta_data.json").write_text(json.dumps(meta))
    return str(folder)


SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "parquet": (make_parquet, {"caption": "label"}),
    "imagefolder": (lambda folder: str(save_folder(folder / "images", 6)), {"caption": "text"}),
    "webdataset": (make_webdataset, {}),
    "mjhq": (make_mjhq, {}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_layout_gives_its_captions_and_images(kind: str, tmp_path: Path) -> None:
    make, options = SOURCES[kind]
    examples = read_examples(Data(kind=kind, path=make(tmp_path), **options))
    assert sorted(examples[i].caption for i in range(len(examples))) == sorted(CAPTIONS)
    pixels = to_tensor(examples[0].image, (16, 16))
    assert pixels.shape == (3, 16, 16)
    assert -1 <= float(pixels.min()) < float(pixels.max()) <= 1


@pytest.mark.parametrize("kind", ["parquet", "imagefolder", "webdataset"])
def test_streams_give_the_same_rows_in_an_order_of_the_epoch(kind: str, tmp_path: Path) -> None:
    make, options = SOURCES[kind]
    data = Data(kind=kind, path=make(tmp_path), streaming=True, **options)
    first, again, second = ([e.caption for e in stream_examples(data, 0, epoch)] for epoch in (0, 0, 1))
    assert sorted(first) == sorted(CAPTIONS)
    assert first == again
    assert first != second


def test_rows_are_filtered_and_mistakes_named(tmp_path: Path) -> None:
    path = make_parquet(tmp_path)
    assert len(read_examples(Data(path=path, caption="label", where={"part": "train"}))) == 3
    assert len(read_examples(Data(path=path, caption="label", limit=2))) == 2
    with pytest.raises(ValueError, match="no option 'labl'; did you mean 'label'"):
        read_examples(Data(path=path, caption="labl"))
    with pytest.raises(ValueError, match="has no rows"):
        read_examples(Data(path=path, caption="label", where={"part": "none"}))
    with pytest.raises(FileNotFoundError, match="matches no file"):
        read_examples(Data(path=str(tmp_path / "absent.parquet")))
    make_mjhq(tmp_path / "mjhq")
    next((tmp_path / "mjhq").rglob("id1.jpg")).unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 6 images are missing, first food/id1.jpg"):
        read_examples(Data(kind="mjhq", path=str(tmp_path / "mjhq")))


def test_a_caption_that_is_absent_is_the_empty_prompt(tmp_path: Path) -> None:
    path = make_parquet(tmp_path, captions=[None, "", *CAPTIONS[2:]])
    examples = read_examples(Data(path=path, caption="label"))
    assert [examples[i].caption for i in range(3)] == ["", "", CAPTIONS[2]]


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("parquet", "a.parquet", b"none"),
        ("webdataset", "a.tar", b"none"),
        ("imagefolder", "metadata.jsonl", b'{"file_name": "0.png"'),
        ("imagefolder", "notes.txt", b"no picture"),
        ("prompts", "a.jsonl", b'{"text": "a cat"}'),
        ("prompts", "a.json", b"{"),
        ("prompts", "a.txt", b"\xff\xfe"),
        ("mjhq", "meta_data.json", b"{"),
        ("mjhq", "meta_data.json", b'{"id0": {"text": "a cat"}}'),
    ],
)
def test_a_source_that_cannot_be_read_is_named(kind: Any, name: str, content: bytes, tmp_path: Path) -> None:
    if name == "metadata.jsonl":
        picture(0).save(tmp_path / "0.png")
    (tmp_path / name).write_bytes(content)
    path = tmp_path if kind in ("imagefolder", "mjhq") else tmp_path / name
    with pytest.raises(ValueError, match=rf"data.path='{path}' does not read as .*{kind} \(.+\); (mend|give)"):
        read_examples(Data(kind=kind, path=str(path)))


def test_a_data_set_of_several_configurations(tmp_path: Path) -> None:
    make_parquet(tmp_path)
    (tmp_path / "other").mkdir()
    make_parquet(tmp_path / "other", captions=["a boat"] * 6)
    configs = [
        {"config_name": name, "data_files": f"{at}*.parquet"} for name, at in (("first", ""), ("second", "other/"))
    ]
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    examples = read_examples(Data(kind="hub", path=str(tmp_path), config="second", caption="label"))
    assert [example.caption for example in examples] == ["a boat"] * 6
    with pytest.raises(ValueError, match=r"does not read as data.kind=hub .*second"):
        read_examples(Data(kind="hub", path=str(tmp_path), caption="label"))
    with pytest.raises(ValueError, match="has no configurations"):
        Data(path=str(tmp_path), config="second").check()


def test_a_stream_that_breaks_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match=rf"data.path='{path}' does not read as data.kind=parquet .*mend its files"):
        list(stream_examples(Data(path=str(path), streaming=True), 0, 0))
    whole = make_webdataset(tmp_path)
    last = tmp_path / "1.tar"
    last.write_bytes(last.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"data.path=.* does not read as data.kind=webdataset .*mend its files"):
        list(stream_examples(Data(kind="webdataset", path=whole, streaming=True), 0, 0))


def test_a_date_to_look_for_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="data.where.day is a date; give a text, a number or null"):
        Data(path="a.parquet", where={"day": datetime.date(2026, 1, 1)}).check()


def test_pictures_without_captions_are_told_where_those_belong(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"known keys: image; captions of an imagefolder are in its metadata.jsonl"):
        read_examples(Data(kind="imagefolder", path=str(tmp_path), caption="text"))


def test_a_stream_reads_pictures_from_inside_an_archive(tmp_path: Path) -> None:
    images = save_folder(tmp_path / "images", 2)
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for path in images.iterdir():
            archive.write(path, path.name)
    shutil.rmtree(images)
    data = Data(kind="imagefolder", path=str(tmp_path), caption="text", streaming=True)
    for example, seed in zip(sorted(stream_examples(data, 0, 0), key=lambda e: e.caption), (1, 0), strict=True):
        assert torch.equal(example.pixels([(32, 32)]), to_tensor(picture(seed), (32, 32)))


def test_captions_shape_and_limit_are_known_without_reading_pictures(
    tmp_path: Path, family: SD3Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_parquet(tmp_path)
    whole = digest([Example(caption) for caption in CAPTIONS[:4]])

    def read(self: Rows, index: int) -> Example:
        raise AssertionError(f"row {index} was read, and its picture with it")

    monkeypatch.setattr(Rows, "__getitem__", read)
    examples = read_examples(Data(path=path, caption="label", limit=4))
    assert digest(examples) == whole
    assert ImageItems(examples, family, [(32, 32)]).grid(3) == (16, 16)


def test_a_picture_is_upright_as_its_camera_held_it() -> None:
    sideways, upright = io.BytesIO(), picture(0, 32, 48)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(sideways, "PNG", exif=exif)
    example, sizes = Example("", sideways.getvalue()), bucket_sizes(32, 8, buckets=True)
    assert example.size(sizes) == nearest_size(48, 32, sizes)
    assert torch.equal(example.pixels([(48, 32)]), to_tensor(upright, (48, 32)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_as_pil_turns_it(orientation: int) -> None:
    stored, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    picture(0, 32, 48).save(stored, "JPEG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(stored))
    assert size_of(stored.getvalue()) == (upright.height, upright.width)
    assert torch.equal(to_tensor(stored.getvalue(), (32, 32)), to_tensor(upright, (32, 32)))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_sound_picture_of_broken_exif_is_trained_on(form: str) -> None:
    stored, plain = io.BytesIO(), io.BytesIO()
    picture(0).save(stored, form, exif=b"Exif\0\0garbage of a camera")
    picture(0).save(plain, form)
    assert size_of(stored.getvalue()) == (32, 32)
    assert torch.equal(to_tensor(stored.getvalue(), (32, 32)), to_tensor(plain.getvalue(), (32, 32)))


def test_grey_of_sixteen_bits_is_as_bright_as_of_eight() -> None:
    grey, big = picture(0).convert("L"), io.BytesIO()
    values = np.asarray(grey, dtype=np.uint16) * 257
    Image.frombytes("I;16B", grey.size, values.astype(">u2").tobytes()).save(big, "TIFF")
    assert Image.open(big).mode == "I;16B"
    integers = Image.fromarray(np.asarray(grey, dtype=np.int32))
    for same in (Image.fromarray(values), Image.fromarray(values.astype(np.int32)), big.getvalue(), integers):
        torch.testing.assert_close(to_tensor(same, (32, 32)), to_tensor(grey, (32, 32)), rtol=0, atol=0)


@pytest.mark.parametrize("content", [b"", b"no picture", png(0)[:200], None], ids=["empty", "text", "cut", "none"])
def test_a_picture_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path, family: SD3Family) -> None:
    examples = read_examples(Data(path=make_parquet(tmp_path, broken={4: content}), caption="label"))
    items = ImageItems(examples, family, [(32, 32)])
    with pytest.raises(ValueError, match=r"the image of row 4, 'a dog on a hill' cannot be read \(.+\); mend it, or"):
        items.read([3, 4])


def test_a_picture_that_is_missing_is_named(family: SD3Family) -> None:
    items = ImageItems([Example("a cat", "nowhere.png")], family, bucket_sizes(32, 4, buckets=True))
    with pytest.raises(ValueError, match=r"the image of 'a cat' cannot be read \(.*nowhere.png.*\); mend it, or"):
        items.grid(0)


def test_prompt_files(tmp_path: Path) -> None:
    contents = {"a.txt": "one\n\ntwo\n", "a.json": '["one", "two"]', "a.jsonl": '{"prompt": "one"}\n{"prompt": "two"}'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        assert [e.caption for e in read_examples(Data(kind="prompts", path=str(tmp_path / name)))] == ["one", "two"]


def test_buckets_have_about_one_area_and_keep_the_aspect() -> None:
    sizes = bucket_sizes(1024, 16, buckets=True)
    assert (1024, 1024) in sizes
    assert all(0.9 < h * w / 1024**2 < 1.1 and h % 16 == w % 16 == 0 for h, w in sizes)
    height, width = nearest_size(600, 900, sizes)
    assert height / width == pytest.approx(2 / 3, rel=0.03)
    assert bucket_sizes(1024, 16, buckets=False) == [(1024, 1024)]


def test_micro_batches_share_a_shape_and_every_sample_comes_once_an_epoch(family: SD3Family) -> None:
    pictures = [Example(str(i), picture(i, *((32, 32) if i % 3 else (48, 24)))) for i in range(10)]
    items = ImageItems(pictures, family, bucket_sizes(32, 4, buckets=True))
    feed = MapFeed(items, range(10), 2, seed=0)
    epoch = feed.step(0, 5)
    assert len({items.grid(i) for ref in epoch for i in ref.members}) == 2
    assert all(len({items.grid(i) for i in ref.members}) == 1 for ref in epoch)
    assert sorted(i for ref in epoch for i in ref.members) == list(range(10))
    assert feed.step(1, 5) != epoch
    assert feed.step(0, 5) == epoch
    assert feed.read(epoch[0])[0].shape[0] == 2


def test_ranks_read_parts_of_the_same_global_batch(family: SD3Family, folder: Path) -> None:
    items = ImageItems(read_examples(recipe_from(tiny_recipe(folder)).data), family, [(32, 32)])
    whole = [loaded.refs for loaded in load_ahead(MapFeed(items, range(12), 1, 0), 0, 5, 4, range(4))]
    for rank in range(2):
        feed = MapFeed(items, range(12), 1, 0)
        for step, loaded in enumerate(load_ahead(feed, 2, 5, 4, range(rank, 4, 2))):
            assert loaded.refs == whole[step + 2]
            assert list(loaded.mine) == list(range(rank, 4, 2))


def test_a_stream_resumes_where_it_was(family: SD3Family, folder: Path) -> None:
    data = Data(kind="imagefolder", path=str(folder / "images"), caption="text", streaming=True)

    def captions(start: int) -> list[list[str]]:
        feed = StreamFeed(data, family, [(32, 32)], 2, seed=0, held_out=1)
        return [[e.caption for ref in feed.step(step, 2) for e in ref.members] for step in range(start, 5)]

    assert captions(0)[3:] == captions(3)


def test_a_stream_holds_out_rows_not_captions(family: SD3Family, folder: Path) -> None:
    data = Data(kind="imagefolder", path=str(folder / "images"), caption="text", streaming=True)
    feed = StreamFeed(data, family, [(32, 32)], 1, seed=0, held_out=1)
    (held_out,) = feed.first(1)
    epoch = [ref.members[0] for ref in feed.step(0, 11)]
    assert held_out not in epoch
    assert [e.caption for e in epoch].count(held_out.caption) == 1, "another row of the same caption is trained on"


def test_a_column_that_a_stream_has_not_is_named(family: SD3Family, tmp_path: Path) -> None:
    def first(**where: str) -> None:
        data = Data(path=make_parquet(tmp_path), caption="label", streaming=True, where=where)
        StreamFeed(data, family, [(32, 32)], 1, seed=0, held_out=1).step(0, 1)

    with pytest.raises(ValueError, match="data.where: the data set has no option 'prt'; did you mean 'part'"):
        first(prt="train")
    with pytest.raises(ValueError, match="has no rows; check data.where={'part': 'none'}"):
        first(part="none")


def test_a_cache_remembers_its_makers(family: SD3Family, folder: Path, tmp_path: Path) -> None:
    recipe = recipe_from(tiny_recipe(folder, data={"cache": str(tmp_path / "cache")}))
    prepared = prepare(recipe, family, tmp_path, Ranks(), lambda *_: None)
    items = prepared.held_out
    latents, text = items.encode(items.read([0, 3]))
    examples = read_examples(recipe.data)
    fresh = ImageItems(examples, family, [(32, 32)])
    expected = [fresh.encode(fresh.read([i])) for i in (0, 3)]
    assert torch.equal(latents, torch.cat([x for x, _ in expected]))
    assert torch.equal(text["hidden"], torch.cat([t["hidden"] for _, t in expected]))
    with torch.no_grad():
        next(family.pipe.vae.parameters()).add_(1.0)
    with pytest.raises(ValueError, match=r"made with another vae .* data.cache"):
        prepare(recipe, family, tmp_path, Ranks(), lambda *_: None)
    with pytest.raises(FileNotFoundError, match="must be a folder of latents"):
        LatentCache.open(tmp_path / "absent", {})


def test_what_a_kill_left_half_written_goes_when_its_shard_is_written(tmp_path: Path) -> None:
    cache = LatentCache.open(tmp_path, {}, 1)
    (tmp_path / ".shard-00000.safetensors.abcd1234").write_bytes(b"half")
    cache.fill(0, lambda index: (torch.zeros(4, 2, 2), {}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00000.safetensors"]


def test_a_cache_keeps_nothing_that_is_not_finite(
    family: SD3Family, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_from(tiny_recipe(folder, data={"cache": str(tmp_path / "cache")}))
    monkeypatch.setattr(family, "latents", lambda pixels: torch.full((len(pixels), 4, 16, 16), torch.inf))
    with pytest.raises(ValueError, match=r"0.latents holds NaN or infinity.*compute.precision to bf16"):
        prepare(recipe, family, tmp_path, Ranks(), lambda *_: None)
    assert not list((tmp_path / "cache").glob("shard-*"))


def test_a_cache_tells_other_pictures_of_the_same_captions_wherever_they_lie(
    family: SD3Family, folder: Path, tmp_path: Path
) -> None:
    def prepare_from(images: Path) -> None:
        data = {"path": str(images), "cache": str(tmp_path / "cache")}
        prepare(recipe_from(tiny_recipe(folder, data=data)), family, tmp_path, Ranks(), lambda *_: None)

    prepare_from(save_folder(tmp_path / "images"))
    prepare_from(save_folder(tmp_path / "moved"))
    picture(99).save(tmp_path / "images" / "5.png")
    with pytest.raises(ValueError, match=r"made with another images .* data.cache"):
        prepare_from(tmp_path / "images")


def test_a_cache_of_clips_has_so_many_frames(family: SD3Family, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\na cat\na dog\nrain\n")
    data = {"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "resolution": 32, "generate": {"steps": 1}}
    for frames in (1, 2):
        recipe = recipe_from({**tiny_recipe(folder, model={"frames": frames}), "data": data})
        if frames == 2:
            with pytest.raises(ValueError, match=r"made with another frames \(1, this run has 2\)"):
                prepare(recipe, family, tmp_path, Ranks(), lambda *_: None)
        else:
            prepare(recipe, family, tmp_path, Ranks(), lambda *_: None)


def test_latents_made_beforehand_are_read_without_images(family: SD3Family, folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    prepare(recipe_from(tiny_recipe(folder, data={"cache": cache})), family, tmp_path, Ranks(), lambda *_: None)
    recipe = recipe_from({**tiny_recipe(folder), "data": {"kind": "latents", "path": cache}})
    assert len(prepare(recipe, family, tmp_path, Ranks(), lambda *_: None).held_out) == 12
    longer = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, text_length=8))
    with pytest.raises(ValueError, match=r"another text_length \(0, this run has 8\); make it the same"):
        prepare(longer, family, tmp_path, Ranks(), lambda *_: None)


def test_prompts_alone_are_drawn_by_the_pipeline(family: SD3Family, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\na cat\na dog\nrain\n")
    data = {"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "resolution": 32, "generate": {"steps": 2}}
    recipe = recipe_from({**tiny_recipe(folder), "data": data})
    items = prepare(recipe, family, tmp_path, Ranks(), lambda *_: None).held_out
    latents, _ = items.encode(items.read([0, 1, 2, 3]))
    assert latents.shape == (4, 4, 16, 16)
    assert latents.isfinite().all()
    assert (tmp_path / "latents" / "manifest.json").exists()


@pytest.mark.parametrize("index", ["[1]", "{", '{"_class_name": "StableDiffusion3Pipeline", "transformer": 3}'])
def test_a_pipeline_that_does_not_load_is_one_line(index: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model.path='.*' does not load as a diffusers pipeline \(.*\); restore"):
        load_family(Model(str(tmp_path)), torch.float32)
