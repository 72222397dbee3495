"""Metrics of our own tables: the embedded model's towers, and a small public network in Inception's place."""

from reproduce.metrics import networks, text  # noqa: F401  (each registers its metrics)
