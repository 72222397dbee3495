"""One file a method, or a kin of small ones: its options, its presets, its state, and what it does at each site."""

from shiva.methods.coredit import CoReDiT
from shiva.methods.diffcr import DiffCR
from shiva.methods.dydit import DyDiT
from shiva.methods.gated import LapSum, NeuralSort, SoftTopK
from shiva.methods.ibtm import IBTM
from shiva.methods.jit import JiT
from shiva.methods.pruner import Pruner
from shiva.methods.refresh import RAS, Refresh
from shiva.methods.rules import Dense, DiffSparse, Lattice, Ranked, Sweep
from shiva.methods.sdtm import SDTM
from shiva.methods.shiva import Shiva, ShivaMethod
from shiva.methods.sparsedit import SparseDiT
from shiva.methods.toca import ToCa
from shiva.methods.toma import ToMA
from shiva.methods.tomesd import ToFu, ToMeSD
