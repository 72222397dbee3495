"""`shiva eval`: what is lost in quality and won in cost, for any pipeline and any set of methods.

One direction: candidates -> images (drawing) -> metrics, costs -> tables. A protocol says who goes through it.
"""
