"""Readers of prompt sets, on small files of the original forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shiva.evaluate.prompts import Prompt, PromptSet, read_prompts

PARQUET = Path(__file__).parents[1] / "recipes" / "emoji" / "data" / "fluent-emoji-64.parquet"


def test_mjhq_has_categories_and_images(tmp_path: Path) -> None:
    entries = {"a1": {"category": "logo", "prompt": "a sign"}, "b2": {"category": "food", "prompt": "soup"}}
    path = tmp_path / "meta_data.json"
    path.write_text(json.dumps(entries))
    assert read_prompts(path).image is None
    (tmp_path / "logo").mkdir()
    (tmp_path / "logo" / "a1.jpg").write_bytes(b"picture")
    found = read_prompts(path)
    assert found.prompts == (Prompt("a sign", "logo", "a1"), Prompt("soup", "food", "b2"))
    assert found.image is not None
    assert found.image(found.prompts[0]) == b"picture"


def test_what_is_not_mjhq_is_told_its_form(tmp_path: Path) -> None:
    path = tmp_path / "meta_data.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no prompt; pass --prompts a file with at least one"):
        read_prompts(path)
    for content in ('["a fox"]', '{"a1": {"text": "a fox"}}', "{"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"has not MJHQ-30K's form, .*; pass its meta_data.json"):
            read_prompts(path)


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    """Spreadsheets and editors of Windows put one into files they call UTF-8."""
    contents = {"p.csv": "Prompts\ncafé\n", "p.txt": "café\n", "p.json": '{"a": {"prompt": "café", "category": ""}}'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, "utf-8-sig")
        assert read_prompts(tmp_path / name).texts == ["café"]


def test_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"p.txt is not UTF-8 \(.*\); save it as UTF-8"):
        read_prompts(path)


def test_drawbench_is_a_csv_with_quotes(tmp_path: Path) -> None:
    path = tmp_path / "drawbench.csv"
    path.write_text('Prompts,Category\n"A red car, and a sheep.",Colors\nA bird.,Counting\n')
    assert [(p.text, p.category) for p in read_prompts(path).prompts] == [
        ("A red car, and a sheep.", "Colors"),
        ("A bird.", "Counting"),
    ]


def test_parti_is_a_tsv_whose_quotes_are_text(tmp_path: Path) -> None:
    path = tmp_path / "PartiPrompts.tsv"
    path.write_text('Prompt\tCategory\tChallenge\tNote\na "quoted" cat\tAnimals\tBasic\t\n')
    assert read_prompts(path).prompts == (Prompt('a "quoted" cat', "Animals", "0"),)
    path.write_text("Text\tCategory\nx\ty\n")
    with pytest.raises(ValueError, match="no column 'Prompt' but Text, Category"):
        read_prompts(path)


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("a fox\n\n  a pizza \n")
    assert read_prompts(path).texts == ["a fox", "a pizza"]


def test_emoji_set_knows_group_split_and_core() -> None:
    train, held_out = read_prompts(PARQUET), read_prompts(PARQUET, split="validation")
    every = read_prompts(PARQUET, split="all", core=False)
    assert not set(train.texts) & set(held_out.texts)
    assert len(every) == len(every.labels) > len(train) + len(held_out)
    assert "symbols" in {prompt.category for prompt in held_out.prompts}
    assert train.image is not None
    assert train.image(train.prompts[0]).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--split='test' is unknown"):
        read_prompts(PARQUET, split="test")


def test_a_limit_is_spread_over_the_set() -> None:
    prompts = PromptSet("x", tuple(Prompt(str(i)) for i in range(10)))
    assert prompts.limited(4).texts == ["0", "3", "6", "9"]
    assert prompts.limited(None) is prompts
    assert prompts.limited(99) is prompts


def test_an_unknown_file_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pass --prompts"):
        read_prompts(tmp_path / "none.txt")
    path = tmp_path / "prompts.xml"
    path.write_text("")
    with pytest.raises(ValueError, match=r"known are .json"):
        read_prompts(path)
