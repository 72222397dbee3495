"""soft_rank against the definition in float64: every method, every kind of scores, every edge."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shiva.ops import softrank, softrank_cells, softrank_soe
from shiva.ops.softrank import soft_rank

METHODS = ("direct", "cells", "soe")
TAU = 0.05
INF = math.inf


def reference(s: Tensor, g: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks, vjp and the vjp's scale (1 / tau) sum (|g_i| + |g_m|) K over all pairs, in float64."""
    infinite, s, g = s.isinf(), s.double().clamp(-1e38, 1e38), g.double()
    d = (s.unsqueeze(-2) - s.unsqueeze(-1)) / tau  # (..., i, j)
    p = torch.sigmoid(-d.abs())
    K = p * (1 - p)
    r = 0.5 + torch.sigmoid(d).sum(-1)
    v = ((K * g.unsqueeze(-2)).sum(-1) - g * K.sum(-1)) / tau
    scale = (K * (g.abs().unsqueeze(-2) + g.abs().unsqueeze(-1))).sum(-1) / tau
    return r, v.masked_fill(infinite, 0.0), scale


def evaluate(s: Tensor, g: Tensor, tau: float | Tensor, method: Any) -> tuple[Tensor, Tensor]:
    s = s.detach().clone().requires_grad_()
    r = soft_rank(s, tau, method)
    (v,) = torch.autograd.grad(r, s, g.to(r.dtype))
    return r.detach(), v


def with_values(s: Tensor, places: dict[int, float]) -> Tensor:
    s = s.clone()
    for place, value in places.items():
        s[..., place] = value
    return s


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(2, n, generator=torch.Generator().manual_seed(seed))


N = 1000
SCORES = {
    "normal": normal(N),
    "tied": (normal(N) * 4).round() / 4,
    "clustered": (normal(N, 1) * 3).round() + 1e-3 * normal(N),
    "wide": normal(N) * 100,
    "cauchy": normal(N) / normal(N, 1),
    "outlier": with_values(normal(N), {3: 1e9, 5: -1e9}),
    "infinite": with_values(normal(N), {0: INF, 7: -INF, 8: -INF, N - 1: INF}),
    "all infinite": normal(N).sign() * INF,
    "offset": normal(N) + 1e4,
    "uneven rows": normal(N) * torch.tensor([[1.0], [50.0]]),
    "constant": torch.full((2, N), 0.3),
}


@pytest.mark.parametrize("method", [*METHODS, "auto"])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_agrees_with_the_definition(name: str, method: str, dtype: torch.dtype, tolerance: float) -> None:
    s, g = SCORES[name], normal(N, seed=2)
    if (name, method) == ("outlier", "cells"):
        with pytest.raises(ValueError, match=r"span 4e\+10 temperatures.*use method='auto' or 'soe'"):
            soft_rank(s.to(dtype), TAU, "cells")
        return
    expected, v_expected, scale = reference(s, g, TAU)
    r, v = evaluate(s.to(dtype), g, TAU, method)
    assert r.dtype == v.dtype == dtype
    assert ((r - expected).abs() / expected).max() <= tolerance
    assert ((v - v_expected).abs() / scale).max() <= tolerance


@pytest.mark.parametrize("method", METHODS)
def test_tokens_far_from_a_sparse_gradient_get_none(method: str) -> None:
    """The self terms of both halves of the vjp cancel, although the mean of g is not 0."""
    s = torch.arange(500.0).unsqueeze(0)  # 20 temperatures apart
    _, v = evaluate(s, torch.eye(1, 500), TAU, method)
    assert v[0, :2].abs().min() > 1e-9
    assert v[0, 3:].abs().max() < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 31, 33, 70])
def test_gradcheck_in_scores_and_temperature(method: str, n: int) -> None:
    s = normal(n).double().requires_grad_()
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, tau: soft_rank(s, tau, method), (s, tau))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 3, 31, 33, 700])
def test_constant_scores_share_the_middle_rank_exactly(method: str, n: int) -> None:
    r, v = evaluate(torch.full((2, n), -7.3), torch.full((2, n), 0.1), TAU, method)
    assert (r == (n + 1) / 2).all()
    assert (v == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_infinite_scores_rank_at_the_ends_share_ties_and_have_no_gradient(method: str) -> None:
    s = torch.tensor([[INF, 0.0, -INF, INF, 10.0, -INF]])
    r, v = evaluate(s, torch.arange(6.0).unsqueeze(0), TAU, method)
    assert torch.equal(r, torch.tensor([[1.5, 4.0, 5.5, 1.5, 3.0, 5.5]]))
    assert torch.equal(v, torch.zeros_like(v))


@pytest.mark.parametrize("method", [*METHODS, "auto"])
@pytest.mark.parametrize("n", [20, 700])
def test_nan_spoils_its_own_row_only(method: str, n: int) -> None:
    s, g = normal(n), normal(n, 1)
    expected = evaluate(s, g, TAU, method)
    one, whole = s.clone(), s.clone()
    one[1, n // 2] = whole[1] = math.nan
    one[1, 0] = INF
    for spoiled in (evaluate(one, g, TAU, method), evaluate(whole, g, TAU, method)):
        for want, have in zip(expected, spoiled, strict=True):
            torch.testing.assert_close(have[0], want[0])
            assert have[1].isnan().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_give_float32_ranks_and_a_gradient_in_kind(method: str, dtype: torch.dtype) -> None:
    s, g = normal(300).to(dtype), normal(300, 1)
    r, v = evaluate(s, g, TAU, method)
    assert r.dtype == torch.float32
    assert v.dtype == dtype
    expected, v_expected, scale = reference(s, g, TAU)
    torch.testing.assert_close(r.double(), expected, rtol=1e-6, atol=0)
    assert ((v - v_expected).abs() / scale).max() < torch.finfo(dtype).eps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (2, 0, 4)])
def test_nothing_to_rank(method: str, shape: tuple[int, ...]) -> None:
    s, tau = torch.zeros(shape, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    r = soft_rank(s, tau, method)
    assert r.shape == shape
    r.sum().backward()
    assert s.grad is not None
    assert tau.grad == 0


@pytest.mark.parametrize("method", METHODS)
def test_any_leading_shape_and_strides(method: str) -> None:
    s = torch.randn(90, 3, 2, generator=torch.Generator().manual_seed(0)).permute(2, 1, 0)  # (2, 3, 90)
    r = soft_rank(s, TAU, method)
    assert r.shape == s.shape
    for row, expected in zip(s.reshape(-1, 90), r.reshape(-1, 90), strict=True):
        torch.testing.assert_close(soft_rank(row.contiguous(), TAU, method), expected)


@pytest.mark.parametrize("method", METHODS)
def test_temperature_gradient_survives_an_offset(method: str) -> None:
    s, g = normal(400), normal(400, 1)
    grads = []
    for scores, dtype in ((s.double() + 1024, torch.float64), ((s.double() + 1024).float(), torch.float32)):
        tau = torch.tensor(0.25, dtype=dtype, requires_grad=True)
        (soft_rank(scores.float().to(dtype), tau, method) * g).sum().backward()
        grads.append(tau.grad)
    torch.testing.assert_close(grads[1].double(), grads[0], rtol=1e-5, atol=0)


# Properties of the function itself, whichever way it is computed.

rows = st.lists(st.floats(-20, 20, width=32, allow_subnormal=False), min_size=1, max_size=80)
temperatures = st.floats(0.02, 20)
each_method = pytest.mark.parametrize("method", METHODS)
quick = settings(max_examples=25, deadline=None)


@each_method
@quick
@given(row=rows, tau=temperatures, seed=st.integers(0, 99))
def test_property_permutation_equivariance(method: str, row: list[float], tau: float, seed: int) -> None:
    s = torch.tensor(row)
    shuffle = torch.randperm(len(row), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        soft_rank(s[shuffle], tau, method), soft_rank(s, tau, method)[shuffle], rtol=1e-6, atol=0
    )


@each_method
@quick
@given(row=rows, tau=temperatures, shift=st.floats(-1e3, 1e3))
def test_property_shift_invariance(method: str, row: list[float], tau: float, shift: float) -> None:
    s = torch.tensor(row, dtype=torch.float64)
    torch.testing.assert_close(soft_rank(s + shift, tau, method), soft_rank(s, tau, method), rtol=1e-9, atol=0)


@each_method
@quick
@given(row=rows, tau=temperatures)
def test_property_conserved_sums(method: str, row: list[float], tau: float) -> None:
    """Each pair shares one rank between its two tokens, and what a score gains the others lose."""
    n, s = len(row), torch.tensor(row)
    g = normal(n)[0]
    r, v = evaluate(s, g, tau, method)
    _, _, scale = reference(s, g, tau)
    assert abs(r.double().sum() - n * (n + 1) / 2) <= 1e-6 * n * (n + 1)
    assert abs(v.double().sum()) <= 1e-6 * scale.sum()


@each_method
@quick
@given(row=rows, tau=temperatures)
def test_property_a_larger_score_has_a_smaller_rank(method: str, row: list[float], tau: float) -> None:
    s = torch.tensor(sorted(row))
    r = soft_rank(s, tau, method)
    assert (r.diff() <= 1e-6 * r[:-1]).all()
    assert r.min() > 1 - 1e-6
    assert r.max() < len(row) * (1 + 1e-6)
    apart = s.diff() > 0.1 * tau
    assert (r.diff()[apart] < 0).all()


@each_method
@quick
@given(row=rows, tau=temperatures)
def test_property_agreement_with_the_definition(method: str, row: list[float], tau: float) -> None:
    s, g = torch.tensor(row), normal(len(row), 3)[0]
    expected, v_expected, scale = reference(s, g, tau)
    r, v = evaluate(s, g, tau, method)
    assert ((r - expected).abs() / expected).max() <= 1e-6
    assert ((v - v_expected).abs() <= 1e-6 * scale).all()


# What the surrounding code relies on.


@pytest.mark.parametrize(
    ("shape", "scale", "expected"),
    [
        ((2, 256), 1.0, "direct"),
        ((2, 4096), 1.0, "cells"),
        ((64, 512), 1.0, "cells"),
        ((2, 4096), 1e3, "soe"),
    ],
)
def test_auto_on_a_cpu(shape: tuple[int, int], scale: float, expected: str) -> None:
    s = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tau = torch.tensor(TAU)
    assert softrank.choose(s, tau) == expected
    masked = with_values(s, {0: -softrank.FAR})  # a masked token does not change the choice
    assert softrank.choose(masked, tau) == expected


@pytest.mark.parametrize(("method", "n"), [("direct", 40), ("soe", 70), ("auto", 70)])
@pytest.mark.parametrize("learn_tau", [False, True])
def test_compiles_to_one_graph(method: str, n: int, learn_tau: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softrank, "DIRECT_TOKENS", 50)
    check_compiled(method, n, learn_tau, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiles_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softrank_soe, "BLOCK", 4)  # less to compile, the same code
    check_compiled("soe", 10, learn_tau=True, backend="inductor")


def check_compiled(method: Any, n: int, learn_tau: bool, backend: str) -> None:
    def loss(s: Tensor, tau: float | Tensor) -> Tensor:
        return torch.sigmoid((n / 2 - soft_rank(s, tau, method)) / 3).square().sum()  # eq:prob_select

    torch._dynamo.reset()
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        s = normal(n).requires_grad_()
        tau = torch.tensor(TAU, requires_grad=True) if learn_tau else TAU
        value = function(s, tau)
        value.backward()
        results.append((value.detach(), s.grad, tau.grad if isinstance(tau, Tensor) else None))
    for eager, compiled in zip(*results, strict=True):
        if eager is not None:
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_saved_memory_is_linear(method: str) -> None:
    def saved_bytes(n: int) -> int:
        sizes: list[int] = []

        def pack(t: Tensor) -> Tensor:
            sizes.append(t.numel() * t.element_size())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            soft_rank(torch.randn(1, n, requires_grad=True), TAU, method)
        return sum(sizes)

    assert saved_bytes(1024) <= 20 * 1024 + 8  # a score, D and a place in the order for each token; tau
    assert saved_bytes(2048) - saved_bytes(1024) == saved_bytes(1024) - 8


def test_long_rows_are_sorted_as_integers() -> None:
    s = normal(softrank_soe.RADIX_FROM)
    s[0, :6] = torch.tensor([0.0, -0.0, 1e38, -1e38, 1e-40, -1e-40])
    order = softrank_soe.ascending(s)
    assert torch.equal(s.gather(-1, order), s.sort(-1).values)
    assert torch.equal(order.sort(-1).values, torch.arange(s.shape[-1]).expand_as(s))


def test_long_rows_agree_between_methods() -> None:
    s, g = normal(softrank_soe.RADIX_FROM), normal(softrank_soe.RADIX_FROM, 1)
    r, v = evaluate(s, g, TAU, "cells")
    r_soe, v_soe = evaluate(s, g, TAU, "soe")
    torch.testing.assert_close(r_soe, r, rtol=2e-6, atol=0)
    torch.testing.assert_close(v_soe, v, rtol=1e-5, atol=1e-6 * float(v.abs().max()))


@pytest.mark.parametrize("n", [12, 20])
def test_series_meets_the_kernels(n: int) -> None:
    a, b = softrank_soe._series(n)
    d = torch.linspace(0, 30, 2001, dtype=torch.float64)
    p = torch.sigmoid(-d)
    for c, kernel, bound in ((a, p, 5.83**-n), (b, p * (1 - p), 2 * n * 5.83**-n)):
        value = sum(c_k * torch.exp(-(k + 1) * d) for k, c_k in enumerate(c))
        assert ((value - kernel).abs() / kernel).max() < 5 * bound + 1e-13
    assert sum(a) == pytest.approx(0.5, abs=1e-15)
    assert a[0] == b[0] == 1


def test_cells_with_a_score_on_the_last_edge() -> None:
    tau = torch.tensor(0.1, dtype=torch.float64)
    for k in range(1, 200):
        s = torch.tensor([[0.0, math.nextafter(0.2 * k, 0.0)]], dtype=torch.float64)
        r, _, _ = softrank_cells.ranks(s, tau)
        torch.testing.assert_close(r.sum(), torch.tensor(3.0, dtype=torch.float64))


def test_is_differentiable_once_and_says_so() -> None:
    s = normal(20).requires_grad_()
    (v,) = torch.autograd.grad(soft_rank(s, TAU).square().sum(), s, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        v.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), 0.0), r"tau=0.0 is not a positive number"),
        ((torch.zeros(3), math.nan), r"tau=nan is not a positive number"),
        ((torch.zeros(3), torch.tensor(-1.0)), r"tau=-1.0 is not a positive number"),
        ((torch.zeros(3), torch.ones(2)), r"tau is torch.float32 of shape \(2,\)"),
        ((torch.zeros(3, dtype=torch.int64), 0.1), r"scores are torch.int64 of shape \(3,\)"),
        ((torch.zeros(()), 0.1), r"scores are torch.float32 of shape \(\)"),
        ((torch.zeros(3), 0.1, "fast"), r"method='fast' is unknown; pass one of auto, direct, cells, soe"),
    ],
)
def test_errors_name_the_value_and_the_fix(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soft_rank(*arguments)
