"""Shiva: faster Diffusion Transformers by learning which image tokens each block may skip."""

from shiva.backbones import Backbone
from shiva.backbones import register as register_backbone
from shiva.checkpoint import ShivaCheckpoint
from shiva.methods import (
    IBTM,
    SDTM,
    Dense,
    DiffCR,
    DyDiT,
    LapSum,
    NeuralSort,
    Shiva,
    SoftTopK,
    SparseDiT,
    ToFu,
    ToMA,
    ToMeSD,
)
from shiva.modules.schedule import RatioSchedule
from shiva.session import Session, attach

__version__ = "0.1.0"

__all__ = [
    "IBTM",
    "SDTM",
    "Backbone",
    "Dense",
    "DiffCR",
    "DyDiT",
    "LapSum",
    "NeuralSort",
    "RatioSchedule",
    "Session",
    "Shiva",
    "ShivaCheckpoint",
    "SoftTopK",
    "SparseDiT",
    "ToFu",
    "ToMA",
    "ToMeSD",
    "__version__",
    "attach",
    "register_backbone",
]
