"""Ratio policies, and the tables they compile to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiva.core.context import normalized_distance
from shiva.core.cost import CostModel, Flops, SiteCost
from shiva.ops.networks import BudgetController, ContextRouter, RatioPolicy, RouterBank, group_size
from shiva.ops.schedule import RatioSchedule


def varied(seed: int = 0, steps: int = 7, layers: int = 6, spread: float = 2.0) -> RatioSchedule:
    logits = spread * torch.randn(steps, layers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return RatioSchedule(tuple(torch.linspace(1000, 30, steps).tolist()), logits)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.02, 1.0), st.integers(0, 1000))
def test_shift_meets_the_budget(budget: float, seed: int) -> None:
    shifted = varied(seed).shift(budget)
    assert shifted.mean_keep == pytest.approx(budget, abs=1e-4)
    assert (shifted.ratios()[:, 0] == 1).all(), "the first block is bypassed"


def test_shift_keeps_the_order_of_the_table_and_one_means_dense() -> None:
    schedule = varied()
    order = schedule.ratios()[:, 1:].flatten().argsort()
    assert torch.equal(schedule.shift(0.3).ratios()[:, 1:].flatten().argsort(), order)
    assert schedule.shift(1.0).counts(100) == [[100] * 6] * 7


@settings(deadline=None, max_examples=40)
@given(st.floats(0.05, 0.95), st.floats(0.1, 9.0), st.integers(2, 30))
def test_a_tilt_moves_tokens_to_early_steps_and_keeps_their_mean(budget: float, tilt: float, steps: int) -> None:
    even = RatioSchedule.flat(budget, 5).resample(torch.linspace(1000, 30, steps).tolist())
    falling = even.tilted(tilt)
    assert falling.mean_keep == pytest.approx(budget, abs=1e-4)
    rows = falling.ratios()[:, 1]
    assert (rows.diff() < 0).all()
    assert float(torch.logit(rows[0]) - torch.logit(rows[-1])) == pytest.approx(tilt, rel=1e-6)
    assert torch.equal(even.tilted(0.0).ratios(), even.ratios())
    assert RatioSchedule.flat(1.0, 5).resample([1000.0, 500.0]).tilted(tilt).counts(64) == [[64] * 5] * 2


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 8, 16, 32, 64]), st.floats(0.1, 0.99), st.integers(0, 1000))
def test_buckets_are_multiples_and_hold_the_mean(multiple: int, budget: float, seed: int) -> None:
    schedule, tokens = varied(seed, steps=20, layers=24).shift(budget), 4096
    counts = torch.tensor(schedule.bucket(multiple, tokens))[:, 1:].double()
    assert (counts % multiple == 0).all()
    assert counts.min() >= multiple
    assert counts.max() <= tokens
    assert counts.mean() / tokens == pytest.approx(budget, abs=0.005 * budget + multiple / tokens / 20)


def test_a_bucket_at_the_top_holds_all_tokens() -> None:
    assert RatioSchedule.flat(1.0, 3).bucket(64, 100) == [[100] * 3]
    logits = torch.tensor([[0.0, torch.inf, 0.0, 0.0]], dtype=torch.float64)
    assert RatioSchedule((500.0,), logits).bucket(20, 90) == [[90, 90, 40, 40]]


def test_flops_shift_prices_the_table_and_says_what_is_out_of_reach() -> None:
    site = SiteCost(Flops(5, 0), Flops(3, 0), Flops(0, 0.01))
    cost = CostModel(outside=Flops(100, 0), layers=(site,) * 6, tokens=256)
    for target in (0.4, 0.6, 0.9):
        shifted = varied().shift(flops=target, cost=cost)
        assert cost.share((shifted.ratios() * 256).tolist()) == pytest.approx(target, abs=1e-6)
    with pytest.raises(ValueError, match=r"flops=0.01 cannot be reached"):
        varied().shift(flops=0.01, cost=cost)
    with pytest.raises(ValueError, match="cost"):
        varied().shift(flops=0.5)
    with pytest.raises(ValueError, match="either"):
        varied().shift(0.5, flops=0.5)


def test_resampling_interpolates_in_time_and_is_exact_on_its_own_timesteps() -> None:
    schedule = varied()
    torch.testing.assert_close(schedule.resample(schedule.timesteps).logits, schedule.logits)
    middle = (schedule.timesteps[0] + schedule.timesteps[1]) / 2
    torch.testing.assert_close(schedule.resample([middle]).logits[0], schedule.logits[:2].mean(dim=0))
    beyond = schedule.resample([1500.0, 0.0]).logits
    torch.testing.assert_close(beyond[0], schedule.logits[0])
    torch.testing.assert_close(beyond[1], schedule.logits[-1])
    assert schedule.row(schedule.timesteps[3] + 1) == 3
    assert RatioSchedule.flat(0.5, 4).resample([900.0, 100.0]).counts(10) == [[10, 5, 5, 5]] * 2


def test_timesteps_may_come_in_any_order() -> None:
    schedule, order = varied(), [3, 0, 6, 1, 5, 2, 4]
    rising = schedule.resample(schedule.timesteps[::-1])
    torch.testing.assert_close(rising.logits, schedule.logits.flip(0))
    mixed = schedule.resample([schedule.timesteps[i] for i in order])
    torch.testing.assert_close(mixed.logits, schedule.logits[order])
    for table in (rising, mixed):
        torch.testing.assert_close(table.resample([700.0, 20.0]).logits, schedule.resample([700.0, 20.0]).logits)


def test_a_policy_compiles_to_what_it_says_at_any_scheduler() -> None:
    policy = RatioPolicy(6, target=0.6)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    timesteps = [999.0, 640.5, 33.0]
    table = RatioSchedule.compile(policy, timesteps)
    torch.testing.assert_close(table.ratios()[:, 1:].float(), policy(torch.tensor(timesteps))[:, 1:])
    fine = RatioSchedule.compile(policy).resample(timesteps)
    torch.testing.assert_close(fine.ratios(), table.ratios(), atol=0.02, rtol=0)


def test_policies_start_flat_at_the_target_and_add_up() -> None:
    policy, times = RatioPolicy(5, target=0.7), torch.tensor([900.0, 500.0, 10.0])
    torch.testing.assert_close(policy(times), torch.full((3, 5), 0.7))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    logits = policy.logits(times)
    interaction = logits - logits.mean(0) - logits.mean(1, keepdim=True) + logits.mean()
    assert interaction.abs().max() < 1e-5


def test_a_schedule_survives_its_state() -> None:
    schedule = varied().shift(0.4)
    again = RatioSchedule.from_state(schedule.state())
    assert again.counts(4096) == schedule.counts(4096)
    assert again.timesteps == schedule.timesteps


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows for 1 timesteps"):
        RatioSchedule((1.0,), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="multiple=300"):
        varied().bucket(300, 256)


@pytest.mark.parametrize(
    ("sharing", "groups"), [("pairwise", 4), ("global", 1), ("independent", 7), ("groups-3", 3), ("groups-9", 1)]
)
def test_routers_are_shared_as_asked(sharing: str, groups: int) -> None:
    bank = RouterBank(8, 6, 4, layers=7, sharing=sharing)
    assert len(bank.routers) == groups
    x, time, prompt = torch.randn(2, 5, 8), torch.randn(2, 6), torch.randn(2, 4)
    scores = [bank(x, time, prompt, layer, {}) for layer in range(7)]
    assert all(s.shape == (2, 5) for s in scores)
    assert all(not torch.equal(scores[i], scores[i + 1]) for i in range(6)), "the layer embedding tells them apart"


def test_the_router_is_the_papers_formula_and_its_signals_can_be_switched_off() -> None:
    router = ContextRouter(8, 6, 4, layers=2, unit=False)
    x, time, prompt = torch.randn(2, 5, 8), torch.randn(2, 6), torch.randn(2, 4)
    context = router.proj_t(time) + router.proj_p(prompt) + router.proj_l(router.layer.weight[1])
    hidden = torch.nn.functional.silu(router.proj_x(x) + context[:, None])
    torch.testing.assert_close(router(x, time, prompt, 1), (router.norm(hidden) @ router.score.weight.T)[..., 0])
    plain = ContextRouter(8, 6, 4, layers=2, signals=())
    assert torch.equal(plain(x, None, None, 0), plain(x, None, None, 1))
    unit = ContextRouter(8, 6, 4, layers=2)
    torch.testing.assert_close(unit(x, time, prompt, 0), unit(x, 9 * time, prompt / 9, 0))
    assert not torch.allclose(router(x, time, prompt, 0), router(x, 9 * time, prompt / 9, 0))
    with pytest.raises(ValueError, match="signal='colour' is unknown"):
        ContextRouter(8, 6, 4, layers=2, signals=("colour",))
    assert group_size("pairwise", 24) == 2


@pytest.mark.parametrize("dual", [0.0, 0.02])
def test_the_budget_loss_is_the_papers(dual: float) -> None:
    """Eq. ema_avg, then Eq. budget_loss with the average just made; the dual term adds its integral."""
    controller = BudgetController(0.6, beta=0.2, dual=dual).train()
    for mean, mu, nu in [(0.8, 0.64, 0.04 * dual), (0.5, 0.612, 0.052 * dual)]:
        batch = torch.tensor(mean, requires_grad=True)
        loss = controller(batch)
        loss.backward()
        assert controller.mu.item() == pytest.approx(mu)
        assert loss.item() == pytest.approx(mean * (2 * (mu - 0.6) + nu), rel=1e-4)
        assert batch.grad is not None
        assert batch.grad.item() == pytest.approx(2 * (mu - 0.6) + nu, rel=1e-4)


def test_distillation_ignores_scale_and_offset() -> None:
    features = torch.randn(2, 7, 16)
    assert normalized_distance(features * 5 + 2, features) < 1e-6
    assert normalized_distance(torch.randn(2, 7, 16), features) > 1
