"""Tiny pipelines of the classes of the pattern table, and how to call them without text encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import PIL.Image
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from pipelines import make_vae
from tiny_images import FLUX_AXES, IMAGES, make
from tiny_videos import HUNYUAN, LTX, VIDEOS, WAN

from tiny import TEXT, noise, randomized

SIZE = {"height": 32, "width": 24}


def pipeline(name: str, **parts: Any) -> Any:
    """A pipeline of a class by its name; the text encoders it would have are absent."""
    cls: Any = getattr(diffusers, name)
    optional = dict.fromkeys(cls._optional_components)
    absent = dict.fromkeys(("text_encoder", "tokenizer", *parts.pop("absent", ())))
    scheduler = parts.pop("scheduler", None) or FlowMatchEulerDiscreteScheduler()
    return cls(**{**optional, **absent, "scheduler": scheduler, **parts})


def embeds(prompts: int, width: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(prompts, TEXT, width, seed=4),
        "negative_prompt_embeds": noise(prompts, TEXT, width, seed=6),
        **more,
    }


def flux2_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=1,
        layers_per_block=1,
        norm_num_groups=2,
    )
    return {"vae": randomized(vae), "transformer": IMAGES["flux2"].make()}


def klein(prompts: int, guidance: float) -> dict[str, Any]:
    return {**embeds(prompts), "guidance_scale": guidance, "height": 16, "width": 12}


def distilled(prompts: int, guidance: float) -> dict[str, Any]:
    call = klein(prompts, guidance)
    del call["negative_prompt_embeds"]
    return call


def edited(prompts: int, guidance: float) -> dict[str, Any]:
    return {**klein(prompts, guidance), "image": PIL.Image.new("RGB", (64, 64), "orange")}


def klein_kv(prompts: int, guidance: float) -> dict[str, Any]:
    call = edited(prompts, guidance)
    return {key: call[key] for key in ("image", "prompt_embeds", "height", "width")}


FLUX_TEXT = ("text_encoder_2", "tokenizer_2")


def flux_parts(channels: int = 4) -> dict[str, Any]:
    sizes = {**FLUX_AXES, "in_channels": channels, "out_channels": 4, "pooled_projection_dim": 20}
    return {"vae": make_vae(1), "transformer": make("FluxTransformer2DModel", **sizes), "absent": FLUX_TEXT}


def flux_call(prompts: int) -> dict[str, Any]:
    embedded = {"prompt_embeds": noise(prompts, TEXT, 8, seed=4), "pooled_prompt_embeds": noise(prompts, 20, seed=5)}
    return {**embedded, **SIZE}


def kontext(prompts: int, guidance: float) -> dict[str, Any]:
    negative = {
        "negative_prompt_embeds": noise(prompts, TEXT, 8, seed=6),
        "negative_pooled_prompt_embeds": noise(prompts, 20, seed=7),
        "true_cfg_scale": guidance,
    }
    picture = {"image": torch.rand(1, 3, 32, 32), "max_area": 1024, "_auto_resize": False}
    return {**flux_call(prompts), **negative, **picture}


def fill(prompts: int, guidance: float) -> dict[str, Any]:
    return {**flux_call(prompts), "image": torch.rand(1, 3, 32, 24), "mask_image": torch.ones(1, 1, 32, 24)}


def control(prompts: int, guidance: float) -> dict[str, Any]:
    return {**flux_call(prompts), "control_image": torch.rand(1, 3, 32, 24)}


def qwen_vae() -> Any:
    return randomized(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
    )


def qwen(prompts: int, guidance: float) -> dict[str, Any]:
    masks = {"prompt_embeds_mask": torch.ones(prompts, TEXT), "negative_prompt_embeds_mask": torch.ones(prompts, TEXT)}
    return {**embeds(prompts), **masks, "true_cfg_scale": guidance, "height": 48, "width": 32}


def chroma(prompts: int, guidance: float) -> dict[str, Any]:
    masks = {"prompt_attention_mask": torch.ones(prompts, TEXT)}
    masks["negative_prompt_attention_mask"] = masks["prompt_attention_mask"]
    return {**embeds(prompts), **masks, "guidance_scale": guidance, **SIZE}


def zimage(prompts: int, guidance: float) -> dict[str, Any]:
    texts = {"prompt_embeds": list(noise(prompts, TEXT, 8, seed=4))}
    texts["negative_prompt_embeds"] = list(noise(prompts, 3, 8, seed=6))
    return {**texts, "guidance_scale": guidance, **SIZE}


def wan_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    sizes = {**WAN, "in_channels": 16, "out_channels": 16}
    experts = {key: make("WanTransformer3DModel", **sizes) for key in ("transformer", "transformer_2")}
    return {"vae": randomized(vae), **experts, "boundary_ratio": 0.7}


def wan(prompts: int, guidance: float) -> dict[str, Any]:
    return {**embeds(prompts), "guidance_scale": guidance, "height": 64, "width": 48, "num_frames": 9}


def ltx_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        patch_size=1,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
    )
    return {"vae": randomized(vae), "transformer": make("LTXVideoTransformer3DModel", **LTX)}


def ltx(prompts: int, guidance: float) -> dict[str, Any]:
    masks = {key: torch.ones(prompts, TEXT) for key in ("prompt_attention_mask", "negative_prompt_attention_mask")}
    return {**embeds(prompts), **masks, "guidance_scale": guidance, "height": 32, "width": 32, "num_frames": 9}


def hunyuan_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=2
    )
    sizes = {**HUNYUAN, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "patch_size": 1}
    text = {"text_embed_dim": 8, "pooled_projection_dim": 20}
    transformer = make("HunyuanVideoTransformer3DModel", **sizes, **text, guidance_embeds=True)
    return {"vae": randomized(vae), "transformer": transformer, "absent": FLUX_TEXT}


def hunyuan(prompts: int, guidance: float) -> dict[str, Any]:
    call = embeds(prompts, pooled_prompt_embeds=noise(prompts, 20, seed=5))
    call["negative_pooled_prompt_embeds"] = noise(prompts, 20, seed=7)
    masks = {key: torch.ones(prompts, TEXT) for key in ("prompt_attention_mask", "negative_prompt_attention_mask")}
    return {**call, **masks, "true_cfg_scale": guidance, "height": 32, "width": 32, "num_frames": 9}


def cogvideox_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8,) * 4,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler()
    return {"vae": randomized(vae), "transformer": VIDEOS["cogvideox"].make(), "scheduler": scheduler}


def cogvideox(prompts: int, guidance: float) -> dict[str, Any]:
    return {**embeds(prompts), "guidance_scale": guidance, "height": 64, "width": 48, "num_frames": 9}


@dataclass(frozen=True)
class ReachPipeline:
    """One pipeline of the table."""

    name: str
    parts: Callable[[], dict[str, Any]]
    call: Callable[[int, float], dict[str, Any]]
    guidance: str = "sequential"
    """As "sequential" calls, as a "batched" pair, or none."""
    references: bool = False
    """Its calls hold tokens of a picture beside the image's own."""
    keys: bool = True

    def make(self) -> Any:
        return pipeline(self.name, **self.parts())

    def load(self, folder: Path) -> Any:
        """Through the disk, as a user's would come."""
        made = self.make()
        made.save_pretrained(folder)
        absent = {key: None for key, part in made.components.items() if part is None}
        pipe = type(made).from_pretrained(folder, **absent)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def draw(self, pipe: Any, guidance: float = 3.0, steps: int = 3) -> Tensor:
        torch.manual_seed(0)
        arguments = {**self.call(1, guidance), "num_inference_steps": steps, "output_type": "latent"}
        result = pipe(generator=torch.Generator().manual_seed(0), **arguments)
        drawn = result.images if hasattr(result, "images") else result.frames
        return torch.stack(drawn) if isinstance(drawn, list) else drawn


REACH: dict[str, ReachPipeline] = {
    "flux2": ReachPipeline("Flux2Pipeline", flux2_parts, distilled, "none", keys=False),
    "klein": ReachPipeline("Flux2KleinPipeline", flux2_parts, klein, keys=False),
    "klein edit": ReachPipeline("Flux2KleinPipeline", flux2_parts, edited, references=True, keys=False),
    "klein kv": ReachPipeline("Flux2KleinKVPipeline", flux2_parts, klein_kv, "none", references=True, keys=False),
    "kontext": ReachPipeline("FluxKontextPipeline", flux_parts, kontext, references=True),
    "fill": ReachPipeline("FluxFillPipeline", lambda: flux_parts(24), fill, "none"),
    "control": ReachPipeline("FluxControlPipeline", lambda: flux_parts(8), control, "none"),
    "qwen": ReachPipeline(
        "QwenImagePipeline", lambda: {"vae": qwen_vae(), "transformer": IMAGES["qwen"].make()}, qwen
    ),
    "chroma": ReachPipeline(
        "ChromaPipeline", lambda: {"vae": make_vae(1), "transformer": IMAGES["chroma"].make()}, chroma, keys=False
    ),
    "zimage": ReachPipeline(
        "ZImagePipeline", lambda: {"vae": make_vae(4), "transformer": IMAGES["zimage"].make()}, zimage, "batched"
    ),
    "wan": ReachPipeline("WanPipeline", wan_parts, wan),
    "ltx": ReachPipeline("LTXPipeline", ltx_parts, ltx, "batched"),
    "hunyuan-video": ReachPipeline("HunyuanVideoPipeline", hunyuan_parts, hunyuan),
    "cogvideox": ReachPipeline("CogVideoXPipeline", cogvideox_parts, cogvideox, "batched"),
}
