from shiva.backbones import image_table, uncommon_table, video_table
from shiva.backbones.base import Backbone, Site, backbone_of, register
