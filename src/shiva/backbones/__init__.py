from shiva.backbones import dit, flux, pixart, sd3
from shiva.backbones.base import Backbone, Call, Signals, Site, Surroundings, backbone_of, register

__all__ = [
    "Backbone",
    "Call",
    "Signals",
    "Site",
    "Surroundings",
    "backbone_of",
    "dit",
    "flux",
    "pixart",
    "register",
    "sd3",
]
