"""A folder of generated images: what they were made with, which are still missing, and making those.

<folder>/run.json                              settings, prompts, candidates, environment
<folder>/images/<candidate>/<seed>/<index>.png
<folder>/scores/<candidate>/<seed>.json        what was measured on them; may be deleted at any time
<folder>/tables/<protocol>.json
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shiva.bench.table import environment
from shiva.checkpoint import write_atomically, write_image
from shiva.core.options import REFUSALS, fitted
from shiva.evaluate.candidates import Candidate, slug
from shiva.evaluate.drawing import Workers, accepted, draw, of_images
from shiva.evaluate.metrics import Pictures, decode
from shiva.evaluate.prompts import PromptSet
from shiva.evaluate.rivals import magnitude_ratios
from shiva.session import Session

CALIBRATION = 2**31 - 1
"""The seed of the run on which a cache is calibrated."""


class OtherImages(ValueError):
    """The folder holds images of the same name that were made otherwise."""


@dataclass(frozen=True)
class Settings:
    """All that decides an image beside its prompt, its seed and its candidate."""

    model: str
    weights: str | None
    """Fingerprint of a local model's weights."""
    steps: int
    guidance: float
    height: int | None = None
    width: int | None = None
    batch: int = 1
    """Prompts a call; some methods share choices over a batch, so it is part of the settings."""
    dtype: str = "float32"
    without: tuple[str, ...] = ()
    """Components of the pipeline that were not loaded."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of every call of the pipeline."""
        return {"height": self.height, "width": self.width, **self.arguments}


@dataclass(frozen=True)
class Chunk:
    """One call of the pipeline: some prompts under one candidate and seed."""

    name: str
    seed: int
    indices: tuple[int, ...]


class Run:
    """Images of several candidates under the same settings."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        prompts: PromptSet,
        candidates: Mapping[str, Candidate],
        pipe: Callable[[], Any],
    ) -> None:
        self.folder, self.settings, self.prompts, self.pipe = folder, settings, prompts, pipe
        self.candidates = dict(candidates)
        self.skipped: dict[str, str] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self._ratios: dict[tuple[int, str], list[float]] = {}

    # -- what is there -------------------------------------------------------------------------------

    def path(self, name: str, seed: int, index: int) -> Path:
        return self.folder / "images" / slug(name) / str(seed) / f"{index:05d}.png"

    def pictures(self, name: str, seed: int) -> Pictures:
        return Pictures.files([self.path(name, seed, index) for index in range(len(self.prompts))])

    @functools.cached_property
    def reference(self) -> Pictures | None:
        """The real images of the prompts."""
        read = self.prompts.image
        if read is None:
            return None
        return Pictures(lambda index: decode(read(self.prompts.prompts[index])), len(self.prompts))

    def missing(self, name: str, seed: int) -> list[Chunk]:
        """Calls of which at least one image is not on disk yet."""
        size = self.settings.batch
        starts = range(0, len(self.prompts), size)
        chunks = [tuple(range(start, min(start + size, len(self.prompts)))) for start in starts]
        return [
            Chunk(name, seed, chunk)
            for chunk in chunks
            if not all(self.path(name, seed, index).is_file() for index in chunk)
        ]

    def config(self, name: str) -> dict[str, Any]:
        if name not in self._configs:
            self._configs[name] = self.candidates[name].config()
        return self._configs[name]

    def key(self, *names: str) -> str:
        """Of all that decides the images of these candidates: a cached figure under another key is stale."""
        decides = [asdict(self.settings), [asdict(p) for p in self.prompts.prompts], [self.config(n) for n in names]]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    # -- the manifest --------------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        """What the folder knows of its images, tables and frontier; empty before the first."""
        path, results = self.folder / "run.json", ("images/*/*/*.png", "tables/*.json", "frontier.json")
        holds = (found for made in results for found in self.folder.glob(made))
        if not path.is_file() or next(holds, None) is None:
            return {}
        try:
            known = json.loads(path.read_bytes())
            fitted(
                dict[str, dict[str, Any]], {name: known[name] for name in ("settings", "candidates")}, "what it holds"
            )
            fitted(list[dict[str, Any]], known["prompts"], "prompts")
            return known
        except (ValueError, LookupError, TypeError) as error:
            raise OtherImages(
                f"{path} is damaged ({error}); delete {self.folder}, or pass another --output"
            ) from error

    def claim(self, names: Sequence[str]) -> list[str]:
        """The candidates that can be resolved, after making sure the folder's images are of this very kind.

        Images under the same name but other settings are an error, never silently mixed or made anew.
        """
        able = []
        for name in names:
            self.skipped.pop(name, None)
            try:
                self.config(name)
                able.append(name)
            except REFUSALS as error:
                self.skipped[name] = str(error)
        known = self.manifest
        if known:
            self._compare(known, able)
        return able

    def _note(self, names: Sequence[str], seeds: Sequence[int], making: bool) -> None:
        """Write the manifest; what only reads the folder's images (`making` none) leaves their environment alone."""
        known = self.manifest
        here, before = environment(), known.get("environment")
        earlier = known.get("earlier_environments", [])
        if before and not making:
            here = before
        elif before and lasting(before) != lasting(here):
            earlier = [*earlier, before]
        entries = {}
        for name in names:
            candidate = self.candidates[name]
            made = {"config": self.config(name), "checkpoint": candidate.checkpoint, "paper": candidate.paper}
            entries[name] = {"slug": slug(name), **made}
        left_out = {name: why for name, why in known.get("skipped", {}).items() if name not in names}
        manifest = {
            "settings": {**asdict(self.settings), "prompts": self.prompts.name},
            "seeds": sorted({*known.get("seeds", []), *seeds}),
            "prompts": [asdict(prompt) for prompt in self.prompts.prompts],
            "candidates": {**known.get("candidates", {}), **entries},
            "skipped": {**left_out, **self.skipped},
            "environment": here,
            "earlier_environments": earlier,
        }
        write_atomically(self.folder / "run.json", json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")

    def _compare(self, known: dict[str, Any], names: Sequence[str]) -> None:
        asked = json.loads(json.dumps({**asdict(self.settings), "prompts": self.prompts.name}))
        changed = differences(known["settings"], asked)
        if not changed and known["prompts"] != [asdict(prompt) for prompt in self.prompts.prompts]:
            changed = [f"{len(self.prompts)} prompts, not the same as the {len(known['prompts'])} there"]
        if changed:
            raise OtherImages(
                f"{self.folder} holds images made with other settings: {'; '.join(changed)}; "
                "pass another --output, or delete the folder"
            )
        made = {entry["slug"]: entry for entry in known["candidates"].values()}
        otherwise = []
        for name in names:
            folder = self.folder / "images" / slug(name)
            before = made.get(slug(name), {"config": {}})
            changed = differences(before["config"], json.loads(json.dumps(self.config(name))))
            if changed and any(folder.glob("*/*.png")):
                otherwise.append(f"{folder} holds images of {name!r} made otherwise: {', '.join(changed)}")
        if otherwise:
            raise OtherImages(f"{'; '.join(otherwise)}; pass another --output, or delete what is named")

    # -- generating ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attached(self, name: str) -> Iterator[Session | None]:
        """The pipeline under a candidate."""
        candidate = self.candidates[name]
        with candidate.attached(self.pipe(), functools.partial(self._magnitudes, candidate)) as session:
            yield session

    def _magnitudes(self, candidate: Candidate) -> list[float]:
        """MagCache's ratios at a candidate's steps, measured once on noise that no image begins with."""
        steps, pipe = self.steps(candidate), self.pipe()
        if (steps, candidate.solver) not in self._ratios:
            with magnitude_ratios(pipe.transformer) as ratios:
                self.draw(pipe, CALIBRATION, [0], steps, output_type="latent")
            self._ratios[steps, candidate.solver] = ratios
        return self._ratios[steps, candidate.solver]

    def steps(self, candidate: Candidate) -> int:
        return candidate.steps or self.settings.steps

    def draw(self, pipe: Any, seed: int, indices: Sequence[int], steps: int | None = None, **more: Any) -> Any:
        """One call of the pipeline, as every image of the run is made."""
        settings, texts = self.settings, [self.prompts.prompts[index].text for index in indices]
        how = {**settings.call, **more}
        return draw(pipe, texts, seed, indices, steps or settings.steps, settings.guidance, **how)

    def complete(
        self,
        names: Sequence[str],
        seeds: Sequence[int],
        workers: Workers,
        progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> list[str]:
        """Make what is missing, this process its share; the candidates that have all their images in the end.

        `progress` is told the candidate, and the images made and asked for in this process.
        """
        able = self.claim(names)
        todo = [chunk for name in able for seed in seeds for chunk in self.missing(name, seed)]
        if todo:  # before the folder is claimed for settings that perhaps no pipeline runs with
            accepted(of_images(self.pipe()), self.settings.call)
        if workers.main:
            self._note(able, seeds, making=bool(todo))
        workers.wait()  # every process has listed what is missing before one makes any of it
        mine = workers.share(todo)
        total, done = sum(len(chunk.indices) for chunk in mine), 0
        for name in dict.fromkeys(chunk.name for chunk in mine):
            chunks = [chunk for chunk in mine if chunk.name == name]
            try:
                with self.attached(name):
                    for chunk in chunks:
                        self._make(chunk)
                        done += len(chunk.indices)
                        progress(name, done, total)
            except REFUSALS as error:
                self.skipped[name] = str(error)
        workers.wait()
        whole = [name for name in able if not any(self.missing(name, seed) for seed in seeds)]
        for name in able:
            if name not in whole:
                self.skipped.setdefault(name, "another process could not run it; see its output")
        if workers.main:
            self._note(able, seeds, making=bool(todo))
        return whole

    def _make(self, chunk: Chunk) -> None:
        steps = self.steps(self.candidates[chunk.name])
        images = self.draw(self.pipe(), chunk.seed, chunk.indices, steps)
        for index, image in zip(chunk.indices, images, strict=True):
            path = self.path(chunk.name, chunk.seed, index)
            if not path.is_file():
                write_image(path, image)


def lasting(where: Mapping[str, Any]) -> dict[str, Any]:
    """An environment without what changes from hour to hour."""
    return {name: value for name, value in where.items() if name not in ("date", "load")}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], inside: str = "") -> list[str]:
    """What changed between two mappings, each as `name is this, was that`."""
    found: list[str] = []
    for name in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{inside}{name}.")
        elif old != new:
            found.append(f"{inside}{name} is {new}, was {old}")
    return found
