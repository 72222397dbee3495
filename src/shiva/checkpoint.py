"""ShivaCheckpoint: a trained method and its DoRA adapter in one folder, on disk or on the hub."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
from safetensors.torch import save
from torch import Tensor, nn

import shiva.methods  # noqa: F401  (a checkpoint names its method: each registers its config)
from shiva.adapter import AttachedAdapter
from shiva.core import options
from shiva.core.method import BackboneSpec, MethodConfig, Trainable
from shiva.core.options import Ratio
from shiva.files import compare, finite, inside, read_json, read_tensors, to_json

FORMAT = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "shiva.safetensors"
TABLE = "table."
ADAPTER_DIR, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"


def write_atomically(path: Path, data: bytes) -> None:
    """Write all of a file or nothing: a temporary file beside it, synced, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a full disk does not say where
        raise


def write_image(path: Path, image: Any) -> None:
    """Write a PIL image as PNG, all of it or nothing."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    write_atomically(path, buffer.getvalue())


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a checkpoint was trained on and for."""

    backbone: BackboneSpec
    base_model: str | None = None
    """Hub id of the pipeline it was trained on, or a folder's name or relative path."""
    budget: Ratio | None = None
    """The mean keep it was trained to."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What `config.json` holds; keys beyond these are others' and are left alone."""

    format: int
    method: str
    options: dict[str, Any]
    backbone: dict[str, Any]
    base_model: str | None = None
    trained_budget: Ratio | None = None

    @classmethod
    def read(cls, path: Path) -> Description:
        found = read_json(path)
        missing = {"format", "method", "options", "backbone"} - found.keys()
        if missing:
            raise ValueError(f"{path} has no {sorted(missing)[0]!r}; is it a Shiva checkpoint?")
        if found["format"] != FORMAT:
            raise ValueError(f"{path} has format {found['format']!r}, this version reads {FORMAT}; update shiva-dit")
        if found["method"] not in list(MethodConfig.known):
            unknown = options.unknown_key(str(found["method"]), MethodConfig.known, "this version of shiva")
            raise ValueError(f"{path}: {unknown}")
        try:
            return options.build(cls, found, others=True)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def config(self) -> MethodConfig:
        return options.build(MethodConfig.known[self.method], self.options)

    def origin(self) -> Origin:
        return Origin(options.build(BackboneSpec, self.backbone, "backbone"), self.base_model, self.trained_budget)


CARD = """---
{{ card_data }}
---
# {{ method }} for `{{ base }}`

{{ what }}: for Shiva (`pip install -e {{ package }}` in a checkout){{ budget }}.

```python
import shiva

session = shiva.attach(pipe, "this folder or hub id")   # pipe: the diffusers pipeline of {{ base }}
print(session.summary())
```

Holds {{ parts }}; `config.json` has every option. Nothing in it is executable.
"""
"""README.md of a saved checkpoint."""
CARD_END = CARD.splitlines()[-1].partition(";")[2]
SKIPPING = "Which image tokens each block of the transformer may skip, and what those get"
WHOLE = "An adapter alone, trained with every image token computed"


class ShivaCheckpoint(
    ModelHubMixin, library_name="shiva-dit", tags=["diffusion", "token-pruning"], model_card_template=CARD
):
    """A trained method, ready for `shiva.attach(pipe, checkpoint)`: Shiva, or a trained baseline."""

    def __init__(
        self,
        method_config: MethodConfig,
        weights: dict[str, Tensor],
        tables: dict[str, Tensor],
        origin: Origin,
        adapter_config: dict[str, Any] | None = None,
        adapter_weights: dict[str, Tensor] | None = None,
    ):
        self.method_config = method_config
        self.weights = weights
        self.tables = tables
        self.origin = origin
        self.adapter_config = adapter_config
        self.adapter_weights = adapter_weights

    @classmethod
    def of(
        cls,
        method: Trainable,
        *,
        base_model: str | None = None,
        budget: float | None = None,
        adapter_config: Mapping[str, Any] | None = None,
        adapter_weights: Mapping[str, Tensor] | None = None,
    ) -> ShivaCheckpoint:
        """The checkpoint of a method as it is now; of a model at an absolute path it tells the folder's name alone."""
        if base_model is not None and Path(base_model).is_absolute():
            base_model = Path(base_model).name
        weights = {name: t.detach().cpu().contiguous() for name, t in method.state_dict().items()}
        return cls(
            method.config,
            weights,
            method.tables(),
            Origin(method.spec, base_model, budget),
            None if adapter_config is None else dict(adapter_config),
            None if adapter_weights is None else dict(adapter_weights),
        )

    # -- files ---------------------------------------------------------------------------------------

    def _save_pretrained(self, save_directory: Path) -> None:
        folder = Path(save_directory)
        remove_card(folder)
        tables = {TABLE + name: tensor for name, tensor in self.tables.items()}
        write_atomically(folder / WEIGHTS_FILE, save({**self.weights, **tables}))
        if self.adapter_config is not None and self.adapter_weights is not None:
            adapter = folder / ADAPTER_DIR
            write_atomically(adapter / ADAPTER_WEIGHTS, save(self.adapter_weights))
            write_atomically(adapter / "adapter_config.json", to_json(self.adapter_config))
        elif (folder / ADAPTER_DIR).is_dir():  # an earlier checkpoint's, which would be read as this one's
            shutil.rmtree(folder / ADAPTER_DIR)
        description = {
            "format": FORMAT,
            "method": type(self.method_config).__name__,
            "options": dataclasses.asdict(self.method_config),  # type: ignore[call-overload]
            "backbone": dataclasses.asdict(self.origin.backbone),
            "base_model": self.origin.base_model,
            "trained_budget": self.origin.budget,
        }
        write_atomically(folder / CONFIG_FILE, to_json(description))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """What it is for and how to attach it, filled into `CARD`."""
        parts = {
            "the method's weights": self.weights,
            "a ratio table": self.tables,
            "an adapter": self.adapter_weights,
        }
        budget, skips = self.origin.budget, bool(self.weights or self.tables)
        return super().generate_model_card(
            *args,
            method=type(self.method_config).__name__,
            what=SKIPPING if skips else WHOLE,
            base=self.origin.base_model or "an unnamed pipeline",
            budget="" if budget is None else f" for a mean keep of {budget:g}; another one is `budget=` of `attach`",
            package='".[adapter]"' if self.adapter_weights else ".",
            parts=", ".join(name for name, held in parts.items() if held) or "options only",
            **kwargs,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> ShivaCheckpoint:
        """Load from a folder, or from the hub by its `owner/name`; `kwargs` (revision, token, ...) are the hub's.

        The mixin's own would read `config.json` first, and as something else.
        """
        folder = Path(pretrained_model_name_or_path)
        if folder.is_dir():
            return cls.read(folder)
        if not may_be_hub_id(str(folder)):
            raise FileNotFoundError(f"no checkpoint folder at {folder}; check the path, or pass a hub id (owner/name)")
        try:
            found = snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"], **kwargs)
        except (OSError, ValueError) as error:  # the hub's own: not there, not to be seen, not reached
            raise FileNotFoundError(
                f"{folder} is no folder here, and the hub does not give it ({' '.join(str(error).split())[:200]}); "
                "check the name, the network, or the token"
            ) from error
        return cls.read(Path(found))

    @classmethod
    def read(cls, folder: Path) -> ShivaCheckpoint:
        """Read a checkpoint folder."""
        path = inside(folder, CONFIG_FILE)
        description = Description.read(path)
        try:
            config, origin = description.config(), description.origin()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        tensors = read_tensors(inside(folder, WEIGHTS_FILE))
        tables = {name.removeprefix(TABLE): t for name, t in tensors.items() if name.startswith(TABLE)}
        weights = {name: t for name, t in tensors.items() if not name.startswith(TABLE)}
        finite(folder / WEIGHTS_FILE, weights)
        if not (folder / ADAPTER_DIR).is_dir():
            return cls(config, weights, tables, origin)
        about = read_json(inside(folder, f"{ADAPTER_DIR}/adapter_config.json"))
        adapter = inside(folder, f"{ADAPTER_DIR}/{ADAPTER_WEIGHTS}")
        return cls(config, weights, tables, origin, about, finite(adapter, read_tensors(adapter)))

    # -- use -----------------------------------------------------------------------------------------

    def check(self, spec: BackboneSpec) -> None:
        """Refuse a pipeline the checkpoint was not trained for, naming what differs."""
        mine = self.origin.backbone
        if mine.name != spec.name:
            raise ValueError(f"this checkpoint is for {mine.name}; the pipeline has a {spec.name}")
        if (mine.layers, mine.width) != (spec.layers, spec.width):
            raise ValueError(
                f"this checkpoint is for {mine.layers} layers of width {mine.width}; "
                f"the pipeline has {spec.layers} of {spec.width}"
            )
        if mine.variant and mine.variant != spec.variant:
            raise ValueError(
                f"this checkpoint is for a {mine.name} of {mine.variant}; the pipeline's has {spec.variant}"
            )
        if mine != dataclasses.replace(spec, variant=mine.variant):
            raise ValueError(f"this checkpoint is for {mine}; the pipeline has {spec}")

    def method(self, **overrides: Any) -> Trainable:
        """The trained method, with some of its options changed (budget, flops, bucket, dense, ...)."""
        fixed = self.method_config.fixed & overrides.keys()
        if fixed:
            knob = self.method_config.knob
            instead = f", or set {knob}, which needs no training" if knob else ""
            raise ValueError(f"{sorted(fixed)[0]} is fixed by training; train again to change it{instead}")
        config = self.method_config.changed(overrides)
        span, dense = getattr(config, "span", 1), getattr(self.method_config, "dense", ())
        given = overrides.get("dense")
        if span > 1 and given is not None and tuple(given) != dense:
            raise ValueError(
                f"dense={given} would begin other spans of {span} layers than those that were fitted or trained; keep "
                f"dense={dense}, or make the checkpoint again with span=1"
            )
        with torch.device("meta"):
            expected = self.method_config.build(self.origin.backbone)  # the file is held to the options it came with
        if not isinstance(expected, Trainable):
            raise ValueError(f"{CONFIG_FILE} names {type(config).__name__}, which is never trained; attach it by name")
        compare(WEIGHTS_FILE, self.weights, expected.state_dict())
        compare(f"the table in {WEIGHTS_FILE}", self.tables, expected.tables(), shapes=False)
        method = config.build(self.origin.backbone)
        assert isinstance(method, Trainable)
        method.load_state_dict(self.weights)
        method.load_tables(self.tables)
        return method

    def add_adapter(self, transformer: nn.Module) -> AttachedAdapter | None:
        """Put the trained adapter into the transformer, if there is one."""
        if self.adapter_config is None or self.adapter_weights is None:
            return None
        return AttachedAdapter(transformer, self.adapter_config, self.adapter_weights)


def remove_card(folder: Path) -> None:
    """Take out the card of an earlier checkpoint, which would be kept; a README of the user's own stays."""
    card = folder / "README.md"
    if card.is_file() and card.read_text("utf-8").rstrip().endswith(CARD_END):
        card.unlink()


def may_be_hub_id(name: str) -> bool:
    """Whether a name is `owner/name` with no such folder here: where there is a `runs`, `runs/x` is a path."""
    return name.count("/") == 1 and name[0] not in "./~" and not Path(name.partition("/")[0]).is_dir()
