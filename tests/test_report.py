"""Figures and the page: what they hold, and how a browser shows it."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops
from rich.progress import Progress

from browser import PHONE, TOO_WIDE, UNNAMED, become_a_phone, complaints, open_browser, requested
from shiva.cli.short import report
from shiva.core.context import Trace
from shiva.evaluate.drawing import hints
from shiva.evaluate.frontier import pareto
from shiva.show import figures
from shiva.show.demo import chosen_rows, demo_rows, make_demo
from shiva.show.documents import figure_of
from shiva.show.figures import Point
from shiva.show.page import THUMBNAIL, Page
from shiva.show.report import add, collect
from shiva.show.style import encode, family, plot

REPOSITORY = Path(__file__).parent.parent


def test_the_front_holds_what_no_other_beats() -> None:
    points = [(3, 9), (2, 4), (3, 8), (1, 5)]
    assert pareto(points, itemgetter(0), itemgetter(1)) == [(1, 5), (3, 9)]
    assert pareto(points, itemgetter(0), lambda point: -point[1]) == [(1, 5), (2, 4)]


def test_spread_keeps_both_ends() -> None:
    assert figures.spread(range(20), 5) == [0, 5, 10, 14, 19]
    assert figures.spread([3, 4], 5) == [3, 4]
    assert figures.spread(range(20), 1) == [0]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("Shiva 60 cached", "ours"),
        ("Sweep 60", "ours"),
        ("fine-tuned", "dense"),
        ("ToMeSD, FFN too", "others"),
    ],
)
def test_methods_are_marked_by_their_family(name: str, title: str) -> None:
    assert family(name).title == title


def test_the_overlay_leaves_computed_tokens_as_they_are() -> None:
    image = Image.new("RGB", (8, 8), "orange")
    mask = torch.zeros(2, 2, dtype=torch.bool)
    mask[0, 1] = True
    shown = figures.overlay(image, mask, size=64)
    assert shown.size == (64, 64)
    assert shown.getpixel((60, 4)) == image.getpixel((0, 0))
    assert shown.getpixel((4, 4)) == shown.getpixel((60, 60)) != image.getpixel((0, 0))


def trace() -> Trace:
    made = Trace(grid=(4, 6), layers=3, timesteps={0: 900.0, 1: 400.0})
    for step in (0, 1):
        for layer in (1, 2):
            made.scores[step, layer] = torch.rand(2, 24)
            made.positions[step, layer] = made.scores[step, layer].topk(12).indices
    return made


def training_run(folder: Path) -> Path:
    stages = ["warmup"] * 2 + ["policy"] * 2
    lines = [
        json.dumps({"step": i, "stage": s, "loss": 2.0 - i / 4, "keep": 0.6, "budget_ema": 0.6})
        for i, s in enumerate(stages)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')  # killed while writing
    (folder / "validation.jsonl").write_text(json.dumps({"step": 3, "mse/schedule": 0.2}) + "\n")
    return folder


def test_every_figure_draws(tmp_path: Path) -> None:
    image, seen = Image.new("RGB", (24, 16), "teal"), trace()
    drawings = [
        lambda: figures.quality_cost([Point("dense", 1, 9), Point("Shiva 60%", 0.6, 8)], "FLOPs", "PSNR"),
        lambda: figures.schedule_map(seen.keep(), [900.0, 400.0]),
        lambda: figures.token_masks(image, seen),
        lambda: figures.score_maps({"stratified": seen, "fixed": seen}),
        lambda: figures.image_grid(["dense", "Shiva"], [("a fox", [image, image])]),
        lambda: figures.training_curves(training_run(tmp_path)),
    ]
    for draw in drawings:
        assert encode(draw(), "svg", dpi=40).rstrip().endswith(b"</svg>")
    assert encode(drawings[0]()) == encode(drawings[0]())  # a committed figure changes with its data only


def test_a_figure_without_data_says_what_to_pass(tmp_path: Path) -> None:
    empty = Trace(grid=(2, 2), layers=1, timesteps={0: 1.0})
    with pytest.raises(ValueError, match="smaller budget"):
        figures.token_masks(Image.new("RGB", (4, 4)), empty)
    with pytest.raises(ValueError, match="no token was scored"):
        figures.score_maps({"a": empty})
    with pytest.raises(FileNotFoundError, match="folder of a training run"):
        figures.training_curves(tmp_path)


# -- the page --------------------------------------------------------------------------------------------


def evaluation(folder: Path) -> Path:
    """What `shiva eval` leaves: two prompts, three candidates, one of them without its last image."""
    shades = {"ToMeSD <25%>": "#0f0", "dense": "#f00", "Shiva 60%": "#00f"}
    candidates = {name: {"slug": slug} for name, slug in zip(shades, ("tomesd", "dense", "shiva-60"), strict=True)}
    settings = {"model": "models/emoji", "steps": 20, "guidance": 4.0, "prompts": "emoji"}
    run = {"settings": settings, "seeds": [0, 1], "prompts": [{"text": "a fox"}, {"text": "<b>cake</b>"}]}
    (folder / "tables").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**run, "candidates": candidates, "skipped": {"DyDiT": "no weights"}}))
    for name, candidate in candidates.items():
        for index in range(2):
            if (name, index) == ("Shiva 60%", 1):
                continue
            path = folder / "images" / candidate["slug"] / "0" / f"{index:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), shades[name]).save(path)
    quality = {
        "title": "Main table",
        "columns": ["method", "PSNR to dense, dB ↑", "MSE to dense ↓", "paper: FID ↓"],
        "rows": [["dense", "", "", "1"], ["ToMeSD <25%>", "19.7", "0.2", "2"], ["Shiva 60%", "20.8", "0.1", "3"]],
        "caption": "PSNR to dense",
    }
    cost = {
        "title": "Cost of a step",
        "columns": ["method", "GFLOPs", "GFLOPs, paper's count", "latency, s"],
        "rows": [["dense", "2.9", "2", ""], ["ToMeSD <25%>", "2.4", "2", "1.1"], ["Shiva 60%", "1.8", "1", "0.9"]],
    }
    even = {
        **cost,
        "rows": [["dense", "2.9", "2", ""], ["ToMeSD <25%>", "1.9", "2", ""], ["Shiva 60%", "1.8", "1", ""]],
    }
    shares = {"cost": {"dense": {"share": 1.0}, "ToMeSD <25%>": {"share": 0.83}, "Shiva 60%": {"share": 0.62}}}
    write(folder / "tables" / "main.json", {"tables": [quality, cost], "results": shares})
    write(folder / "tables" / "matched-60.json", {"tables": [quality, even]})
    write(
        folder / "tables" / "categories.json", {"tables": [{"title": "By kind", "columns": ["category"], "rows": []}]}
    )
    return folder


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def test_a_report_holds_tables_claims_figures_and_images(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    report([evaluation(tmp_path / "eval")], output)
    page = output.read_text()
    assert page.count("data:image/png;base64") >= 5
    assert "data:image/svg+xml" in page
    assert "&lt;b&gt;cake&lt;/b&gt;" in page
    assert "<b>cake" not in page
    assert 'class="number paper">paper: FID ↓' in page
    assert 'class="number">GFLOPs, paper&#x27;s count' in page
    assert "no weights" in page
    assert 'src="http' not in page


def test_a_frontier_shows_its_table_and_figure_beside_its_images(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "frontier")
    shutil.rmtree(folder / "tables")
    write(folder / "frontier.json", {"tables": [{"title": "Less time", "columns": ["way"], "rows": [["8 steps"]]}]})
    Image.new("RGB", (32, 32), "#123").save(folder / "frontier.png")
    page = str(collect([folder]))
    assert "What to do for less time" in page
    assert "8 steps" in page
    assert page.count("data:image/png;base64") == 5 + 1
    shutil.rmtree(folder / "images")
    assert "shiva frontier models/emoji --prompts FILE --steps 20 --guidance 4 --limit 2" in str(collect([folder]))


def test_an_evaluation_reads_in_the_order_of_its_protocols_and_tables(tmp_path: Path) -> None:
    page = Page("Test")
    add(page, evaluation(tmp_path / "eval"))
    asked = [heading.split(":")[0].split(",")[0] for heading in page.sections.values()]
    assert asked == [
        "Evaluation",
        "All methods",
        "Paired differences in each category; our symbols are the paper's logo",
        "Every method at the same true FLOPs",
        "What the words mean",
    ]
    assert list(page.sections.values())[3].endswith("(matched-60)")
    names = re.findall("<figcaption>([^<]+)</figcaption></figure>", page.parts[2])
    assert names[:3] == ["dense", "Shiva 60%, −38 % FLOPs", "ToMeSD &lt;25%&gt;, −17 % FLOPs"]
    words = re.findall("<dt>([^<]+)</dt>", str(page))
    assert words == ["dense", "Shiva", "ToMeSD", "PSNR to dense", "MSE to dense", "GFLOPs", "latency", "paper:"]


def test_quality_is_drawn_against_both_costs_but_not_at_equal_cost(tmp_path: Path) -> None:
    page = Page("Test")
    add(page, evaluation(tmp_path / "eval"))
    drawn = re.findall("<figcaption>([^<]+); the line", str(page))
    assert drawn == ["PSNR to dense, dB against GFLOPs", "PSNR to dense, dB against latency, s"]


def test_differences_to_a_line_are_not_drawn_as_values(tmp_path: Path) -> None:
    folder, page = evaluation(tmp_path / "eval"), Page("Test")
    main = json.loads((folder / "tables" / "main.json").read_text())
    columns = ["method", "FLOPs", "line between", "LPIPS to dense ↓"]
    rows = [["ToMeSD <25%>", "83%", "3 to 4 steps", "-0.01 ± 0.002"], ["Shiva 60%", "62%", "2 to 3 steps", "-0.02"]]
    above = {"title": "Above the line of fewer steps", "columns": columns, "rows": rows}
    write(folder / "tables" / "main.json", {**main, "tables": [*main["tables"], above]})
    add(page, folder)
    assert "3 to 4 steps" in str(page)
    assert "LPIPS to dense against" not in str(page)


def test_linked_folders_are_left_out_so_that_a_loop_ends(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    shown = evaluation(folder / "eval")
    (shown / "runs").mkdir()
    (shown / "runs" / "loop").symlink_to(shown, target_is_directory=True)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "itself").symlink_to(folder / "itself")
    page = Page("Test")
    add(page, folder)
    assert sum(heading.startswith("Evaluation") for heading in page.sections.values()) == 1


def test_only_images_of_the_folder_itself_are_carried(tmp_path: Path) -> None:
    folder, secret = tmp_path / "bench", tmp_path / "secret.png"
    folder.mkdir()
    Image.new("RGB", (4, 4), "red").save(secret)
    Image.new("RGB", (4, 4), "blue").save(folder / "own.png")
    (folder / "linked.png").symlink_to(secret)
    (folder / "text.png").write_text("password")
    for name in ("own", "linked", "text"):
        write(folder / f"{name}.json", {"tables": [{"title": name, "columns": ["method"], "rows": [["x"]]}]})
    page = Page("Test")
    add(page, folder)
    assert str(page).count("<figure") == 1
    assert base64.b64encode((folder / "own.png").read_bytes()).decode() in str(page)
    assert base64.b64encode(b"password").decode() not in str(page)

    shown = evaluation(tmp_path / "eval")
    run = json.loads((shown / "run.json").read_text())
    run["candidates"]["dense"]["slug"] = "../../images"
    (tmp_path / "images" / "0").mkdir(parents=True)
    secret.rename(tmp_path / "images" / "0" / "00000.png")
    write(shown / "run.json", run)
    page = Page("Test")
    add(page, shown)
    assert 'alt="a fox, dense"' not in str(page)
    assert 'alt="a fox, ToMeSD' in str(page)


def test_one_prompt_can_be_shown(tmp_path: Path) -> None:
    page = Page("Test")
    add(page, evaluation(tmp_path / "eval"), prompts=1)
    assert "a fox" in str(page)
    assert "cake" not in str(page)


def test_folders_inside_are_shown_whatever_lies_beside_them(tmp_path: Path) -> None:
    sheet = {"title": "Speed", "columns": ["method"], "rows": [["dense"]]}
    first, second = ({"cpu": "a", "threads": 1, "date": day} for day in ("monday", "tuesday"))
    write(tmp_path / "one.json", {**sheet, "environment": first})
    write(tmp_path / "two.json", {**sheet, "environment": second})
    write(tmp_path / "other.json", [1, 2])
    (tmp_path / "run").mkdir()
    training_run(tmp_path / "run")
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "model_index.json", {})
    write(tmp_path / "model" / "config.json", {"not": "a checkpoint"})
    page = Page("Test")
    add(page, tmp_path)
    assert list(page.sections.values()) == [tmp_path.name, "Training of run"]
    assert "monday: . (one)" in str(page)
    assert "tuesday: . (two)" in str(page)
    assert page.parts[-1].endswith("other.json.</p>")
    assert "config.json" not in page.parts[-1]
    with pytest.raises(ValueError, match="neither tables nor claims"):
        add(page, tmp_path / "other.json")


def test_checkpoints_of_any_method_are_shown() -> None:
    page = Page("Test")
    add(page, REPOSITORY / "models")
    shown = [Path(heading).name for heading in page.sections.values()]
    assert {"60", "80", "dydit"} <= set(shown)
    assert "DyDiT for" in str(page)


def test_training_runs_are_drawn(tmp_path: Path) -> None:
    page = Page("Test")
    add(page, training_run(tmp_path))
    assert page.sections == {f"training-of-{tmp_path.name.replace('_', '-')}": f"Training of {tmp_path.name}"}
    assert "svg+xml" in str(page)


def test_results_are_found_at_any_depth(tmp_path: Path) -> None:
    page = Page("Test")
    deep = tmp_path / "here" / "and" / "there"
    deep.mkdir(parents=True)
    training_run(deep)
    add(page, tmp_path)
    assert list(page.sections) == ["training-of-there"]


def test_a_folder_without_results_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.json of an evaluation"):
        add(Page("Test"), tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor"):
        add(Page("Test"), tmp_path / "nowhere")
    (tmp_path / "cut.json").write_text('{"tables": [')
    with pytest.raises(ValueError, match=r"cut\.json is not JSON"):
        add(Page("Test"), tmp_path)


@pytest.mark.parametrize(("cell", "value"), [("83.4%", 83.4), ("−1.5 dB", -1.5), ("1.2e-3", 1.2e-3), ("", None)])
def test_cells_hold_numbers(cell: str, value: float | None) -> None:
    assert figure_of(cell) == value


def test_without_matplotlib_the_page_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"\.\[report\]"):
        plot()
    page = Page("Test")
    add(page, training_run(tmp_path))
    assert "No figure: figures need matplotlib" in str(page)


def test_the_demo_shows_dense_and_shiva_beside_the_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    _, rows, _ = chosen_rows("recipes/eval/emoji.yaml", every=False, steps=None)
    candidates = {row.name: row for row in rows}
    assert next(iter(candidates)) == "dense"
    shiva = {f"Shiva {budget}" for budget in (90, 80, 70, 60)} | {"Sweep 60"}
    assert shiva <= candidates.keys()
    assert {"ToMeSD", "ToFu", "SDTM", "ToMA", "IBTM"} <= candidates.keys()
    assert {"NeuralSort", "SparseDiT", "DyDiT", "DiffCR"} <= candidates.keys()


def test_the_demo_loads_and_calls_a_model_as_its_file_of_candidates_says(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("{without: [image_encoder], arguments: {max_sequence_length: 9}, candidates: {dense: {}}}")
    _, rows, _ = chosen_rows(str(file), every=False, steps=None)
    assert hints("elsewhere", rows[0].file) == (("image_encoder",), {"max_sequence_length": 9})


@pytest.mark.slow
def test_the_demos_bar_ends_where_the_drawing_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Kept(Progress):
        def __init__(self, **how: Any) -> None:
            super().__init__(**how)
            bars.append(self)

    monkeypatch.setattr("shiva.show.demo.Progress", Kept)
    monkeypatch.chdir(REPOSITORY)
    make_demo("ToMeSD", every=False, output=tmp_path, steps=2, seed=0, count=3)
    assert bars[0].tasks[0].completed == bars[0].tasks[0].total == 2 * 2 * 2, "turns, methods, steps"


def test_the_demo_has_eight_rows_at_most_and_takes_the_larger_model_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("emoji", "emoji-128", "emoji-128-turbo"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "model_index.json").write_text("{}")
    rows = demo_rows("emoji-128")
    assert len(rows) <= 8
    assert {row.model for row in rows[-4:]} == {Path("models/emoji-128-turbo")}
    assert [row.passes for row in rows[-4:]] == [4, 3, 3, 3]
    assert rows[-1].candidate.checkpoint == "models/turbo/shiva"
    base, found, left_out = chosen_rows(None, every=False, steps=8)
    assert base == Path("models/emoji-128")
    assert {row.name: row.steps for row in found} == {
        "dense": 8,
        "Sweep 40": 8,
        "ToMeSD": 8,
        "fewer steps": 5,
        "turbo in 4 steps": 4,
        "turbo in 3 steps": 3,
    }
    assert [line.partition(" is not here")[0] for line in left_out] == [
        "turbo, Shiva 66: models/turbo/shiva",
        "turbo, Shiva 50: models/turbo/shiva",
    ]
    with pytest.raises(FileNotFoundError, match="run shiva demo --all in a checkout"):
        chosen_rows(None, every=True, steps=None)
    monkeypatch.chdir(REPOSITORY)
    base, every, left_out = chosen_rows(None, every=True, steps=None)
    assert base == Path("models/emoji-128")
    assert {row.name: row.steps for row in every}.items() >= {"dense": 16, "Sweep 60": 16, "8 steps": 8}.items()
    assert any(line.startswith("MagCache: step caches") for line in left_out)


def test_headings_go_down_a_level_at_a_time(tmp_path: Path) -> None:
    """As screen readers move by them, folded or not."""
    levels = list(map(int, re.findall(r"<h(\d)", str(collect([evaluation(tmp_path / "eval")])))))
    assert {1, 2, 3} == set(levels)
    assert all(after - before <= 1 for before, after in zip([0, *levels], levels, strict=False))


def visible(browser: Any) -> list[str]:
    shots = browser.find_elements("css selector", ".shot")
    return [shot.text.splitlines()[0] for shot in shots if shot.is_displayed()]


@pytest.mark.slow
def test_a_browser_shows_one_prompt_at_a_time_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    report([evaluation(tmp_path / "eval")], output)
    with open_browser() as browser:
        browser.get(output.as_uri())
        assert visible(browser) == ["a fox"]
        choice = browser.find_element("css selector", "select")
        back, on = browser.find_elements("tag name", "button")
        choice.send_keys("<")  # by keyboard, as in any list
        assert visible(browser) == ["<b>cake</b>"]
        on.click()
        assert visible(browser) == ["a fox"]
        back.click()
        assert visible(browser) == ["<b>cake</b>"]
        choice.send_keys("all")
        assert visible(browser) == ["a fox", "<b>cake</b>"]
        images = browser.find_elements("tag name", "img")
        assert all(browser.execute_script("return arguments[0].naturalWidth > 0", image) for image in images)
        become_a_phone(browser)  # only tables and plots scroll sideways, each on its own
        assert browser.execute_script(TOO_WIDE) <= PHONE
        assert browser.execute_script(UNNAMED) == 0
        row, box = browser.find_element("css selector", "tbody th"), browser.find_element("css selector", ".wide")
        assert box.get_attribute("tabindex") == "0"
        browser.execute_script("arguments[0].scrollLeft = 999", row.find_element("xpath", "ancestor::div[1]"))
        assert 0 <= row.rect["x"] < PHONE / 2  # the method's name stays in sight
        browser.execute_script("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
        assert browser.execute_script(TOO_WIDE) <= PHONE
        plots = browser.find_elements("css selector", ".plot img")
        assert all(plot.size["width"] > 600 for plot in plots)
        assert complaints(browser) == []
        assert requested(browser) == [output.as_uri()]


@pytest.mark.slow
def test_the_report_of_all_results_is_a_summary_and_folds(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    report([REPOSITORY / "results"], output)
    page = output.read_text()
    assert "Its images are not here" in page  # those of results/ are not in git
    protocols = ("main", "points", "transfer", "categories", "ratio", "int8", "matched")
    how = f"{' '.join(f'--protocol {name}' for name in protocols)} --steps 16 --guidance 3 --limit 64 --seeds 0"
    assert f"shiva eval models/emoji --methods recipes/eval/emoji.yaml {how}" in page
    assert "softrank_speed.json" in page
    assert "stratified timesteps have a lower variance" in page
    with open_browser() as browser:
        browser.get(output.as_uri())
        assert browser.execute_script("return document.documentElement.scrollHeight") < 12_000
        shown = browser.find_element("tag name", "body").text
        for word in ("what was measured", "what is saved, and what is lost", "Sweep 60", "the paper's claims"):
            assert word in shown
        assert "One step of sd3-medium" not in shown
        browser.get(f"{output.as_uri()}#speed")
        assert "One step of sd3-medium" in browser.find_element("tag name", "body").text
        assert browser.execute_script(UNNAMED) == 0
        assert complaints(browser) == []


@pytest.mark.slow
def test_the_page_reads_without_javascript(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    report([evaluation(tmp_path / "eval")], output)
    with open_browser("--blink-settings=scriptEnabled=false") as browser:
        browser.get(output.as_uri())
        assert visible(browser) == ["a fox", "<b>cake</b>"]
        assert not browser.find_element("css selector", ".controls").is_displayed()


def embedded(page: Page, kind: str) -> Any:
    found = re.search(rf"data:image/{kind};base64,([^\"]+)", str(page))
    assert found is not None
    return Image.open(io.BytesIO(base64.b64decode(found[1])))


def test_the_gallery_shows_the_images_it_was_given() -> None:
    page, image = Page("Test"), Image.new("RGB", (4, 4), "#123456")
    page.gallery(["dense"], [("a", [image])])
    assert ImageChops.difference(embedded(page, "png"), image).getbbox() is None


def test_large_images_are_reduced() -> None:
    page = Page("Test")
    page.gallery(["dense"], [("a", [Image.effect_noise((1024, 512), 60)])])
    assert embedded(page, "webp").size == (THUMBNAIL, THUMBNAIL // 2)
    assert len(str(page)) < 100_000
