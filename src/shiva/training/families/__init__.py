"""The pipeline families that training knows, by the class of their transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shiva.core.options import unknown_key
from shiva.training.families.flux import Flux2Family, FluxFamily
from shiva.training.families.pixart import DiTFamily, PixArtFamily
from shiva.training.families.qwen import QwenFamily, ZImageFamily
from shiva.training.families.sd3 import SD3Family
from shiva.training.families.wan import WanFamily
from shiva.training.family import Family
from shiva.training.sections import Model

FAMILIES: dict[str, type[Family]] = {
    "SD3Transformer2DModel": SD3Family,
    "FluxTransformer2DModel": FluxFamily,
    "PixArtTransformer2DModel": PixArtFamily,
    "DiTTransformer2DModel": DiTFamily,
    "Flux2Transformer2DModel": Flux2Family,
    "QwenImageTransformer2DModel": QwenFamily,
    "ZImageTransformer2DModel": ZImageFamily,
    "WanTransformer3DModel": WanFamily,
}


def family_of(pipe: Any, text_length: int | None = None, guidance: float = 3.5) -> Family:
    """The family of a pipeline, by its transformer's class."""
    name = type(getattr(pipe, "transformer", None)).__name__
    if name not in FAMILIES:
        raise ValueError(f"training has no family for {name}; it knows {', '.join(FAMILIES)} (training/families)")
    return FAMILIES[name](pipe, text_length, guidance)


def load_family(model: Model, dtype: torch.dtype) -> Family:
    """The pipeline in main memory, everything frozen."""
    from diffusers import DiffusionPipeline

    if model.path.startswith((".", "/")) and not Path(model.path).is_dir():
        raise FileNotFoundError(f"model.path={model.path!r} is not a folder; paths are relative to the current folder")
    try:
        index = dict(DiffusionPipeline.load_config(model.path, revision=model.revision))
    except Exception as error:
        raise unloadable(model, error) from error
    absent = {name: None for name, value in index.items() if value == [None, None]}
    for name in model.without:
        if name not in index:
            raise ValueError(f"model.without: {unknown_key(name, index, 'the pipeline')}")
        absent[name] = None
    try:
        pipe = DiffusionPipeline.from_pretrained(model.path, revision=model.revision, dtype=dtype, **absent)
    except Exception as error:
        raise unloadable(model, error) from error
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    family = family_of(pipe, model.text_length, model.guidance)
    if model.frames > 1 and not isinstance(family, WanFamily):
        raise ValueError(f"model.frames={model.frames} is for video models; {type(pipe).__name__} draws pictures")
    if isinstance(family, WanFamily):
        family.frames = model.frames
    return family


def unloadable(model: Model, error: Exception) -> ValueError:
    """What to raise where diffusers, which raises what it likes, does not load a pipeline."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ValueError(f"model.path={model.path!r} does not load as a diffusers pipeline ({told}); restore its files")
