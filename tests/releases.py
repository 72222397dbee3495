"""Whether Shiva works on each release of diffusers that pyproject.toml allows: a fresh virtualenv and tests in it.

python tests/releases.py                  makes the virtualenvs, runs the tests, and prints the table
python tests/releases.py --write          and writes it into docs/compatibility.md
python tests/releases.py --in FOLDER      keeps the virtualenvs there, and takes those that are there already
python tests/releases.py --only 0.40      tries this release alone
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
PLACE = re.compile(r"(<!-- releases: [^\n]*-->\n).*?(<!-- /releases -->)", re.DOTALL)
TORCH = "torch==2.13.0"
"""Goes first: a package that asks for torch with none present would pull a CUDA build of several GB."""
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "accelerate>=1.10", "pillow>=10")
REACH = "tests/test_pipelines_reach.py::test_a_run_is_reduced_by_every_kind_of_method"
TESTS = (
    f"{REACH}[qwen]",
    f"{REACH}[wan]",
    "tests/test_models.py",
    "tests/test_patterns.py::test_tokens_in_another_order_give_the_same_picture",
    "tests/test_stranger.py",
)
"""Pipelines that announce their calls, what is known, every class with its tokens in another order, a user's calls."""
CIRCULAR = "tests/test_models.py::test_every_release_that_is_allowed_was_tried_and_none_failed"
"""What reads the table."""


class Row(NamedTuple):
    diffusers: str
    transformers: str
    passed: int
    failed: int
    missing: tuple[str, ...]
    """Transformer classes of Shiva's that this release does not have."""


def allowed() -> list[str]:
    """The minor releases of pyproject.toml's range, oldest first."""
    found = re.search(r'"diffusers>=0\.(\d+),<0\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return [f"0.{minor}" for minor in range(int(found[1]), int(found[2]))]


def python_with(release: str, folder: Path) -> Path:
    """A virtualenv with this checkout and a release."""
    home = folder / f"diffusers-{release}"
    python, complete = home / "bin" / "python", home / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*install, TORCH, "numpy"], check=True)
        subprocess.run([*install, f"{ROOT}[adapter]", f"diffusers=={release}.*", *TOOLS], check=True)
        complete.touch()
    return python


def tried(release: str, folder: Path) -> Row:
    python = python_with(release, folder)
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = ["-m", "not slow", "-rs", "-p", "no:cacheprovider", "--deselect", CIRCULAR]
    run = [str(python), "-m", "pytest", *how, *TESTS]
    done = subprocess.run(run, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, text=True)
    print(f"diffusers {release}", done.stdout, sep="\n")
    return read(versions(python), done.stdout)


def versions(python: Path) -> tuple[str, str]:
    ask = "import importlib.metadata as m; print(m.version('diffusers'), m.version('transformers'))"
    diffusers, transformers = subprocess.check_output([str(python), "-c", ask], text=True).split()
    return diffusers, transformers


def read(versions: tuple[str, str], output: str) -> Row:
    """A row from what pytest prints at its end."""
    last = re.search(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last[1] if last else "")}
    missing = tuple(sorted(set(re.findall(r"has no (\w+Transformer\w*Model)", output))))
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return Row(*versions, counts.get("passed", 0), failed, missing)


def table(rows: list[Row]) -> str:
    lines = [
        "| diffusers | with transformers | tests passed | failed | without |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        missing = ", ".join(f"`{name}`" for name in row.missing)
        lines.append(f"| {row.diffusers} | {row.transformers} | {row.passed} | {row.failed} | {missing} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a minor release; all that are allowed unless one is named")
    parser.add_argument("--in", dest="folder", type=Path, help="where the virtualenvs are kept")
    parser.add_argument("--at-once", type=int, default=2, help="how many are tried at a time")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compatibility.md")
    given = parser.parse_args()
    if given.write and given.only:
        parser.error("--write is for all releases")
    chosen = [given.only] if given.only else allowed()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.at_once) as pool:
        rows = list(pool.map(lambda release: tried(release, given.folder or Path(scratch)), chosen))
    print(table(rows))
    if given.write:
        PAGE.write_text(PLACE.sub(lambda found: found[1] + table(rows) + found[2], PAGE.read_text()))
    return int(any(row.failed or not row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
