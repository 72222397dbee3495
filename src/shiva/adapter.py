"""A checkpoint's adapter: folded into the weights, where it costs nothing, and taken out without a trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiva.core.needs import need
from shiva.core.options import Positive, Size, build
from shiva.files import compare

ADAPTER_NAME = "shiva"
SAVE = "save_pretrained"
SAMPLE = 4096
"""Numbers of a weight that are looked at to see whether it has changed; a LoRA changes nearly all."""


@dataclass(frozen=True)
class LoraOptions:
    """Arguments of PEFT's LoraConfig that a checkpoint may give; others change how weights are made or loaded."""

    r: Size
    target_modules: tuple[str, ...]
    lora_alpha: Positive = 8
    use_dora: bool = False


@dataclass(frozen=True)
class Folded:
    """A layer with the adapter in its weight, the weight from before, and a sample of the one it was given."""

    layer: nn.Linear
    original: Tensor
    given: Tensor

    def changed(self) -> bool:
        """Whether more than rounding was done to the weight since: moving, casting or unfusing a LoRA does no more."""
        weight = self.layer.weight.data
        if type(weight) is not Tensor or not weight.is_floating_point():
            return True
        now = sample(weight)
        coarsest = max(torch.finfo(t.dtype).eps for t in (now, self.given))
        given = self.given.double()
        return bool((now.double() - given).norm() > coarsest * given.norm())

    def restore(self) -> None:
        self.layer.weight.data = self.original.to(self.layer.weight.data)


class AttachedAdapter:
    """A PEFT adapter put into a transformer.

    Run live, DoRA adds products and norms to every layer. So it is folded into the weights, and the originals wait in
    main memory for `remove()`. Where weights are not plain numbers in reach (quantized), it stays live.
    """

    def __init__(self, transformer: nn.Module, config: Mapping[str, Any], weights: Mapping[str, Tensor]):
        self.transformer = transformer
        self._given = config, weights
        self._folded: list[Folded] = []
        self._own_save = vars(transformer).get(SAVE)
        options = build(LoraOptions, config, "the adapter's config")
        check_rank(options, weights)
        if keeps_copies(transformer):
            raise ValueError(
                "group offload with streams or to disk is on, and reloads weights without the checkpoint's adapter; "
                "load the pipeline again, attach first, then enable group offload"
            )
        if any(map(is_float8, transformer.parameters())):
            raise ValueError(
                "weights of 8 bits, as of layerwise casting, take no adapter; load the pipeline again in more bits, "
                "attach first, then call enable_layerwise_casting"
            )
        if options.use_dora and any(map(is_gguf, transformer.parameters())):
            raise ValueError(
                "the checkpoint's adapter is a DoRA, which takes norms of the weights, and PEFT takes none of a GGUF "
                "file's; call pipe.transformer.dequantize() first, which needs the memory of plain weights"
            )
        need("peft", "adapter")
        if any(layer.merged_adapters for layer in tuner_layers(transformer)):
            raise ValueError(
                "a LoRA is fused into the weights, which adding the checkpoint's adapter would undo; call "
                "pipe.unfuse_lora() first, or pipe.unload_lora_weights(), after which it stays in them"
            )
        try:
            with torch.random.fork_rng(devices=[]):  # PEFT draws weights before ours are loaded
                inject_adapter(transformer, options, weights)
            if all(map(can_fold, adapted_layers(transformer))):
                self._fold()
            if hasattr(transformer, SAVE):
                setattr(transformer, SAVE, self._saving(getattr(transformer, SAVE)))
        except BaseException:
            remove_adapter(transformer, ADAPTER_NAME)
            self.remove()
            raise

    def _fold(self) -> None:
        for adapted in adapted_layers(self.transformer):
            layer: nn.Linear = adapted.get_base_layer()
            original = layer.weight.data.cpu()
            adapted.merge(safe_merge=True, adapter_names=[ADAPTER_NAME])  # a new tensor: the original stays as it is
            self._folded.append(Folded(layer, original, sample(layer.weight.data)))
            adapted.merged_adapters.remove(ADAPTER_NAME)  # or a user's own adapter on the layer would fall silent
        remove_adapter(self.transformer, ADAPTER_NAME)

    def remove(self) -> None:
        """Give every layer the weights it had, bit for bit; refuse, with nothing changed, where that cannot last."""
        if not self._folded:
            if any(ADAPTER_NAME in layer.merged_adapters for layer in adapted_layers(self.transformer)):
                raise ValueError("the checkpoint's adapter was fused with others; call pipe.unfuse_lora() first")
            remove_adapter(self.transformer, ADAPTER_NAME)
        elif keeps_copies(self.transformer):
            raise ValueError(
                "group offload with streams or to disk holds the adapted weights and would bring them back; "
                "load the pipeline again, or detach before group offload is enabled"
            )
        elif any(folded.layer.weight.is_meta for folded in self._folded):
            raise ValueError(
                "CPU offload holds the adapted weights and would bring them back; "
                "call pipe.remove_all_hooks() first, and enable offload again after detach()"
            )
        elif any(folded.changed() for folded in self._folded):
            raise ValueError(
                "weights have changed since attach, as by a fused LoRA or by quantizing, which detach() would undo; "
                "call pipe.unfuse_lora() first, or fuse and quantize before attach"
            )
        for folded in self._folded:
            folded.restore()
        self._folded.clear()
        vars(self.transformer).pop(SAVE, None)
        if self._own_save is not None:
            vars(self.transformer)[SAVE] = self._own_save

    def again(self) -> AttachedAdapter:
        """The same adapter put in once more, after `remove()`."""
        return AttachedAdapter(self.transformer, *self._given)

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """The transformer's own `save_pretrained`, which pipelines call too, over the weights from before."""

        @functools.wraps(save)
        def save_original(*args: Any, **kwargs: Any) -> Any:
            if not self._folded or any(folded.layer.weight.is_meta or folded.changed() for folded in self._folded):
                raise ValueError(
                    "the checkpoint's adapter is in the weights and would be saved with them; detach() first, or save "
                    "the pipeline before attach"
                )
            adapted = [folded.layer.weight.data for folded in self._folded]
            try:
                for folded in self._folded:
                    folded.restore()
                return save(*args, **kwargs)
            finally:
                for folded, weight in zip(self._folded, adapted, strict=True):
                    folded.layer.weight.data = weight

        return save_original


def sample(weight: Tensor) -> Tensor:
    flat = weight.flatten()
    return flat[:: flat.numel() // SAMPLE | 1].cpu().clone()  # an odd stride: never one column alone


def is_float8(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.itemsize == 1


def is_gguf(weight: Tensor) -> bool:
    return type(weight).__name__ == "GGUFParameter"  # its module needs the gguf package


def keeps_copies(transformer: nn.Module) -> bool:
    """Whether group offload loads weights from copies of its own, past any change to the weights themselves."""
    for module in transformer.modules():
        hook = getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).get("group_offloading")
        if hook is not None and (hook.group.stream is not None or hook.group.offload_to_disk_path is not None):
            return True
    return False


def tuner_layers(transformer: nn.Module) -> list[Any]:
    """PEFT's layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


def adapted_layers(transformer: nn.Module) -> list[Any]:
    """PEFT's layers that hold the adapter."""
    return [layer for layer in tuner_layers(transformer) if ADAPTER_NAME in layer._get_available_adapters()]


@contextlib.contextmanager
def others_kept(transformer: nn.Module) -> Iterator[None]:
    """The user's own adapters act and train after this context as before it; PEFT makes a new one the only one."""
    active = {layer: layer.active_adapters for layer in tuner_layers(transformer)}
    trainable = {parameter for parameter in transformer.parameters() if parameter.requires_grad}
    try:
        yield
    finally:
        for layer, names in active.items():
            there = layer._get_available_adapters()
            layer.set_adapter([name for name in dict.fromkeys((*names, ADAPTER_NAME)) if name in there])
        for parameter in transformer.parameters():
            parameter.requires_grad_(parameter in trainable)


def can_fold(layer: Any) -> bool:
    base = layer.get_base_layer()
    if type(base) is not nn.Linear:
        return False
    weight = base.weight.data
    return type(weight) is Tensor and weight.is_floating_point() and not weight.is_meta


def check_rank(options: LoraOptions, weights: Mapping[str, Tensor]) -> None:
    """Refuse a rank that is not the file's before anything of its size is made."""
    ranks = {name: tensor.shape[0] for name, tensor in weights.items() if ".lora_A." in name and tensor.ndim}
    if not ranks:
        raise ValueError("the adapter's file holds no lora_A; save or download the checkpoint again")
    for name, rank in ranks.items():
        if rank != options.r:
            raise ValueError(f"the adapter's config has r={options.r}, but {name} is of rank {rank} (size mismatch)")


def inject_adapter(transformer: nn.Module, options: LoraOptions, weights: Mapping[str, Tensor]) -> None:
    """Add a PEFT adapter to any transformer, also those without diffusers' own adapter support."""
    peft = need("peft", "adapter")
    config = peft.LoraConfig(**{**vars(options), "target_modules": list(options.target_modules)})
    with others_kept(transformer):
        try:
            peft.inject_adapter_in_model(config, transformer, adapter_name=ADAPTER_NAME)
        except ValueError as error:
            raise ValueError(f"the adapter's target_modules do not fit this model: {error}") from error
        load_adapter(transformer, weights)


def load_adapter(transformer: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give an injected adapter its weights: all of them, and nothing else."""
    peft = need("peft", "adapter")
    compare("the adapter", weights, peft.get_peft_model_state_dict(transformer, adapter_name=ADAPTER_NAME))
    peft.set_peft_model_state_dict(transformer, dict(weights), adapter_name=ADAPTER_NAME)


def remove_adapter(transformer: nn.Module, name: str) -> None:
    """Take an adapter out; a layer without any other adapter becomes the plain layer it was."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    with others_kept(transformer):
        for path, module in list(transformer.named_modules()):
            if not isinstance(module, BaseTunerLayer):
                continue
            module.delete_adapter(name)
            if not module._get_available_adapters():
                parent, _, leaf = path.rpartition(".")
                setattr(transformer.get_submodule(parent), leaf, module.get_base_layer())
    known = getattr(transformer, "peft_config", None)
    if known is not None:
        known.pop(name, None)
        if not known:
            del transformer.peft_config
