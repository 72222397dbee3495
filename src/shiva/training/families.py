"""The pipeline families that training knows, by the class of their transformer; the later ones among them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from shiva.core.options import unknown_key
from shiva.training.family import (
    DiTFamily,
    Family,
    FluxFamily,
    PixArtFamily,
    SD3Family,
    Size,
    Text,
    normalised,
    padded,
    times,
)
from shiva.training.sections import Model


class Flux2Family(Family):
    """FLUX.2 and klein. Latents are the autoencoder's in patches of 2x2, normalised: (B, 4C, h, w), one a token."""

    text_encoders = ("text_encoder",)
    patch = 1

    @property
    def factor(self) -> int:
        return 2 * super().factor

    def prompts(self, prompts: list[str]) -> Text:
        hidden, _ = self.pipe.encode_prompt(prompts, **self.length)
        return {"hidden": hidden}

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        return self.pipe._encode_vae_image(pixels.to(vae.device, vae.dtype), None)

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        if noisy.shape not in self._ids:
            self._ids[noisy.shape] = self.pipe._prepare_latent_ids(noisy).to(noisy.device)
        guided = self.transformer.config.guidance_embeds
        return {
            "hidden_states": self.pipe._pack_latents(noisy),
            "timestep": times(noisy, timestep / 1000),
            "guidance": times(noisy, self.guidance) if guided else None,
            "encoder_hidden_states": text["hidden"],
            "txt_ids": self.pipe._prepare_text_ids(text["hidden"]).to(noisy.device),
            "img_ids": self._ids[noisy.shape],
            "return_dict": False,
        }

    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        return output.transpose(1, 2).reshape(noisy.shape)

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        guided = {"negative_prompt_embeds": empty["hidden"]} if "Klein" in type(self.pipe).__name__ else {}
        return {"prompt_embeds": text["hidden"], **guided, "height": size[0], "width": size[1]}

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        """As training has them, in patches and normalised; klein's pipeline gives the autoencoder's own."""
        drawn = self.draw(text, size, steps, guidance, seeds, "latent")
        if drawn.ndim == 3:
            return drawn.transpose(1, 2).unflatten(2, (size[0] // self.factor, size[1] // self.factor))
        drawn = self.pipe._patchify_latents(drawn)
        norm = self.pipe.vae.bn
        mean, variance = (part.view(1, -1, 1, 1).to(drawn) for part in (norm.running_mean, norm.running_var))
        return (drawn - mean) / torch.sqrt(variance + self.pipe.vae.config.batch_norm_eps)


class QwenFamily(FluxFamily):
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    guided_by = "true_cfg_scale"
    longest: ClassVar[int] = 512
    """Text tokens, unless the recipe says otherwise; all samples have as many, their padding masked."""

    @property
    def factor(self) -> int:
        return self.pipe.vae_scale_factor

    def prompts(self, prompts: list[str]) -> Text:
        length = self.length.get("max_sequence_length", self.longest)
        hidden, mask = self.pipe.encode_prompt(prompts, max_sequence_length=length)
        return padded(hidden, mask, length)

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        pictures = pixels.to(vae.device, vae.dtype)[:, :, None]
        return normalised(vae, vae.encode(pictures).latent_dist.mode())[:, :, 0]

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        batch, _, height, width = noisy.shape
        return {
            "hidden_states": self.pipe._pack_latents(noisy, *noisy.shape),
            "timestep": times(noisy, timestep / 1000),
            "encoder_hidden_states": text["hidden"],
            "encoder_hidden_states_mask": text["mask"],
            "img_shapes": [[(1, height // 2, width // 2)]] * batch,
            "return_dict": False,
        }

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": text["hidden"], "prompt_embeds_mask": text["mask"]}
        negative = {"negative_prompt_embeds": empty["hidden"], "negative_prompt_embeds_mask": empty["mask"]}
        return {**prompt, **negative, "height": size[0], "width": size[1]}


class ZImageFamily(QwenFamily):
    """Pictures and captions are lists; the transformer predicts clean - noise, and its time rises."""

    guided_by = "guidance_scale"

    @property
    def factor(self) -> int:
        return 2 ** (len(self.pipe.vae.config.block_out_channels) - 1)

    def prompts(self, prompts: list[str]) -> Text:
        length = self.length.get("max_sequence_length", self.longest)
        found, _ = self.pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=length)
        texts = [padded(hidden[None], None, length) for hidden in found]
        return {name: torch.cat([text[name] for text in texts]) for name in ("hidden", "mask")}

    latents = Family.latents

    def captions(self, text: Text) -> list[Tensor]:
        """Each without its padding, (L, D)."""
        return [hidden[: int(mask.sum())] for hidden, mask in zip(text["hidden"], text["mask"], strict=True)]

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        return {
            "x": list(noisy[:, :, None]),
            "t": times(noisy, 1 - timestep / 1000),
            "cap_feats": self.captions(text),
            "return_dict": False,
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        return -torch.stack(list(output))[:, :, 0]

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": self.captions(text), "negative_prompt_embeds": self.captions(empty)}
        return {**prompt, "height": size[0], "width": size[1]}

    draw_latents = Family.draw_latents


class WanFamily(Family):
    """Clips of `frames` latent frames as (B, C * F, h, w), so that all else of training takes them for pictures.

    Captioned pictures are clips of one frame; clips of more are those that the pipeline draws from prompts alone.
    """

    text_encoders = ("text_encoder",)

    def __init__(self, pipe: Any, text_length: int | None = None, guidance: float = 3.5):
        super().__init__(pipe, text_length, guidance)
        self.frames = 1
        if getattr(pipe, "transformer_2", None) is not None:
            raise ValueError(
                "this Wan has two experts, of which each sees a part of the timesteps, and training would show the "
                "first all of them; train Wan 2.1 or TI2V, or fit each expert with shiva fit"
            )

    @property
    def factor(self) -> int:
        return self.pipe.vae_scale_factor_spatial

    @property
    def patch(self) -> int:
        return self.transformer.config.patch_size[-1]

    def prompts(self, prompts: list[str]) -> Text:
        unguided: Any = {"do_classifier_free_guidance": False, **{"max_sequence_length": 512, **self.length}}
        hidden, _ = self.pipe.encode_prompt(prompts, **unguided)
        return {"hidden": hidden}

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        clips = pixels.to(vae.device, vae.dtype)[:, :, None]
        return normalised(vae, vae.encode(clips).latent_dist.mode()).flatten(1, 2)

    def call(self, noisy: Tensor, timestep: float, text: Text) -> dict[str, Any]:
        clips = noisy.unflatten(1, (self.transformer.config.in_channels, -1))
        time = times(noisy, timestep)
        if self.pipe.config.get("expand_timesteps"):
            time = time[:, None].expand(-1, clips.shape[2] * self.tokens((noisy.shape[-2], noisy.shape[-1])))
        return {
            "hidden_states": clips,
            "timestep": time,
            "encoder_hidden_states": text["hidden"],
            "return_dict": False,
        }

    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        return output.flatten(1, 2)

    def arguments(self, text: Text, empty: Text, size: Size) -> dict[str, Any]:
        prompt = {"prompt_embeds": text["hidden"], "negative_prompt_embeds": empty["hidden"]}
        pixels = 1 + (self.frames - 1) * self.pipe.vae_scale_factor_temporal
        return {**prompt, "height": size[0], "width": size[1], "num_frames": pixels}

    def draw(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int], output: str) -> Any:
        drawn = super().draw(text, size, steps, guidance, seeds, output)
        return drawn if output == "latent" else [clip[0] for clip in drawn]

    def draw_latents(self, text: Text, size: Size, steps: int, guidance: float, seeds: Sequence[int]) -> Tensor:
        return self.draw(text, size, steps, guidance, seeds, "latent").flatten(1, 2)


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
        raise ValueError(f"training has no family for {name}; it knows {', '.join(FAMILIES)} (training/families.py)")
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
