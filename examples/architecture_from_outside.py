"""A transformer that Shiva does not know, CogView3 Plus, made known by one entry."""

import torch
from diffusers import CogView3PlusTransformer2DModel

import shiva
from shiva.backbones.grids import Latents
from shiva.backbones.patterns import IMAGE_TEXT, Inner, PatternBackbone, Prompt, Stack, Time

COGVIEW3 = PatternBackbone(
    transformers=("CogView3PlusTransformer2DModel",),
    stacks=(
        Stack(
            "transformer_blocks",
            outputs=IMAGE_TEXT,
            inner=(Inner("attn1", "attention", outputs=IMAGE_TEXT, keys="leads"),),
            rotary=False,
        ),
    ),
    grid=Latents(),
    clock="scheduler",
    time=Time("time_condition_embed.time_proj", "time_condition_embed.timestep_embedder"),
    prompt=Prompt(through=("patch_embed.text_proj",)),
)


def tiny() -> CogView3PlusTransformer2DModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4}
    text = {"text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4}
    return CogView3PlusTransformer2DModel(in_channels=4, out_channels=4, sample_size=32, **heads, **text).eval()


def main() -> None:
    shiva.register_backbone(COGVIEW3)
    model = tiny()
    sizes = {name: torch.zeros(1, 2) for name in ("original_size", "target_size", "crop_coords")}
    with shiva.attach(model, shiva.Sweep(budget=0.6)) as session, torch.no_grad():
        for timestep in (900.0, 600.0, 300.0):
            latents, text = torch.randn(1, 4, 32, 24), torch.randn(1, 16, 8)
            model(latents, text, torch.tensor([timestep]), **sizes)
        print(session.summary())


if __name__ == "__main__":
    main()
