"""Each family calls its bare transformer as the pipeline does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines import PIPELINES
from shiva.training.family import Text, family_of

from tiny import TEXT, noise

TEXTS: dict[str, Text] = {
    "sd3": {"hidden": noise(2, TEXT, 24, seed=4), "pooled": noise(2, 20, seed=5)},
    "flux": {"hidden": noise(2, TEXT, 24, seed=4), "pooled": noise(2, 20, seed=5)},
    "pixart": {"hidden": noise(2, TEXT, 24, seed=4), "mask": torch.ones(2, TEXT)},
    "dit": {"label": torch.tensor([3, 5])},
}
EMPTY: dict[str, Text] = {name: {key: value[:1] for key, value in text.items()} for name, text in TEXTS.items()}
SIZES = {"sd3": (32, 24), "flux": (32, 24), "pixart": (32, 24), "dit": (32, 32)}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_bare_call_predicts_what_the_pipelines_call_predicts(name: str) -> None:
    """The pipeline's first step, caught on its way into the transformer, equals training's call."""
    pipe: Any = PIPELINES[name].make()
    family = family_of(pipe)
    family.empty = EMPTY[name]
    seen: list[tuple[dict[str, Any], Tensor]] = []

    def catch(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        arguments = {**({"hidden_states": args[0]} if args else {}), **kwargs}
        seen.append((arguments, output[0]))

    handle = pipe.transformer.register_forward_hook(catch, with_kwargs=True)
    family.draw(TEXTS[name], SIZES[name], 2, 1.0, [0, 1], "np")
    handle.remove()
    arguments, expected = seen[0]
    timestep = float(arguments["timestep"].flatten()[0]) * (1000 if name == "flux" else 1)
    height, width = (side // family.factor for side in SIZES[name])
    noisy = arguments["hidden_states"]
    if name == "flux":
        noisy = family._unpack(noisy, height, width)  # type: ignore[attr-defined]
    with torch.no_grad():
        output = pipe.transformer(**family.call(noisy, timestep, TEXTS[name]))[0]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    prediction = family.prediction(output, noisy)
    assert prediction.shape == noisy.shape == (2, noisy.shape[1], height, width)
    assert family.tokens((height, width)) == (height // family.patch) * (width // family.patch)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_draws_latents_for_training(name: str) -> None:
    family = family_of(PIPELINES[name].make())
    family.empty = EMPTY[name]
    latents = family.draw_latents(TEXTS[name], SIZES[name], 2, 2.0, [0, 1])
    assert latents.shape == (2, latents.shape[1], SIZES[name][0] // family.factor, SIZES[name][1] // family.factor)
    assert latents.isfinite().all()


def test_classes_by_name_and_number() -> None:
    pipe: Any = PIPELINES["dit"].make()
    pipe.labels = {"white shark": 2}
    family = family_of(pipe)
    assert family.encode(["white shark", "7", ""])["label"].tolist() == [2, 7, 1000]
    with pytest.raises(ValueError, match="did you mean 'white shark'"):
        family.encode(["white shrk"])


def test_an_unknown_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="no family for Linear"):
        family_of(type("Pipe", (), {"transformer": torch.nn.Linear(1, 1)})())
