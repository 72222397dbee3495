"""Mutated inputs: each is refused in a sentence that names it, or means what a second, valid run agrees with.

2,000 cases by default, more with `pytest tests/test_fuzz.py --fuzz 50000`. A case is replayed by its seed. None may
take longer than `SECONDS` or more memory than `BYTES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import shiva
from fuzz import mutated, mutated_bytes
from shiva.api import public_methods
from shiva.cli import app
from shiva.cli.terminal import TO_MEND
from shiva.core.method import MethodConfig
from shiva.core.options import REFUSALS
from shiva.evaluate.candidates import read_candidates
from shiva.ops.schedule import RatioSchedule
from shiva.show.report import collect
from shiva.training.recipe import load_recipe
from shiva.training.state import State, load_state, save_state
from test_checkpoint import adapter, varied_method

from tiny import BACKBONES, make_sd3

REPOSITORY = Path(__file__).parents[1]
SECONDS = 20
"""A case that takes longer hangs."""
BYTES = 1 << 30
"""What a case may allocate beyond what the process holds; more is an error of the allocator, which is no refusal."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """At most so many seconds, and so many bytes more than now."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer in {SECONDS} seconds")

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory, before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, memory[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


def refused(error: Exception, names: list[str]) -> bool:
    """Whether an error is a sentence for a person, as the command line tells it, with one of the names in it."""
    mendable = isinstance(error, OSError) and error.errno in TO_MEND
    return (isinstance(error, REFUSALS) or mendable) and any(name in str(error) for name in names if name)


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


# -- surfaces: each tries one mutated input in a folder, and checks what it accepted. `names` gets what a refusal must
#    have one of: the options that were mutated on the way, or the file ----------------------------------------------


def try_config(rng: random.Random, folder: Path, names: list[str]) -> None:
    known = {name: cls for name, cls in public_methods().items() if name in shiva.__all__}  # not those of other tests
    cls = known[rng.choice(sorted(known))]
    values = mutated(rng, dataclasses.asdict(cls()), names)  # type: ignore[call-overload]
    if not isinstance(values, dict):
        return
    config = cls().changed(values)
    known = dataclasses.asdict(config)  # type: ignore[call-overload]
    assert finite(known), config
    assert cls(**json.loads(json.dumps(known))) == config


class Subject:
    """One model that every checkpoint is tried on, and must come back from as it was."""

    def __init__(self, folder: Path):
        self.model, self.call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
        made = shiva.ShivaCheckpoint.of(varied_method(self.model), **adapter(make_sd3()))
        made.save_pretrained(folder)
        self.files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.dense = self.output()

    @torch.no_grad()
    def output(self) -> torch.Tensor:
        return self.model(**self.call)[0]

    def run(self, folder: Path) -> torch.Tensor:
        with shiva.attach(self.model, folder) as session:
            session.begin_run()
            return self.output()


SUBJECTS: list[Subject] = []


def try_checkpoint(rng: random.Random, folder: Path, names: list[str]) -> None:
    if not SUBJECTS:
        SUBJECTS.append(Subject(folder))
    subject = SUBJECTS[0]
    spoilt = rng.choice([path for path in subject.files if path.suffix != ".md"])
    names += [
        spoilt.name,
        "this checkpoint is for",
        "the checkpoint's weights",
        *(["the adapter"] if "adapter" in spoilt.parts else []),
    ]
    for path, data in subject.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path == spoilt and path.suffix == ".json" and rng.random() < 0.8:
            data = json.dumps(mutated(rng, json.loads(data), names)).encode()
        elif path == spoilt:
            data = mutated_bytes(rng, data)
        (folder / path).write_bytes(data)
    try:
        output = subject.run(folder)
        assert torch.equal(subject.run(folder), output)
    finally:
        assert torch.equal(subject.output(), subject.dense), "the model is not what it was"


def try_recipe(rng: random.Random, folder: Path, names: list[str]) -> None:
    source = rng.choice(sorted((REPOSITORY / "recipes").glob("*.yaml")))
    values, path = yaml.safe_load(source.read_text()), folder / source.name
    if "extends" in values:
        (folder / values["extends"]).write_text((source.parent / values["extends"]).read_text())
    names.append(path.name)
    text = yaml.safe_dump(mutated(rng, values, []))
    path.write_bytes(mutated_bytes(rng, text.encode()) if rng.random() < 0.2 else text.encode())
    recipe = load_recipe(path)
    recipe.method_config()
    assert finite(recipe.to_dict())
    path.write_text(yaml.safe_dump(json.loads(json.dumps(recipe.to_dict()))))
    assert load_recipe(path) == recipe


EVAL_FILE = {
    "candidates": {
        "dense": None,
        "a": {"method": "ToMeSD", "options": {"ratio": 0.5, "sites": ["attention"]}},
        "b": {"method": "Sweep", "preset": "paper", "int8": 1, "flat": False},
    },
    "tables": {"main": ["a", "b"]},
    "steps": 4,
    "guidance": 3.0,
    "sizes": [[64, 96]],
    "arguments": {"max_sequence_length": 8},
}


def try_eval_file(rng: random.Random, folder: Path, names: list[str]) -> None:
    path = folder / "candidates.yaml"
    text = yaml.safe_dump(mutated(rng, EVAL_FILE, names))
    path.write_bytes(mutated_bytes(rng, text.encode()) if rng.random() < 0.2 else text.encode())
    names.append(path.name)
    found = read_candidates(str(path))
    configs = {name: candidate.config() for name, candidate in found.candidates.items()}
    assert finite(dataclasses.asdict(found)["sizes"])
    assert {name: candidate.config() for name, candidate in read_candidates(str(path)).candidates.items()} == configs


def try_schedule(rng: random.Random, folder: Path, names: list[str]) -> None:
    values = mutated(
        rng, {"timesteps": [1000.0, 500.0], "logits": [[0.0, 1.0], [2.0, 3.0]], "bias": 0.0, "dense": [0]}, names
    )
    try:
        tensors = {name: torch.tensor(value) for name, value in values.items()}
    except Exception:  # not a tensor at all: no file holds it
        return
    names += ["table", "dense"]
    schedule = RatioSchedule.from_state(tensors)
    ratios = schedule.ratios()
    assert not ratios.isnan().any()
    again = RatioSchedule.from_state(schedule.state()).ratios()
    assert torch.equal(again, ratios)


def try_state(rng: random.Random, folder: Path, names: list[str]) -> None:
    tensors = {"weight": torch.ones(3)}
    state = State(3, {"stages": []}, tensors, {"state": {}, "x": torch.ones(2)}, tensors)
    path = save_state(folder, state, keep=1)
    spoilt = rng.choice(sorted(path.iterdir()))
    names.append(path.name)
    if spoilt.suffix == ".json" and rng.random() < 0.8:
        spoilt.write_text(json.dumps(mutated(rng, json.loads(spoilt.read_text()), [])))
    else:
        spoilt.write_bytes(mutated_bytes(rng, spoilt.read_bytes()))
    loaded, again = load_state(path), load_state(path)
    assert (loaded.step, loaded.recipe) == (again.step, again.recipe)
    assert type(loaded.step) is int


def try_report(rng: random.Random, folder: Path, names: list[str]) -> None:
    kept = [path for part in ("bench", "validate") for path in (REPOSITORY / "results" / part).glob("*.json")]
    source = rng.choice(sorted(kept, key=lambda path: path.stat().st_size)[:12])
    text = json.dumps(mutated(rng, json.loads(source.read_text()), []))
    path = folder / source.name
    names.append(path.name)
    path.write_bytes(mutated_bytes(rng, text.encode()) if rng.random() < 0.2 else text.encode())
    assert str(collect([path])) == str(collect([path]))


WORDS = ("--set", "--check", "--methods", "--steps", "--budget", "--output", "x", "0", "-1", "nan", "1e999", "a=b",
         "=", "method.budget=[", "method.budget=0.5", "stages=3", "--protocol", "main", "", "..", "\0", "train",
         "eval", "report", "generate", "--seeds", "0,1", "--record", "ToMeSD", "--help")  # fmt: skip


def try_command(rng: random.Random, folder: Path, names: list[str]) -> None:
    command = rng.choice((["train", "none.yaml"], ["eval", "none"], ["report", "none"], ["generate", "none", "a cat"]))
    words = [*command, *(rng.choice(WORDS) for _ in range(rng.randrange(5)))]
    names += words[1:]
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2), (words, result.output)
    told = [
        *(word for word in words[1:] if word),
        "Missing option '--",
        "Missing argument '",
        "Invalid value for '",
        "extra argument",
    ]
    assert result.exit_code == 0 or any(name in result.output for name in told), (words, result.output)


SURFACES: dict[str, tuple[Callable[[random.Random, Path, list[str]], None], float]] = {
    "configs": (try_config, 0.4),
    "checkpoints": (try_checkpoint, 0.15),
    "recipes": (try_recipe, 0.15),
    "eval files": (try_eval_file, 0.1),
    "schedules": (try_schedule, 0.1),
    "states": (try_state, 0.05),
    "reports": (try_report, 0.025),
    "commands": (try_command, 0.025),
}
"""Each with its share of the cases."""


@pytest.mark.parametrize("surface", SURFACES)
def test_a_mutated_input_is_refused_by_name_or_means_one_thing(
    surface: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, share = SURFACES[surface]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    faults, accepted = [], 0
    for seed in range(round(share * request.config.getoption("--fuzz"))):
        folder = tmp_path / str(seed % 8)
        folder.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names: list[str] = []
            try:
                with limited():
                    attempt(random.Random(f"{surface} {seed}"), folder, names)
                accepted += 1
            except Exception as error:
                if not refused(error, names):
                    faults.append(f"{seed}: {type(error).__name__}: {str(error)[:160]}")
    assert accepted, f"every one of {surface} was refused: the input they are made from is refused too"
    assert not faults, f"{len(faults)} of {surface}:\n" + "\n".join(faults[:20])


def test_the_oracle_sees_a_type_that_slips_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MethodConfig, "__post_init__", lambda self: None)
    faults = 0
    for seed in range(90):
        names: list[str] = []
        try:
            try_config(random.Random(f"configs {seed}"), tmp_path, names)
        except Exception as error:
            faults += not refused(error, names)
    assert faults > 5


def test_the_oracle_sees_a_nameless_refusal_and_memory_taken() -> None:
    assert refused(ValueError("budget=3 is above 1; pass less"), ["budget"])
    assert not refused(ValueError("3 is above 1; pass less"), ["budget"])
    with pytest.raises(RuntimeError, match="memory"), limited():
        torch.empty(BYTES, dtype=torch.int64)
