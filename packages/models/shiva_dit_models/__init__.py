"""The small models that Shiva's demo and server show: a folder of weights each, beside this file.

`shiva demo` and `shiva serve` find them here where there is no checkout of Shiva.
"""
