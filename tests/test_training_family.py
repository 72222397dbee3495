"""Each family calls its bare transformer as the pipeline does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import shiva
from pipelines import PIPELINES
from pipelines_reach import REACH, pipeline, wan_parts
from shiva.core.context import Exploration
from shiva.core.options import merge
from shiva.fitting import fit
from shiva.training.call import call
from shiva.training.families import family_of
from shiva.training.family import Text
from shiva.training.noise import FlowMatching, noise_process
from shiva.training.recipe import lay_over, read_recipe, recipe_from
from shiva.training.trainer import Trainer
from training_tiny import save_folder

from tiny import TEXT, noise

REPOSITORY = Path(__file__).parent.parent


def hidden(width: int = 8) -> Tensor:
    return noise(2, TEXT, width, seed=4)


MASKED: Text = {"hidden": hidden(), "mask": torch.tensor([[True] * TEXT, [True] * 3 + [False] * 2])}


@dataclass(frozen=True)
class Row:
    """A family: its pipeline, text for it, and what of a call of its transformer holds the latents."""

    make: Callable[[], Any]
    text: Text
    size: tuple[int, int] = (32, 24)
    latents: str = "hidden_states"
    unit: float = 1.0
    """The scheduler's timestep of a timestep of one; it rises where this is below zero."""


def one_expert() -> Any:
    parts = {**wan_parts(), "transformer_2": None, "boundary_ratio": None}
    return pipeline("WanPipeline", **parts)


ROWS = {
    "sd3": Row(PIPELINES["sd3"].make, {"hidden": hidden(24), "pooled": noise(2, 20, seed=5)}),
    "flux": Row(PIPELINES["flux"].make, {"hidden": hidden(24), "pooled": noise(2, 20, seed=5)}, unit=1000),
    "pixart": Row(PIPELINES["pixart"].make, {"hidden": hidden(24), "mask": torch.ones(2, TEXT)}),
    "dit": Row(PIPELINES["dit"].make, {"label": torch.tensor([3, 5])}, (32, 32)),
    "flux2": Row(REACH["flux2"].make, {"hidden": hidden()}, (16, 12), unit=1000),
    "klein": Row(REACH["klein"].make, {"hidden": hidden()}, (16, 12), unit=1000),
    "qwen": Row(REACH["qwen"].make, MASKED, (48, 32), unit=1000),
    "zimage": Row(REACH["zimage"].make, MASKED, latents="x", unit=-1000),
    "wan": Row(one_expert, {"hidden": hidden()}, (64, 48)),
}
EMPTY: dict[str, Text] = {name: {key: value[:1] for key, value in row.text.items()} for name, row in ROWS.items()}


def latents_in(argument: Any, family: Any, grid: tuple[int, int]) -> Tensor:
    """Latents (B, C, h, w) of what a pipeline gives its transformer."""
    if isinstance(argument, list):
        return torch.stack(argument)[:, :, 0]
    if argument.ndim == 3 and hasattr(family, "unpack"):
        return family.unpack(argument, *grid)
    if argument.ndim == 3:
        return argument.transpose(1, 2).unflatten(2, grid)
    return argument.flatten(1, 2) if argument.ndim == 5 else argument


@pytest.mark.parametrize("name", ROWS)
def test_the_bare_call_predicts_what_the_pipelines_call_predicts(name: str) -> None:
    """The pipeline's first step, caught on its way into the transformer, equals training's call."""
    row = ROWS[name]
    pipe: Any = row.make()
    family = family_of(pipe)
    family.empty = EMPTY[name]
    seen: list[tuple[dict[str, Any], Any]] = []

    def catch(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append(
            (
                {**dict(zip(("x" if row.latents == "x" else "hidden_states", "t"), args, strict=False)), **kwargs},
                output[0],
            )
        )

    handle = pipe.transformer.register_forward_hook(catch, with_kwargs=True)
    family.draw(row.text, row.size, 2, 1.0 if name != "zimage" else 0.0, [0, 1], "latent" if name != "dit" else "np")
    handle.remove()
    arguments, expected = seen[0]
    time = float(arguments["timestep" if "timestep" in arguments else "t"].flatten()[0])
    timestep = 1000 * (1 - time) if row.unit < 0 else time * row.unit
    grid = height, width = row.size[0] // family.factor, row.size[1] // family.factor
    noisy = latents_in(arguments[row.latents], family, grid)
    with torch.no_grad():
        output = pipe.transformer(**family.call(noisy, timestep, row.text))[0]
    found, wanted = (family.prediction(part, noisy) for part in (output, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found.shape == noisy.shape == (2, noisy.shape[1], height, width)
    assert family.tokens(grid) == (height // family.patch) * (width // family.patch)


@pytest.mark.parametrize("name", ROWS)
def test_the_pipeline_draws_latents_for_training_and_pictures_are_encoded_alike(name: str) -> None:
    row = ROWS[name]
    family = family_of(row.make())
    family.empty = EMPTY[name]
    latents = family.draw_latents(row.text, row.size, 2, 2.0, [0, 1])
    assert latents.shape == (2, latents.shape[1], row.size[0] // family.factor, row.size[1] // family.factor)
    assert latents.isfinite().all()
    assert family.latents(torch.rand(2, 3, *row.size) * 2 - 1).shape == latents.shape
    assert noise_process(family.pipe.scheduler, "uniform").timestep(0.5, 64) >= 0


def test_clips_of_several_frames_are_drawn_from_prompts(tmp_path: Path) -> None:
    pipe = one_expert()
    family: Any = family_of(pipe)
    family.empty, family.frames = EMPTY["wan"], 3
    latents = family.draw_latents(ROWS["wan"].text, (64, 48), 1, 1.0, [0, 1])
    assert latents.shape == (2, 16 * 3, 8, 6)
    call = family.call(latents, 500.0, ROWS["wan"].text)
    assert call["hidden_states"].shape == (2, 16, 3, 8, 6)
    with torch.no_grad():
        assert family.prediction(pipe.transformer(**call)[0], latents).shape == latents.shape
    with pytest.raises(ValueError, match="two experts"):
        family_of(REACH["wan"].make())


@pytest.mark.parametrize("name", ["klein", "qwen", "zimage", "wan"])
def test_a_method_learns_on_a_call_of_its_family(name: str) -> None:
    """One forward and backward pass of training, as the loop makes them; the gradient reaches the router."""
    row = ROWS[name]
    family = family_of(row.make())
    family.transformer.requires_grad_(False)
    latents = noise(2, *latent_shape(family, row))
    with shiva.attach(family.pipe, shiva.Shiva(budget=0.5, guess="zero"), cfg="none") as session:
        session.method.train()
        explore = Exploration(ratio=0.5)
        output, _ = call(session, family.call(latents, 400.0, row.text), explore=explore)
        family.prediction(output, latents).square().mean().backward()
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in session.method.routers.parameters())


def latent_shape(family: Any, row: Row) -> tuple[int, int, int]:
    family.empty = {key: value[:1] for key, value in row.text.items()}
    return tuple(family.draw_latents(row.text, row.size, 1, 1.0, [0, 1]).shape[1:])


def test_a_pipeline_of_every_new_family_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With text encoders that a stand-in replaces: prompts become the row's own text."""
    for name in ("klein", "qwen", "zimage", "wan"):
        row = ROWS[name]
        pipe = row.make()
        pipe.set_progress_bar_config(disable=True)
        monkeypatch.setattr(pipe, "encode_prompt", stand_in(name, row))
        size = {"height": row.size[0], "width": row.size[1], **({"num_frames": 5} if name == "wan" else {})}
        fitted = fit(pipe, ["a", "b"], steps=(1,), guidance=2.0, rank=2, batch=1, arguments=size)
        assert len(fitted.layers) == fitted.method.spec.layers
        assert fitted.tokens > 0


def stand_in(name: str, row: Row) -> Any:
    text = row.text["hidden"][:1]
    made: dict[str, Any] = {
        "klein": (text, torch.zeros(1, TEXT, 4)),
        "qwen": (text, None),
        "zimage": ([text[0]], [text[0]]),
        "wan": (text, text),
    }
    return lambda *args, **kwargs: made[name]


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


def made_small(row: Row, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A tiny pipeline, saved beside four images, and what makes a recipe for its family train it in no time."""
    made = row.make()
    made.save_pretrained(folder / "pipeline")
    save_folder(folder / "images", 4)
    return made, {
        "model": {"path": str(folder / "pipeline")},
        "data": {"kind": "imagefolder", "path": str(folder / "images"), "caption": "text", "resolution": 32},
        "method": {"bottleneck": 4},
        "sampling": {"batch": 2},
        "adapter": {"rank": 2, "alpha": 2},
        "validation": {"samples": 1, "images": 0, "every": 0},
    }


RECIPES = {"flux2-klein": "klein", "qwen-image": "qwen", "z-image": "zimage", "wan": "wan"}
FEW_STEPS = {"sd35-turbo": "sd3", "flux-schnell": "flux", "flux2-klein-turbo": "klein"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FEW_STEPS)
def test_a_recipe_for_few_steps_trains_a_tiny_pipeline(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own settings but for size, data and steps: three steps that are led back to a dense run of four."""
    row = ROWS[FEW_STEPS[recipe]]
    made, changes = made_small(row, tmp_path)
    text = {key: value[:1] for key, value in row.text.items()}

    def encode(self: Any, prompts: Any) -> Text:
        return {key: value.repeat(len(prompts), *[1] * (value.ndim - 1)) for key, value in text.items()}

    monkeypatch.setattr(type(family_of(made)), "encode", encode)
    changes["model"]["text_length"] = None
    changes["method"]["rank"] = 4
    changes |= {"start": None, "stages": {"all": {"steps": 2}}}
    values = lay_over(read_recipe(REPOSITORY / "recipes" / f"{recipe}.yaml"), changes)
    values["data"]["cache"] = "auto"
    trainer = Trainer(recipe_from(values), tmp_path / "run")
    output = trainer.run()
    process = trainer.objectives.process
    assert isinstance(process, FlowMatching)
    assert (len(process.levels), len(process.followed), process.dense_steps) == (3, 4, (0,))
    with shiva.attach(made, output, budget=0.5) as session:
        family = family_of(made)
        family.empty = EMPTY[FEW_STEPS[recipe]]
        latents = family.draw_latents(text, row.size, 3, 0.0, [0])
        assert latents.isfinite().all()
        reduced = [min(record.kept.values()) < record.tokens for record in session.stats]
        assert reduced == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_a_new_family_trains_a_tiny_pipeline(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own settings but for size, data and steps; the checkpoint is attached to the pipeline it was made for."""
    row = ROWS[RECIPES[recipe]]
    made, changes = made_small(row, tmp_path)
    (tmp_path / "prompts.txt").write_text("a fox\na cat\na dog\n")
    monkeypatch.setattr(type(made), "encode_prompt", encoder(type(made).encode_prompt, row))
    settings = yaml.safe_load((REPOSITORY / "recipes" / f"{recipe}.yaml").read_text())
    drawn = {"path": str(tmp_path / "prompts.txt"), "generate": {"steps": 1}, "limit": None, "resolution": 32}
    changes["model"] |= {"text_length": TEXT, "without": ["text_encoder", "tokenizer"]}
    changes["stages"] = {stage: {"steps": 1} for stage in ("warmup", "policy", "joint")}
    if recipe == "wan":
        changes["model"]["frames"] = 2
        changes["data"] = drawn
    changes["data"]["cache"] = "auto"
    output = Trainer(recipe_from(merge(settings, changes)), tmp_path / "run").run()
    with shiva.attach(made, output) as session:
        family = family_of(made)
        latents = noise(1, *latent_shape(family, row))
        with torch.no_grad():
            made.transformer(**family.call(latents, 400.0, {key: value[:1] for key, value in row.text.items()}))
        assert session.summary().keep < 1


def encoder(original: Any, row: Row) -> Any:
    """A class's `encode_prompt` that knows no prompt: each gets the row's first text, as if made beforehand."""

    def encode(self: Any, prompt: Any = None, *args: Any, **kwargs: Any) -> Any:
        if prompt is None:
            return original(self, prompt, *args, **kwargs)
        text = row.text["hidden"][:1].repeat(1 if isinstance(prompt, str) else len(prompt), 1, 1)
        made = list(text) if "ZImage" in type(self).__name__ else text
        return original(self, prompt, *args, **{**kwargs, "prompt_embeds": made})

    return encode
