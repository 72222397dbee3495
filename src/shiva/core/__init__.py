"""The seam between methods and backbones."""

from shiva.core.context import Exploration, Recording, StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, Trainable, unify_guidance
from shiva.core.reduction import Reduction, Streams, select

__all__ = [
    "BackboneSpec",
    "Exploration",
    "Layout",
    "Method",
    "MethodConfig",
    "Place",
    "Recording",
    "Reduction",
    "StepContext",
    "Streams",
    "Trainable",
    "select",
    "unify_guidance",
]
