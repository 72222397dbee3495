"""The session itself: its errors, its modes, and what it composes with."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import PixArtTransformer2DModel, SanaTransformer2DModel
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

import shiva
from pipelines import PIPELINES
from shiva.backbones import Backbone, Site, backbone_of
from shiva.backbones.base import registered
from shiva.core.context import StepContext
from shiva.core.layout import Layout
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place
from shiva.core.options import share
from shiva.core.reduction import Reduction, select
from shiva.cost import tensor_bytes
from shiva.ops.schedule import RatioSchedule

from tiny import BACKBONES, make_flux, make_sd3, noise, randomized


@dataclass(frozen=True)
class Chosen(MethodConfig):
    """Keeps the tokens it is told to, each sample its own."""

    indices: torch.Tensor

    def build(self, spec: BackboneSpec) -> Method:
        return ChosenMethod(self, spec)


class ChosenMethod(Method):
    def reduction(self, x: torch.Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        return select(self.config.indices[: x.shape[0]], x.shape[1])


class Untouched(Method):
    def selects(self, site: Place) -> bool:
        return False


def run(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**call)[0]


def test_flux_at_batch_two_equals_two_single_runs_with_their_own_rows() -> None:
    model, tiny = make_flux(), BACKBONES["flux"]
    call = tiny.call(2, 6, 8)
    indices = torch.stack([torch.randperm(48)[:20].sort().values for _ in range(2)])
    with shiva.attach(model, Chosen(indices)) as session:
        together = run(model, call)
        for i in range(2):
            session.method.config = Chosen(indices[i : i + 1])
            single = {k: v if k.endswith("_ids") else v[i : i + 1] for k, v in call.items()}
            torch.testing.assert_close(run(model, single), together[i : i + 1], rtol=1e-5, atol=1e-6)


def test_flux_rope_rows_are_those_of_the_kept_positions() -> None:
    """Keeping a permuted set of all tokens must not change the image: each token takes its own rotary phase."""
    model, tiny = make_flux(), BACKBONES["flux"]
    for batch in (1, 2):
        call = tiny.call(batch, 6, 8)
        dense = run(model, call)
        order = torch.stack([torch.randperm(48) for _ in range(batch)])
        with shiva.attach(model, Chosen(order)):
            torch.testing.assert_close(run(model, call), dense, rtol=1e-4, atol=1e-5)


def test_controlnet_residuals_meet_full_length_tokens() -> None:
    model = make_sd3()
    call = BACKBONES["sd3"].call(2, 6, 6)
    residuals = [noise(2, 36, 32, seed=s) for s in range(2)]
    call["block_controlnet_hidden_states"] = residuals
    dense = run(model, call)
    for span in (1, 2):
        with shiva.attach(model, shiva.Shiva(budget=1.0, span=span)):
            assert torch.equal(run(model, call), dense)
        with shiva.attach(model, shiva.Shiva(budget=0.5, span=span)):
            assert run(model, call).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_half_precision(backbone: str, dtype: torch.dtype) -> None:
    tiny = BACKBONES[backbone]
    model = tiny.make().to(dtype)
    call = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() and not k.endswith("_ids") else v
        for k, v in tiny.call(2, 6, 6).items()
    }
    dense = run(model, call)
    with shiva.attach(model, shiva.Shiva(budget=1.0)):
        assert torch.equal(run(model, call), dense)
    with shiva.attach(model, shiva.Shiva(budget=0.5)):
        reduced = run(model, call)
    assert reduced.dtype == dtype
    assert reduced.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["sd3", "flux", "pixart"])
def test_a_step_compiles_without_graph_breaks_once_per_distinct_row(backbone: str, graphs: Any) -> None:
    tiny = BACKBONES[backbone]
    model = tiny.make()

    rows = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None].expand(3, 4)
    schedule = shiva.RatioSchedule((1000.0, 500.0, 0.0), rows)
    with shiva.attach(model, shiva.Shiva()) as session:
        session.method.set_schedule(schedule)
        calls = [tiny.call(2, 6, 6, timestep=t) for t in (990.0, 510.0, 490.0, 10.0, 980.0, 5.0)]
        eager = [run(model, call) for call in calls]
        session.compile(backend=graphs, fullgraph=True)
        compiled = [run(model, call) for call in calls]
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(graphs.seen) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        shiva.Shiva(budget=0.5, fill="cached", age=0.5),
        shiva.Shiva(budget=0.5, fill="cached", signals=("time", "prompt", "layer", "age")),
        shiva.Sweep(budget=0.5),
    ],
    ids=["age", "age as a signal", "sweep"],
)
def test_cached_updates_and_age_compile_too(config: MethodConfig, graphs: Any) -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]

    calls = [tiny.call(2, 6, 6, timestep=t) for t in (900.0, 600.0, 300.0, 200.0)]
    with shiva.attach(model, config) as session:
        for router in getattr(session.method, "routers", nn.ModuleList()).modules():
            if getattr(router, "proj_a", None) is not None:
                torch.nn.init.normal_(router.proj_a)
        eager = [run(model, call) for call in calls]
        assert session.stats[0].kept["transformer_blocks.1"] == 36
        assert session.stats[1].kept["transformer_blocks.1"] == 18
        session.compile(backend=graphs, fullgraph=True)
        compiled = [run(model, call) for call in calls]
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(graphs.seen) == 2, "the dense first step, and one for all others"


@pytest.mark.slow
def test_a_compiled_transformer_may_be_attached_to() -> None:
    """A user's own torch.compile keeps working: only the session's bookkeeping stays outside the graph."""
    torch._dynamo.reset()
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 6, 6)
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(0)
    with shiva.attach(model, shiva.Shiva(budget=0.5)):
        expected = run(model, call)
    torch.manual_seed(0)
    with shiva.attach(compiled, shiva.Shiva(budget=0.5)):
        torch.testing.assert_close(run(compiled, call), expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_record_holds_every_block_dense_and_reduced() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        with session.disabled(), session.record() as teacher:
            run(model, call)
        with session.record() as student:
            run(model, call)
    assert list(teacher.outputs) == list(student.outputs) == [0, 1, 2, 3]
    assert torch.equal(teacher.outputs[0], student.outputs[0]), "the first block is dense"
    untouched = (student.updates[1] == 0).all(dim=-1)
    assert untouched.sum() == 18, "half of the tokens ride the residual"
    torch.testing.assert_close(teacher.updates[1], teacher.outputs[1] - teacher.outputs[0])


def test_a_recording_is_of_the_calls_and_not_of_their_pricing() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        with session.record() as recording:
            run(model, tiny.call(1, 6, 6))
            session.summary()
        assert not any(output.is_meta for output in (*recording.outputs.values(), *recording.updates.values()))
        small = session.cost_model()
        with session.disabled(), session.record():
            run(model, tiny.call(1, 8, 8))
        assert session.cost_model().tokens == 64
        run(model, tiny.call(1, 6, 6))
        assert session.cost_model() == small


def test_attaching_again_replaces_the_session_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    dense = run(model, call)
    first = shiva.attach(model, shiva.Shiva(budget=0.5))
    run(model, call)
    with pytest.raises(ValueError, match="budget=7"):
        shiva.attach(model, shiva.Shiva, budget=7)
    assert first.attached, "a refused attach changes nothing"
    second = shiva.attach(model, "shiva", budget=0.7)
    assert "is replaced by" in caplog.text
    run(model, call)
    assert second.stats[0].kept["transformer_blocks.1"] == 25
    assert not first.attached
    assert shiva.summary(model).keep == second.summary().keep
    shiva.detach(model)
    assert torch.equal(run(model, call), dense)
    with pytest.raises(ValueError, match=r"no Shiva session.*shiva\.attach"):
        shiva.summary(model)


def test_one_session_serves_one_thread_at_a_time() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        refused: list[str] = []

        def elsewhere() -> None:
            try:
                run(model, call)
            except RuntimeError as error:
                refused.append(str(error))

        begin = session.method.begin_step

        def meanwhile(ctx: StepContext) -> None:
            session.method.begin_step = begin  # type: ignore[method-assign]
            other = threading.Thread(target=elsewhere)
            other.start()
            other.join()
            begin(ctx)

        session.method.begin_step = meanwhile  # type: ignore[method-assign]
        run(model, call)
        assert len(refused) == 1
        assert "another thread" in refused[0]
        run(model, call)


def test_an_attached_model_is_neither_copied_nor_pickled() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Sweep(budget=0.5)):
        with pytest.raises(RuntimeError, match="detach"):
            copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="detach"):
            pickle.dumps(model)
    copy.deepcopy(model)


def test_what_cannot_be_attached_to_says_why() -> None:
    with pytest.raises(ValueError, match="3x3 convolutions"):
        shiva.attach(tiny_sana(), shiva.Shiva())
    with pytest.raises(ValueError, match=r"Linear is not a supported transformer.*register_backbone"):
        shiva.attach(nn.Linear(2, 2), shiva.Shiva())
    with pytest.raises(ValueError, match="int has no transformer"):
        shiva.attach(3, shiva.Shiva())
    with pytest.raises(TypeError, match="cannot attach a dict"):
        shiva.attach(make_sd3(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches none of the 4 sites"):
        shiva.attach(make_sd3(), Untouched(MethodConfig(), BackboneSpec("", 4, 32, 32, 20)))


def tiny_sana() -> nn.Module:
    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
    )


@pytest.mark.parametrize("hook", ["pyramid_attention_broadcast", "faster_cache_block", "taylorseer_cache"])
def test_attention_caches_are_refused_by_name(hook: str) -> None:
    model = make_sd3()
    HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[1].attn).register_hook(ModelHook(), hook)
    with pytest.raises(ValueError, match="caches attention outputs.*disable_cache"):
        shiva.attach(model, shiva.Shiva())


BAD_OPTIONS = [
    ({"budget": 0.0}, "budget=0.0 is not above 0; pass a share above 0 and at most 1"),
    ({"budget": 1.4}, "budget=1.4 is above 1; pass a share above 0 and at most 1"),
    ({"budget": float("nan")}, "budget=nan is not finite"),
    ({"budgt": 0.5}, "no option 'budgt'; did you mean 'budget'?"),
    ({"budget": 0.5, "flops": 0.5}, "exclude each other"),
    ({"guess": "median"}, "guess='median' is unknown; pass one of 'zero', 'mean', 'ridge', 'teacher'"),
    ({"sharing": "trio"}, "sharing='trio' is unknown"),
    ({"dense": (0, 7)}, "names layer 7, but SD3Transformer2DModel has 4"),
    ({"dense": (0, 1, 2, 3)}, "all 4 layers are dense"),
    ({"bucket": 0}, "bucket=0 is not at least 1; pass a number of at least 1"),
    ({"guidance": "both"}, "guidance='both' is unknown; pass one of 'shared', 'per-sample', 'max'"),
    ({"budget": True}, "budget=True is not a number"),
    ({"budget": "0.5"}, "budget='0.5' is not a number"),
    ({"budget": [0.5]}, "budget=[0.5] is not a number"),
    ({"flops": float("inf")}, "flops=inf is not finite"),
    ({"dense": [0.5]}, "dense[0]=0.5 is not a whole number"),
    ({"dense": 0}, "dense=0 is not a list; write [0]"),
    ({"dense": (-1,)}, "dense[0]=-1 is not at least 0"),
    ({"bucket": 1.5}, "bucket=1.5 is not a whole number"),
    ({"bottleneck": 10**9}, "bottleneck=1000000000 is above 65536"),
    ({"span": 0}, "span=0 is not at least 1"),
    ({"guidance": 3}, "guidance=3 is unknown; pass one of 'shared', 'per-sample', 'max'"),
    ({"cfg": "both"}, "cfg='both' is unknown; pass one of 'auto', 'batched', 'sequential', 'none'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(o) for o, _ in BAD_OPTIONS])
def test_a_bad_option_names_the_value_and_the_fix_and_leaves_the_model_alone(
    options: dict[str, Any], message: str
) -> None:
    model = make_sd3()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=".*") as error:
        shiva.attach(model, shiva.Shiva(), **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_how_the_halves_agree_is_an_option_of_the_method() -> None:
    with shiva.attach(make_sd3(), shiva.Shiva(), guidance="per-sample", cfg="batched") as session:
        assert session.method.config.guidance == session.method.guidance == "per-sample"
        assert session._tracker.cfg == "batched"


def test_attaching_draws_nothing_from_the_global_generator() -> None:
    model = make_sd3()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    shiva.attach(model, shiva.Shiva()).detach()
    assert torch.equal(torch.rand(3), expected)


def test_untrained_weights_are_told_once_and_only_where_they_choose() -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)

    def told(source: Any, train: bool = False) -> list[str]:
        with warnings.catch_warnings(record=True) as caught, shiva.attach(model, source) as session:
            warnings.simplefilter("always")
            if train:
                session.method.train().eval()
            for _ in range(3):
                run(model, call)
        return [str(warning.message) for warning in caught if "untrained" in str(warning.message)]

    config = shiva.Shiva(budget=0.5)
    for source in (config, shiva.DyDiT(bias=0.0)):
        (message,) = told(source)
        assert "attach a trained checkpoint, or shiva.Sweep" in message
    assert not told(config, train=True)
    built = config.build(backbone_of(model).spec(model))
    for source in (shiva.Sweep(budget=0.5), shiva.Shiva(budget=1.0), shiva.ToMeSD(), built):
        assert not told(source)
    assert not told(shiva.ShivaCheckpoint.of(built))


def test_nan_scores_are_refused() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        nn.init.constant_(session.method.routers.routers[0].score.weight, float("nan"))
        with pytest.raises(ValueError, match="router scores hold NaN"):
            run(model, BACKBONES["sd3"].call(1, 6, 6))


@pytest.mark.parametrize(
    "ids",
    [lambda ids: torch.cat([ids] * 2)[:27], lambda ids: ids[torch.randperm(16)], lambda ids: ids * 0],
    ids=["joined", "in another order", "all alike"],
)
def test_position_ids_of_no_grid_are_refused_only_by_what_needs_one(ids: Any) -> None:
    model, call = make_flux(), BACKBONES["flux"].call(1, 4, 4)
    call["img_ids"] = ids(call["img_ids"])
    tokens = len(call["img_ids"])
    call["hidden_states"] = noise(1, tokens, 4)
    dense = run(model, call)
    with shiva.attach(model, shiva.Shiva(budget=1.0)):
        assert torch.equal(run(model, call), dense)
    for config in (shiva.Shiva(budget=0.5), shiva.Sweep(budget=0.5), shiva.NeuralSort(keep=0.5)):
        with shiva.attach(model, config) as session:
            assert run(model, call).isfinite().all()
            assert session.stats[-1].tokens == tokens
    for refusing in (shiva.ToMeSD(), shiva.Lattice(budget=0.5), shiva.ToMA(site="block", skip=0)):
        with shiva.attach(model, refusing), pytest.raises(ValueError, match="describe no grid"):
            run(model, call)


def test_the_images_own_tokens_must_be_in_one_piece() -> None:
    model, call = make_flux(), BACKBONES["flux"].call(1, 4, 4)
    call["img_ids"][5, 0] = 1
    with shiva.attach(model, shiva.Shiva()), pytest.raises(ValueError, match="not in one piece"):
        run(model, call)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_flops_budget_is_met_in_true_flops(backbone: str) -> None:
    tiny = BACKBONES[backbone]
    model = tiny.make()
    grid = (16, 16) if backbone == "dit" else (12, 15)
    with shiva.attach(model, shiva.Shiva(flops=0.7)) as session:
        run(model, tiny.call(2, *grid))
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.01)


def test_buckets_reach_the_counts() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Shiva(budget=0.55, bucket=8)) as session:
        run(model, BACKBONES["sd3"].call(2, 8, 8))
        assert all(kept % 8 == 0 for kept in session.stats[-1].kept.values())


def test_pixart_alpha_with_its_size_conditions() -> None:
    model = randomized(
        PixArtTransformer2DModel(
            sample_size=128,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=2,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=24,
            caption_channels=24,
            use_additional_conditions=True,
        )
    )
    call = BACKBONES["pixart"].call(2, 8, 6)
    sizes = {"resolution": torch.full((2, 2), 1024.0), "aspect_ratio": torch.ones(2, 1)}
    call["added_cond_kwargs"] = sizes
    dense = run(model, call)
    with shiva.attach(model, shiva.Shiva(budget=1.0)):
        assert torch.equal(run(model, call), dense)
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        assert run(model, call).isfinite().all()
        assert session.stats[-1].kept == {"transformer_blocks.0": 48, "transformer_blocks.1": 24}


def test_summary_is_readable_by_people_and_programs() -> None:
    model = make_sd3()
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        assert "nothing has run yet" in str(session.summary())
        run(model, BACKBONES["sd3"].call(2, 6, 6))
        summary = session.summary()
    described = summary.to_dict()
    assert described["keep"] == 0.5
    assert [row["kept"] for row in described["layers"]] == [18, 18, 18]
    assert {"router", "sort", "gather", "scatter"} <= described["seconds"].keys()
    assert "transformer_blocks.3" in str(summary)
    assert f"{described['flops_share']:.1%} of dense" in str(summary)


def fail_once(model: Any, call: dict[str, Any]) -> None:
    handle = model.norm_out.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, call)
    handle.remove()


@pytest.mark.parametrize("ends", ["detach", "begin_run", "fails"])
def test_what_a_run_carried_is_let_go_of_when_it_ends_early(ends: str) -> None:
    model, call = make_sd3(), BACKBONES["sd3"].call(2, 6, 6)
    session = shiva.attach(model, shiva.SDTM())
    run(model, call)
    carries = session.summary().cached_bytes
    assert carries > 0
    assert session.ctx is not None
    run_state = session.ctx.run
    carried = [weakref.ref(value) for value in (*run_state.merged.values(), *run_state.results.values())]
    assert carried
    del run_state
    if ends == "fails":
        fail_once(model, call)
    else:
        getattr(session, ends)()
    gc.collect()
    assert all(value() is None for value in carried)
    if session.attached:
        assert session.summary().cached_bytes >= carries, "what was carried is still told"
        return
    with pytest.raises(RuntimeError, match="ask for its cost or summary before detach"):
        session.summary()


def test_a_call_that_failed_may_be_made_again() -> None:
    """It was taken for the second of its step, which finds no tokens chosen by the first."""
    model, call = make_sd3(), BACKBONES["sd3"].call(1, 6, 6)
    with shiva.attach(model, shiva.Sweep(budget=0.5, fill="identity", attends="selected")) as session:
        fail_once(model, call)
        run(model, call)
        assert session.ctx is not None
        assert session.ctx.branch == 0
        assert len(session.stats) == 1


@pytest.mark.parametrize("config", [shiva.SDTM(), shiva.SparseDiT(split=(1, 1, 1, 1), bottom=0, top=0)])
def test_the_autoencoder_has_the_memory_of_a_run_that_is_over(config: MethodConfig, tmp_path: Path) -> None:
    pipe = PIPELINES["sd3"].load(tmp_path)
    with shiva.attach(pipe, config) as session:
        PIPELINES["sd3"].image(pipe)
        assert session.ctx is not None
        assert tensor_bytes(session.ctx.now) == tensor_bytes(session.ctx.run) == 0


def test_an_architecture_from_outside_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shiva.backbones.base._REGISTRY", dict(registered()))

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor]:
            for block in self.blocks:
                hidden_states = block(hidden_states)
            return (hidden_states,)

    class ToyBackbone(Backbone):
        transformers = ("Toy",)

        def sites(self, transformer: Any) -> list[Site]:
            return [
                Site(f"blocks.{i}", "block", i, block, image="input") for i, block in enumerate(transformer.blocks)
            ]

        def spec(self, transformer: Any) -> BackboneSpec:
            return BackboneSpec("Toy", 3, 8, 8, 8)

        def layout(self, transformer: Any, call: dict[str, Any]) -> Layout:
            return Layout(1, call["hidden_states"].shape[1])

    shiva.register_backbone(ToyBackbone())
    model, x = Toy(), noise(1, 10, 8)
    with shiva.attach(model, Chosen(torch.arange(4)[None])):
        reduced = run(model, {"hidden_states": x, "timestep": torch.tensor([5.0])})
    assert torch.equal(reduced[:, 4:], x[:, 4:])
    assert not torch.equal(reduced[:, :4], x[:, :4])


def test_share_accepts_the_ends_it_says() -> None:
    assert share("keep", 1.0) == 1.0
    with pytest.raises(ValueError, match=r"keep=0\.0 is not above 0"):
        share("keep", 0.0)


FREE_SWEEP = shiva.Sweep(budget=0.9, fill="identity", attends="selected")
"""Also the first step of its runs is reduced."""


@torch.no_grad()
@pytest.mark.parametrize("method", [FREE_SWEEP, shiva.LapSum(keep=0.9)])
def test_a_budget_turned_in_place_acts_from_the_next_run_as_if_attached_with_it(method: Any) -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    knob = method.knob

    def outputs(session: Any) -> list[torch.Tensor]:
        session.begin_run()
        torch.manual_seed(0)
        return [model(**tiny.call(1, 6, 6, timestep))[0] for timestep in (900.0, 500.0)]

    torch.manual_seed(1)
    with shiva.attach(model, method.changed({knob: 0.5})) as session:
        expected = outputs(session)
        weights = session.method.state_dict()
    with shiva.attach(model, method) as session:
        session.method.load_state_dict(weights) if weights else None
        before = outputs(session)
        model(**tiny.call(1, 6, 6, 900.0))
        session.set_budget(0.5)
        assert session.budget == 0.5
        assert getattr(session.method.config, knob) == 0.9, "the run that is under way keeps its own"
        after = outputs(session)
    assert all(map(torch.equal, after, expected))
    assert not all(map(torch.equal, before, expected))


@torch.no_grad()
def test_a_single_call_may_stand_in_a_whole_run() -> None:
    """As validation's do: the budget is met over all steps of the run, not over those from the call's own on."""
    model, tiny, timesteps = make_sd3(), BACKBONES["sd3"], (900.0, 700.0, 500.0, 300.0)
    pipeline = SimpleNamespace(transformer=model, scheduler=SimpleNamespace(timesteps=torch.tensor(timesteps)))
    rising = torch.linspace(0.2, 0.8, 4)[:, None].expand(4, 4).contiguous()
    with shiva.attach(pipeline, FREE_SWEEP.changed({"budget": 0.5, "tilt": 0})) as session:
        session.method.count.set(RatioSchedule(timesteps, torch.logit(rising).double()))

        def kept(*calls: float, **begin: int) -> dict[str, int]:
            session.begin_run(**begin)
            for timestep in calls:
                model(**tiny.call(1, 8, 8, timestep))
            return session.stats[-1].kept

        assert kept(300.0, first=0) == kept(*timesteps)
        assert kept(300.0) != kept(*timesteps)


@torch.no_grad()
def test_a_budget_is_turned_to_a_share_of_flops_and_refused_by_name() -> None:
    model, tiny = make_sd3(), BACKBONES["sd3"]
    with shiva.attach(model, FREE_SWEEP) as session:
        session.set_budget(flops=0.7)
        model(**tiny.call(1, 8, 8))
        assert (session.method.config.budget, session.budget) == (None, 0.7)
        assert session.summary().flops_share == pytest.approx(0.7, abs=0.03)
        for wrong in ({}, {"budget": 0.5, "flops": 0.5}, {"budget": 7}, {"budget": "0.5"}, {"flops": True}):
            with pytest.raises(ValueError, match="budget|flops"):
                session.set_budget(**wrong)
        with pytest.raises(AttributeError, match=r"session.set_budget\(0.5\)"):
            session.budget = 0.5
    with (
        shiva.attach(model, shiva.ToMeSD()) as session,
        pytest.raises(ValueError, match="ToMeSD has no budget to turn"),
    ):
        session.set_budget(0.5)
