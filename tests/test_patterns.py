"""Architectures as data: every class of the table gathers what its blocks are given per token."""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiva
from neighbours import ALIKE, NO_WHOLE_GRAPH
from shiva.backbones.base import backbone_of
from shiva.backbones.grids import GivenFrames, Latents, PositionIds, told_by_shapes, told_by_sizes
from shiva.backbones.patterns import PatternBackbone
from shiva.backbones.per_token import (
    Chosen,
    InTurn,
    KeyMask,
    RopeRows,
    Rows,
    SharedRope,
    SquareMask,
    gather_axis,
    image_and_text_rope,
    rope_of_each_head,
)
from shiva.core.context import StepContext
from shiva.core.layout import Layout, Scattered
from shiva.core.method import BackboneSpec, Method, MethodConfig, Place, SiteKind
from shiva.core.reduction import Reduction, select
from tiny_images import IMAGES, grid_ids
from tiny_videos import VIDEOS

from tiny import noise, randomized

PATTERNS = {**IMAGES, **VIDEOS}
DECLARED = {name: tiny for name, tiny in PATTERNS.items() if name != "kontext"}


@dataclass(frozen=True)
class Shuffled(MethodConfig):
    """Runs all tokens in an order of each sample's own: nothing may change."""

    kind: SiteKind = "block"

    def build(self, spec: BackboneSpec) -> Method:
        return ShuffledMethod(self, spec)


class ShuffledMethod(Method):
    def __init__(self, config: Shuffled, spec: BackboneSpec):
        super().__init__(config, spec)
        self.sites = frozenset({config.kind})

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        generator = torch.Generator().manual_seed(site.layer)
        order = [torch.randperm(x.shape[1], generator=generator) for _ in range(x.shape[0])]
        return select(torch.stack(order), x.shape[1])


def output(model: nn.Module, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result = model(**call)[0]
        return torch.stack(result) if isinstance(result, list) else result


def kinds(name: str) -> list[SiteKind]:
    return ["block", "attention"] if PATTERNS[name].attention else ["block"]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PATTERNS for kind in kinds(name)])
def test_tokens_in_another_order_give_the_same_picture(name: str, kind: SiteKind) -> None:
    tiny = PATTERNS[name]
    model, call = tiny.make(), tiny.call(2, 4, 6)
    dense = output(model, call)
    with shiva.attach(model, Shuffled(kind)):
        torch.testing.assert_close(output(model, call), dense, rtol=1e-4, atol=1e-5)


def test_the_first_frame_that_replaces_noise_always_runs() -> None:
    tiny = VIDEOS["hunyuan-video"]
    made: Any = tiny.make()
    sizes = {name: value for name, value in made.config.items() if not name.startswith("_")}
    model = randomized(type(made)(**{**sizes, "image_condition_type": "token_replace"}))
    call = tiny.call(2, 4, 6)
    dense = output(model, call)
    with shiva.attach(model, Shuffled()) as session:
        torch.testing.assert_close(output(model, call), dense, rtol=1e-4, atol=1e-5)
        assert session.layout == Layout(4, 6, frames=1, text=5, before=24)


def test_a_prefix_in_qwens_own_cache_is_not_the_images() -> None:
    tiny = IMAGES["qwen21"]
    model = tiny.make()
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    caches = []

    def two_steps() -> Tensor:
        cache = {"kv_cache": QwenImage21KVCache(4)}
        caches[:] = [weakref.ref(cache["kv_cache"])]
        output(model, {**tiny.call(2, 4, 6, 900.0), **cache, "kv_cache_mode": "extract"})
        return output(model, {**tiny.call(2, 4, 6), **cache, "kv_cache_mode": "cached"})

    dense = two_steps()
    with shiva.attach(model, Shuffled()) as session:
        torch.testing.assert_close(two_steps(), dense, rtol=1e-4, atol=1e-5)
        assert session.layout == Layout(4, 6)
        assert len(session.stats) == 2, "one run"
    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        two_steps()
        assert session.summary().flops_share < 0.9
        assert caches[0]() is None, "its memory is free once the run is over"


@pytest.mark.parametrize("name", [name for name in DECLARED if name != "auraflow"])
def test_and_another_picture_where_the_rotary_table_is_left_as_it_is(name: str) -> None:
    """The control of the test above; AuraFlow has no rotary table."""
    tiny = PATTERNS[name]
    model, call = tiny.make(), tiny.call(2, 4, 6)
    dense = output(model, call)
    backbone = backbone_of(model)
    assert isinstance(backbone, PatternBackbone)
    with shiva.attach(model, Shuffled()) as session:
        for hook in session.hooks._sites:
            per_token = {k: v for k, v in hook.site.per_token.items() if "rot" not in k and "rope" not in k}
            per_token = {k: v for k, v in per_token.items() if k != "freqs_cis"}
            hook.site = dataclasses.replace(hook.site, per_token=per_token)
        assert (output(model, call) - dense).abs().max() > 1e-5


ONE_OF_A_KIND = [name for name in PATTERNS if name not in (*NO_WHOLE_GRAPH, *ALIKE)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_a_step_is_one_graph_where_the_dense_model_is(name: str, graphs: Any) -> None:
    tiny = PATTERNS[name]
    model = tiny.make()

    with shiva.attach(model, shiva.Shiva(budget=0.5)) as session:
        eager = output(model, tiny.call(1, 4, 6))
        session.compile(backend=graphs, fullgraph=True)
        torch.testing.assert_close(output(model, tiny.call(1, 4, 6)), eager, rtol=1e-4, atol=1e-5)
    assert len(graphs.seen) == 1


@pytest.mark.parametrize("name", DECLARED)
def test_signals_are_as_wide_as_the_spec_says(name: str) -> None:
    tiny = PATTERNS[name]
    model, call = tiny.make(), tiny.call(2, 4, 6)
    backbone = backbone_of(model)
    spec = backbone.spec(model)
    with torch.no_grad():
        time, prompt = backbone.signals(model, call)
    assert time.shape == (2, spec.time_width)
    assert prompt.shape == (2, spec.prompt_width)
    assert not torch.equal(prompt[0], prompt[1])
    blocks = [site for site in backbone.sites(model) if site.kind == "block"]
    assert [site.layer for site in blocks] == list(range(spec.layers))
    if name != "cosmos":
        assert backbone.timestep(call).max().item() == pytest.approx(500.0)


@pytest.mark.parametrize(("name", "channels"), [("cogvideox", 4), ("kandinsky5", 4), ("zimage", 4), ("wan", 4)])
def test_methods_see_predictions_with_channels_second(name: str, channels: int) -> None:
    """Whatever the transformer's own order of axes; what replaces one goes back in that order."""
    tiny = PATTERNS[name]
    model, call = tiny.make(), tiny.call(2, 4, 6)
    backbone = backbone_of(model)
    with torch.no_grad():
        given = model(**call)[0]
    seen = backbone.channels_second(given)
    assert seen.shape == (2, channels, tiny.frames, 8, 12)
    assert backbone.channels_second(backbone.latents_of(call)).shape == seen.shape
    back = backbone.in_place_of(seen, given)
    assert all(map(torch.equal, back, given))


# -- forms of arguments ------------------------------------------------------------------------------

POSITIONS = torch.tensor([[2, 0], [1, 3]])
AFTER_TEXT = Chosen(POSITIONS, Layout(2, 2, text=1), whole_keys=False)
ROWS = torch.tensor([[0, 3, 1], [0, 2, 4]])


def test_a_shared_table_gets_the_axes_its_attention_asks_for() -> None:
    cos, sin = noise(5, 6), noise(5, 6, seed=2)
    rows = SharedRope(after_text=True)((cos, sin), AFTER_TEXT)
    assert torch.equal(rows[0][None, :, None, :], cos[ROWS][:, :, None])  # R1
    assert torch.equal(rows[1][None, None, :, :], sin[ROWS][:, None])  # R2
    alone = AFTER_TEXT._replace(positions=POSITIONS[:1])
    assert torch.equal(SharedRope(after_text=True)((cos, sin), alone)[0], cos[ROWS[0]])


def test_complex_rows_of_the_image_come_beside_those_of_the_text() -> None:
    image, text = torch.polar(noise(4, 3), noise(4, 3)), torch.polar(noise(1, 3), noise(1, 3))
    rows, same = image_and_text_rope((image, text), AFTER_TEXT._replace(layout=Layout(2, 2)))
    assert torch.equal(rows.unsqueeze(1), image[POSITIONS][:, :, None])  # R3
    assert same is text


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 5, 3), 1),  # R4, R6
        ((1, 5, 1, 3), 1),  # R5
        ((2, 2, 5, 3), -2),  # R7
        ((2, 5, 1, 3, 2, 2), 1),  # R8
        ((2, 6, 5, 3), 2),
    ],
)
def test_rows_are_gathered_along_their_axis(shape: tuple[int, ...], axis: int) -> None:
    value = noise(*shape)
    cut = Rows(axis, after_text=True)(value, AFTER_TEXT)
    for sample in range(2):
        expected = value[min(sample, shape[0] - 1)].index_select(axis - (axis > 0), ROWS[sample])
        assert torch.equal(cut[sample], expected)
    assert torch.equal(gather_axis(value, ROWS[:1], axis), value.index_select(axis, ROWS[0]))


def test_heads_may_have_rows_of_their_own() -> None:
    cos, sin = noise(4, 2, 3), noise(4, 2, 3, seed=2)
    assert torch.equal(rope_of_each_head((cos, sin), AFTER_TEXT._replace(layout=Layout(2, 2)))[1], sin[POSITIONS])


def test_one_row_for_all_tokens_and_other_forms_of_modulation_are_left_alone() -> None:
    shared = noise(2, 1, 6)
    assert Rows()(shared, AFTER_TEXT) is shared
    modulation = noise(2, 5, 6)
    assert Rows(only_with_axes=4)(modulation, AFTER_TEXT) is modulation


def test_masks_keep_the_columns_of_what_runs_and_of_all_keys_where_they_are_whole() -> None:
    keys, square = noise(2, 1, 1, 5), noise(2, 5, 5)
    whole = AFTER_TEXT._replace(whole_keys=True)
    assert torch.equal(KeyMask(after_text=True)(keys, AFTER_TEXT)[0, 0, 0], keys[0, 0, 0, ROWS[0]])
    assert KeyMask(after_text=True)(keys, whole) is keys
    assert torch.equal(SquareMask(after_text=True)(square, AFTER_TEXT)[1], square[1][ROWS[1]][:, ROWS[1]])
    assert torch.equal(SquareMask(after_text=True)(square, whole)[1], square[1][ROWS[1]])


def test_queries_take_their_rows_first_and_keys_all_of_them() -> None:
    cos, sin = noise(5, 6), noise(5, 6, seed=2)
    turn = SharedRope(after_text=True)((cos, sin), AFTER_TEXT._replace(whole_keys=True))
    assert isinstance(turn, InTurn)
    queries, _ = turn
    assert isinstance(queries, RopeRows)
    keys, _ = turn
    assert keys is cos


# -- grids -------------------------------------------------------------------------------------------


class Config:
    patch_size, patch_size_t, use_layer3d_rope = 2, None, False
    config: Any


Config.config = Config


def tokens(count: int) -> dict[str, Any]:
    return {"hidden_states": noise(1, count, 4), "encoder_hidden_states": noise(1, 5, 8)}


def test_position_ids_may_start_anywhere_and_hold_references_on_either_side() -> None:
    own, other = grid_ids(3, 4, start=512), grid_ids(2, 2, first=1)
    after = PositionIds()(Config, {**tokens(16), "img_ids": torch.cat([own, other])})
    assert after == Layout(3, 4, text=5, after=4)
    before = PositionIds()(Config, {**tokens(16), "img_ids": torch.cat([other, own])[None]})
    assert before == Layout(3, 4, text=5, before=4)
    scaled = own * torch.tensor([1.0, 0.37, 0.37])
    assert PositionIds()(Config, {**tokens(12), "img_ids": scaled}) == Layout(3, 4, text=5)
    assert PositionIds()(Config, {**tokens(11), "img_ids": own[:-1]}) == Scattered(1, 11, text=5)


def test_shapes_name_the_image_first_and_its_layers_before_their_reference() -> None:
    edited = {**tokens(18), "img_shapes": [[(1, 3, 4), (1, 2, 3)]]}
    assert told_by_shapes(Config, edited) == Layout(3, 4, text=5, after=6)
    layered = type("Layered", (Config,), {"use_layer3d_rope": True})
    layered.config = layered
    shapes = {**tokens(36), "img_shapes": [[(1, 3, 4)] * 3]}
    assert told_by_shapes(layered, shapes) == Layout(3, 4, frames=2, text=5, after=12)
    with pytest.raises(ValueError, match="does not describe"):
        told_by_shapes(Config, {**tokens(19), "img_shapes": [[(1, 3, 4), (1, 2, 3)]]})


def test_clips_are_read_from_any_order_of_axes_and_given_frames_are_not_the_videos_own() -> None:
    text = {"encoder_hidden_states": noise(1, 5, 8)}
    clip = {**text, "hidden_states": noise(1, 4, 3, 8, 6), "timestep": torch.tensor([7.0])}
    assert Latents("BCFHW")(Config, clip) == Layout(4, 3, frames=3, text=5)
    assert Latents("BFHWC")(Config, {**text, "hidden_states": noise(1, 3, 8, 6, 4)}) == Layout(4, 3, 3, 5)
    of_tokens = torch.tensor([[0.0] * 12 + [7.0] * 24])
    grid = GivenFrames(Latents("BCFHW"))
    assert grid(Config, clip) == Layout(4, 3, frames=3, text=5)
    assert grid(Config, {**clip, "timestep": of_tokens}) == Layout(4, 3, frames=2, text=5, before=12)


def test_a_grid_that_is_told_may_be_wrong_where_there_are_coordinates() -> None:
    told = {"num_frames": 2, "height": 3, "width": 2}
    assert told_by_sizes(Config, {**tokens(12), **told}) == Layout(3, 2, 2, 5)
    places = Layout(3, 2, 2).places(torch.device("cpu")).T[None] * 1.5
    extra = torch.cat([places[:, :, :1]] * 2 + [places], dim=2)
    unsaid = {"num_frames": 1, "height": 1, "width": 1}
    assert told_by_sizes(Config, {**tokens(12), **unsaid, "video_coords": places}) == Layout(3, 2, 2, 5)
    assert told_by_sizes(Config, {**tokens(14), **unsaid, "video_coords": extra}) == Layout(3, 2, 2, 5, before=2)
