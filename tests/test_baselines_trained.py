"""The trained methods of the comparison: each holds what its paper says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiva
from pipelines import PIPELINES
from shiva.adapters import AttachedAdapter
from shiva.core.context import StepContext
from shiva.core.method import BackboneSpec, Exploration, MethodConfig
from shiva.core.reduction import Streams, select
from shiva.measure import shapes
from shiva.methods._gated import input_gates
from shiva.methods.diffcr import DiffCRMethod, bin_count, bracket, nearest_bin
from shiva.methods.lapsum import LapSumMethod
from shiva.methods.sparsedit import SparseDiTMethod, cell_centres, pool, pruning_rate, sparse_grid, upsample
from shiva.modules.lapsum import lapsum_topk
from shiva.modules.neuralsort import neuralsort_topk, relaxed_permutation, total_distance
from shiva.modules.soft_topk import largest_cost, soft_topk
from shiva.modules.topk import hard_topk, inclusion
from shiva.training.adapter import adapter_config, adapter_parameters, adapter_state, add_adapter
from shiva.training.stages import Stage, Temperatures, exploration, moment

from method_table import METHODS
from tiny import BACKBONES, make_sd3, noise

SPEC = BackboneSpec("toy", layers=6, width=16, time_width=8, prompt_width=8)
TRAINED = ("diffcr", "dydit", "lapsum", "neuralsort", "soft-topk", "sparsedit")

Gates = Callable[[Tensor, int, float], Tensor]
SELECTORS: dict[str, Gates] = {
    "neuralsort": neuralsort_topk,
    "sinkhorn": lambda s, k, tau: soft_topk(s, k, tau, "sinkhorn", 2000),
    "closed_form": lambda s, k, tau: soft_topk(s, k, tau, "closed_form"),
    "lapsum": lapsum_topk,
    "shiva": lambda s, k, tau: inclusion(s, torch.tensor(k + 0.5), tau, tau),
}
EXACT = ("neuralsort", "sinkhorn", "closed_form", "lapsum")


def scores(batch: int = 2, tokens: int = 23, seed: int = 4) -> Tensor:
    return noise(batch, tokens, seed=seed).double()


def forward(model: nn.Module, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**call)[0]


# -- the selectors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTORS)
def test_gates_follow_the_order_and_become_the_hard_mask(name: str) -> None:
    s, k = scores(), 7
    hard = torch.zeros_like(s).scatter(1, hard_topk(s, k), 1.0)
    soft = SELECTORS[name](s, k, 0.1)
    assert torch.equal(hard_topk(soft, k), hard_topk(s, k))
    torch.testing.assert_close(SELECTORS[name](s, k, 1e-4), hard, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", SELECTORS)
def test_gates_are_equivariant_to_order_and_blind_to_a_shift(name: str) -> None:
    s, order = scores(), torch.randperm(23)
    gates = SELECTORS[name](s, 7, 0.1)
    torch.testing.assert_close(SELECTORS[name](s[:, order], 7, 0.1), gates[:, order], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(SELECTORS[name](s + 3.0, 7, 0.1), gates, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("k", [1, 7, 22])
def test_gates_sum_to_k(name: str, k: int) -> None:
    gates = SELECTORS[name](scores(), k, 0.1)
    torch.testing.assert_close(gates.sum(1), torch.full((2,), float(k), dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", EXACT)
def test_half_precision_scores_and_equal_scores_are_handled(name: str) -> None:
    gates = SELECTORS[name](torch.zeros(1, 8, dtype=torch.bfloat16), 2, 0.1)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, torch.full((1, 8), 0.25))
    assert SELECTORS[name](noise(1, 8) * 1e4, 3, 0.1).isfinite().all()


@pytest.mark.parametrize("name", ["neuralsort", "lapsum"])
def test_gradient_of_the_scores(name: str) -> None:
    s = scores(tokens=9).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda s: SELECTORS[name](s, 4, 0.3), (s,))


@pytest.mark.parametrize("solver", ["sinkhorn", "closed_form"])
def test_gradient_of_soft_topk_by_implicit_differentiation(solver: Any) -> None:
    s = scores(tokens=9).requires_grad_(True)
    scale = largest_cost(s - s.mean(1, keepdim=True))  # has no gradient by definition, so it is held fixed
    assert torch.autograd.gradcheck(lambda s: soft_topk(s, 4, 0.1, solver, 2000, scale), (s,))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["diffcr", "lapsum", "neuralsort", "shiva", "soft-topk"])
def test_all_methods_choose_the_same_tokens_for_the_same_scores(name: str, training: bool) -> None:
    model, call, s = make_sd3(), BACKBONES["sd3"].call(2, 8, 8), noise(2, 64, seed=3)
    with shiva.attach(model, METHODS[name].on, cfg="none") as session, session.trace() as trace:
        session.method.train(training).scores = lambda x, layer, ctx: s
        session.method.exploration = Exploration(ratio=0.5)
        forward(model, call)
    for layer in (1, 2, 3):
        assert torch.equal(torch.stack([*trace.positions[0, layer]]), hard_topk(s, 32))


def test_gates_change_no_value() -> None:
    x, s = noise(2, 12, 4), noise(2, 12, seed=3)
    expected = hard_topk(s, 5)
    for gates in SELECTORS.values():
        reduction = input_gates(select(expected, s.shape[1]), gates(s, 5, 0.1))
        assert torch.equal(reduction.reduce(x), x.gather(1, expected[..., None].expand(-1, -1, 4)))
        assert torch.equal(reduction.restore(reduction.reduce(x), x), x)


def test_the_straight_through_gate_hands_each_selected_token_its_inner_product() -> None:
    x, gates, upstream = noise(1, 6, 3), torch.rand(1, 6, requires_grad=True), noise(1, 2, 3, seed=8)
    indices = torch.tensor([[1, 4]])
    (input_gates(select(indices, gates.shape[1]), gates).reduce(x) * upstream).sum().backward()
    expected = torch.zeros(1, 6)
    expected[0, indices[0]] = (x[0, indices[0]] * upstream[0]).sum(-1)
    torch.testing.assert_close(gates.grad, expected)


# -- NeuralSort -------------------------------------------------------------------------------------------


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


# -- SOFT -------------------------------------------------------------------------------------------------


def test_soft_topk_is_the_transport_plan_of_plain_sinkhorn() -> None:
    """The scaling algorithm on the n x 2 plan itself."""
    s, k, epsilon = scores(1, 12)[0], 5, 0.1
    centred = -(s - s.mean())
    cost = torch.stack([(centred + 1).square(), centred.square()], dim=1)  # (n, 2): selected, rejected
    kernel = torch.exp(-cost / cost.max() / epsilon)
    rows = torch.full((12,), 1 / 12, dtype=torch.float64)
    columns = torch.tensor([k / 12, 1 - k / 12], dtype=torch.float64)
    u, v = torch.ones(12, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for _ in range(3000):
        u = rows / (kernel @ v)
        v = columns / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    torch.testing.assert_close(soft_topk(s[None], k, epsilon, iterations=3000)[0], 12 * plan[:, 0])


def test_sinkhorn_converges_to_the_closed_form() -> None:
    s = scores()
    torch.testing.assert_close(
        soft_topk(s, 7, iterations=5000), soft_topk(s, 7, solver="closed_form"), atol=1e-12, rtol=0
    )


def test_only_the_closed_form_of_soft_gives_k_a_gradient() -> None:
    s, weights = scores(), noise(2, 23, seed=9).double()
    scale = largest_cost(s - s.mean(1, keepdim=True))
    k = torch.tensor(7.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: soft_topk(s, k, solver="closed_form", scale=scale), (k,))
    (gradient,) = torch.autograd.grad((soft_topk(s, k) * weights).sum() + 0 * k, k)
    assert gradient == 0


# -- LapSum -----------------------------------------------------------------------------------------------


def test_lapsum_gradients_of_scores_budget_and_width() -> None:
    s = scores(3, 11).requires_grad_(True)
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([[0.2], [5.0], [10.7]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lapsum_topk, (s, k, alpha))


def test_lapsum_budget_derivative_by_finite_differences() -> None:
    s, k, h = scores(), torch.tensor(7.0, dtype=torch.float64, requires_grad=True), 1e-5
    weights = noise(2, 23, seed=9).double()
    (gradient,) = torch.autograd.grad((lapsum_topk(s, k, 0.2) * weights).sum(), k)
    quotient = ((lapsum_topk(s, 7 + h, 0.2) - lapsum_topk(s, 7 - h, 0.2)) * weights).sum() / (2 * h)
    torch.testing.assert_close(gradient, quotient, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 1.0, 1e6])
def test_lapsum_meets_its_budget_at_any_width_and_is_the_laplace_function(alpha: float) -> None:
    s, k = scores(2, 4096), 1234.5
    p = lapsum_topk(s, k, alpha)
    torch.testing.assert_close(p.sum(1), torch.full((2,), k, dtype=torch.float64), atol=1e-6, rtol=0)
    if alpha == 1.0:
        b = s - torch.distributions.Laplace(0.0, 1.0).icdf(p)
        torch.testing.assert_close(b, b[:, :1].expand_as(b))


def test_lapsum_learns_its_layers_ratios_and_meets_the_budget() -> None:
    method = shiva.LapSum(keep=0.6).build(SPEC).train()
    assert isinstance(method, LapSumMethod)
    with torch.no_grad():
        method.ratio_logits.copy_(torch.linspace(-2, 4, 6))
    optimizer = torch.optim.Adam(method.groups()["policy"], lr=0.05)
    ctx = StepContext(grid=(10, 10), timestep=500.0)
    for _ in range(300):
        optimizer.zero_grad()
        method.losses(ctx)["budget"].backward()
        optimizer.step()
    ratios = torch.sigmoid(method.ratio_logits.detach())
    assert ratios[1:].mean() == pytest.approx(0.6, abs=1e-3)
    assert ratios[5] > ratios[1] + 0.2
    counts = method.eval().plan(ctx, None)
    assert counts[0] == 100
    assert sum(counts[1:]) == pytest.approx(5 * 60, abs=5)
    assert len(set(counts)) > 3


def test_lapsum_is_built_and_run_in_inference_mode() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with torch.inference_mode(), shiva.attach(model, shiva.LapSum(keep=0.5)) as session:
        model(**call)
        assert session.stats[-1].kept["transformer_blocks.2"] == 32


def test_lapsum_blocks_hand_their_gradient_to_the_ratio() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.LapSum(keep=0.5)) as session:
        method = session.method.train()
        model(**BACKBONES["sd3"].call(2, 8, 8))[0].square().mean().backward()
        gradient = method.ratio_logits.grad
        assert gradient[0] == 0
        assert (gradient[1:] != 0).all()
        method.exploration.ratio = 0.25
        forward(model, BACKBONES["sd3"].call(2, 8, 8))
        assert session.stats[-1].kept["transformer_blocks.2"] == 16
        assert method.losses(session.ctx) == {}


# -- DyDiT ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", BACKBONES)
def test_dydit_gather_path_equals_its_mask_path(backbone: str) -> None:
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 6, 6)
    with shiva.attach(model, shiva.DyDiT(bias=0.0), cfg="none") as session:
        gathered = forward(model, call)
        method = session.method

        def masked(run: Any, x: Tensor, base: Tensor, site: Any, ctx: StepContext) -> Any:
            mask = torch.sigmoid(method.logits(x, site, ctx)) > 0.5
            out = run(x, None)
            return out._replace(image=out.image * mask[..., None])

        method.around = masked
        torch.testing.assert_close(gathered, forward(model, call))


def test_dydit_starts_dense_and_its_count_follows_the_data() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    call = tiny.call(1, 8, 8)
    other = {**call, "hidden_states": noise(1, 4, 16, 16, seed=11) * 2}
    dense = forward(model, call)
    with shiva.attach(model, shiva.DyDiT()):
        assert torch.equal(forward(model, call), dense)
    with shiva.attach(model, shiva.DyDiT(bias=0.0)) as session:
        counts = []
        for sample in (call, other):
            forward(model, sample)
            counts.append([n for name, n in session.stats[-1].kept.items() if name.endswith(".ff")])
        assert counts[0] != counts[1]
        assert 0 < sum(counts[0]) < 4 * 64


def test_dydit_union_computes_a_token_for_all_if_any_sample_wants_it() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    kept = {}
    for union in (False, True):
        torch.manual_seed(0)
        with shiva.attach(model, shiva.DyDiT(bias=0.0, union=union), cfg="none") as session:
            forward(model, call)
            kept[union] = session.stats[-1].kept["transformer_blocks.0.ff"]
    assert kept[False] < kept[True] <= 2 * kept[False] + 1


def test_dydit_has_no_whole_graph() -> None:
    with (
        shiva.attach(make_sd3(), shiva.DyDiT()) as session,
        pytest.raises(ValueError, match="follow the data.*pass fullgraph=False"),
    ):
        session.compile()


def test_dydit_flops_loss_is_one_when_all_on_and_pushes_masks_down() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(bias=20.0, flops=0.9)) as session:
        method = session.method.train()
        model(**call)
        assert method.flops_share(session.ctx).item() == pytest.approx(1.0)
        assert method.losses(session.ctx)["flops"].item() == pytest.approx(0.0)
        method.exploration.step = 600
        assert method.target() == pytest.approx(0.95)
        method.exploration.step = 10_000
        loss = method.losses(session.ctx)["flops"]
        assert loss.item() == pytest.approx(2 * (1 - 0.9) ** 2)
        loss.backward()
        for router in method.routers:
            assert router.logit.bias.grad > 0  # descent lowers the logits


def test_dydit_target_goes_on_falling_from_stage_to_stage() -> None:
    stages = (Stage(name="first", steps=300, trains=("router",)), Stage(name="second", steps=900, trains=("router",)))
    method, targets = shiva.DyDiT(flops=0.8).build(SPEC), []
    for step in (0, 299, 300, 600, 1150):
        now = moment(stages, step)
        assert now is not None
        method.exploration = exploration(now, Temperatures(), step, 0.0, 0, None)
        targets.append(method.target())
    assert targets == pytest.approx([1.0, 0.9602, 0.96, 0.9, 0.8])


def test_dydit_flops_share_is_that_of_the_counted_model() -> None:
    """With all masks off, F is what remains of the blocks: dense without the FFN, counted by torch."""
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(bias=-50.0, flops=0.99)) as session:
        forward(model, call)
        summary, cost = session.summary(), session.cost_model()
        blocks = sum(layer(64).true for layer in cost.layers)
        expected = (summary.flops.true - cost.outside.true) / blocks
        session.method.train()
        model(**call)
        assert session.method.flops_share(session.ctx).item() == pytest.approx(expected, rel=1e-6)


def test_dydit_refuses_a_target_that_its_ffns_cannot_reach() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(flops=0.2)) as session:
        session.method.train()
        model(**call)
        with pytest.raises(ValueError, match=r"flops=0\.2 cannot be reached"):
            session.method.losses(session.ctx)


def test_dydit_loss_trains_its_routers_to_the_target() -> None:
    model, call = make_sd3().requires_grad_(False), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, shiva.DyDiT(flops=0.85, hold=0, warmup=1)) as session:
        method = session.method.train()
        method.exploration.step = 10
        optimizer = torch.optim.Adam(method.parameters(), lr=0.05)
        shares = []
        for _ in range(80):
            model(**call)
            optimizer.zero_grad()
            method.losses(session.ctx)["flops"].backward()
            optimizer.step()
            shares.append(method.flops_share(session.ctx).item())
        assert sum(shares[-20:]) / 20 == pytest.approx(0.85, abs=0.02)


# -- DiffCR -----------------------------------------------------------------------------------------------


def test_diffcr_bins() -> None:
    bins = shiva.DiffCR().bins
    assert bracket(1.0, bins) == (0.9, 1.0)
    assert bracket(0.73, bins) == (0.7, 0.8)
    assert bracket(0.7, bins) == (0.6, 0.7)
    assert bracket(0.1, bins) == (0.1, 0.2)
    assert [nearest_bin(r, bins) for r in (0.74, 0.75, 0.02)] == [0.7, 0.8, 0.1]
    assert [bin_count(b, 4096) for b in (0.1, 0.3, 1.0)] == [410, 1229, 4096]
    assert bin_count(0.7, 10) == 7


def diffcr_output(ratio: float, training: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Output of a model whose middle layer alone is reduced, and d(weighted output) / d(its ratio)."""
    model, call = make_sd3(layers=3), BACKBONES["sd3"].call(1, 8, 8)
    torch.manual_seed(0)
    with shiva.attach(model, shiva.DiffCR(dense=(0, 2), **options)) as session:
        method = session.method.train(training)
        with torch.no_grad():
            method.rho[1, 2] = ratio
        result = model(**call)[0]
        (result * noise(*result.shape, seed=6)).sum().backward()
        return result.detach(), method.rho.grad


def test_diffcr_bins_named_twice_are_one() -> None:
    assert shiva.DiffCR(bins=(1.0, 0.5, 0.5)).bins == (0.5, 1.0)


def test_diffcr_at_a_bin_equals_the_single_pass() -> None:
    for ratio in (0.1, 0.5, 0.6, 1.0):
        twice, _ = diffcr_output(ratio, training=True)
        once, _ = diffcr_output(ratio, training=False)
        torch.testing.assert_close(twice, once, atol=1e-5, rtol=1e-5)


def test_diffcr_mixes_image_and_text_of_both_passes_and_has_their_difference_as_gradient() -> None:
    """Inside a bin the model after the block is not linear, so the block's own output is compared."""
    method = shiva.DiffCR(gate=False).build(SPEC).train()
    x, text = noise(2, 10, 16), noise(2, 3, 16, seed=2)

    def run(image: Tensor, reduction: Any) -> Streams:
        return Streams(image * 2 + image.mean(1, keepdim=True), text * image.shape[1])

    class Place:
        name, kind, layer, module = "block", "block", 1, nn.Identity()

    ctx = StepContext(grid=(2, 5), timestep=600.0)
    with torch.no_grad():
        method.rho.fill_(0.73)
    mixed = method.around(run, x, x, Place(), ctx)
    low, high = (method.single_pass(run, x, method.scores(x, 1, ctx), k, Place(), ctx) for k in (7, 8))
    for got, a, b in zip(mixed, low, high, strict=True):
        torch.testing.assert_close(got, a + 0.3 * (b - a))
        weights = torch.rand_like(got)
        (gradient,) = torch.autograd.grad((got * weights).sum(), method.rho, retain_graph=True)
        torch.testing.assert_close(gradient[1, 2], ((b - a) * weights).sum() / 0.1, rtol=1e-4, atol=1e-4)
        assert gradient.count_nonzero() == 1


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("training", [False, True])
def test_diffcr_without_gate_at_ratio_one_is_dense_and_with_it_is_not(backbone: str, training: bool) -> None:
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    dense = forward(model, call)
    for gate in (False, True):
        with shiva.attach(model, shiva.DiffCR(gate=gate)) as session:
            session.method.train(training)
            assert torch.allclose(forward(model, call), dense, atol=1e-5) is not gate


def test_diffcr_forced_gate_of_one_is_dense() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    dense = forward(model, call)
    with shiva.attach(model, shiva.DiffCR()) as session:
        session.method.scores = lambda x, layer, ctx: torch.full(x.shape[:2], 100.0)
        assert torch.equal(forward(model, call), dense)


def test_diffcr_regions_have_their_own_ratios() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    with shiva.attach(model, shiva.DiffCR()) as session:
        with torch.no_grad():
            session.method.rho[2] = torch.tensor([1.0, 0.9, 0.52, 0.13])
        for timestep, kept in [(1000.0, 7), (750.0, 7), (749.0, 32), (250.0, 58), (0.0, 64)]:
            forward(model, tiny.call(1, 8, 8, timestep))
            assert session.stats[-1].kept["transformer_blocks.2"] == kept
            assert "transformer_blocks.2.ff" not in session.stats[-1].kept


def test_diffcr_budget_loss_drives_the_mean_ratio_to_target() -> None:
    method = shiva.DiffCR(keep=0.7).build(SPEC).train()
    assert isinstance(method, DiffCRMethod)
    optimizer = torch.optim.SGD([method.rho], lr=0.01)
    ctx = StepContext(grid=(8, 8), timestep=300.0)
    with torch.no_grad():
        method.rho[0] = 1.7  # outside the bins: the gradient must still lead it back
    for _ in range(1500):
        optimizer.zero_grad()
        method.losses(ctx)["budget"].backward()
        optimizer.step()
    assert method.ratios().mean().item() == pytest.approx(0.7, abs=1e-3)
    assert method.rho[0, 0] < 1.7


def test_diffcr_clamp_lets_no_ratio_run_away() -> None:
    method = shiva.DiffCR().build(SPEC).train()
    (-method.ratios().sum()).backward()  # descent would raise the ratios, which stand at their top
    assert method.rho.grad.count_nonzero() == 0


# -- SparseDiT --------------------------------------------------------------------------------------------


def test_sparsedit_schedule() -> None:
    assert pruning_rate(0.0, 0.61, 0.86) == pytest.approx(0.61)
    assert pruning_rate(250.0, 0.61, 0.86) == pytest.approx(0.61)
    assert pruning_rate(625.0, 0.61, 0.86) == pytest.approx((0.61 + 0.86) / 2)
    assert pruning_rate(1000.0, 0.61, 0.86) == pytest.approx(0.86)
    assert pruning_rate(float("nan"), 0.61, 0.86) == pytest.approx(0.61)
    assert [sparse_grid((32, 32), r) for r in (0.61, 0.86, 0.90, 0.96)] == [(20, 20), (12, 12), (10, 10), (6, 6)]
    assert sparse_grid((64, 48), 0.75) == (32, 24)
    assert sparse_grid((2, 2), 0.99) == (1, 1)


def test_sparsedit_pooling_and_upsampling() -> None:
    x = noise(2, 48, 5)
    pooled = pool(x, (6, 8), (3, 4))
    cells = x.view(2, 3, 2, 4, 2, 5).mean(dim=(2, 4)).flatten(1, 2)
    torch.testing.assert_close(pooled, cells)
    torch.testing.assert_close(pool(upsample(pooled, (3, 4), (6, 8)), (6, 8), (3, 4)), pooled)
    torch.testing.assert_close(pool(torch.ones(1, 63, 2), (7, 9), (4, 5)), torch.ones(1, 20, 2))
    assert cell_centres((6, 8), (3, 4), x.device).tolist()[:5] == [9, 11, 13, 15, 25]
    assert torch.equal(cell_centres((6, 8), (6, 8), x.device), torch.arange(48))


def test_sparsedit_layout_of_24_layers() -> None:
    method = shiva.SparseDiT().build(BackboneSpec("toy", 24, 8, 8, 8))
    assert isinstance(method, SparseDiTMethod)
    layout = "".join(method.roles.get(layer, ("-", 0))[0][0] for layer in range(24))
    assert layout == "--" + "gsssrd" * 3 + "----"
    assert len(method.merges) == 3
    with pytest.raises(ValueError, match="do not fit the 6 layers"):
        shiva.SparseDiT().build(SPEC)


def test_sparsedit_recover_starts_from_the_modules_input() -> None:
    method = shiva.SparseDiT(bottom=0, top=0).build(SPEC)
    dense = noise(1, 9, 16)
    assert torch.equal(method.merges[0](noise(1, 9, 16, seed=5), dense), dense)


@pytest.mark.parametrize("backbone", ["sd3", "sd35", "pixart", "dit"])
def test_sparsedit_blocks_on_the_full_grid_are_ordinary_blocks(backbone: str) -> None:
    """With equal query and key sets, and merging that passes the sparse tokens on, nothing is approximated."""
    tiny = BACKBONES[backbone]
    model, call = tiny.make(), tiny.call(2, 8, 8)
    dense = forward(model, call)
    with shiva.attach(model, METHODS["sparsedit"].off) as session:
        method = session.method
        nn.init.eye_(method.merges[0].sparse.weight)
        nn.init.zeros_(method.merges[0].dense.weight)
        method.around = lambda run, x, base, site, ctx: (
            method.block(run, x, ctx.grid, site, ctx) if site.kind == "block" else method.inside(run, x, site, ctx)
        )
        torch.testing.assert_close(forward(model, call), dense, atol=1e-5, rtol=1e-5)


def test_sparsedit_generate_attends_from_pooled_tokens_and_text_to_all_tokens() -> None:
    """The block written out for SD3: q of pooled tokens and text, k and v of all tokens and text."""
    model = make_sd3(layers=4)
    block: Any = model.transformer_blocks[0]
    x, text, temb = noise(1, 64, 32), noise(1, 5, 32, seed=2), noise(1, 32, seed=3)
    seen: dict[str, Tensor] = {}
    with shiva.attach(model, METHODS["sparsedit"].on), torch.no_grad():
        block.register_forward_hook(lambda m, a, out: seen.update(out=out[1], text=out[0]))
        handle = block.register_forward_pre_hook(
            lambda m, a, kw: (a, {**kw, "hidden_states": x, "encoder_hidden_states": text, "temb": temb}),
            with_kwargs=True,
        )
        forward(model, BACKBONES["sd3"].call(1, 8, 8))
        handle.remove()
    with torch.no_grad():
        pooled = pool(x, (8, 8), (4, 4))
        query, gate, shift, scale, gate_mlp = block.norm1(pooled, emb=temb)
        keys = block.norm1(x, emb=temb)[0]
        context = block.norm1_context(text, emb=temb)[0]
        attn = block.attn

        def heads(*parts: Tensor) -> Tensor:
            return torch.cat(parts, dim=1).unflatten(2, (4, 8)).transpose(1, 2)

        attended = nn.functional.scaled_dot_product_attention(
            heads(attn.to_q(query), attn.add_q_proj(context)),
            heads(attn.to_k(keys), attn.add_k_proj(context)),
            heads(attn.to_v(keys), attn.add_v_proj(context)),
        )
        update = attn.to_out[0](attended.transpose(1, 2).flatten(2)[:, :16])
        hidden = pooled + gate[:, None] * update
        ffn = block.ff(block.norm2(hidden) * (1 + scale[:, None]) + shift[:, None])
        expected = hidden + gate_mlp[:, None] * ffn
    torch.testing.assert_close(seen["out"], expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_training_acts_on_sparsedits_keys_as_the_folded_one_does() -> None:
    trained, plain = make_sd3(), make_sd3()
    call = BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(trained, METHODS["sparsedit"].on) as session, torch.no_grad():
        config = adapter_config(trained, session.backbone, 4, 4, True)
        add_adapter(trained, config, seed=0)
        session.rehook()
        for seed, parameter in enumerate(adapter_parameters(trained)):
            parameter.add_(0.1 * noise(*parameter.shape, seed=seed))
        live = trained(**call)[0]
        state, weights = adapter_state(trained), session.method.state_dict()
    adapter = AttachedAdapter(plain, config, state)
    with shiva.attach(plain, METHODS["sparsedit"].on) as session, torch.no_grad():
        session.method.load_state_dict(weights)
        torch.testing.assert_close(plain(**call)[0], live, rtol=1e-4, atol=1e-5)
    adapter.remove()


def test_sparsedit_tokens_stay_few_inside_a_module_and_follow_the_timestep() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    config = shiva.SparseDiT(rates=(0.44, 0.75), split=(1, 1, 1, 1), bottom=0, top=0)
    with shiva.attach(model, config) as session, session.record() as tape:
        for timestep, side in [(1000.0, 4), (100.0, 6)]:
            forward(model, tiny.call(1, 8, 8, timestep))
            assert [tape.outputs[layer].shape[1] for layer in range(4)] == [side**2, side**2, 64, 64]
            assert list(session.ctx.counts) == [side**2, side**2, 64, 64]
            assert set(session.stats[-1].kept) == {f"transformer_blocks.{i}" for i in range(4)}
        assert session.summary().flops_share < 1


def test_sparsedit_is_refused_where_attention_is_rotary() -> None:
    with pytest.raises(ValueError, match="SparseDiT is not defined on FluxTransformer2DModel"):
        shiva.attach(BACKBONES["flux"].make(), METHODS["sparsedit"].on)


# -- all of them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_every_group_and_loss_reaches_its_parameters_also_through_gradient_checkpointing(name: str) -> None:
    gradients: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        model, call = make_sd3().requires_grad_(False), BACKBONES["sd3"].call(2, 8, 8)
        if checkpointing:
            model.enable_gradient_checkpointing()
        torch.manual_seed(0)
        with shiva.attach(model, METHODS[name].on, cfg="none") as session:
            method = session.method.train()
            method.exploration.step = 10_000
            call["hidden_states"].requires_grad_(True)
            loss = model(**call)[0].square().mean()
            (loss + sum(method.losses(session.ctx).values())).backward()
            gradients.append({n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None})
            for group, parameters in method.groups().items():
                assert any(p.grad is not None and p.grad.abs().max() > 0 for p in parameters), group
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_brings_the_method_back(name: str, tmp_path: Path) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 8, 8)
    with shiva.attach(model, METHODS[name].on) as session:
        with torch.no_grad():
            for parameter in session.method.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        expected = forward(model, call)
        shiva.ShivaCheckpoint.of(session.method).save_pretrained(tmp_path)
    with shiva.attach(model, str(tmp_path)) as session:
        assert type(session.method.config) is type(METHODS[name].on)
        assert session.method.config == METHODS[name].on
        assert torch.equal(forward(model, call), expected)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (shiva.DiffCR(), {"keep": 0.8}, "keep is fixed by training; train again to change it$"),
        (shiva.DyDiT(), {"flops": 0.5}, "flops is fixed by training; train again to change it, or set threshold"),
        (shiva.LapSum(), {"alpha": 0.5}, "alpha is fixed by training; train again to change it, or set keep"),
        (shiva.NeuralSort(), {"tau": 0.5}, "tau is fixed by training; train again to change it, or set keep"),
        (shiva.SoftTopK(), {"epsilon": 0.5}, "epsilon is fixed by training; train again to change it, or set keep"),
        (shiva.Shiva(), {"estimator": "input"}, "estimator is fixed by training.*or set budget"),
    ],
)
def test_a_trained_checkpoint_refuses_what_would_change_nothing(
    config: MethodConfig, changes: dict[str, Any], message: str
) -> None:
    checkpoint = shiva.ShivaCheckpoint.of(config.build(SPEC))
    with pytest.raises(ValueError, match=message):
        checkpoint.method(**changes)
    if config.knob is not None:
        checkpoint.method(**{config.knob: 0.7})


IN_PIPELINES = [(name, backbone) for name in TRAINED for backbone in PIPELINES if backbone in METHODS[name].backbones]


@pytest.mark.parametrize(("name", "backbone"), IN_PIPELINES)
def test_a_guided_pipeline_runs_and_runs_again_alike(name: str, backbone: str) -> None:
    tiny = PIPELINES[backbone]
    pipe = tiny.make()
    pipe.set_progress_bar_config(disable=True)
    dense = tiny.image(pipe)
    with shiva.attach(pipe, METHODS[name].on):
        first, second = tiny.image(pipe), tiny.image(pipe)
    assert torch.equal(first, second), "a run must not remember the one before it"
    assert not torch.equal(first, dense)
    assert torch.equal(tiny.image(pipe), dense)


@pytest.mark.parametrize("name", TRAINED)
def test_presets_and_guidance_are_declared(name: str) -> None:
    config = type(METHODS[name].on)
    assert config.preset("official") == config()
    assert isinstance(config.preset("paper"), config)
    assert config().build(BackboneSpec("toy", 24, 8, 8, 8)).guidance in ("shared", "per-sample", "max")


@pytest.mark.parametrize(
    ("config", "tera"),
    [
        (shiva.NeuralSort.preset("paper"), 9.47),
        (shiva.LapSum(keep=0.843), 9.47),
        (shiva.SparseDiT.preset("paper", rates=(0.39, 0.39)), 9.02),
        (shiva.SparseDiT.preset("paper", rates=(0.42, 0.42)), 8.86),
        (shiva.DiffCR.preset("paper", initial=0.8), 8.87),
    ],
)
def test_price_at_the_real_shape_of_sd3(config: MethodConfig, tera: float) -> None:
    """The paper's column says 9.47 for NeuralSort and 8.95 for SparseDiT, between its preset's two rates."""
    shape = shapes.shape("sd3-medium")
    model = shape.build("meta")
    with shiva.attach(model, config) as session:
        forward(model, shape.call("meta"))
        assert session.summary().flops.paper / 1e12 == pytest.approx(tera, abs=0.03)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shiva.NeuralSort(tau=0.0), r"tau=0\.0 is not above 0"),
        (lambda: shiva.NeuralSort(keep=1.4), r"keep=1\.4 is above 1"),
        (lambda: shiva.SoftTopK(solver="newton"), "solver='newton' is unknown"),
        (lambda: shiva.SoftTopK(iterations=0), "iterations=0 is below 1"),
        (lambda: shiva.LapSum(alpha=-1.0), r"alpha=-1\.0 is not above 0"),
        (lambda: shiva.LapSum(dense=(9,)).build(SPEC), "names layer 9"),
        (lambda: shiva.DyDiT(flops=0.0), r"flops=0\.0 is not above 0"),
        (lambda: shiva.DyDiT(warmup=0), "warmup=0"),
        (lambda: shiva.DiffCR(bins=(0.5,)), "fewer than two ratios"),
        (lambda: shiva.DiffCR(bins=(0.5, 0.5)), "fewer than two ratios"),
        (lambda: shiva.DiffCR(regions=0), "regions=0 is below 1"),
        (lambda: shiva.DiffCR(budget_weight=-1.0), r"budget_weight=-1\.0 is below 0"),
        (lambda: shiva.DyDiT(flops_weight=-1.0), r"flops_weight=-1\.0 is below 0"),
        (lambda: shiva.SparseDiT(rates=(0.8, 0.5)), "must rise"),
        (lambda: shiva.SparseDiT(rates=(0.5,)), r"rates=\(0\.5,\) must rise"),
        (lambda: shiva.SparseDiT(split=(2, 1, 1, 1)), "must be"),
        (lambda: shiva.SparseDiT(split=(1, 3, 1)), r"split=\(1, 3, 1\) must be"),
        (lambda: shiva.SparseDiT(bottom=-1), "bottom=-1 is below 0"),
    ],
)
def test_wrong_options_are_refused_with_the_value(make: Callable[[], MethodConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
