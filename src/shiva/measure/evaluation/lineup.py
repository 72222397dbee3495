"""Who takes part in an evaluation: contenders by name, from a YAML file or from methods' names."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiva.checkpoint import CONFIG_FILE, ShivaCheckpoint
from shiva.core import options
from shiva.core.method import MethodConfig
from shiva.core.needs import install
from shiva.measure.evaluation.int8 import quantized
from shiva.modules.schedule import RatioSchedule
from shiva.session import Session, attach

DENSE = "dense"


@dataclass(frozen=True)
class Contender:
    """A method with its options, or a trained checkpoint; neither is the dense pipeline."""

    method: str | None = None
    """Name of a method, such as ToMeSD."""
    preset: str = "paper"
    """The method's named set of values."""
    checkpoint: str | None = None
    """Folder or hub id of a trained method; a folder that holds one checkpoint in a subfolder will do."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method, over its preset or over those it was trained with."""
    flat: bool = False
    """Shiva: one ratio everywhere instead of the learned table."""
    int8: int = 0
    """Quantize the feed-forward layers of so many blocks, counted from the last, to INT8."""
    train: str = ""
    """How to make the checkpoint, for whoever has none."""
    paper: str = ""
    """The row of the paper's main table it corresponds to."""

    def __post_init__(self) -> None:
        if self.method is not None and self.checkpoint is not None:
            raise ValueError(f"method {self.method} and checkpoint {self.checkpoint} exclude each other; give one")
        if self.method is not None and self.method not in MethodConfig.known:
            raise ValueError(options.unknown_key(self.method, MethodConfig.known, "shiva"))

    @property
    def is_dense(self) -> bool:
        return self.method is None and self.checkpoint is None

    def source(self) -> MethodConfig | ShivaCheckpoint:
        """What to attach; an error says which checkpoint is missing, and how to train it."""
        if self.method is not None:
            return MethodConfig.known[self.method].preset(self.preset, **listed(self.options))
        assert self.checkpoint is not None
        try:
            return ShivaCheckpoint.from_pretrained(self.folder())
        except OSError as error:
            how = f"; train it: {self.train}" if self.train else ""
            raise FileNotFoundError(f"{self.checkpoint} is not here{how}") from error

    def folder(self) -> str:
        """The checkpoint's folder: the named one, or the only one inside it."""
        assert self.checkpoint is not None
        root = Path(self.checkpoint)
        if not root.is_dir() or (root / CONFIG_FILE).is_file():
            return self.checkpoint
        inside = sorted(path.parent for path in root.glob(f"*/{CONFIG_FILE}"))
        if len(inside) > 1:
            raise ValueError(f"{root} holds {', '.join(path.name for path in inside)}; name one of them")
        return str(inside[0]) if inside else self.checkpoint

    def config(self) -> dict[str, Any]:
        """All that decides its images, resolved; two equal ones make equal images."""
        if self.is_dense:
            return {"method": None, "int8": self.int8}
        source = self.source()
        config = source if isinstance(source, MethodConfig) else source.method_config
        if isinstance(source, ShivaCheckpoint):
            config = config.changed(listed(self.options))
        return {
            "method": type(config).__name__,
            "options": plain(dataclasses.asdict(config)),  # type: ignore[call-overload]
            "weights": None if isinstance(source, MethodConfig) else fingerprint(Path(self.folder())),
            "flat": self.flat,
            "int8": self.int8,
        }

    @contextlib.contextmanager
    def attached(self, pipe: Any) -> Iterator[Session | None]:
        """The pipeline under this contender; as it was before, afterwards."""
        if self.is_dense:
            with quantized(pipe.transformer, self.int8):
                yield None
            return
        source = self.source()
        overrides = listed(self.options) if isinstance(source, ShivaCheckpoint) else {}
        with attach(pipe, source, **overrides) as session, quantized(session.transformer, self.int8):
            if self.flat:
                flatten(session)
            yield session


def flatten(session: Session) -> None:
    """Replace a learned table by one ratio everywhere, of the same mean."""
    method: Any = session.method
    if not isinstance(getattr(method, "schedule", None), RatioSchedule):
        raise ValueError(f"flat: true needs a method with a table of ratios; {type(method).__name__} has none")
    schedule: RatioSchedule = method.schedule
    budget = method.config.budget if method.config.budget is not None else schedule.mean_keep
    method.set_schedule(RatioSchedule.flat(budget, schedule.layers, sorted(schedule.dense)))


def listed(values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML has lists where configs have tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def plain(value: Any) -> Any:
    """A config as JSON would give it back."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def fingerprint(folder: Path) -> str | None:
    """Of a model's or checkpoint's folder: names, sizes, and both ends of weights and configs; None for a hub id."""
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json")):
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(1 << 18)
            file.seek(max(0, size - (1 << 18)))
            digest.update(f"{path.relative_to(folder)} {size} ".encode() + head + file.read())
    return digest.hexdigest()[:16]


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "contender"


@dataclass(frozen=True)
class Lineup:
    """A file of contenders: who they are, which protocol shows whom, and the settings they were meant for."""

    contenders: dict[str, Contender]
    casts: dict[str, list[str]] = field(default_factory=dict)
    """Protocol to contenders' names; the first is what the others are held against."""
    model: str | None = None
    prompts: str | None = None
    split: str = "train"
    steps: int = 28
    guidance: float = 4.5
    without: list[str] = field(default_factory=list)
    """Components that the pipeline is loaded without."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call."""
    sizes: list[list[int]] = field(default_factory=list)
    """Height and width of the other resolutions."""

    def __post_init__(self) -> None:
        slugs: dict[str, str] = {}
        for name in self.contenders:
            other = slugs.setdefault(slug(name), name)
            if other != name:
                raise ValueError(f"contenders {other!r} and {name!r} would share the folder {slug(name)}; rename one")
        for protocol, names in self.casts.items():
            for name in names:
                if name not in self.contenders:
                    raise ValueError(options.unknown_key(name, self.contenders, f"casts.{protocol}"))

    def cast(self, protocol: str) -> list[str]:
        """The contenders of a protocol; all of them where the file does not say."""
        return self.casts.get(protocol) or list(self.contenders)


def read_lineup(methods: str) -> Lineup:
    """A YAML file, or names such as `ToMeSD,ToMA:official`, to which dense is added."""
    if methods.endswith((".yaml", ".yml")):
        return _read_file(Path(methods))
    contenders = {DENSE: Contender()}
    for name in filter(None, methods.split(",")):
        if name == DENSE:
            continue
        method, _, preset = name.partition(":")
        contenders[name] = Contender(method=method, preset=preset or "paper")
    return Lineup(contenders)


def _read_file(path: Path) -> Lineup:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{path} needs pyyaml to be read: {install('metrics')}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not here; pass --methods a YAML file of contenders, or methods' names")
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or "contenders" not in content:
        raise ValueError(f"{path} has no `contenders`; see docs/evaluation.md")
    entries = {str(name): options.build(Contender, entry or {}) for name, entry in content.pop("contenders").items()}
    return options.build(Lineup, {**content, "contenders": entries})
