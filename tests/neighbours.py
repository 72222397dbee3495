"""What else people put on a transformer: one row here is tested before and after attach, and goes into the page."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import accelerate
import diffusers
import peft
import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TextKVCacheConfig
from packaging.version import Version
from torch import nn

from tiny_images import IMAGES
from tiny_videos import VIDEOS

from tiny import BACKBONES, Tiny

TINY: dict[str, Tiny] = {**BACKBONES, **IMAGES, **VIDEOS}
FEW = ("sd3", "flux", "qwen", "wan")
MANY = (*FEW, "pixart", "flux2", "zimage", "ltx", "hunyuan-video", "chroma")
CACHES = ("flux", "qwen", "wan", "ltx")
NO_WHOLE_GRAPH = ("lumina2", "qwen21", "zimage", "hidream", "hunyuan-video-15")
"""Transformers that read values on the host, or enter what no graph can hold."""
ALIKE = ("kontext", "qwen-zero-t", "bria", "longcat", "wan-per-token", "wan-vace", "skyreels", "ltx-per-token")
"""Those whose stacks, and so graphs, are like another's."""
DISPATCHED = ("flux", "qwen", "wan", "flux2", "zimage", "ltx", "hunyuan-video", "chroma")
"""Those whose attention goes through diffusers' choice of kernels."""
CPU = torch.device("cpu")


def lora(model: Any) -> None:
    """On attention and feed-forward of the first and the last block; its weights are not zero."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".0." in name]
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=linears)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, model)


def int8(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())


def bitsandbytes(model: Any) -> None:
    """As diffusers does on loading: linear layers of the blocks in eight bits."""
    bnb = pytest.importorskip("bitsandbytes")
    for parent in [module for name, module in model.named_modules() if "blocks." in name]:
        for name, linear in parent.named_children():
            if type(linear) is nn.Linear:
                sizes = (linear.in_features, linear.out_features, linear.bias is not None)
                packed = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                packed.load_state_dict(linear.state_dict())
                parent._modules[name] = packed.to("cpu")


def mag_cache(model: Any) -> None:
    model.enable_cache(MagCacheConfig(num_inference_steps=3, mag_ratios=[1.0] * 3))


def group_offload(model: Any) -> None:
    if Version(diffusers.__version__) < Version("0.41"):
        pytest.skip("diffusers 0.40 offloads groups where there is an accelerator only")
    model.enable_group_offload(onload_device=CPU, offload_type="leaf_level")


def device_map(model: Any) -> None:
    """As diffusers puts hooks on each component of a pipeline that is loaded with device_map="balanced"."""
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


@dataclass(frozen=True)
class Neighbour:
    """Something put on a transformer, which must then compute with a session that keeps all as it does without."""

    put: Callable[[Any], None] | None = None
    classes: tuple[str, ...] = FEW
    """Tiny transformers it is tried on."""
    before: str | None = None
    """Why it is refused where it comes before attach; None where it works."""
    after: str | None = None
    """The same after attach."""
    test: str | None = None
    """Where it is tested, if not by `put`: a file of tests/ and a function."""

    def check_test(self) -> None:
        if self.test is not None:
            file, function = self.test.split("::")
            assert hasattr(importlib.import_module(file), function), self.test


FIRST_ATTACH = "attach first, then enable"
NEIGHBOURS: dict[str, Neighbour] = {
    "LoRA": Neighbour(lora, MANY),
    "fused QKV": Neighbour(lambda model: model.fuse_qkv_projections(), ("sd3", "flux", "pixart", "wan", "chroma")),
    "torchao INT8": Neighbour(int8, MANY),
    "bitsandbytes": Neighbour(bitsandbytes, ("sd3", "flux")),
    "GGUF": Neighbour(
        classes=("flux",), after="it is a way to load the model", test="test_gguf::test_a_pipeline_of_a_gguf_file"
    ),
    "device_map, one device": Neighbour(device_map, MANY),
    "device_map, with disk": Neighbour(
        classes=("flux",),
        before="load without it, attach first, then enable offload",
        test="test_beside::test_weights_that_device_map_leaves_on_disk_come_after_the_session",
    ),
    "model offload": Neighbour(
        lambda model: accelerate.cpu_offload_with_hook(model, execution_device="cpu"), before=FIRST_ATTACH
    ),
    "sequential offload": Neighbour(
        lambda model: accelerate.cpu_offload(model, execution_device="cpu"), before=FIRST_ATTACH
    ),
    "group offload": Neighbour(group_offload, MANY),
    "set_attention_backend": Neighbour(lambda model: model.set_attention_backend("_native_math"), DISPATCHED),
    "FirstBlockCache": Neighbour(
        lambda model: model.enable_cache(FirstBlockCacheConfig(threshold=0.05)), CACHES, before=FIRST_ATTACH
    ),
    "MagCache": Neighbour(mag_cache, CACHES, before=FIRST_ATTACH),
    "TextKVCache": Neighbour(lambda model: model.enable_cache(TextKVCacheConfig()), CACHES),
    "cache-dit": Neighbour(
        classes=("sd3", "flux", "pixart"),
        after="it runs the model past the session: enable it first",
        test="test_cache_dit::test_a_cache_that_never_hits_leaves_shiva_as_it_is_and_one_that_hits_skips_blocks",
    ),
    "compile_repeated_blocks": Neighbour(
        classes=("flux", "qwen", "wan"), test="test_beside::test_blocks_compiled_one_by_one_share_two_graphs"
    ),
    "session.compile()": Neighbour(
        classes=tuple(name for name in TINY if name not in (*NO_WHOLE_GRAPH, *ALIKE, "dit")),
        test="test_patterns::test_a_step_is_one_graph_where_the_dense_model_is",
    ),
    "gradient checkpointing": Neighbour(
        classes=("sd3",),
        test="test_methods::test_and_so_it_does_in_inference_whose_blocks_find_their_first_choice_again",
    ),
    "IP-Adapter": Neighbour(classes=("flux",), test="test_beside::test_an_image_prompt_adapter_of_flux"),
    "ControlNet": Neighbour(
        classes=("sd3", "flux", "qwen"), test="test_beside::test_a_controlnet_adds_to_all_tokens_between_blocks"
    ),
    "context parallelism": Neighbour(
        classes=("flux", "qwen", "wan"),
        before="it splits the tokens over processes before blocks see them",
        after="it splits the tokens over processes before blocks see them",
        test="test_beside::test_context_parallelism_is_refused_by_name",
    ),
}
