"""The operators that relax top-k: time forward and backward, and bytes kept for the backward pass, by N."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reproduce.bench.pages import seconds
from shiva.bench.entries import Timing, timed
from shiva.bench.table import Table
from shiva.core.reduction import flat_rows, gather
from shiva.ops.relaxed import lapsum_topk, neuralsort_topk, relaxed_permutation, soft_topk
from shiva.ops.softrank import soft_rank
from shiva.ops.topk import hard_topk, straight_through

TAU_RANK, TAU_SEL, TAU_NEURALSORT, KEEP = 0.2, 0.1, 0.05, 0.6
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


def inclusion(scores: Tensor, k: Tensor, method: str) -> Tensor:
    ranks = soft_rank(scores, TAU_RANK, method)  # type: ignore[arg-type]
    return torch.sigmoid((k - ranks) / (TAU_SEL * scores.shape[-1]))


def hard_tokens(gates: Tensor, scores: Tensor, x: Tensor, k: int) -> Tensor:
    """The k selected tokens (B, k, D), gated so that the gradient reaches the scores."""
    rows = flat_rows(hard_topk(scores.detach(), k), x.shape[1])
    return gather(x, rows) * (1 + gather(straight_through(gates), rows))


@dataclass(frozen=True)
class Operator:
    """Scores (B, N) to what a loss can be put on: gates (B, N), or for the soft permutation its rows."""

    gates: Callable[[Tensor, Tensor], Tensor]
    """(scores (B, N), k as a 0-d tensor) -> gates."""
    matrices: float
    """N x N float32 matrices alive at the peak, from which it is decided beforehand whether a length fits."""
    mixes: bool = False
    """Tokens are mixed by the permutation's rows instead of picked."""
    learns_k: bool = False

    def tokens(self, scores: Tensor, k: Tensor, x: Tensor) -> Tensor:
        gates = self.gates(scores, k)
        return gates @ x if self.mixes else hard_tokens(gates, scores, x, int(k))


OPERATORS: dict[str, Operator] = {
    "Shiva": Operator(lambda s, k: inclusion(s, k, "auto"), 0, learns_k=True),
    "Shiva, direct N²": Operator(lambda s, k: inclusion(s, k, "direct"), 4, learns_k=True),
    "NeuralSort (soft)": Operator(
        lambda s, k: relaxed_permutation(s, TAU_NEURALSORT * s.shape[-1], int(k)), 5, mixes=True
    ),
    "NeuralSort (STE)": Operator(lambda s, k: neuralsort_topk(s, int(k), TAU_NEURALSORT), 5),
    "SOFT top-k": Operator(lambda s, k: soft_topk(s, k), 0),
    "LapSum": Operator(lambda s, k: lapsum_topk(s, k, 0.1), 0, learns_k=True),
}

PAPER = {
    ("Shiva", 1024): (0.133, 0.825, 20.2),
    ("Shiva", 2048): (0.133, 0.817, 40.3),
    ("Shiva", 4096): (0.253, 3.341, 80.6),
    ("NeuralSort (soft)", 1024): (0.442, 0.856, 54.6),
    ("NeuralSort (soft)", 2048): (1.624, 3.117, 167.9),
    ("NeuralSort (soft)", 4096): (9.283, 17.066, 570.6),
    ("NeuralSort (STE)", 1024): (0.476, 1.137, 58.8),
    ("NeuralSort (STE)", 2048): (1.232, 2.265, 172.9),
    ("NeuralSort (STE)", 4096): (7.622, 15.135, 580.8),
    ("SOFT top-k", 1024): (4.119, 11.277, 28.6),
    ("SOFT top-k", 2048): (4.006, 10.951, 57.2),
    ("SOFT top-k", 4096): (4.006, 11.427, 114.4),
}
"""Milliseconds forward, backward, and MB kept, with tokens of width 1536 in fp16 (table topk_measured)."""


@dataclass(frozen=True)
class SelectorResult:
    """One operator at one length; seconds are NaN where it was left out."""

    name: str
    tokens: int
    forward: float = float("nan")
    backward: float = float("nan")
    saved: int = 0
    """Bytes kept for the backward pass by the operator alone."""
    forward_on_tokens: float = float("nan")
    backward_on_tokens: float = float("nan")
    saved_on_tokens: int = 0
    """The same with the tokens it picks or mixes, as the paper counts it."""
    skipped: str = ""


def saved_bytes(call: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `call`, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = call()
    del held
    return sum(storages.values())


def passes(call: Callable[[], Tensor], inputs: list[Tensor], rounds: int) -> tuple[float, float]:
    """Median seconds forward and backward, after a round that warms up."""
    forward, backward = Timing(), Timing()
    for round_ in range(1 + rounds):
        out: list[Tensor] = []
        ahead = timed(lambda out=out: out.append(call()))  # type: ignore[misc]
        grad = torch.ones_like(out[0]).mul_(
            torch.linspace(-1, 1, out[0].shape[1]).view(1, -1, *[1] * (out[0].ndim - 2))
        )
        back = timed(lambda out=out, grad=grad: torch.autograd.grad(out[0], inputs, grad, allow_unused=True))  # type: ignore[misc]
        if round_:
            forward.seconds.append(ahead)
            backward.seconds.append(back)
    return forward.median, backward.median


def available_bytes() -> float:
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8e9


def measure_selector(
    lengths: tuple[int, ...] = LENGTHS,
    width: int = 1536,
    batch: int = 2,
    rounds: int = 5,
    names: tuple[str, ...] = tuple(OPERATORS),
    limit: float | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[SelectorResult]:
    """Every operator at every length that fits `limit` bytes (two thirds of free memory otherwise)."""
    limit = available_bytes() * 2 / 3 if limit is None else limit
    results = []
    for tokens in lengths:
        generator = torch.Generator().manual_seed(tokens)
        scores = torch.randn(batch, tokens, generator=generator).requires_grad_()
        k = torch.tensor(float(int(KEEP * tokens)), requires_grad=True)
        for name in names:
            operator = OPERATORS[name]
            needed = 4.0 * batch * (operator.matrices * tokens**2 + 8 * tokens * width)
            if needed > limit:
                reason = f"needs about {needed / 2**30:.0f} GiB of {limit / 2**30:.0f}"
                results.append(SelectorResult(name, tokens, skipped=reason))
            else:
                results.append(_measure_one(name, operator, scores, k, width, rounds))
            progress(f"{name} at {tokens}")
    return results


def _measure_one(name: str, operator: Operator, scores: Tensor, k: Tensor, width: int, rounds: int) -> SelectorResult:
    batch, tokens = scores.shape
    inputs = [scores, k] if operator.learns_k else [scores]

    def alone() -> Tensor:
        return operator.gates(scores, k if operator.learns_k else k.detach())

    forward, backward = passes(alone, inputs, rounds)
    saved = saved_bytes(alone)
    x = torch.randn(batch, tokens, width).requires_grad_()

    def on_tokens() -> Tensor:
        return operator.tokens(scores, k if operator.learns_k else k.detach(), x)

    forward_x, backward_x = passes(on_tokens, [*inputs, x], max(1, rounds // 2))
    return SelectorResult(name, tokens, forward, backward, saved, forward_x, backward_x, saved_bytes(on_tokens))


def selector_table(results: list[SelectorResult], width: int, batch: int) -> Table:
    ours = {row.tokens: row for row in results if row.name == "Shiva"}
    rows = []
    for row in results:
        if row.skipped:
            rows.append((row.name, str(row.tokens), f"left out: {row.skipped}", *[""] * 7))
            continue
        paper = PAPER.get((row.name, row.tokens))
        base = ours.get(row.tokens)
        rows.append(
            (
                row.name,
                str(row.tokens),
                seconds(row.forward),
                seconds(row.backward),
                f"{row.backward / base.backward:.1f}x" if base else "",
                f"{row.saved / 1e6:.2f} MB",
                seconds(row.forward_on_tokens),
                seconds(row.backward_on_tokens),
                f"{row.saved_on_tokens / 1e6:.0f} MB",
                "" if paper is None else "{:g} / {:g} ms, {:g} MB".format(*paper),
            )
        )
    columns: tuple[Any, ...] = ("operator", "N", "forward", "backward", "of Shiva's", "kept")
    return Table(
        title=f"One selection, batch {batch}, keep {KEEP}, float32",
        columns=(*columns, f"forward, {width} wide", f"backward, {width} wide", "kept with tokens", "paper"),
        rows=rows,
        caption="the operator alone (scores to gates), then with the tokens it picks or mixes; paper: RTX 4090, fp16, "
        "with tokens",
    )
