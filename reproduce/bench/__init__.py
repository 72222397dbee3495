"""Benchmarks of the paper's tables, at its shapes and beside its figures; `shiva bench` runs them in a checkout."""
