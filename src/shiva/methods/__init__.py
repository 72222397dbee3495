from shiva.methods.shiva import Shiva, ShivaMethod

__all__ = ["Shiva", "ShivaMethod"]
