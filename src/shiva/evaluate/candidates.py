"""Who is compared: candidates by name, from a YAML file or from methods' names."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiva.api import attach, methods_by_name, plain, unknown_method
from shiva.checkpoint import CONFIG_FILE, WEIGHTS_FILE, ShivaCheckpoint, may_be_hub_id
from shiva.core import options
from shiva.core.method import MethodConfig
from shiva.core.options import Count, NotNegative, Whole, build, conform
from shiva.evaluate.rivals import CacheName, Solver, caching, quantized, solving, wraps_blocks
from shiva.files import read_yaml
from shiva.ops.schedule import RatioSchedule
from shiva.session import Session

DENSE = "dense"


def method_named(name: str) -> type[MethodConfig]:
    """A method's config class by its name in any case."""
    found = methods_by_name().get(plain(name))
    if found is None:
        raise ValueError(unknown_method(name))
    return found


@dataclass(frozen=True)
class Candidate:
    """A method with its options, or a trained checkpoint; neither is the dense pipeline.

    Any of them may take fewer steps, another solver, or a step cache.
    """

    method: str | MethodConfig | None = None
    """Name of a method, such as ToMeSD, or its config."""
    preset: str = "official"
    """The method's named set of values."""
    checkpoint: str | ShivaCheckpoint | None = None
    """Folder or hub id of a trained method; a folder that holds one checkpoint in a subfolder will do."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method, over its preset or over those it was trained with."""
    flat: bool = False
    """Shiva: one ratio everywhere instead of the learned table."""
    int8: Whole = 0
    """Quantize the feed-forward layers of so many blocks, counted from the last, to INT8."""
    steps: Count | None = None
    """Its own number of denoising steps; the run's otherwise."""
    solver: Solver = "own"
    """own, the pipeline's scheduler; even, the same with noise levels evenly spaced; multistep, of second order."""
    cache: CacheName | None = None
    """A step cache: MagCache, FirstBlockCache or TaylorSeer of diffusers, DBCache of cache-dit."""
    setting: NotNegative | None = None
    """The cache's threshold, or TaylorSeer's interval; its default otherwise."""
    train: str = ""
    """How to make the checkpoint, for whoever has none."""
    paper: str = ""
    """The row of the paper's main table it corresponds to."""

    def __post_init__(self) -> None:
        conform(self)
        if self.method is not None and self.checkpoint is not None:
            raise ValueError(f"method {self.method} and checkpoint {self.checkpoint} exclude each other; give one")
        if isinstance(self.method, str):
            method_named(self.method)
        if self.method is None and self.checkpoint is None and (self.options or self.flat):
            ignored = f"options {', '.join(self.options)}" if self.options else "flat: true"
            raise ValueError(f"{ignored} would change nothing; give a method or a checkpoint too")
        if self.preset != "official" and self.method is None:
            raise ValueError(f"preset {self.preset} would change nothing; give a method, which it is of")
        if self.setting is not None and self.cache is None:
            raise ValueError(f"setting {self.setting:g} would change nothing; give a cache too")

    @property
    def is_rival(self) -> bool:
        """Whether its steps are not those of the dense run, one by one, so that only whole runs compare."""
        return self.steps is not None or self.solver != "own" or self.cache is not None

    @property
    def only_steps(self) -> bool:
        """Whether it is the dense pipeline but for its number of steps."""
        return self.steps is not None and dataclasses.replace(self, train="", paper="") == Candidate(steps=self.steps)

    def source(self) -> MethodConfig | ShivaCheckpoint | None:
        """What to attach; an error says which checkpoint is missing, and how to train it."""
        if isinstance(self.method, MethodConfig):
            return self.method.changed(self.options)
        if self.method is not None:
            return method_named(self.method).preset(self.preset, **self.options)
        if self.checkpoint is None or isinstance(self.checkpoint, ShivaCheckpoint):
            return self.checkpoint
        try:
            return ShivaCheckpoint.from_pretrained(self.folder())
        except OSError as error:
            named = str(self.checkpoint)
            if not self.train and (Path(named).is_dir() or may_be_hub_id(named)):
                raise  # which says what the folder lacks, or the hub answered
            how = f"; train it: {self.train}" if self.train else ""
            raise FileNotFoundError(f"{self.checkpoint} is not here{how}") from error

    def folder(self) -> str:
        """The checkpoint's folder: the named one, or the only one inside it."""
        root = Path(str(self.checkpoint))
        if not root.is_dir() or (root / CONFIG_FILE).is_file():
            return str(self.checkpoint)
        inside = sorted(path.parent for path in root.glob(f"*/{WEIGHTS_FILE}"))
        if len(inside) > 1:
            raise ValueError(f"{root} holds {', '.join(path.name for path in inside)}; name one of them")
        return str(inside[0]) if inside else str(self.checkpoint)

    def config(self) -> dict[str, Any]:
        """All that decides its images, resolved; two equal ones make equal images."""
        source, names = self.source(), ("steps", "solver", "cache", "setting")
        rival = {name: getattr(self, name) for name in names} if self.is_rival else {}
        if source is None:
            return {"method": None, "int8": self.int8, **rival}
        trained = isinstance(source, ShivaCheckpoint)
        config = source.method_config.changed(self.options) if isinstance(source, ShivaCheckpoint) else source
        return {
            "method": type(config).__name__,
            "options": json.loads(json.dumps(dataclasses.asdict(config))),  # type: ignore[call-overload]
            "weights": fingerprint(Path(self.folder())) if trained else None,
            "flat": self.flat,
            "int8": self.int8,
            **rival,
        }

    @contextlib.contextmanager
    def attached(self, pipe: Any, ratios: Callable[[], Sequence[float]] | None = None) -> Iterator[Session | None]:
        """The pipeline under this candidate; as it was before, afterwards. `ratios` measures MagCache's, dense."""
        with solving(pipe, self.solver):
            measured = (ratios or no_ratios)() if self.cache == "MagCache" else ()
            cache = caching(pipe, self.cache, self.setting, measured) if self.cache else contextlib.nullcontext()
            with contextlib.ExitStack() as stack:
                if wraps_blocks(self.cache):
                    stack.enter_context(cache)
                session = stack.enter_context(self._pruned(pipe))
                if not wraps_blocks(self.cache):
                    stack.enter_context(cache)
                yield session

    @contextlib.contextmanager
    def _pruned(self, pipe: Any) -> Iterator[Session | None]:
        source = self.source()
        if source is None:
            with quantized(pipe, self.int8):
                yield None
            return
        overrides = self.options if isinstance(source, ShivaCheckpoint) else {}
        with attach(pipe, source, **overrides) as session, quantized(pipe, self.int8):
            if self.flat:
                flatten(session)
            yield session


def no_ratios() -> Sequence[float]:
    raise ValueError("MagCache needs its magnitudes measured, as an evaluation does; run it by `shiva eval`")


def flatten(session: Session) -> None:
    """Replace a learned table by one ratio everywhere, of the same mean."""
    method: Any = session.method
    if not isinstance(getattr(method, "schedule", None), RatioSchedule):
        raise ValueError(f"flat: true needs a method with a table of ratios; {type(method).__name__} has none")
    schedule: RatioSchedule = method.schedule
    budget = method.config.budget if method.config.budget is not None else schedule.mean_keep
    method.set_schedule(RatioSchedule.flat(budget, schedule.layers, sorted(schedule.dense)))


def fingerprint(folder: Path) -> str | None:
    """Of a model's or checkpoint's folder: names, sizes, and both ends of weights and configs; None for a hub id.

    Components may be links to another model's.
    """
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    files = [Path(inside, name) for inside, _, names in os.walk(folder, followlinks=True) for name in names]
    for path in sorted(path for path in files if path.suffix in (".safetensors", ".json")):
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(1 << 18)
            file.seek(max(0, size - (1 << 18)))
            digest.update(f"{path.relative_to(folder)} {size} ".encode() + head + file.read())
    return digest.hexdigest()[:16]


def slug(name: str) -> str:
    """A name as a file, a folder or an anchor has it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


@dataclass(frozen=True)
class Candidates:
    """A file of candidates: who they are, which table shows whom, and the settings they were meant for."""

    candidates: dict[str, Candidate]
    tables: dict[str, list[str]] = field(default_factory=dict)
    """Protocol to candidates' names; the first is what the others are held against."""
    model: str | None = None
    prompts: str | None = None
    split: str = "train"
    steps: Count = 28
    guidance: NotNegative = 4.5
    without: list[str] = field(default_factory=list)
    """Components that the pipeline is loaded without."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call."""
    sizes: list[tuple[Count, Count]] = field(default_factory=list)
    """Height and width of the other resolutions."""

    def __post_init__(self) -> None:
        conform(self)
        slugs: dict[str, str] = {}
        for name in self.candidates:
            other = slugs.setdefault(slug(name), name)
            if other != name:
                raise ValueError(f"candidates {other!r} and {name!r} would share the folder {slug(name)}; rename one")
        for protocol, names in self.tables.items():
            for name in names:
                if name not in self.candidates:
                    raise ValueError(options.unknown_key(name, self.candidates, f"tables.{protocol}"))

    def of(self, protocol: str) -> list[str]:
        """The candidates of a protocol; all of them where the file does not say."""
        return self.tables.get(protocol) or list(self.candidates)


def read_candidates(methods: str) -> Candidates:
    """A YAML file, or names such as `ToMeSD,ToMA:paper` and checkpoints' folders, to which dense is added."""
    if methods.endswith((".yaml", ".yml")):
        return _read_file(Path(methods))
    found = {DENSE: Candidate()}
    for name in filter(None, methods.split(",")):
        method, _, preset = name.partition(":")
        if name == DENSE:
            continue
        if (Path(name) / CONFIG_FILE).is_file() or (Path(name).is_dir() and plain(method) not in methods_by_name()):
            found[name] = Candidate(checkpoint=name)
        else:
            found[name] = Candidate(method=method, preset=preset or "official")
    return Candidates(found)


def _read_file(path: Path) -> Candidates:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not here; pass --methods a YAML file of candidates, or methods' names")
    content = read_yaml(path)
    entries = content.get("candidates") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} has no `candidates`, a mapping of names; see docs/evaluation.md")
    for name, entry in entries.items():
        if entry is not None and not isinstance(entry, dict):
            raise ValueError(f"{path}: candidate {name!r} is {entry!r}; write a mapping such as {{method: ToMeSD}}")
    try:
        made = {str(name): _read_candidate(str(name), entry or {}) for name, entry in entries.items()}
        return build(Candidates, {**content, "candidates": made}, text=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_candidate(name: str, entry: dict[str, Any]) -> Candidate:
    """A candidate, its method's options checked; a checkpoint may come later."""
    candidate = build(Candidate, entry, f"candidates.{name}")
    try:
        if candidate.method is not None:
            candidate.source()
    except ValueError as error:
        raise ValueError(f"candidates.{name}: {error}") from error
    return candidate
