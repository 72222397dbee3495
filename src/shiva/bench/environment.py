"""What a figure was measured on; it goes beside every result."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "torchao", "shiva-dit")


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Device, threads and versions of this process."""
    cuda = torch.cuda.is_available()
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "malloc": os.environ.get("GLIBC_TUNABLES"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "packages": {name: found for name in PACKAGES if (found := version(name))},
    }
