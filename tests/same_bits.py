"""What every method computes today, to tell whether a rebuild computes the same.

    python tests/same_bits.py --exact              # compares bit by bit, on the machine that wrote the record
    python tests/same_bits.py --write              # writes tests/same_bits.json anew
    python tests/same_bits.py --write --only sweep # only the rows whose name has this

tests/test_same_bits.py holds a few numbers of each row against the record within a tolerance: another processor
rounds otherwise.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

import shiva
from pipelines import PIPELINES
from shiva.core.context import Earlier, Exploration

from method_table import METHODS
from tiny import BACKBONES, make_sd3, noise

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
LINEUP = ROOT / "recipes" / "eval" / "emoji.yaml"
EVERYWHERE = tuple(BACKBONES)
PRICED = ("sd3", "flux")
NOT_FLUX = ("sd3", "sd35", "pixart", "dit")

Row = Callable[[], "Bits"]


@dataclass(frozen=True)
class Case:
    """A method on tiny transformers."""

    config: Any
    backbones: tuple[str, ...] = EVERYWHERE
    guided: bool = False
    """The batch is two halves over the same latents, and `attach` is told so."""


CASES: dict[str, Case] = {
    **{name: Case(row.on, row.backbones, guided=name == "ibtm") for name, row in METHODS.items()},
    # -- the moving band
    "sweep": Case(shiva.Sweep(budget=0.5)),
    "sweep-guided": Case(shiva.Sweep(budget=0.5), guided=True),
    # -- Shiva: what ranks tokens, what the rejected get, how many run
    "shiva-paper": Case(shiva.Shiva.preset("paper", budget=0.45)),
    "shiva-guided-max": Case(shiva.Shiva(budget=0.5), guided=True),
    "shiva-guided-shared": Case(shiva.Shiva(budget=0.5, guidance="shared"), guided=True),
    "shiva-guided-per-sample": Case(shiva.Shiva(budget=0.5, guidance="per-sample"), guided=True),
    "shiva-global-router": Case(shiva.Shiva(budget=0.5, sharing="global", bottleneck=16)),
    "shiva-time-only": Case(shiva.Shiva(budget=0.5, sharing="independent", signals=("time",))),
    "shiva-dense-ends": Case(shiva.Shiva(budget=0.5, dense=(0, 3), dense_steps=(1,))),
    "shiva-flops": Case(shiva.Shiva(flops=0.8)),
    "shiva-bucket": Case(shiva.Shiva(budget=0.55, bucket=8)),
    "shiva-norm": Case(shiva.Ranked(budget=0.5, score="norm")),
    "shiva-random": Case(shiva.Ranked(budget=0.5, score="random")),
    "shiva-cached-random": Case(shiva.Ranked(budget=0.5, fill="cached", score="random")),
    # Breaks ties of age by the same random scores.
    "shiva-cached-age": Case(shiva.Ranked(budget=0.5, fill="cached", score="age")),
    "shiva-cached-router": Case(shiva.Shiva(budget=0.5, fill="cached")),
    "shiva-cached-norm": Case(shiva.Ranked(budget=0.5, fill="cached", score="norm")),
    "shiva-cached-update": Case(shiva.Ranked(budget=0.5, fill="cached", score="update")),
    "shiva-cached-bonus-of-age": Case(shiva.Shiva(budget=0.5, fill="cached", age=0.5)),
    "shiva-cached-reads-age": Case(shiva.Shiva(budget=0.5, fill="cached", signals=("time", "prompt", "layer", "age"))),
    "shiva-cached-attends-all": Case(shiva.Shiva(budget=0.5, fill="cached", attends="all")),
    "shiva-cached-in-some-layers": Case(shiva.Shiva(budget=0.5, fill="cached", cache_layers=(1, 2), dense_steps=(2,))),
    "shiva-cached-in-bfloat16": Case(shiva.Shiva(budget=0.5, fill="cached", cache_dtype="bfloat16")),
    "shiva-auto": Case(shiva.Shiva(budget=0.5, fill="auto")),
    "shiva-near-spatial": Case(shiva.Shiva(budget=0.5, fill="near", near="spatial")),
    # -- the other trained methods
    "neuralsort-cached": Case(shiva.NeuralSort(keep=0.5, fill="cached")),
    "neuralsort-cached-attends-all": Case(shiva.NeuralSort(keep=0.5, fill="cached", attends="all")),
    "neuralsort-near": Case(shiva.NeuralSort(keep=0.5, fill="near")),
    "lapsum-cached": Case(shiva.LapSum(keep=0.5, fill="cached")),
    "dydit-union": Case(shiva.DyDiT(bias=0.0, union=True)),
    "dydit-guided-max": Case(shiva.DyDiT(bias=0.0, guidance="max"), guided=True),
    "dydit-cached": Case(shiva.DyDiT(bias=0.0, fill="cached")),
    "dydit-near": Case(shiva.DyDiT(bias=0.0, fill="near")),
    "dydit-near-spatial": Case(shiva.DyDiT(bias=0.0, fill="near", near="spatial")),
    "diffcr-guided": Case(shiva.DiffCR(initial=0.5), guided=True),
    "diffcr-cached": Case(shiva.DiffCR(initial=0.5, fill="cached", dense=(0,))),
    "diffcr-near": Case(shiva.DiffCR(initial=0.5, fill="near")),
    "diffcr-without-gate": Case(shiva.DiffCR(initial=0.5, gate=False)),
    "sparsedit-by-timestep": Case(shiva.SparseDiT(rates=(0.44, 0.75), split=(1, 0, 1, 0), bottom=1, top=0), NOT_FLUX),
    # -- the training-free methods
    "tomesd-guided-shared": Case(shiva.ToMeSD(guidance="shared"), guided=True),
    "tomesd-round": Case(shiva.ToMeSD(ratio=0.3, sx=4, round_to=8, seed=3)),
    "tofu-everywhere": Case(shiva.ToFu(sites=("attention", "ffn"), switch=0.25)),
    "sdtm-release": Case(shiva.SDTM(round_to=1, steps=4)),
    "sdtm-release-guided-shared": Case(shiva.SDTM(round_to=1, steps=4, guidance="shared"), guided=True),
    "sdtm-details": Case(shiva.SDTM.preset("paper", round_to=1, switch=0.02)),
    "toma-every-step": Case(shiva.ToMA(skip=1, every=1, scale=20.0, site="block")),
    "toma-selects-every-other-step": Case(shiva.ToMA(skip=0, every=1, select_every=2, scale=20.0, site="block")),
    "toma-assigns-every-other-step": Case(
        shiva.ToMA(skip=0, every=1, select_every=4, assign_every=2, tile=3, scale=20.0, site="block")
    ),
    "toma-guided-cond": Case(shiva.ToMA(skip=0, every=1, select_from="cond", scale=20.0, site="block"), guided=True),
    "toma-per-sample": Case(shiva.ToMA(skip=0, every=1, guidance="per-sample", scale=20.0, site="block")),
    "toma-mixed": Case(shiva.ToMA(skip=0, every=1, scale=20.0)),
    "ibtm-merges": Case(shiva.IBTM(layers=(0, 3), merge_from=0.0, seed=1), guided=True),
    "ibtm-drops-then-merges": Case(shiva.IBTM(layers=(0, 3), merge_from=0.5, steps=4, pool=1.5, seed=1), guided=True),
    "ibtm-by-features": Case(shiva.IBTM(layers=(0, 2), similarity="feature", first_step="dense"), guided=True),
    "ibtm-shared": Case(
        shiva.IBTM(layers=(0, 3), similarity="feature", sites=("attention", "ffn"), guidance="shared"), guided=True
    ),
}

IN_PIPELINES: dict[str, Any] = {
    "shiva": shiva.Shiva(budget=0.6),
    "shiva-flops": shiva.Shiva(flops=0.8, bucket=8),
    "shiva-span": shiva.Shiva(budget=0.6, span=2),
    "shiva-auto": shiva.Shiva(budget=0.6, fill="auto"),
    "sweep": shiva.Sweep(budget=0.6),
    "tomesd": shiva.ToMeSD(),
    "sdtm": shiva.SDTM(round_to=1, switch=0.25, protect_every=2),
    "ibtm": shiva.IBTM(layers=(0, 3), merge_from=0.5),
    "dydit": shiva.DyDiT(bias=0.0),
    "diffcr": shiva.DiffCR(initial=0.5),
    "lapsum": shiva.LapSum(keep=0.6),
}

TRAINED: dict[str, Any] = {
    "shiva-output": shiva.Shiva(budget=0.5),
    "shiva-output-zero": shiva.Shiva(budget=0.5, guess="zero"),
    "shiva-output-ridge": shiva.Shiva(budget=0.5, guess="ridge", policy="film"),
    "shiva-output-near": shiva.Shiva(budget=0.5, fill="near"),
    "shiva-output-cached": shiva.Shiva(budget=0.5, fill="cached", signals=("time", "prompt", "layer", "age")),
    "shiva-input": shiva.Shiva(budget=0.5, estimator="input"),
    "shiva-paper": shiva.Shiva.preset("paper", budget=0.5),
    "neuralsort": shiva.NeuralSort(keep=0.5),
    "neuralsort-cached": shiva.NeuralSort(keep=0.5, fill="cached"),
    "soft-topk": shiva.SoftTopK(keep=0.5, iterations=3),  # so few that it has not come to the closed form
    "soft-topk-closed-form": shiva.SoftTopK(keep=0.5, solver="closed_form"),
    "lapsum": shiva.LapSum(keep=0.5),
    "dydit": shiva.DyDiT(bias=0.0),
    "diffcr": shiva.DiffCR(initial=0.5),
    "sparsedit": METHODS["sparsedit"].on,
}

BY_A_HAIR = (
    "tiny/toma*",  # covering by either of two tokens that are each other's nearest gains exactly the same
    "emoji/ToMA",
    "emoji/IBTM*",
    "emoji/Shiva 60",
    "emoji/Shiva 60 fixed",
    "pipeline/ibtm/dit",
    "tiny/ibtm-drops-then-merges/dit",
    "tiny/ibtm/sd3",
)
"""Patterns of rows in which two tokens come so near each other that rounding chooses: weights changed by a millionth
change them. Another processor is held to little there."""

TIMESTEPS = (900.0, 700.0, 500.0, 300.0)
PROMPT = "owl"
GOLDEN = (5**0.5 - 1) / 2


# -- a row -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bits:
    """What is kept of a result."""

    sha256: str
    """Of all its float32 values."""
    numbers: list[float]
    """Its mean and deviation, its values at a few places, and its lengths along a few directions, which see it all."""
    flops: float | None = None
    """Share of the dense run's FLOPs by the session's own count, in some pipelines: it takes longer than the run."""


def bits(values: list[Tensor], flops: float | None = None, besides: Sequence[Tensor] = ()) -> Bits:
    """Of values, and the hash also of those besides."""
    whole = flat(values)
    assert whole.isfinite().all()
    exact = whole.double()
    scattered = [exact[int(len(exact) * (GOLDEN * (i + 1) % 1))] for i in range(8)]
    directions = noise(8, len(exact), seed=30).double() / len(exact) ** 0.5
    numbers = [exact.mean(), exact.std(), *scattered, *(directions @ exact)]
    digest = hashlib.sha256(flat([whole, *besides]).numpy().tobytes()).hexdigest()
    return Bits(digest, [significant(number) for number in numbers], None if flops is None else significant(flops))


def flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.detach().float().flatten() for value in values])


def significant(number: Tensor | float) -> float:
    return float(f"{float(number):.6g}")


def settle_weights(method: nn.Module) -> None:
    """Weights that follow from a parameter's name alone, so that the order in which a method builds is free.

    What starts as a constant, such as DiffCR's ratios, stays near it.
    """
    with torch.no_grad():
        for name, parameter in method.named_parameters():
            drawn = noise(*parameter.shape or (1,), seed=zlib.crc32(name.encode())).view_as(parameter)
            constant = parameter.min() == parameter.max()
            parameter.copy_(parameter + 0.05 * drawn if constant else drawn * (0.5 / max(drawn.shape) ** 0.5))


# -- tiny transformers -----------------------------------------------------------------------------------


def calls(backbone: str, guided: bool) -> Iterator[dict[str, Any]]:
    """A run of calls: the timestep falls and the latents change."""
    for step, timestep in enumerate(TIMESTEPS):
        call = BACKBONES[backbone].call(4 if guided else 2, 8, 8, timestep=timestep)
        latents = call["hidden_states"]
        latents = torch.lerp(latents, noise(*latents.shape, seed=20), 0.15 * step)
        call["hidden_states"] = torch.cat([latents[:2]] * 2) if guided else latents
        yield call


def on_tiny(case: Case, backbone: str) -> Bits:
    model = BACKBONES[backbone].make()
    with shiva.attach(model, case.config, cfg="batched" if case.guided else "auto") as session, torch.no_grad():
        settle_weights(session.method)
        return bits([model(**call)[0] for call in calls(backbone, case.guided)])


# -- pipelines -------------------------------------------------------------------------------------------


def in_pipeline(config: Any, backbone: str) -> Bits:
    tiny = PIPELINES[backbone]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    with shiva.attach(pipe, config) as session:
        settle_weights(session.method)
        image = tiny.image(pipe, prompts=2, steps=4)
        return bits([image], session.summary().flops_share if backbone in PRICED else None)


# -- the emoji model -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def emoji_pipeline() -> Any:
    pipe = StableDiffusion3Pipeline.from_pretrained(ROOT / "models" / "emoji", text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def candidates() -> dict[str, dict[str, Any]]:
    """Those of the evaluation that `attach` alone makes: neither a flattened table nor INT8."""
    entries = yaml.safe_load(LINEUP.read_text())["candidates"]
    return {name: entry for name, entry in entries.items() if not {"flat", "int8", "steps"} & set(entry)}


def attach_candidate(pipe: Any, entry: dict[str, Any]) -> Any:
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.get("options", {}).items()
    }
    if "checkpoint" in entry:
        return shiva.attach(pipe, ROOT / entry["checkpoint"], **options)
    return shiva.attach(pipe, getattr(shiva, entry["method"]).preset(entry.get("preset", "official"), **options))


def emoji(entry: dict[str, Any]) -> Bits:
    pipe = emoji_pipeline()

    def draw() -> list[Tensor]:
        return [
            pipe(
                PROMPT,
                num_inference_steps=4,
                guidance_scale=3.0,
                max_sequence_length=0,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
            ).images
        ]

    if not {"method", "checkpoint"} & entry.keys():
        return bits(draw())
    with attach_candidate(pipe, entry):
        return bits(draw())


# -- training --------------------------------------------------------------------------------------------


def training_step(config: Any) -> Bits:
    """Losses of one step, and the gradients' lengths by parameter."""
    model = make_sd3().requires_grad_(False)
    earlier, call = (BACKBONES["sd3"].call(2, 8, 8, timestep=timestep) for timestep in (700.0, 500.0))
    with shiva.attach(model, config, cfg="none") as session:
        method = session.method
        settle_weights(method)
        method.train()
        with session.disabled(), torch.no_grad():
            with session.record() as before:
                model(**earlier)
            with session.record() as now:
                target = model(**call)[0]
        now.earlier = Earlier(dict(before.updates), steps=3.0)
        explore = Exploration(step=600, score_noise=0.1, logit_noise=0.1)
        torch.manual_seed(0)
        method.begin_batch([500.0], explore)
        # Some blocks ask for gradients of their inputs.
        call["hidden_states"].requires_grad_(True)
        output, ctx = session.call(call, teacher=now, explore=explore)
        distance = (output[0] - target).square().mean()
        losses = {"distance": distance, **method.losses(ctx)}
        sum(losses.values()).backward()
    gradients = [p.grad for _, p in sorted(method.named_parameters()) if p.grad is not None]
    return bits([losses[name] for name in sorted(losses)] + [g.norm() for g in gradients], besides=gradients)


# -- all rows --------------------------------------------------------------------------------------------


def rows() -> dict[str, Row]:
    """Every row by name; nothing runs yet."""
    return {
        **{
            f"tiny/{name}/{backbone}": functools.partial(on_tiny, case, backbone)
            for name, case in CASES.items()
            for backbone in case.backbones
        },
        **{
            f"pipeline/{name}/{backbone}": functools.partial(in_pipeline, config, backbone)
            for (name, config), backbone in itertools.product(IN_PIPELINES.items(), PIPELINES)
        },
        **{f"emoji/{name}": functools.partial(emoji, entry) for name, entry in candidates().items()},
        **{f"training/{name}": functools.partial(training_step, config) for name, config in TRAINED.items()},
    }


def measure(row: Row) -> Bits:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*by untrained weights")
        return row()


def recorded() -> dict[str, Bits]:
    return {name: Bits(**row) for name, row in json.loads(RECORD.read_text()).items()} if RECORD.exists() else {}


def write(found: dict[str, Bits]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(vars(found[name]))}" for name in sorted(found)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the record")
    what.add_argument("--exact", action="store_true", help="compare with the record bit by bit")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    arguments = parser.parse_args()
    known, wanted = recorded(), rows()
    chosen = [name for name in wanted if arguments.only in name]
    found = {name: measure(wanted[name]) for name in chosen}
    if arguments.write:
        write({**{name: row for name, row in known.items() if arguments.only and name in wanted}, **found})
        print(f"{len(found)} rows written")
        return 0
    differing = [name for name in chosen if name not in known or found[name] != known[name]]
    gone = [name for name in known if arguments.only in name and name not in wanted]
    for name in differing:
        print(f"{name}: {'differs' if name in known else 'is not recorded'}")
    for name in gone:
        print(f"{name}: is recorded, and no longer a row")
    print(f"{len(differing) + len(gone)} of {len(chosen)} rows differ")
    return 1 if differing or gone else 0


if __name__ == "__main__":
    sys.exit(main())
