"""Kills a training run at random moments and inside every kind of write, and compares what it ends as.

python tests/kills.py --kills 50 --seed 0

Each attempt is a fork that continues the run and kills itself at a chosen write, or is killed after a random time.
Ended, the run must be the uninterrupted one: the same files with the same bytes, but for the seconds its steps took.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from shiva.training.log import Log
from shiva.training.recipe import Recipe, recipe_from
from shiva.training.trainer import Trainer
from training_tiny import make_folder, tiny_recipe

RUNS = 3
ANY_MOMENT = "any moment"
ON_RESUME = ("metrics.jsonl", "validation.jsonl")
"""Written anew, without what came after the state, when a run is continued."""
STEPS = {"stages": {"warmup": {"steps": 2}, "policy": {"steps": 2}, "joint": {"steps": 4}}}
OFTEN = {"checkpoints": {"every": 1, "keep": 2}, "validation": {"every": 2, "samples": 1}}


# -- inside writes -----------------------------------------------------------------------------------


def kind_of(path: Any) -> str:
    """What is written at a path: numbers and the letters of a temporary's name do not matter."""
    text = str(path).rpartition("/run/")[2]
    text = re.sub(r"(\.\w+)\.\w{8}$", r"\1", text)
    text = re.sub(r"\d{4,}", "#", text).replace("/.", "/").removeprefix(".")
    if "writing-" in text:
        return text.rpartition("writing-")[2].partition("/")[0]
    return re.sub(r"states/step-#.*", "step-#", text)


class Writes:
    """Passes on every write of this process, and does not come back from one of them."""

    def __init__(self, reached: Callable[[str], None]):
        self.reached = reached
        self._watch(os, "replace", lambda *paths: paths[1])
        self._watch(os, "rename", lambda *paths: paths[1])
        self._watch(os, "fsync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
        self._watch(shutil, "rmtree", lambda path, **kwargs: f"{path} removed" if Path(path).exists() else None)
        write = Log._write

        def record(log: Log, name: str, values: dict[str, Any]) -> None:
            with open(log.output / f"{name}.jsonl", "a") as file:
                file.write(json.dumps(values)[:20])
                file.flush()
                reached(f"record of {name}")
                file.truncate(file.tell() - 20)
            write(log, name, values)

        Log._write = record  # type: ignore[method-assign]

    def _watch(self, module: Any, name: str, path_of: Callable[..., Any]) -> None:
        original = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            path = path_of(*args, **kwargs)
            inside = path is not None and "/run/" in str(path) and "tensorboard" not in str(path)
            if inside:
                self.reached(kind_of(path))
            if inside and name == "rmtree":
                for file in sorted(Path(args[0]).rglob("*"))[:1]:
                    file.unlink() if file.is_file() else None
                self.reached(kind_of(path))
            result = original(*args, **kwargs)
            if inside:
                self.reached(kind_of(path))
            return result

        setattr(module, name, watched)


# -- attempts ----------------------------------------------------------------------------------------


def fork(work: Callable[[], None], errors: Path, seconds: float | None = None) -> int:
    """Do work in a fork of this process, killed after some seconds; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        with open(errors, "w") as told:
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
            try:
                work()
            except BaseException:
                import traceback

                traceback.print_exc(file=told)
                os._exit(1)
            os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(recipe: Recipe, output: Path, reached: Callable[[str], None] = lambda kind: None) -> None:
    torch.set_num_threads(1)
    Writes(reached)
    Trainer(recipe, output).run()


def dying_at(kind: str, time_of_it: int) -> Callable[[str], None]:
    seen = Counter[str]()

    def reached(now: str) -> None:
        seen[now] += 1
        if now == kind and seen[now] == time_of_it:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


# -- what is compared --------------------------------------------------------------------------------


def contents(run: Path) -> dict[str, Any]:
    """All files of a run but TensorBoard's, of which every process writes its own."""
    files = [p for p in run.rglob("*") if p.is_file() and p.name != ".lock" and "tensorboard" not in p.parts]
    return {str(path.relative_to(run)): content(path) for path in files}


def content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [without_seconds(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return without_seconds(json.loads(path.read_text()))
    if path.suffix == ".pt":
        return in_full(torch.load(path, weights_only=True))
    return path.read_bytes()


def in_full(value: Any) -> Any:
    """Nested values with each tensor as all of its numbers, which `==` compares."""
    if isinstance(value, dict):
        return {key: in_full(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_full(part) for part in value]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(part) for key, part in value.items() if key != "seconds"}
    return [without_seconds(part) for part in value] if isinstance(value, list) else value


def differences(run: Path, whole: dict[str, Any]) -> list[str]:
    ended = contents(run)
    stray = [f"{name} is stray" for name in sorted(ended.keys() - whole.keys())]
    lost = [f"{name} is lost" for name in sorted(whole.keys() - ended.keys())]
    return stray + lost + [f"{name} differs" for name in sorted(whole) if name in ended and ended[name] != whole[name]]


# -- the command -------------------------------------------------------------------------------------


def moments(rng: random.Random, kinds: dict[str, int]) -> Iterator[str]:
    """Every kind of write again and again, and among them some random times."""
    while True:
        each = [*kinds, *[ANY_MOMENT] * (len(kinds) // 3)]
        yield from rng.sample(each, len(each))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, done = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        folder = make_folder(Path(made))
        recipe, errors = recipe_from(tiny_recipe(folder, **STEPS, **OFTEN)), folder / "errors.txt"
        noted = folder / "writes.txt"

        def whole_run() -> None:
            with open(noted, "w") as file:
                train(recipe, folder / "whole" / "run", lambda kind: print(kind, file=file))

        began = time.monotonic()
        assert fork(whole_run, errors) == 0, errors.read_text()
        lasted, whole = time.monotonic() - began, contents(folder / "whole" / "run")
        order = noted.read_text().splitlines()
        kinds = {kind: place for place, kind in enumerate(order)}
        kinds |= dict.fromkeys(ON_RESUME, len(order) // 2)
        kills, number, wrong = moments(rng, kinds), 0, 0
        while number < RUNS or sum(done.values()) < options.kills:
            run, left = folder / str(number) / "run", options.kills - sum(done.values())
            quota = min(left, -(-options.kills // RUNS))
            early_first = sorted(islice(kills, quota), key=lambda kind: kinds.get(kind, rng.randrange(len(order))))
            for kind in (*early_first, None):
                seconds = rng.uniform(0.1, 0.8) * lasted if kind == ANY_MOMENT else None
                reached = dying_at(kind or "", rng.choice((1, 1, 1, 2, 3)))
                code = fork(partial(train, recipe, run, reached), errors, seconds)
                if code != -signal.SIGKILL:
                    break
                done[str(kind)] += 1
            found = [errors.read_text()] if code else differences(run, whole)
            wrong += bool(found)
            print(f"run {number}: {'; '.join(found) or 'equal'}", flush=True)
            number += 1
    for kind, count in sorted(done.items()):
        print(f"{count:4d} kills in {kind}")
    print(f"{sum(done.values())} kills over {number} runs, {len(done)} kinds of moments; {wrong} runs differ")
    print(f"not hit: {', '.join(sorted(kinds.keys() - done.keys())) or 'none'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
