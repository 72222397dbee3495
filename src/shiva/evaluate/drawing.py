"""Images of a pipeline: loading it, one call of it, whole runs of it under several candidates; in which processes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import inspect
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from shiva.core import options
from shiva.core.context import Trace
from shiva.core.needs import install
from shiva.cost import Summary
from shiva.evaluate.candidates import Candidate, Candidates

T = TypeVar("T")


class Workers:
    """The processes of this evaluation; accelerate is asked only if there are several."""

    def __init__(self, device: str = "cpu") -> None:
        self.state: Any = None
        self.device = device
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import PartialState
            except ImportError as error:
                raise ImportError(f"several processes need accelerate: {install('metrics')}") from error
            # one process may have hours of images more than another
            self.state = PartialState(cpu=device == "cpu", timeout=timedelta(days=7))
            self.device = str(self.state.device)

    @property
    def main(self) -> bool:
        return self.state is None or bool(self.state.is_main_process)

    def share(self, work: Sequence[T]) -> list[T]:
        """This process's part of the work."""
        if self.state is None:
            return list(work)
        with self.state.split_between_processes(list(work)) as part:
            return list(part)

    def found_by_main(self, find: Callable[[], T]) -> T:
        """What the main process finds, in every process; what it raises, too."""
        if self.state is None:
            return find()
        from accelerate.utils import broadcast_object_list

        answer: list[Any] = [None, None]
        if self.main:
            try:
                answer[0] = find()
            except Exception as error:
                answer[1] = error
        found, failure = broadcast_object_list(answer)
        if failure is not None:
            raise failure
        return found

    def wait(self) -> None:
        if self.state is not None:
            self.state.wait_for_everyone()

    def close(self) -> None:
        if self.state is not None:
            self.state.destroy_process_group()


DTYPES = ("float32", "bfloat16", "float16")


def quiet() -> None:
    """The libraries' own bars and notices would hide the result."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def check_device(name: str) -> str:
    """A device that this machine has; an error says which do exist."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].partition(" device type at start")[0]
        raise ValueError(f"--device {name} is not here ({reason}); pass cpu, or cuda where there is a GPU") from error
    return str(device)


# -- loading ---------------------------------------------------------------------------------------------


WITHOUT_T5 = ("text_encoder_3", "tokenizer_3")


def load_pipeline(model: str | Path, dtype: str = "float32", without: Sequence[str] = ()) -> Any:
    """A diffusers pipeline from a folder or hub id, some components left out; an error says what to do."""
    options.choice("dtype", dtype, DTYPES)
    if not Path(model).is_dir() and Path(model).exists():
        raise ValueError(f"{model} is a file; pass the pipeline's folder or a hub id")
    if Path(model).is_dir() and not (Path(model) / "model_index.json").is_file():
        raise ValueError(
            f"{model} has no model_index.json, so it is no diffusers pipeline; pass the folder of one "
            "(a checkpoint of Shiva goes to --checkpoint or --methods)"
        )
    try:
        pipe = DiffusionPipeline.from_pretrained(model, dtype=getattr(torch, dtype), **dict.fromkeys(without))
    except Exception as error:
        raise ValueError(
            f"{model} does not load as a diffusers pipeline ({type(error).__name__}: {error}); "
            "if files are missing or damaged, restore them (git checkout, or download again)"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def hints(model: str | Path, candidates: Candidates | None = None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What a model says of itself, and a file of candidates of it: components to load it without, arguments of a call.

    A third text encoder without layers, as the embedded model's, only stands where diffusers asks for one. Without it
    a prompt is 16 tokens, the form that model was trained on, instead of 16 and 256 empty ones.
    """
    without: tuple[str, ...] = ()
    arguments: dict[str, Any] = {}
    config = Path(model) / "text_encoder_3" / "config.json"
    if config.is_file() and json.loads(config.read_bytes()).get("num_layers") == 0:
        without, arguments = WITHOUT_T5, {"max_sequence_length": 0}
    if candidates is None:
        return without, arguments
    return tuple(candidates.without) or without, {**arguments, **candidates.arguments}


def load_with_arguments(
    model: str | Path, dtype: str = "float32", device: str = "cpu", candidates: Candidates | None = None
) -> tuple[Any, dict[str, Any]]:
    """A pipeline on its device, and what each call of it should be given."""
    without, arguments = hints(model, candidates)
    return load_pipeline(model, dtype, without).to(check_device(device)), arguments


# -- one call --------------------------------------------------------------------------------------------


def noise_seed(seed: int, index: int) -> int:
    """The seed of an image's noise: the same for every candidate, another for every seed and prompt.

    The prompt's place for seed 0; for others a hash, as torch's generator takes no more than the lowest 32 bits.
    """
    if seed == 0:
        return index
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4], "big")


def draw(
    pipe: Any, prompts: Sequence[str], seed: int, places: Sequence[int], steps: int, guidance: float, **arguments: Any
) -> list[Any]:
    """One call of the pipeline; `places` are the prompts' numbers in their set, which decide their noise."""
    given = {name: value for name, value in arguments.items() if value is not None}
    drawn = pipe(
        **subjects(pipe, prompts),
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(noise_seed(seed, place)) for place in places],
        **{**guided(pipe, guidance, len(prompts)), **given},
    )
    return drawn.images if hasattr(drawn, "images") else drawn.frames


def guided(pipe: Any, guidance: float, prompts: int) -> dict[str, Any]:
    """Arguments of classifier-free guidance; none for a pipeline that has none.

    Qwen-Image takes `guidance_scale` for an embedding it does not have.
    """
    parameters = inspect.signature(pipe.__call__).parameters
    scale = parameters.get("guidance_scale")
    if "true_cfg_scale" in parameters and (scale is None or scale.default is None):
        return {"true_cfg_scale": guidance, "negative_prompt": [" "] * prompts}
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"guidance_scale": guidance} if scale is not None or anything else {}


def of_images(pipe: Any) -> Any:
    """The pipeline as it is; an error says what to do with one that draws videos."""
    if {"num_frames", "video_length", "video"} & inspect.signature(pipe.__call__).parameters.keys():
        raise ValueError(f"{type(pipe).__name__} draws videos, this command images; call shiva.attach(pipe) in Python")
    return pipe


def accepted(pipe: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given; an error names one that this pipeline does not take."""
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if name not in inspect.signature(pipe.__call__).parameters:
            raise ValueError(f"{type(pipe).__name__} takes no {name}={value!r}; leave it out")
    return asked


def subjects(pipe: Any, prompts: Sequence[str]) -> dict[str, Any]:
    """The argument that tells a pipeline what to draw: prompts, or numbers of classes where it has those (DiT)."""
    if not has_classes(pipe):
        return {"prompt": list(prompts)}
    return {"class_labels": [class_number(pipe, prompt) for prompt in prompts]}


def has_classes(pipe: Any) -> bool:
    return "class_labels" in inspect.signature(pipe.__call__).parameters


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


# -- runs of several candidates --------------------------------------------------------------------------


@dataclass
class Outcome:
    """Images of one candidate, their time, and what it spared."""

    images: list[Any]
    seconds: float
    summary: Summary | None
    trace: Trace | None = None
    """What it chose, where it was asked for."""


def generate(
    pipe: Any,
    prompts: Sequence[str],
    candidates: Mapping[str, Candidate],
    *,
    steps: int,
    guidance: float,
    seed: int,
    first: int = 0,
    trace: bool = False,
    progress: Callable[[str, int], None] = lambda name, step: None,
    **arguments: Any,
) -> dict[str, Outcome]:
    """Run every candidate on the same prompts, in one call, and the same noise; the same seed gives the same images.

    `first` is the first prompt's place in a longer list, of which these are a part.
    """
    places = range(first, first + len(prompts))
    outcomes: dict[str, Outcome] = {}
    for name, candidate in candidates.items():
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(candidate.attached(pipe))
            seen = stack.enter_context(session.trace()) if session is not None and trace else None
            start = time.perf_counter()
            with stepping(pipe.scheduler, functools.partial(progress, name)):
                images = draw(pipe, prompts, seed, places, steps, guidance, **arguments)
            seconds = time.perf_counter() - start
            summary = None if session is None else session.summary()
        outcomes[name] = Outcome(images, seconds, summary, seen)
    return outcomes
