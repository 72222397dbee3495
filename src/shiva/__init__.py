"""Shiva: faster Diffusion Transformers by learning which image tokens each block may skip."""

from shiva.backbones import Backbone
from shiva.backbones import register as register_backbone
from shiva.checkpoint import ShivaCheckpoint
from shiva.methods import Shiva
from shiva.session import Session, attach

__version__ = "0.1.0"

__all__ = ["Backbone", "Session", "Shiva", "ShivaCheckpoint", "__version__", "attach", "register_backbone"]
