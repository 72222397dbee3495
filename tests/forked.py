"""Processes that need not import torch and diffusers, which takes ten seconds of a core: forks of one that has.

Real ones otherwise, with an exit code, signals and an environment. `python -m shiva` itself runs where imports or the
encoding are what is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FORKING: Any = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["shiva.show.demo", "shiva.training.trainer", "diffusers.pipelines.stable_diffusion_3"])


class Process:
    """`python -m shiva` with these arguments, or a file of Python, as `subprocess.Popen` would start it."""

    def __init__(self, *arguments: str | Path, file: Path | None = None, cwd: Path | None = None, **environment: str):
        self.command = [str(file or "shiva"), *map(str, arguments)]
        self.printed = tempfile.TemporaryDirectory(prefix="shiva-")
        self.files = [Path(self.printed.name, name) for name in ("out", "err")]
        for path in self.files:
            path.touch()
        place = str(cwd or Path.cwd()), {**os.environ, **environment}, [str(path) for path in self.files]
        self.process = FORKING.Process(target=become, args=(self.command, *place), daemon=True)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def wait(self, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        """Its exit code and what it printed."""
        self.process.join(timeout)
        printed = [path.read_text() for path in self.files]
        if self.process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.command, timeout, *printed)
        return subprocess.CompletedProcess(self.command, self.process.exitcode, *printed)


def run(*arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    return Process(*arguments, **how).wait()


def become(command: list[str], folder: str, environment: dict[str, str], printed: list[str]) -> None:
    for number, path in enumerate(printed, start=1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # the server of forks has read OMP_NUM_THREADS already
    sys.argv = command
    if command[0].endswith(".py"):
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
