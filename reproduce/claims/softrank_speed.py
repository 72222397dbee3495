"""How long soft_rank and its gradient take: method x N, median milliseconds of one thread.

    OMP_NUM_THREADS=1 python reproduce/claims/softrank_speed.py

Prints a table and writes outputs/softrank_speed.json. The clock is the thread's own processor time, which on an
idle machine is the wall time; other load still shows through shared caches, hence the load average in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shiva.bench.table import cpu_name
from shiva.checkpoint import write_atomically
from shiva.ops.softrank import choose, soft_rank

METHODS = ("direct", "cells", "soe", "auto")
TOKENS = (64, 128, 256, 512, 1024, 4096, 16384, 65536)
DIRECT_UP_TO = 4096
BATCH, TAU = 2, 0.05


def time_ms(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and minimum."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return 1e3 * statistics.median(times), 1e3 * min(times)


def measure(method: str, n: int, repeats: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(BATCH, n, generator=generator).requires_grad_()
    g = torch.randn(BATCH, n, generator=generator)
    r = soft_rank(s, TAU, method)  # type: ignore[arg-type]
    forward = time_ms(lambda: soft_rank(s, TAU, method), repeats)  # type: ignore[arg-type]
    vjp = time_ms(lambda: torch.autograd.grad(r, s, g, retain_graph=True), repeats)
    return {
        "method": method,
        "tokens": n,
        "ran": choose(s.detach(), torch.tensor(TAU)) if method == "auto" else method,
        "forward_ms": round(forward[0], 3),
        "vjp_ms": round(vjp[0], 3),
        "forward_min_ms": round(forward[1], 3),
        "vjp_min_ms": round(vjp[1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--output", type=Path, default=Path("outputs/softrank_speed.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)

    cases = [(m, n) for n in TOKENS for m in METHODS if m != "direct" or n <= DIRECT_UP_TO]
    rows = [measure(m, n, options.repeats if n <= 1024 or m != "direct" else 5) for m, n in track(cases)]

    environment = f"{cpu_name()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}"
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    setting = f"B={BATCH}, tau={TAU}, normal float32 scores, median thread time of {options.repeats} runs"
    table = Table(title="soft_rank, forward / vjp in ms", caption=f"{environment}\n{setting}\n{load}")
    for column in ("N", *METHODS):
        table.add_column(column, justify="right")
    by_case = {(row["method"], row["tokens"]): row for row in rows}
    for n in TOKENS:
        cells = [by_case.get((m, n)) for m in METHODS]
        table.add_row(str(n), *(f"{c['forward_ms']:.2f} / {c['vjp_ms']:.2f}" if c else "" for c in cells))
    Console().print(table)

    report = {"environment": environment, "setting": setting, "load": load, "rows": rows}
    write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
