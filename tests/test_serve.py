"""The demo server: what it computes, what it refuses, and how it feels in a browser."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from pathlib import Path
from typing import Any

import gradio
import pytest
import torch
from PIL import Image, ImageChops
from typer.testing import CliRunner

import shiva
from browser import PATIENCE, PHONE, TOO_WIDE, UNNAMED, become_a_phone, complaints, installed, open_browser, requested
from pipelines import dit
from pipelines_reach import REACH
from shiva.cli import app
from shiva.evaluate.checkout import usual_run
from shiva.evaluate.drawing import Outcome, load_with_arguments
from shiva.show import server
from shiva.show.studio import LONGEST_PROMPT, Drawn, Request, Studio, Way, ways_for

EMOJI = Path(__file__).parent.parent / "models" / "emoji"


@pytest.fixture(scope="module")
def studio() -> Studio:
    torch.set_num_threads(1)
    pipe, arguments = load_with_arguments(EMOJI)
    assert arguments == {"max_sequence_length": 0}
    return Studio(pipe, ways_for(str(EMOJI)), **arguments)


@pytest.mark.slow
def test_budget_one_is_the_dense_image_and_less_is_what_was_planned(studio: Studio) -> None:
    whole = studio.draw(Request("red apple", 3, 4, 1.0))
    assert ImageChops.difference(whole.dense, whole.reduced).getbbox() is None
    assert whole.psnr == float("inf")
    assert whole.flops == planned(studio, 1.0, 4).flops == 1.0
    assert whole.masks.all()

    part, plan = studio.draw(Request("red apple", 3, 4, 0.6)), planned(studio, 0.6, 4)
    assert part.dense is whole.dense  # remembered: dragging the budget draws one image
    assert (whole.remembered, part.remembered) == (False, True)
    assert " s when first drawn |" in server.figures_of(part)
    assert " s when first drawn |" not in server.figures_of(whole)
    assert ImageChops.difference(part.dense, part.reduced).getbbox() is not None
    torch.testing.assert_close(part.masks.float().mean(dim=(-2, -1)), plan.keep)
    assert part.flops == pytest.approx(plan.flops)
    assert part.flops < 0.75


def planned(studio: Studio, budget: float, steps: int, way: str = "Sweep") -> Any:
    return studio.plan(Request("any", 0, steps, budget, way))


def test_the_plan_follows_the_budget_and_the_steps(studio: Studio) -> None:
    shares = [planned(studio, budget, 8).flops for budget in (0.4, 0.6, 0.8, 1.0)]
    assert shares == sorted(shares)
    assert planned(studio, 0.5, 8).keep.shape == (8, studio.spec.layers)
    assert planned(studio, 0.5, 8).keep[:, 1:].mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_every_method_of_the_menu_draws_for_less(studio: Studio) -> None:
    assert list(studio.ways) == ["Sweep", "Shiva", "Lattice", "Fewer steps", "ToMeSD"]
    assert studio.ways.keys() == server.MEANINGS.keys()
    for way in studio.ways:
        drawn = studio.draw(Request("red apple", 3, 4, 0.5, way))
        assert drawn.flops < 0.85, way
        assert len(drawn.masks) == (2 if way == "Fewer steps" else 4)
        plan = planned(studio, 0.5, 4, way)
        assert (plan is None) == (way == "ToMeSD")
        assert plan is None or plan.flops == pytest.approx(drawn.flops, abs=0.05)
    with pytest.raises(ValueError, match="'Faster' is not on the menu; choose one of Sweep, "):
        studio.draw(Request("a", 0, 4, 0.5, "Faster"))


def test_a_method_runs_before_it_is_timed(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, int]] = []

    def noted(pipe: Any, prompts: Any, candidates: Any, *, steps: int, **how: Any) -> Any:
        runs.extend((name, steps) for name in candidates)
        return {name: Outcome([Image.new("RGB", (64, 64))], 1.0, None) for name in candidates}

    monkeypatch.setattr("shiva.show.studio.generate", noted)
    monkeypatch.setattr(studio, "_warm", set())
    monkeypatch.setattr(studio, "_dense", OrderedDict())
    for budget in (1.0, 0.5, 0.7):
        studio.draw(Request("a fox", 9, 8, budget))
    assert runs == [("", 2), ("", 8), ("", 8), ("Sweep", 2), ("Sweep", 8), ("Sweep", 8)], "all of it is no Sweep"


REFUSED = [
    (("", 0, 4, 0.6), "the prompt is empty"),
    (("a" * (LONGEST_PROMPT + 1), 0, 4, 0.6), "301 characters"),
    (("a", -1, 4, 0.6), "seed -1 is outside"),
    (("a", 0, 1000, 0.6), "steps 1000 is outside 1 to 50"),
    (("a", 0, 4, 0.1), "share 0.1 is outside 0.3 to 1.0"),
    (("a", None, 4, 0.6), "seed None is none of the numbers"),
    (("a", 0, "many", 0.6), "steps 'many' is none of the numbers"),
    (("a", float("nan"), 4, 0.6), "seed nan is outside"),
    (("a", 0, float("inf"), 0.6), "steps inf is outside"),
    (("a", 0, 4, float("nan")), "share nan is outside"),
    (("a", 0, 4.5, 0.6), "steps 4.5 is no whole number"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_out_of_bounds_is_refused(asked: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request.read(*asked)


def test_a_method_without_a_budget_is_refused() -> None:
    from shiva.methods import SDTM

    with pytest.raises(ValueError, match="SDTM has no budget to drag; .* Refresh or DiffSparse"):
        Way(SDTM())


@pytest.mark.parametrize("config", [shiva.Refresh(), shiva.DiffSparse()], ids=lambda config: type(config).__name__)
def test_a_checkpoint_of_any_method_with_a_budget_is_on_the_page(config: Any) -> None:
    pipe: Any = dit()
    pipe.set_progress_bar_config(disable=True)
    page = server.build(Studio(pipe, {type(config).__name__: Way(config)}, guidance=2.0), "tiny", steps=2)
    preview = next(function.fn for function in page.fns.values() if function.api_name == "preview")
    assert preview(0.6, 2, type(config).__name__)[1].startswith("Planned")


def test_a_pipeline_of_videos_is_refused_before_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    class Video:
        def __call__(self, prompt: str, num_frames: int) -> None:
            pytest.fail("it was drawn")

    monkeypatch.setattr(server, "load_with_arguments", lambda *given: (Video(), {}))
    with pytest.raises(ValueError, match="Video draws videos, this command images"):
        server.run_server("clips", None, 4.0, "cpu", "float32", "127.0.0.1", free_port(), 4)


def test_a_turbo_opens_with_what_is_made_for_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(iter(ways_for(str(EMOJI)))) == "Sweep"
    monkeypatch.setattr("shiva.show.studio.checkpoint_for", lambda model, folder: EMOJI.parent / "lattice")
    for turbo in ("models/emoji-128-turbo", "Tongyi-MAI/Z-Image-Turbo"):
        assert list(ways_for(turbo))[:3] == ["Shiva", "Lattice", "Sweep"]
        assert usual_run(turbo) == (4, 0.0)
    assert next(iter(ways_for("elsewhere", str(EMOJI.parent / "shiva" / "60")))) == "Shiva"
    assert next(iter(ways_for("elsewhere", str(EMOJI.parent / "lattice")))) == "Lattice"


def test_a_pipeline_of_classes_is_drawn() -> None:
    pipe: Any = dit()
    pipe.set_progress_bar_config(disable=True)
    studio = Studio(pipe, guidance=2.0)
    assert studio.calls == 1
    drawn = studio.draw(Request(studio.example, 0, 2, 0.6))
    assert drawn.flops < 1


def test_where_guidance_takes_a_second_call_it_is_counted() -> None:
    tiny = REACH["qwen"]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)

    class Embedded:
        """The pipeline with embeddings in the prompts' place."""

        transformer, scheduler = pipe.transformer, pipe.scheduler

        def __call__(self, prompt: Any, negative_prompt: Any, true_cfg_scale: float, **how: Any) -> Any:
            return pipe(**tiny.call(1, true_cfg_scale), **how)

    assert Studio(Embedded(), guidance=3.0).calls == 2


def test_without_gradio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with pytest.raises(ImportError, match=r"\.\[serve\]"):
        server.need_gradio()


def test_a_port_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0"])
    assert result.exit_code == 2
    assert "--port" in result.output


HOSTS = [
    ("127.0.0.1", "127.0.0.1:7860", None, True),
    ("127.0.0.1", "localhost:7860", "http://localhost:7860", True),
    ("127.0.0.1", "[::1]:7860", None, True),
    ("127.0.0.1", "evil.example:7860", None, False),
    ("127.0.0.1", "127.0.0.1:7860", "http://evil.example", False),
    ("127.0.0.1", "127.0.0.1:7860", "null", False),
    ("127.0.0.1", "192.168.0.9:7860", None, False),
    ("127.0.0.1", "", None, False),
    ("0.0.0.0", "192.168.0.9:7860", "http://192.168.0.9:7860", True),
    ("0.0.0.0", "evil.example:7860", None, False),
    ("box.lan", "box.lan:7860", "http://box.lan:7860", True),
]


@pytest.mark.parametrize(("bound", "host", "origin", "served"), HOSTS)
def test_requests_under_another_name_are_refused(bound: str, host: str, origin: str | None, served: bool) -> None:
    sent: list[Any] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()), *([] if origin is None else [(b"origin", origin.encode())])]
    asyncio.run(server.OwnPagesOnly(page, bound)({"type": "http", "headers": headers}, None, send))
    assert sent[0]["status"] == (200 if served else 403)


BODIES = [
    ({"content-length": "70000"}, 413),
    ({"content-length": "-1"}, 413),
    ({"content-length": "²"}, 413),
    ({"transfer-encoding": "chunked"}, 413),
    ({"content-length": "900"}, 200),
    ({}, 200),
]


@pytest.mark.parametrize(("headers", "status"), BODIES)
def test_requests_are_bounded(headers: dict[str, str], status: int) -> None:
    refusal = server.OwnPagesOnly(None, "127.0.0.1").refusal({"host": "localhost:7860", **headers})
    assert (200 if refusal is None else refusal[0]) == status


def post(address: str, path: str, content: bytes, kind: str = "application/json") -> Any:
    request = urllib.request.Request(f"{address}gradio_api/{path}", content, {"content-type": kind})
    return urllib.request.urlopen(request, timeout=PATIENCE)


def test_an_upload_is_bounded_and_a_drawing_whose_client_has_gone_is_dropped(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, drawn = threading.Event(), threading.Event(), list[str]()

    def draw(request: Request) -> Any:
        drawn.append(request.prompt)
        began.set()
        go_on.wait(PATIENCE)
        raise ValueError("enough")

    page = server.build(studio, "emoji", steps=4)
    monkeypatch.setattr(studio, "draw", draw)
    address = launched(page)
    number = next(index for index, function in page.fns.items() if function.api_name == "draw")
    try:
        part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.bin"\r\n\r\n'
        for size in (5_000, 200_000):
            with pytest.raises(urllib.error.HTTPError, match="413"):
                post(address, "upload", part + b"0" * size + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")
        streams = {}
        for prompt in ("first", "gone", "last"):
            asked = {"data": [prompt, 0, 4, 0.6, "Sweep", 1, 1], "fn_index": number, "session_hash": prompt}
            post(address, "queue/join", json.dumps(asked).encode())
            streams[prompt] = urllib.request.urlopen(f"{address}gradio_api/queue/data?session_hash={prompt}")
            streams[prompt].readline()
            assert began.wait(PATIENCE)
        streams["gone"].close()
        deadline = time.monotonic() + PATIENCE
        while len(page._queue) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        go_on.set()
        assert any(b"process_completed" in line for line in streams["last"])
        assert drawn == ["first", "last"]
    finally:
        go_on.set()
        page.close()


def test_every_route_refuses_names_and_numbers_that_are_not_ours(studio: Studio) -> None:
    page = server.build(studio, "emoji", steps=4)
    address = launched(page)
    try:
        for path in ("", "gradio_api/info", "config"):
            request = urllib.request.Request(f"{address}{path}", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request, timeout=PATIENCE)
        routes = {function.api_name: function.fn for function in page.fns.values()}
        wrong = [float("nan"), float("inf"), -1, 10**10, "x", None]
        drawn = Drawn(None, None, 1.0, False, 1.0, 1.0, 1.0, torch.ones(4, studio.spec.layers, 2, 2) > 0)
        for value in wrong:
            for name, given in (
                ("preview", (value, 4, "Sweep")),
                ("preview", (0.6, value, "Sweep")),
                ("draw", ("a", value, 4, 0.6, "Sweep", 1, 1)),
                ("draw", ("a", 0, 4, 0.6, "Sweep", value, 1)),
                ("draw", ("a", 0, 4, 0.6, "Sweep", 1, value)),
                ("mask", (drawn, value, 1)),
                ("mask", (drawn, 1, value)),
            ):
                with pytest.raises(gradio.Error, match="is outside|is none of the numbers"):
                    routes[name](*given)
    finally:
        page.close()


# -- several people --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_people_at_once_see_their_own(studio: Studio) -> None:
    from gradio_client import Client

    page = server.build(studio, "emoji", steps=4)
    address = launched(page)
    try:
        asked = {"red apple": 1.0, "a fox": 0.4}
        people = {prompt: Client(address, verbose=False) for prompt in asked}
        drawings = {
            prompt: people[prompt].submit(prompt, 5, 4, budget, "Sweep", 3, 2, api_name="/draw")
            for prompt, budget in asked.items()
        }
        for prompt, budget in asked.items():
            expected = studio.draw(Request(prompt, 5, 4, budget))
            dense, reduced, told, *_ = drawings[prompt].result(timeout=PATIENCE)
            assert same_image(dense, server.enlarge(expected.dense))
            assert same_image(reduced, server.enlarge(expected.reduced))
            assert ("identical" in told) == (budget == 1.0)
            _, share = people[prompt].predict(3, 2, api_name="/mask")
            assert share.startswith(f"{expected.masks[2, 3].float().mean():.0%} of 256 tokens")
    finally:
        page.close()


def test_a_newcomer_sees_the_table_however_many_drawings_wait(studio: Studio) -> None:
    page = server.build(studio, "emoji", steps=4)
    queued = {function.api_name: function.queue for function in page.fns.values()}
    assert queued == {"draw": True, "preview": False, "mask": False}


def same_image(file: str, image: Any) -> bool:
    with Image.open(file) as shown:
        return ImageChops.difference(shown.convert("RGB"), image.convert("RGB")).getbbox() is None


# -- in a browser ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(page: Any, attempts: int = 5) -> str:
    """Gradio gives its server five seconds to start, which a busy machine may exceed."""
    for left in reversed(range(attempts)):
        try:
            return server.launch(page, "127.0.0.1", free_port(), wait=False)
        except OSError:
            if not left:
                raise
    raise AssertionError("unreachable")


def type_into(browser: Any, name: str, text: str) -> None:
    from selenium.webdriver.common.keys import Keys

    field = browser.find_element("css selector", f"#{name} textarea, #{name} input")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(text)


def drag(browser: Any, name: str, steps: int) -> None:
    """Move a slider by its handle, as a person would, by so many of its steps."""
    from selenium.webdriver.common.action_chains import ActionChains

    handle = browser.find_element("css selector", f"#{name} input[type=range]")
    low, high, now, unit = (float(handle.get_attribute(key)) for key in ("min", "max", "value", "step"))
    width, room = handle.size["width"], handle.size["width"] - 16
    start = 8 + room * (now - low) / (high - low) - width / 2
    far = room * steps * unit / (high - low)
    actions = ActionChains(browser).move_to_element_with_offset(handle, round(start), 0).click_and_hold()
    actions.move_by_offset(round(far), 0).release().perform()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_person_types_drags_and_sees_both_images_and_the_figures_change(studio: Studio) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    installed()
    page = server.build(studio, "emoji", steps=4)
    address = launched(page)
    try:
        assert address.startswith("http://127.0.0.1:")
        with open_browser("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as browser:
            wait = WebDriverWait(browser, PATIENCE)

            def text(name: str) -> str:
                return browser.find_element("id", name).text

            def source(name: str) -> str:
                found = browser.find_elements("css selector", f"#{name} img")
                return (found[0].get_attribute("src") or "") if found else ""

            browser.get(address)
            wait.until(lambda _: "of the computation" in text("planned") and source("table"))
            planned = text("planned")
            opening = source("dense"), source("reduced"), text("figures")
            assert all(opening), "the page opens with a drawing"
            assert "as fast" in opening[2]

            type_into(browser, "prompt", "birthday cake")
            browser.find_element("id", "draw").click()
            wait.until(lambda _: text("figures") != opening[2] and source("reduced") != opening[1])
            figures, reduced, dense = text("figures"), source("reduced"), source("dense")
            assert dense != reduced
            wait.until(lambda _: "of 256 tokens" in text("share") and source("overlay"))
            overlay = source("overlay")

            drag(browser, "layer", -4)  # to the first, which sees all tokens
            wait.until(lambda _: source("overlay") != overlay)

            drag(browser, "budget", 8)  # to 1.0: the table shifts, and the dense image comes out
            wait.until(lambda _: "identical" in text("figures"))
            wait.until(lambda _: text("planned") != planned)
            assert "100%" in text("figures")
            assert text("figures") != figures
            assert source("reduced") != reduced
            wait.until(lambda _: "100% of 256" in text("share"))

            browser.find_element("css selector", "#prompt textarea").clear()
            type_into(browser, "prompt", " ")
            browser.find_element("id", "draw").click()
            wait.until(lambda _: "the prompt is empty" in browser.find_element("tag name", "body").text)

            become_a_phone(browser)
            assert browser.execute_script(TOO_WIDE) <= PHONE
            assert browser.execute_script(UNNAMED) == 0
            assert [url for url in requested(browser) if not url.startswith(address)] == []
            assert complaints(browser) == []
    finally:
        page.close()
