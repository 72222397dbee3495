"""Whole sampling runs of one pipeline under several methods, for the demo and `shiva generate`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from shiva.checkpoint import ShivaCheckpoint
from shiva.core import options
from shiva.core.method import MethodConfig
from shiva.core.trace import Trace
from shiva.session import Session, attach
from shiva.summary import Summary

Source = str | Path | ShivaCheckpoint | MethodConfig
"""What `attach` takes: a checkpoint, or the config of a method."""
DTYPES = ("float32", "bfloat16", "float16")


class Entrant(Protocol):
    """Whoever attaches itself to a pipeline for a while, or leaves it dense."""

    def attached(self, pipe: Any) -> contextlib.AbstractContextManager[Session | None]: ...


@dataclass(frozen=True)
class Contender:
    """A method and the options it runs under; None is the dense pipeline."""

    source: Source | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def settled(self) -> MethodConfig | None:
        """The method with all its options; a checkpoint has its own."""
        return self.source.changed(self.options) if isinstance(self.source, MethodConfig) else None

    @contextlib.contextmanager
    def attached(self, pipe: Any) -> Iterator[Session | None]:
        if self.source is None:
            yield None
        else:
            with attach(pipe, self.source, **self.options) as session:
                yield session


@dataclass
class Outcome:
    """Images of one contender, its time a round, and what it spared."""

    images: list[Any]
    seconds: list[float]
    summary: Summary | None
    trace: Trace | None = None
    """What the last round chose, where it was asked for."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def quiet() -> None:
    """The libraries' own bars and notices would hide the result."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def load_pipeline(model: str | Path, dtype: str = "float32", **components: Any) -> Any:
    """A diffusers pipeline from a folder or hub id, some components replaced; an error says what to do."""
    options.choice("dtype", dtype, DTYPES)
    if not Path(model).is_dir() and Path(model).exists():
        raise ValueError(f"{model} is a file; pass the pipeline's folder or a hub id")
    try:
        pipe = DiffusionPipeline.from_pretrained(model, dtype=getattr(torch, dtype), **components)
    except Exception as error:
        raise ValueError(
            f"{model} does not load as a diffusers pipeline ({type(error).__name__}: {error}); "
            "if files are missing or damaged, restore them (git checkout, or download again)"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_with_arguments(model: str | Path, dtype: str = "float32") -> tuple[Any, dict[str, Any]]:
    """A pipeline, and what each call of it should be given.

    The embedded model's third text encoder has no layers: it only stands where diffusers asks for one. Without it
    a prompt is 16 tokens, the form that model was trained on, instead of 16 and 256 empty ones.
    """
    config = Path(model) / "text_encoder_3" / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("num_layers") == 0:
        return load_pipeline(model, dtype, text_encoder_3=None, tokenizer_3=None), {"max_sequence_length": 0}
    return load_pipeline(model, dtype), {}


def warm_up(pipe: Any, prompt: str, guidance: float, **arguments: Any) -> None:
    """A short dense run whose time nobody takes: the first of a process is slow, and dense is the measure."""
    pipe(**subjects(pipe, [prompt]), num_inference_steps=3, guidance_scale=guidance, **arguments)


def subjects(pipe: Any, prompts: Sequence[str]) -> dict[str, Any]:
    """The argument that tells a pipeline what to draw: prompts, or numbers of classes where it has those (DiT)."""
    if "class_labels" not in inspect.signature(pipe.__call__).parameters:
        return {"prompt": list(prompts)}
    return {"class_labels": [class_number(pipe, prompt) for prompt in prompts]}


def class_number(pipe: Any, prompt: str) -> int:
    """A class by its number or its name."""
    names: dict[str, int] = getattr(pipe, "labels", {})
    classes = pipe.transformer.config.num_embeds_ada_norm
    if prompt.isdecimal() and int(prompt) < classes:
        return int(prompt)
    if prompt not in names:
        nearest = difflib.get_close_matches(prompt, names, n=1)
        name = f", or its name (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"{prompt!r} is no class of this pipeline; pass a number from 0 to {classes - 1}{name}")
    return names[prompt]


@contextlib.contextmanager
def stepping(scheduler: Any, tick: Callable[[int], None]) -> Iterator[None]:
    """Tell each step of a run by its number; every pipeline has a scheduler, but not all a callback."""
    step, numbers = scheduler.step, itertools.count()

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        tick(next(numbers))
        return result

    scheduler.step = counted
    try:
        yield
    finally:
        del scheduler.step


def generate(
    pipe: Any,
    prompts: Sequence[str],
    contenders: Mapping[str, Entrant],
    *,
    steps: int,
    guidance: float,
    seed: int,
    rounds: int = 1,
    batch: int | None = None,
    trace: bool = False,
    progress: Callable[[str, int], None] = lambda name, step: None,
    **arguments: Any,
) -> dict[str, Outcome]:
    """Run every contender on the same prompts and noise, in turns; the same seed gives the same images.

    A call holds `batch` prompts, or all of them; some methods share choices over a call. The summary is of the last.
    """
    size = batch or len(prompts)
    outcomes: dict[str, Outcome] = {}
    for _ in range(rounds):
        for name, contender in contenders.items():
            with contender.attached(pipe) as session, tracing(session, trace) as seen:
                start = time.perf_counter()
                images = []
                for first in range(0, len(prompts), size):
                    called = list(prompts[first : first + size])
                    with stepping(pipe.scheduler, functools.partial(progress, name)):
                        images += pipe(
                            **subjects(pipe, called),
                            num_inference_steps=steps,
                            guidance_scale=guidance,
                            generator=[torch.Generator().manual_seed(seed + first + i) for i in range(len(called))],
                            **arguments,
                        ).images
                seconds = time.perf_counter() - start
                summary = None if session is None else session.summary()
            if name in outcomes:
                outcomes[name].seconds.append(seconds)
                outcomes[name].trace = seen
            else:
                outcomes[name] = Outcome(images, [seconds], summary, seen)
    return outcomes


def tracing(session: Session | None, wanted: bool) -> contextlib.AbstractContextManager[Trace | None]:
    return session.trace() if session is not None and wanted else contextlib.nullcontext()


def psnr(image: Any, reference: Any) -> float:
    """Peak signal-to-noise ratio in dB of two PIL images."""
    import numpy as np

    error = np.asarray(image, dtype=float) - np.asarray(reference, dtype=float)
    mean = float((error**2).mean())
    return float("inf") if mean == 0 else 10 * float(np.log10(255**2 / mean))
