from shiva.core.context import StepContext, Tape
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, unify_guidance
from shiva.core.reduction import Reduction, Streams, select

__all__ = [
    "BackboneSpec",
    "Method",
    "MethodConfig",
    "Place",
    "Reduction",
    "StepContext",
    "Streams",
    "Tape",
    "select",
    "unify_guidance",
]
