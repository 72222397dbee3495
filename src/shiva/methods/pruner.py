"""A pruner is three answers: how many tokens a block runs on, which, and what the others get."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shiva.core.context import Held, StepContext
from shiva.core.method import BackboneSpec, GuidancePolicy, Method, Place, RunSite, run_reduced, unify_guidance
from shiva.core.options import Count, NotNegative, Whole
from shiva.core.reduction import Reduction, Streams
from shiva.methods.fills import FillRun, Key, check_layers, key_of
from shiva.methods.fresh_keys import INSIDE, Fresh, around_block, around_inside, check_fresh
from shiva.methods.scores import Lattice, Score, ScoreRun, ScoreStep, with_bonus
from shiva.methods.shortcut import ShortcutOptions
from shiva.methods.spans import begin_span, check_whole, spans_of, within_span
from shiva.ops.shortcut import Lin
from shiva.ops.topk import hard_topk

SHORTCUT = "shortcut."
"""How the names of the fill's own weights begin."""
Attends = Literal["selected", "all", "fresh", "auto"]
KEPT_TOKENS = 2**18
"""Choices that look at no token are kept from image to image, of so many tokens in all. What a fill knows of their
places takes 300 bytes a token."""


@dataclass(frozen=True)
class PrunerOptions(ShortcutOptions):
    """Options of every method that picks a block's tokens by score."""

    dense: tuple[Whole, ...] = (0,)
    """Layers that always see all tokens; the paper bypasses the first."""
    guidance: GuidancePolicy = "max"
    """How the two guidance halves agree on tokens: the elementwise maximum of scores in the paper."""
    age: float = 0.0
    """Bonus of each step a token has waited, in deviations of the scores; with cached updates it avoids staleness."""
    cover: NotNegative = 0.0
    """Bonus of an even cover of the grid, over layers and steps, in deviations of the scores; 0 has none."""
    span: Count = 1
    """Layers in a row that run on one choice of tokens, which stay gathered between them (`methods.spans`)."""
    freeze_references: Count | None = None
    """Editing models: steps after which reference tokens do not run, and attention sees the keys and values that they
    last had. Exact where a model was trained so (FLUX.2 klein KV, whose pipeline does it by itself), an approximation
    elsewhere. None runs them always."""
    attends: Attends = "selected"
    """What the selected attend to: selected (the paper), or all: by the keys and values that the others last had if
    their updates are cached, by fresh ones otherwise; fresh, by fresh ones of what the others are believed to be;
    auto, all where the model projects keys apart from the rest, else selected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span > 1 and (self.may_cache or self.attends != "selected"):
            clash = f"fill={self.fill!r}" if self.may_cache else f"attends={self.attends!r}"
            raise ValueError(f"span={self.span} and {clash} exclude each other: what is kept is one layer's")


@dataclass
class PrunerRun(FillRun, ScoreRun):
    """What a pruner carries from step to step."""

    references: dict[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Of each projection to keys or values, what reference tokens before and after the image (B, R, D) last had."""


@dataclass
class PrunerStep(ScoreStep):
    """What a pruner keeps for the sites of one step."""

    indices: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, k)
    fresh: Fresh | None = None
    """Inside a block whose keys are made anew."""
    lins: list[Lin] | None = None
    """Each layer's regression at the step's noise level, where the fill has them."""
    spans: dict[int, range] = field(default_factory=dict)
    """Of each reduced layer, the layers that run on one choice with it."""
    held: dict[int, Held] = field(default_factory=dict)
    """By the first layer of a span: its reduction, while tokens stay gathered."""


def choose_once(known: dict[int, Tensor], site: Place, policy: GuidancePolicy, ctx: StepContext) -> Tensor | None:
    """A layer's tokens (B, k) where a step's first call has chosen them for the others too, or this one already."""
    chosen_before = ctx.branch and policy != "per-sample"
    return known.get(site.layer) if chosen_before or ctx.reruns(site.name) else None


class Pruner(Method):
    """Runs a block on the k best tokens. A subclass sets `score`, and says how many in `plan`."""

    config: PrunerOptions
    new_run = PrunerRun
    new_step = PrunerStep
    score: Score

    def __init__(self, config: PrunerOptions, spec: BackboneSpec, *, tracks_age: bool = False):
        super().__init__(config, spec)
        check_layers("dense", config.dense, spec)
        self.fill = config.make_fill(spec, tracks_age or bool(config.age))
        self.shortcut = self.fill.weights
        self._settled: dict[Hashable, Tensor] = {}
        self.age_weight = config.age
        self.whole_keys = config.attends != "selected"
        self.fresh_keys = self.whole_keys and (config.attends == "fresh" or not self.fill.caches)
        self.freezes = config.freeze_references is not None
        with_keys = self.whole_keys or self.freezes
        self.requires = frozenset({"block", "keys"}) if with_keys else frozenset({"block"})
        self.sites = self.requires | INSIDE if self.fresh_keys else self.requires
        if self.shortcut is not None:
            check_whole(spans_of(spec.layers, frozenset(config.dense), config.span), spec.layers, config.span)

    @property
    def holds(self) -> bool:
        return self.config.span > 1

    @property
    def needs_sigma(self) -> bool:  # type: ignore[override]
        return self.shortcut is not None or self.score.observes

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        fill = self.fill
        carries = fill.caches or fill.carries or fill.tracks_age or self.freezes or self.score.observes
        return not (carries or self.score.drawn or self.config.cover)

    def dense_layers(self) -> Collection[int]:
        """Layers that always see all tokens."""
        return self.config.dense

    @property
    def spans(self) -> dict[int, range]:
        """Of each reduced layer, the layers that run on one choice with it."""
        return spans_of(self.spec.layers, frozenset(self.dense_layers()), self.config.span)

    def even(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Counts of all layers, those of a span that differ brought to their mean."""
        unit = getattr(self.config, "bucket", None) or 1
        means = {
            layer: max(unit, sum(counts[i] for i in span) // len(span) // unit * unit)
            for layer, span in self.spans.items()
            if len({counts[i] for i in span}) > 1
        }
        return tuple(means.get(layer, count) for layer, count in enumerate(counts))

    def selects(self, site: Place) -> bool:
        if self.freezes and site.kind == "keys":
            return True
        if site.layer in self.dense_layers():
            return False
        if self.fresh_keys:
            check_fresh(site, self.spec.name)
            return True
        return site.kind == "block" or (site.kind == "keys" and self.keeps_keys(site.layer))

    def _sees_all(self, ctx: StepContext) -> bool:
        return self.whole_keys and (self.fresh_keys or self.fill.in_this(ctx).caches)

    def keeps_keys(self, layer: int) -> bool:
        return self.whole_keys and self.fill.caches_layer(layer)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Weights of this method under any fill: a shortcut that they lack stays as it is, one too many is left."""
        own = {name: value for name, value in self.state_dict().items() if name.startswith(SHORTCUT)}
        given = {name: value for name, value in state_dict.items() if name in own or not name.startswith(SHORTCUT)}
        return super().load_state_dict({**own, **given}, *args, **kwargs)

    def begin_step(self, ctx: StepContext) -> None:
        """Settle the scores that look at no token, where nothing is compiled or recorded."""
        steps = self.config.freeze_references
        waited = steps is not None and ctx.step - ctx.first >= steps
        ctx.frozen = waited and ctx.layout.reference > 0 and bool(ctx.run.references)
        self.fill.begin_step(ctx)
        ctx.now.spans = self.spans
        if self.score.drawn and ctx.now.drawn is None and ctx.now.settled is None:
            if self.settles(ctx):
                ctx.now.settled = self.settle(ctx)
            else:
                ctx.now.drawn = ctx.here(self.score.draw(ctx.layout, ctx.step, self.spec.layers))
        if self.config.cover and ctx.now.cover is None:
            turn = ctx.explore.step + ctx.explore.index if self.training else ctx.step
            drawn = Lattice(self.config.span).draw(ctx.layout, turn, self.spec.layers)
            ctx.now.cover = ctx.here(drawn)

    def end_step(self, output: Tensor, ctx: StepContext) -> None:
        self.score.observe(output, ctx)

    def own_flops(self, ctx: StepContext, counts: Sequence[float]) -> float:
        return self.fill.flops([counts[first] for first in {span.start for span in self.spans.values()}], ctx.layout)

    # -- which ---------------------------------------------------------------------------------------

    def scores(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Scores (B, N) of tokens x (B, N, D): higher is computed."""
        with ctx.phase("router"):
            scores = self.score(x, site, ctx)
        if ctx.trace is not None:
            ctx.trace.scores[ctx.step, site.layer] = scores.detach()
        return scores.to(x.device)

    def choose(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Indices (B, k) of the tokens a layer runs on."""
        scores = unify_guidance(self.scores(x, site, ctx), self.guidance, ctx)
        with ctx.phase("sort"):
            if self.age_weight:
                scores = with_bonus(scores, self.fill.age_of(x, site, ctx), self.age_weight)
            return hard_topk(self.covered(scores, site, ctx), ctx.counts[site.layer])

    def covered(self, scores: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """Scores (B, N) with the bonus of an even cover, where it is asked for."""
        now: PrunerStep = ctx.now
        if now.cover is None:
            return scores
        return with_bonus(scores, now.cover[site.layer].to(scores), self.config.cover)

    def settles(self, ctx: StepContext) -> bool:
        """Whether a drawn score alone chooses, at sizes whose choices can be kept."""
        alone = not (self.age_weight or self.config.cover or ctx.trace is not None or torch.compiler.is_compiling())
        if ctx.latents is None:  # a step that is recorded outside a call
            return False
        choices = {(self.score.turn(ctx.step, layer), k) for layer, k in enumerate(ctx.counts)}
        return alone and len(choices) * ctx.latents.shape[0] * ctx.tokens <= KEPT_TOKENS

    @torch.inference_mode(False)
    def settle(self, ctx: StepContext) -> list[Tensor]:
        """Of each layer, the tokens (B, k) that a drawn score alone chooses; kept for the steps and images to come."""
        assert ctx.latents is not None
        batch, device, drawn = ctx.latents.shape[0], ctx.latents.device, None
        known, settled = self._settled, []
        for layer, k in enumerate(ctx.counts):
            key = (self.score.turn(ctx.step, layer), k, ctx.layout, batch, device)
            indices = known.pop(key, None)
            if indices is None:
                drawn = self.score.draw(ctx.layout, ctx.step, self.spec.layers) if drawn is None else drawn
                indices = hard_topk(drawn[layer][None], k).to(device).repeat(batch, 1)
            known[key] = indices
            settled.append(indices)
        for oldest in list(known)[: max(0, len(known) - KEPT_TOKENS // (batch * ctx.tokens))]:
            del known[oldest]
        return settled

    def _forget(self) -> None:
        self._settled.clear()

    def indices(self, x: Tensor, site: Place, ctx: StepContext) -> Tensor:
        """The tokens a layer runs on; under sequential guidance the second call of a step takes the first's."""
        now: PrunerStep = ctx.now
        if now.settled is not None:
            now.indices[site.layer] = now.settled[site.layer]
            return now.settled[site.layer]
        chosen, first = choose_once(now.indices, site, self.guidance, ctx), now.spans[site.layer].start
        if chosen is None and first < site.layer:  # a span that a ControlNet opens
            chosen = now.indices[first]
        if chosen is None:
            with torch.no_grad():
                chosen = self.choose(x, site, ctx)
        now.indices[site.layer] = chosen
        return chosen

    # -- one block -----------------------------------------------------------------------------------

    def reduction(self, x: Tensor, site: Place, ctx: StepContext) -> Reduction | None:
        if ctx.counts[site.layer] >= x.shape[1] or not self.fill.ready(x, site, ctx):
            return None
        reduction = self.fill(self.indices(x, site, ctx), x, site, ctx)
        if not (self.whole_keys and self.fill.in_this(ctx).caches_layer(site.layer)):
            return reduction
        return replace(reduction, whole_keys=True)

    def around(self, run: RunSite, x: Tensor, base: Tensor, site: Place, ctx: StepContext) -> Streams:
        if self.fresh_keys and site.kind != "block":
            made = around_inside(run, x, site, ctx)
            return self.with_references(made, site, ctx) if site.kind == "keys" else made
        if site.kind == "keys":
            made = run(x, None)
            if self.keeps_keys(site.layer) and site.layer not in self.dense_layers():
                chosen = ctx.now.indices.get(site.layer)
                made = made._replace(image=self.fill.all_keys(made.image, chosen, site, ctx))
            return self.with_references(made, site, ctx)
        span, held = ctx.now.spans[site.layer], ctx.now.held
        if site.layer > span.start and span.start in held:
            return within_span(run, x, site.layer, span, ctx)
        reduction = self.reduction(x, site, ctx)
        if reduction is not None:
            if len(span) > 1 and self.stays_gathered(ctx):
                return begin_span(run, reduction, x, base, span.start, ctx)
            run_block = around_block if self.fresh_keys else run_reduced
            return run_block(run, reduction, x, base, ctx)
        held.pop(span.start, None)
        out = run(x, None)
        if not self.training:
            self.fill.refresh(out.image, base, site, ctx)
        return out

    def stays_gathered(self, ctx: StepContext) -> bool:
        """Whether a span's layers follow on each other; a ControlNet adds to all tokens between them."""
        if not ctx.blocks_adjoin and self.shortcut is not None:
            raise ValueError(
                f"a ControlNet adds to all tokens between blocks, where span={self.config.span} holds fewer and fills "
                "once; detach one of them, or fit with span=1"
            )
        return ctx.blocks_adjoin

    def with_references(self, made: Streams, site: Place, ctx: StepContext) -> Streams:
        """Keys or values with those of reference tokens: kept while these run, added once they do not."""
        if not self.freezes:
            return made
        run: PrunerRun = ctx.run
        if not ctx.frozen:
            if made.rest is not None and ctx.layout.reference:
                before, after = site.references(made.rest.detach(), ctx.layout)
                run.references[key_of(site, ctx)] = before.clone(), after.clone()
            return made
        before, after = run.references[key_of(site, ctx)]
        return made._replace(image=torch.cat([before, made.image, after], dim=1))
