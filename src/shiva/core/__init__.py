"""The seam between methods and backbones."""

from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, Trainable
from shiva.core.reduction import Reduction, select

__all__ = [
    "BackboneSpec",
    "Layout",
    "Method",
    "MethodConfig",
    "Place",
    "Reduction",
    "StepContext",
    "Trainable",
    "select",
]
