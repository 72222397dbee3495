"""What a session did in its current run, for people and for programs."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from shiva.core.cost import ZERO, Flops, SiteCost


@dataclass(frozen=True)
class StepRecord:
    """One transformer call: how many of its tokens each site ran on."""

    timestep: float
    tokens: int
    kept: dict[str, int]
    skipped: tuple[str, ...] = ()
    """Blocks that were not called, because a cache over them answered."""


def total(flops: Iterable[Flops]) -> Flops:
    return sum(flops, ZERO)


@dataclass(frozen=True)
class Summary:
    """Layers, steps, totals and overhead of one sampling run; `str()` draws it, `to_dict()` is for programs."""

    method: str
    places: list[tuple[str, str, int]]
    """(name, kind, layer) of each site that is reduced, and of every block."""
    steps: list[StepRecord]
    costs: dict[str, SiteCost]
    dense: Flops
    """FLOPs of one dense call."""
    seconds: dict[str, float]
    cached_bytes: int = 0
    """Memory of what the method carries from step to step."""

    def _saved(self, step: StepRecord) -> Flops:
        """FLOPs a call did not spend; a block that is reduced inside is priced at its inner sites."""
        reduced = (
            self.costs[name](step.tokens) - self.costs[name](step.kept[name])
            for name, _, _ in self.places
            if name in step.kept
        )
        return total(reduced) + total(self.costs[name](step.tokens) for name in step.skipped)

    def step_flops(self) -> list[Flops]:
        return [self.dense - self._saved(step) for step in self.steps]

    @property
    def flops(self) -> Flops:
        return total(self.step_flops())

    @property
    def flops_share(self) -> float:
        """True FLOPs of the run as a share of the dense run's; the method's own are not counted."""
        return self.flops.true / (self.dense.true * len(self.steps)) if self.steps else 1.0

    def layers(self) -> list[dict[str, Any]]:
        """Mean kept tokens, keep ratio and FLOPs of each reduced site over the run."""
        rows = []
        for name, kind, layer in self.places:
            seen = [(step.kept[name], step.tokens) for step in self.steps if name in step.kept]
            if not seen:
                continue
            kept = sum(k for k, _ in seen) / len(seen)
            tokens = sum(n for _, n in seen) / len(seen)
            rows.append(
                {
                    "layer": layer,
                    "site": name,
                    "kind": kind,
                    "kept": kept,
                    "tokens": tokens,
                    "keep": kept / tokens,
                    "tflops": sum(self.costs[name](k).true for k, _ in seen) / len(seen) / 1e12,
                }
            )
        return rows

    @property
    def keep(self) -> float:
        """Mean share of tokens kept over the sites and steps that were reduced at some step."""
        shares = [row["keep"] for row in self.layers()]
        reduced = [share for share in shares if share < 1.0]
        return sum(reduced) / len(reduced) if reduced else 1.0

    def to_dict(self) -> dict[str, Any]:
        per_step = self.step_flops()
        return {
            "method": self.method,
            "keep": self.keep,
            "flops_share": self.flops_share,
            "tflops": self.flops.true / 1e12,
            "tflops_paper_convention": self.flops.paper / 1e12,
            "dense_tflops_per_step": self.dense.true / 1e12,
            "layers": self.layers(),
            "steps": [
                {"timestep": step.timestep, "kept": step.kept, "tflops": flops.true / 1e12}
                for step, flops in zip(self.steps, per_step, strict=True)
            ],
            "seconds": self.seconds,
            "cached_bytes": self.cached_bytes,
        }

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.method}: nothing has run yet"
        table = Table(title=f"{self.method}, {len(self.steps)} calls of {self.steps[0].tokens} image tokens")
        for heading in ("layer", "site", "kept", "keep", "GFLOPs a call"):
            table.add_column(heading, justify="left" if heading == "site" else "right")
        for row in self.layers():
            table.add_row(
                str(row["layer"]),
                row["site"],
                f"{row['kept']:.0f}",
                f"{row['keep']:.3f}",
                f"{row['tflops'] * 1e3:.3g}",
            )
        table.add_section()
        table.add_row("", "whole run", "", f"{self.keep:.3f}", f"{self.flops_share:.1%} of dense")
        text = io.StringIO()
        console = Console(file=text, width=100)
        console.print(table)
        if self.seconds:
            spent = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in self.seconds.items())
            console.print(f"milliseconds in the reduction path: {spent}")
        if self.cached_bytes:
            console.print(f"carried from step to step: {self.cached_bytes / 2**20:.1f} MiB")
        return text.getvalue()
