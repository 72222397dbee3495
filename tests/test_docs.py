"""What the pages say runs: every block of Python in README and docs, the notebook, and the site's build."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline

import shiva
from browser import PHONE, TOO_WIDE, UNNAMED, become_a_phone, complaints, open_browser, requested
from reproduce import readme
from shiva.backbones.known import known
from shiva.evaluate.drawing import load_with_arguments
from shiva.evaluate.rivals import cache_hooks

from tiny import make_sd3

REPOSITORY = Path(__file__).parent.parent
PAGES = sorted(
    path
    for path in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md"))
    if "```python\n" in path.read_text()
)
LOADED = re.compile(r"<(?:script|img|iframe)[^>]+src=\"http[^\"]+|<link rel=\"stylesheet\" href=\"http[^\"]+")
"""What a page would fetch from elsewhere."""
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EMOJI, CHECKPOINTS = REPOSITORY / "models" / "emoji", REPOSITORY / "models"
NAMED = {"fitted": "lattice", "path-or-hub-id": "shiva/60", "runs/sd3-60/checkpoint": "shiva/60", "models": ""}
"""Folders that pages name, and ours that stand in for them."""


@pytest.fixture(scope="module")
def embedded() -> Any:
    torch.set_num_threads(1)
    return load_with_arguments(EMOJI)


@pytest.fixture
def namespace(embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a reader has at hand: a pipeline. Any that a page loads is the embedded one, in few steps."""
    pipe, arguments = embedded
    call = StableDiffusion3Pipeline.__call__

    def short(self: Any, *args: Any, **given: Any) -> Any:
        steps = min(given.pop("num_inference_steps", 5), 5)
        return call(self, *args, **{**arguments, **given, "num_inference_steps": steps})

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *args, **options: pipe)
    monkeypatch.setattr(DiffusionPipeline, "to", lambda self, *args, **options: self)
    monkeypatch.setattr(StableDiffusion3Pipeline, "__call__", short)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)  # which tests/test_pipelines.py tries
    monkeypatch.setattr(pipe, "transformer_2", make_sd3(), raising=False)
    monkeypatch.chdir(tmp_path)
    for name, ours in NAMED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(CHECKPOINTS / ours)
    scheduler = pipe.scheduler
    yield {"shiva": shiva, "torch": torch, "diffusers": diffusers, "pipe": pipe}
    shiva.detach(pipe)
    pipe.scheduler = scheduler
    for module, hook in cache_hooks(pipe.transformer):  # a step cache that a page put on, which attach would refuse
        module._diffusers_hook.remove_hook(hook, recurse=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(REPOSITORY)) for path in PAGES])
def test_every_block_of_python_runs(page: Path, namespace: dict[str, Any]) -> None:
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1):
        with contextlib.redirect_stdout(None):
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_the_table_of_a_page_is_that_of_the_results(page: Path) -> None:
    assert readme.PLACE.search(page.read_text())
    assert readme.filled(page) == page.read_text(), "python -m reproduce.readme writes it"


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        (["0.029", "0.1458", ""], ["0.0290", "0.1458", ""]),
        (["313.3", "9.25"], ["313.3", "9.2"]),
        (["1.00x", "2.5"], ["1.00x", "2.5"]),
    ],
)
def test_numbers_of_a_column_have_the_same_decimals(cells: list[str], shown: list[str]) -> None:
    assert readme.aligned(cells) == shown


def test_the_readme_is_short_and_begins_with_what_one_needs() -> None:
    page = (REPOSITORY / "README.md").read_text()
    places = [page.index(part) for part in ("docs/images/grid.png", "## Install", "```python", "## What you get")]
    assert places == sorted(places)
    assert len(page[: places[-1]].split()) < 300, "two minutes read aloud, to the first figure"
    assert page.count("\n| --- |") == 1, "one table"
    assert f"{len(list(known()))} transformer classes" in page
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert link.startswith("https://") or (REPOSITORY / link).exists(), link


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as mkdocs builds them; a warning stops it."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=REPOSITORY, env=quiet, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_asks_the_network_for_nothing(site: Path) -> None:
    assert "set_budget" in (site / "api.html").read_text()
    for page in site.rglob("*.html"):
        assert LOADED.findall(page.read_text()) == [], page


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the pages: from files a browser lets no page read another, as the search does."""
    handler = functools.partial(SilentHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_the_site_reads_on_a_phone_and_complains_of_nothing(site: Path) -> None:
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    assert {"index.html", "api.html", "compatibility.html", "how-to/compose.html"} <= set(pages)
    wrong: dict[str, Any] = {}
    with open_browser() as browser, served(site) as address:
        become_a_phone(browser)
        for page in pages:
            browser.get(f"{address}/{page}")
            found = {
                "wide": max(0, browser.execute_script(TOO_WIDE) - PHONE),
                "unnamed": browser.execute_script(UNNAMED),
                "errors": complaints(browser),
                "elsewhere": [url for url in requested(browser) if not url.startswith(address)],
            }
            wrong |= {f"{page}: {what}": seen for what, seen in found.items() if seen}
    assert wrong == {}


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    notebook = nbformat.read(REPOSITORY / "examples" / "first.ipynb", as_version=4)
    assert images_in(notebook) == 4, "they are seen without running it"
    assert "site-packages" not in nbformat.writes(notebook), "a warning of the machine that ran it"
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(REPOSITORY)}}).execute()
    assert images_in(notebook) == 4


def images_in(notebook: Any) -> int:
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in shown)
