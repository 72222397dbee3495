"""One file a method: its options, its presets, its state, and what it does at each site."""

from shiva.methods.coredit import CoReDiT
from shiva.methods.dense import Dense
from shiva.methods.diffcr import DiffCR
from shiva.methods.diffsparse import DiffSparse
from shiva.methods.dydit import DyDiT
from shiva.methods.ibtm import IBTM
from shiva.methods.jit import JiT
from shiva.methods.lapsum import LapSum
from shiva.methods.lattice import Lattice
from shiva.methods.neuralsort import NeuralSort
from shiva.methods.pruner import Pruner
from shiva.methods.ras import RAS
from shiva.methods.refresh import Refresh
from shiva.methods.sdtm import SDTM
from shiva.methods.shiva import Shiva, ShivaMethod
from shiva.methods.soft_topk import SoftTopK
from shiva.methods.sparsedit import SparseDiT
from shiva.methods.sweep import Ranked, Sweep
from shiva.methods.toca import ToCa
from shiva.methods.tofu import ToFu
from shiva.methods.toma import ToMA
from shiva.methods.tomesd import ToMeSD

__all__ = [
    "IBTM",
    "RAS",
    "SDTM",
    "CoReDiT",
    "Dense",
    "DiffCR",
    "DiffSparse",
    "DyDiT",
    "JiT",
    "LapSum",
    "Lattice",
    "NeuralSort",
    "Pruner",
    "Ranked",
    "Refresh",
    "Shiva",
    "ShivaMethod",
    "SoftTopK",
    "SparseDiT",
    "Sweep",
    "ToCa",
    "ToFu",
    "ToMA",
    "ToMeSD",
]
