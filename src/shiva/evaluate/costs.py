"""What a candidate costs and how far one step of it is from dense, on the dense model's own path."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shiva.api import attach
from shiva.backbones.base import bind, parameter_names
from shiva.bench.entries import Timing, interleave
from shiva.bench.table import environment
from shiva.checkpoint import write_atomically
from shiva.compat import native_attention
from shiva.core.cost import Flops, counting, total
from shiva.evaluate.candidates import Candidate, slug
from shiva.evaluate.images import Run
from shiva.evaluate.rivals import scheduled
from shiva.methods import Shiva


@dataclass(frozen=True)
class Cost:
    """Of one transformer call, a mean over a run's calls."""

    gflops: float
    """True FLOPs. Of a method on dense's own steps by the tokens that ran and its fill's own, a router's and a
    matching's not counted; of fewer steps, other solvers and caches every matrix product of a whole run."""
    gflops_paper: float
    """The paper's convention: linear layers as multiply-accumulates, attention as FLOPs."""
    share: float
    """True FLOPs as a share of dense."""
    share_paper: float
    one_step_mse: float | None = None
    """Squared distance of the prediction to dense at the same noisy latents, over all steps; None for whole runs."""
    one_step_cosine: float | None = None

    @classmethod
    def of(cls, flops: Flops, dense: Flops, *one_step: float) -> Cost:
        shares = flops.true / dense.true, flops.paper / dense.paper
        return cls(flops.true / 1e9, flops.paper / 1e9, *shares, *one_step)


@dataclass
class Recording:
    """The transformer calls of dense runs: what went in, what came out."""

    calls: list[tuple[dict[str, Any], Tensor]]
    dense: Flops
    """Of one call."""
    scheduler: Any = None
    """As it stood in those runs: a method fits its table to the steps of the scheduler, and other candidates may since
    have run other numbers of them."""


@torch.no_grad()
def record(run: Run, indices: Sequence[int], seed: int) -> Recording:
    """Dense runs of some prompts, one after the other."""
    pipe = run.pipe()
    calls: list[tuple[dict[str, Any], Tensor]] = []
    names = parameter_names(pipe.transformer)

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append(({**bind(names, args, kwargs), "return_dict": False}, output[0].detach()))

    handle = pipe.transformer.register_forward_hook(note, with_kwargs=True)
    try:
        for index in indices:
            run.draw(pipe, seed, [index], output_type="latent")
    finally:
        handle.remove()
    with attach(pipe, Shiva(budget=1.0)) as session:
        session.transformer(**calls[0][0])
        return Recording(calls, session.summary().dense, copy.deepcopy(pipe.scheduler))


@torch.no_grad()
def replay(run: Run, candidate: Candidate, recording: Recording) -> Cost:
    """A candidate on the very inputs that dense saw, in their order: its FLOPs, and the error of each single step."""
    pipe, errors, cosines, steps = run.pipe(), [], [], []
    with candidate.attached(pipe) as session, scheduled(pipe, recording.scheduler):
        for call, dense in recording.calls:
            found = pipe.transformer(**call)[0]
            errors.append(F.mse_loss(found.float(), dense.float()).item())
            cosines.append(F.cosine_similarity(found.flatten(1).float(), dense.flatten(1).float()).mean().item())
            if session is not None:
                steps.append(session.stats[-1])
        flops = recording.dense
        if session is not None:
            flops = dataclasses.replace(session.summary(), steps=steps).flops.scaled(1 / len(steps))
    return Cost.of(flops, recording.dense, sum(errors) / len(errors), sum(cosines) / len(cosines))


@dataclass(frozen=True)
class Spent:
    """Of one call of the pipeline, from noise to latents."""

    flops: Flops
    """True ones of the transformer, a method's own included."""
    memory: int
    """Most bytes at once, beyond what was held before."""


def spend(run: Run, name: str) -> Spent:
    """One prompt under a candidate, counted and weighed as it runs, whoever stands around the transformer."""
    pipe, steps = run.pipe(), run.steps(run.candidates[name])
    calls: list[Flops] = []
    with run.attached(name), native_attention(pipe.transformer), counting() as so_far, Weighed() as memory:
        before = pipe.transformer.register_forward_pre_hook(lambda *call: calls.append(so_far().scaled(-1)))
        after = pipe.transformer.register_forward_hook(lambda *call: calls.append(so_far()))
        try:
            run.draw(pipe, 0, [0], steps, output_type="latent")
        finally:
            before.remove()
            after.remove()
    return Spent(total(calls), memory.peak)


class Weighed(TorchDispatchMode):
    """Counts the bytes of tensors made inside this context, as long as each lives; `peak` is their most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.untyped_storage()._cdata not in given:
                self._hold(leaf.untyped_storage())
        return output

    def _hold(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._let_go, place, size)

    def _let_go(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.held -= size


class Prices:
    """Costs of a run's candidates, kept beside its images."""

    def __init__(self, run: Run, prompts: int = 4, seed: int = 0) -> None:
        count = min(prompts, len(run.prompts))
        self.run, self.seed = run, seed
        self.indices = [round(place * (len(run.prompts) - 1) / max(1, count - 1)) for place in range(count)]
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            self._recording = record(self.run, self.indices, self.seed)
        return self._recording

    def of(self, name: str) -> Cost:
        def measure() -> dict[str, Any]:
            candidate = self.run.candidates[name]
            return asdict(self._whole(name) if candidate.is_rival else replay(self.run, candidate, self.recording))

        key = f"{self.run.key(name)} {self.indices} {self.seed}"
        return Cost(**cached(self.run.folder / "scores" / slug(name) / "cost.json", key, measure))

    def _whole(self, name: str) -> Cost:
        """Of a candidate whose steps are not dense's: what its run spends, shared out over dense's steps."""
        calls = len(self.recording.calls) / len(self.indices)
        return Cost.of(self.spent(name).flops.scaled(1 / calls), self.recording.dense)

    def spent(self, name: str) -> Spent:
        """What one call of the pipeline takes, measured once."""
        path = self.run.folder / "scores" / slug(name) / "spent.json"
        known = cached(path, self.run.key(name), lambda: asdict(spend(self.run, name)))
        return Spent(Flops(**known["flops"]), known["memory"])

    def share(self, candidate: Candidate) -> float:
        """True FLOPs as a share of dense, of a candidate that is being looked for."""
        return replay(self.run, candidate, self.recording).share


def machine(device: torch.device) -> str:
    """What a time depends on beside the work."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else environment()["cpu"]
    return f"{name}, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class Latency:
    """Seconds of one image."""

    median: float
    spread: float
    """Half the distance between the quartiles."""

    def __str__(self) -> str:
        return f"{self.median:.3g} ± {self.spread:.2g}" if self.spread else f"{self.median:.3g}"


def latency(
    run: Run, names: Sequence[str], rounds: int, device: str, progress: Callable[[str], None] = lambda name: None
) -> dict[str, Latency]:
    """Time of an image of each candidate, all in turns; on a busy machine only their ratios mean much.

    A call holds as many prompts as those that drew the run's images. Finished rounds are kept: a run that was killed
    goes on with the next.
    """
    key = f"{[(name, run.key(name)) for name in names]} {machine(torch.device(device))}"
    path = run.folder / "scores" / "seconds.json"
    found: list[dict[str, float]] = read_cache(path, key) or []
    while len(found) < rounds:
        timings = in_turns(run, names, progress)
        found.append({name: timing.median / len(timed(run)) for name, timing in timings.items()})
        write_cache(path, key, found)
    each = {name: Timing([seconds[name] for seconds in found]) for name in names}
    return {name: Latency(timing.median, timing.spread * timing.median) for name, timing in each.items()}


def timed(run: Run) -> range:
    """The prompts of the call that is timed."""
    return range(min(run.settings.batch, len(run.prompts)))


def in_turns(run: Run, names: Sequence[str], progress: Callable[[str], None]) -> dict[str, Timing]:
    """A round. Each candidate has the one pipeline to itself while its turn lasts: adapters are in its weights."""
    pipe = run.pipe()
    with contextlib.ExitStack() as turn:

        def prepare(name: str) -> Callable[[], Any]:
            turn.close()
            turn.enter_context(run.attached(name))
            draw = functools.partial(run.draw, pipe, 0, timed(run), run.steps(run.candidates[name]))
            draw()  # what a session prepares once is no part of an image
            return draw

        calls = {name: functools.partial(prepare, name) for name in names}
        return interleave(calls, rounds=1, warmup=0, progress=progress)


def read_cache(path: Path, key: str) -> Any:
    """A figure that was measured before under the same key; None otherwise."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        return content["found"] if content["key"] == key else None
    except (ValueError, KeyError, TypeError):  # damaged: measured again, as if it were not there
        return None


def cached(path: Path, key: str, measure: Callable[[], Any]) -> Any:
    """A figure, measured where it was not before."""
    found = read_cache(path, key)
    if found is None:
        write_cache(path, key, found := measure())
    return found


def write_cache(path: Path, key: str, found: Any) -> None:
    write_atomically(path, json.dumps({"key": key, "found": found}, indent=1).encode() + b"\n")
