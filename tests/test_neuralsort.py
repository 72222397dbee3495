"""NeuralSort holds what its paper says of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from baseline_tools import scores
from shiva.ops.relaxed import relaxed_permutation, total_distance

from tiny import noise


def test_neuralsort_rows_are_a_relaxed_permutation() -> None:
    s = scores()
    p = relaxed_permutation(s, 0.5)
    torch.testing.assert_close(p.sum(2), torch.ones(2, 23, dtype=torch.float64))
    assert torch.equal(p.argmax(2), s.argsort(dim=1, descending=True))
    permutation = nn.functional.one_hot(s.argsort(dim=1, descending=True), 23).double()
    torch.testing.assert_close(relaxed_permutation(s, 1e-5), permutation)
    torch.testing.assert_close(relaxed_permutation(s, 0.5, rows=5), p[:, :5])


def test_neuralsort_equals_difftopk() -> None:
    difftopk = pytest.importorskip("difftopk")
    s = noise(3, 17)
    theirs = difftopk.NeuralSort(tau=2.0)(-s).transpose(1, 2)  # it negates the scores and transposes
    torch.testing.assert_close(relaxed_permutation(s, 2.0), theirs, atol=1e-6, rtol=1e-5)


def test_neuralsort_distances_by_a_sort_are_those_of_the_matrix() -> None:
    s = torch.cat([noise(2, 500), torch.zeros(2, 12)], dim=1)
    matrix = (s.double().unsqueeze(-1) - s.double().unsqueeze(-2)).abs().sum(dim=-1)
    torch.testing.assert_close(total_distance(s), matrix.float())


def test_neuralsort_equals_its_published_formula() -> None:
    s = scores(1, 6)[0]
    for q in range(1, 7):
        logits = [(7 - 2 * q) * s[j] - sum(abs(s[j] - s[m]) for m in range(6)) for j in range(6)]
        row = torch.softmax(torch.stack(logits) / 0.7, dim=0)
        torch.testing.assert_close(relaxed_permutation(s[None], 0.7)[0, q - 1], row)
