from shiva.backbones import dit, image_table, pixart, sd3, uncommon_table, video_table
from shiva.backbones.base import Backbone, Call, Signals, Site, backbone_of, register

__all__ = [
    "Backbone",
    "Call",
    "Signals",
    "Site",
    "backbone_of",
    "dit",
    "image_table",
    "pixart",
    "register",
    "sd3",
    "uncommon_table",
    "video_table",
]
