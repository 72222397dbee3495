"""The wheels: what they hold, and that they work where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from shiva.evaluate.checkout import CHECKPOINTS

REPOSITORY = Path(__file__).parent.parent
SDIST_LIMIT = 2_000_000


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """A command outside the checkout, which knows nothing of this process's paths; what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    run(*build, "--sdist", "--wheel", REPOSITORY, cwd=folder)
    run(*build, "--wheel", REPOSITORY / "packages" / "models", cwd=folder)
    return folder


@pytest.mark.slow
def test_the_source_is_small_and_the_wheel_is_typed_and_licensed(built: Path) -> None:
    (source,) = built.glob("shiva_dit-*.tar.gz")
    assert source.stat().st_size < SDIST_LIMIT
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert not [name for name in names if name.startswith(("models/", "results/")) or name.endswith(".png")]
    (wheel,) = built.glob("shiva_dit-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "shiva/py.typed" in inside
    assert [name for name in inside if name.endswith("licenses/LICENSE")]
    (models,) = built.glob("shiva_dit_models-*.whl")
    inside = zipfile.ZipFile(models).namelist()
    assert "shiva_dit_models/emoji/model_index.json" in inside
    shown = {folder for of in CHECKPOINTS.values() for folder in of.values()}
    methods = {name.removesuffix("/shiva.safetensors") for name in inside if name.endswith("/shiva.safetensors")}
    assert methods == {f"shiva_dit_models/{folder}" for folder in shown}
    assert {Path(name).name for name in inside if "/licenses/" in name} == {
        "LICENSE",
        "LICENSE-emojibase.txt",
        "LICENSE-fluentui-emoji.txt",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheels_work_outside_a_checkout(built: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(
        sysconfig.get_path("purelib")
    )  # its .pth files, as of an editable one, are not read
    python, work = place / "bin" / "python", tmp_path / "work"
    work.mkdir()

    def install(pattern: str) -> None:
        (wheel,) = built.glob(pattern)
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
        run(*pip, wheel, cwd=work)

    install("shiva_dit-*.whl")
    shiva = place / "bin" / "shiva"
    where = run(python, "-c", "import shiva; print(shiva.__file__)", cwd=work)
    assert str(packages) in where
    assert run(shiva, "--version", cwd=work).startswith("shiva 0.")
    for command in ("demo", "serve"):
        told = run(shiva, command, cwd=work, code=2).strip().splitlines()
        assert len(told) == 1, told
        assert "install the package shiva-dit-models" in told[0]
    assert "run shiva validate in a checkout" in run(shiva, "validate", cwd=work, code=2)
    install("shiva_dit_models-*.whl")
    told = run(shiva, "demo", "--steps", "2", "--prompts", "1", "--output", work / "demo", cwd=work)
    assert "Sweep 40" in told
    assert (work / "demo" / "index.html").is_file()
