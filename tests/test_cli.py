"""The command line, as a person meets it: real subprocesses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import forked
import shiva as package
from shiva.cli import main
from shiva.cli.terminal import explain
from shiva.show.demo import PROMPTS

REPOSITORY = Path(__file__).parent.parent
EMOJI = REPOSITORY / "models" / "emoji"


def shiva(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forked.run(*arguments, cwd=REPOSITORY)


def test_help_names_every_command() -> None:
    command = [sys.executable, "-m", "shiva", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for command in ("demo", "generate", "fit", "train", "bench", "report", "serve"):
        assert command in result.stdout


def test_a_mistake_is_one_line_with_the_fix() -> None:
    result = shiva("bench", "step", "--model", "sd4")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "sd3-medium" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_terminal_of_few_letters_is_enough(tmp_path: Path) -> None:
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((REPOSITORY / "recipes" / "emoji-smoke.yaml").read_text("utf-8") + "# café\n", "utf-8")
    for arguments in (["generate", "--help"], ["train", str(recipe), "--check"]):
        command = [sys.executable, "-m", "shiva", *arguments]
        done = subprocess.run(command, capture_output=True, timeout=280, cwd=REPOSITORY, env={**os.environ, **plain})
        assert done.returncode == 0, done.stderr


def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    result = shiva("generate", tmp_path / "nowhere", "a fox", "--output", tmp_path)
    assert result.returncode == 2
    assert "does not load as a diffusers pipeline" in result.stderr


HEAVY = ("torch", "diffusers", "transformers", "matplotlib", "gradio", "datasets", "accelerate", "peft", "pandas")


@pytest.mark.parametrize("code", ["import shiva", "import shiva.cli", "main()"], ids=["shiva", "cli", "help"])
def test_only_what_is_needed_is_imported(code: str) -> None:
    start = "import sys; sys.argv = ['shiva', '--help']\nfrom contextlib import suppress\n"
    run = "from shiva.cli import main\nwith suppress(SystemExit): main()" if code == "main()" else code
    end = f"\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", start + run + end], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


WAYS_IN = ("shiva.api", "shiva.checkpoint", "shiva.training.recipe", "shiva.evaluate.images")
EACH_ANEW = """
import importlib, sys
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "shiva"]:
        del sys.modules[name]  # what it stands on stays, and is loaded once
    importlib.import_module(module)
    print(module, "Shiva" in sys.modules["shiva.core.method"].MethodConfig.known)
"""


def test_every_way_in_knows_the_methods() -> None:
    done = subprocess.run([sys.executable, "-c", EACH_ANEW, *WAYS_IN], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [f"{module} True" for module in WAYS_IN], done.stderr


def test_every_public_name_is_there() -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'attache'"):
        package.attache  # noqa: B018


def test_the_version_is_said(call: Call) -> None:
    assert call("--version") == (0, f"shiva {package.__version__}\n", "")


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.json")


REFUSED = [
    (ValueError("ratio=2 is above 1;\n  pass less"), "error: ratio=2 is above 1; pass less"),
    (FileNotFoundError("x is not here; pass y"), "error: x is not here; pass y"),
    (ImportError("gradio is not here: pip install it"), "error: gradio is not here: pip install it"),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "error: a/b: Not a directory; pass another path"),
    (FileExistsError(errno.EEXIST, "File exists", "a"), "error: a: File exists; pass another path"),
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"),
        "error: CUDA out of memory. Tried to allocate 2.00 GiB; do less at once: a smaller image or batch",
    ),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 GB"),
        "error: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 GB; do less",
    ),
    (full(), "error: run.json: No space left on device; make room and run the same command again"),
    (yaml.scanner.ScannerError("while scanning", None, "found a tab"), "error: this is not YAML: while scanning"),
]


@pytest.mark.parametrize(("error", "line"), REFUSED, ids=[type(error).__name__ for error, _ in REFUSED])
def test_what_a_person_can_mend_is_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(error) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(line)


def test_what_only_we_can_mend_says_where_to_report_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("oops")
    assert explain(caught.value) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert "report it" in first
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "KeyError: 'oops'"


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command in this process: exit code, output, errors."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["shiva", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        return int(stop.value.code or 0), told.out, told.err

    return run


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("generate", "m", "a fox", "--method", "ToMeSD", "--set", "ratio"), "--set ratio has no value; pass --set key="),
    (("generate", "m", "a fox", "--method", "ToMeSD", "--set", "ratio=[1"), "--set ratio=[1 does not read as YAML"),
    (("generate", "m", "a fox", "--method", "ToMeSD", "--set", "ratoi=1"), "did you mean 'ratio'?"),
    (("generate", "m", "a fox", "--method", "SelectConfig"), "shiva has no method 'SelectConfig'; methods are "),
    (("generate", "m", "a fox", "--preset", "paper"), "--preset paper needs a method that it is of: pass --method"),
    (("generate", "m", "a fox", "--checkpoint", "c", "--preset", "paper"), "--preset paper needs a method"),
    (("generate", "m", "a fox", "--device", "nowhere"), "--device nowhere is not here"),
    (("generate", "m", "a fox", "--device", "meta:x"), "--device meta:x is not here"),
    (("generate", "m", "a fox", "--output", "{file}/x"), "is a file, so nothing can be written"),
    (("eval", "m", "--methods", "ToMeSD", "--prompts", "{file}", "--device", "nowhere"), "--device nowhere"),
    (("fit", "m", "--output", "{link}"), "is a link to nothing, so nothing can be written"),
    (("eval", "m", "--methods", "{tab}"), "is not YAML"),
    (("eval", "m", "--methods", "{flat}"), "candidate 'ToMeSD' is 0.5; write a mapping"),
    (("eval", "m", "--methods", "ToMeSD", "--output", "{file}"), "is a file, so nothing can be written"),
    (("bench", "step", "--output", "{file}/x"), "is a file, so nothing can be written"),
    (("bench", "step", "--budgets", "0.6,x"), "--budgets 0.6,x holds what is no number"),
    (("bench", "step", "--record", "--output", "x"), "exclude each other"),
    (("bench", "scale", "--lengths", ""), "--lengths names none; pass such as --lengths 1,2"),
    (("bench", "scale", "--depths", ","), "--depths names none; pass such as --depths 2,3"),
    (("bench", "scale", "--depths", "4,1"), "--depths 4,1 holds 1; pass 2 or more"),
    (("bench", "selector", "--lengths", "0"), "--lengths 0 holds 0; pass 1 or more"),
    (("bench", "train", "--layers", "1"), "Invalid value for '--layers'"),
    (("validate", "--record", "--only", "jacobian"), "--record does not go with a quick run; pass --all"),
    (("eval", "m", "--methods", "ToMeSD", "--prompts", "{file}", "--seeds", ""), "--seeds names none"),
    (("frontier", "m", "--methods", "ToMeSD", "--seeds", ","), "--seeds names none"),
    (("frontier", "m", "--methods", "Sweep", "--budgets", "0.6,40"), "budget=40.0 is above 1; pass a share"),
    (("frontier", "m", "--methods", "Sweep", "--prompts", "0"), "--prompts 0 draws nothing; pass at least 1"),
    (("generate", "models/shiva/60", "a fox"), "models/shiva/60 has no model_index.json, so it is no diffusers pipe"),
    (("generate", "m", "a fox", "--checkpoint", "models/shiva"), "models/shiva holds 60, 60-fixed, 80; name one"),
    (("generate", "m", "a fox", "--checkpoint", "models/shiva/60/adapter"), "config.json is missing; is models/shiva"),
    (("generate", "m", "a fox", "--checkpoint", "nobody/nothing"), "the hub does not give it"),
    (("generate", "m", "a fox", "--checkpoint", "models/emoji"), "config.json is missing; is models/emoji a Shiva"),
    (("report", "{file}", "--output", "page.html"), "is neither a folder nor a .json file"),
    (("report", "results/bench/step.json", "--output", "{file}/page.html"), "is a file, so nothing can be written"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(given[:7]) for given, _ in MISTAKES])
def test_a_mistake_is_refused_before_any_work(
    arguments: tuple[str, ...], message: str, call: Call, tmp_path: Path
) -> None:
    files = {"file": "a fox", "tab": "candidates:\n\t- x", "flat": "candidates: {ToMeSD: 0.5}"}
    for name, text in files.items():
        (tmp_path / f"{name}.{'txt' if name == 'file' else 'yaml'}").write_text(text)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    paths = {path.stem: str(path) for path in tmp_path.iterdir()}
    code, _, told = call(*(part.format(**paths) if "{" in part else part for part in arguments))
    assert code == 2, told
    assert message in " ".join(told.split())
    assert "Traceback" not in told


def test_outside_a_checkout_the_papers_part_is_missed_by_name(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shiva.evaluate.checkout.MARK", Path("nowhere"))
    code, _, told = call("validate")
    assert (code, told) == (2, "error: reproduce/ is not here; run shiva validate in a checkout of the repository\n")
    code, _, told = call("eval", "m", "--methods", "ToMeSD", "--protocol", "seeds")
    assert code == 2
    assert "--protocol has no option 'seeds'; known keys: all, floor, main, matched" in told


WRONG_CALLS = [
    (("--budget", "0.5"), "--budget 0.5 needs something to keep it"),
    (("--method", "ToMeSD", "--budget", "0.5"), "ToMeSD has no option 'budget'"),
    (("--dtype", "float8"), "dtype='float8' is unknown"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_CALLS, ids=[message for _, message in WRONG_CALLS])
def test_generate_refuses_what_does_not_fit(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = shiva("generate", EMOJI, "a fox", *options, "--output", tmp_path)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


class UNetPipeline:
    def to(self, device: str) -> None:
        pass

    def __call__(self, prompt: str) -> None:
        pass


def test_a_method_that_a_pipeline_cannot_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shiva.evaluate.drawing.load_with_arguments", lambda *given: (UNetPipeline(), {}))
    call = ("generate", "a U-Net", "a fox", "--method", "ToMeSD", "--output", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["shiva", *call])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "error: UNetPipeline has no transformer; pass a DiT pipeline" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_writes_images_and_what_was_spared(tmp_path: Path) -> None:
    method = ("--method", "sweep", "--budget", "0.4", "--dtype", "bfloat16")
    result = shiva("generate", EMOJI, "red apple", "a fox", *method, "--steps", "3", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert Image.open(tmp_path / "000-red-apple.png").size == (64, 64)
    assert Image.open(tmp_path / "001-a-fox.png").size == (64, 64)
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["summary"]["flops_share"] < 0.6
    assert report["settings"]["dtype"] == "bfloat16"
    assert report["settings"]["prompts"] == ["red apple", "a fox"]


@pytest.mark.slow
def test_demo_writes_a_page_that_needs_no_network(tmp_path: Path) -> None:
    candidates = tmp_path / "methods.yaml"
    candidates.write_text(
        "model: models/emoji\n"
        "candidates:\n"
        "  ToMeSD: {method: ToMeSD}\n"
        "  LapSum: {checkpoint: models/nowhere, train: shiva train mine.yaml}\n"
        "  Shiva 60: {checkpoint: models/shiva/60}\n"
    )
    result = shiva("demo", "--methods", candidates, "--steps", "2", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "index.html").as_uri() in result.stdout
    assert "left out: LapSum: models/nowhere is not here; train it: shiva train mine.yaml" in result.stdout
    page = (tmp_path / "index.html").read_text()
    assert PROMPTS[-1] in page
    assert "How Shiva 60 scored the tokens" in page
    assert page.count("data:image/png;base64") >= 24
    assert "http" not in page
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
