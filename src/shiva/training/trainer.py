"""The loop: one for all stages and all trained methods, on accelerate."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shiva.checkpoint import ShivaCheckpoint, to_json, write_atomically
from shiva.core.options import unknown_key
from shiva.session import attach
from shiva.training.adapter import adapter_config, adapter_parameters, adapter_state, add_adapter, load_adapter_state
from shiva.training.diagnose import NonFiniteError, diagnose, not_finite_of
from shiva.training.feed import Loaded, load_ahead
from shiva.training.interrupts import Interrupted, Interrupts
from shiva.training.log import Log
from shiva.training.objectives import Before, MicroBatch, Objectives
from shiva.training.parallel import choose_precision, make_accelerator, sum_gradients
from shiva.training.prepare import Ranks, load_family, prepare
from shiva.training.recipe import Recipe
from shiva.training.sampling import generator_of, noise_process, seed_of, strata, stratified_ratios
from shiva.training.stages import Moment, exploration, moment
from shiva.training.state import (
    State,
    check_recipe,
    checkpoints,
    load_state,
    newest_of,
    rename_into_place,
    save_state,
)
from shiva.training.validate import Validator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


class Trainer:
    """A training run in a folder: `run()` begins it, or continues it after its newest checkpoint."""

    def __init__(self, recipe: Recipe, output: Path, log: Log | None = None):
        self.recipe, self.output = recipe, output
        self.saved = output / "states"
        self.final = output / "checkpoint"
        self.accelerator = make_accelerator(choose_precision(recipe.compute.precision), output, recipe.logging.wandb)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device
        self.micro_batches = recipe.sampling.micro_batches
        if self.micro_batches % self.world:
            raise ValueError(
                f"a global batch of {self.micro_batches} micro-batches cannot be shared by {self.world} ranks; "
                "change sampling.batch or sampling.micro_batch"
            )
        self.log = log or Log(output, self.accelerator, recipe)
        self.adapter: dict[str, Any] | None = None
        self.groups: dict[str, list[nn.Parameter]] = {}
        self.optimizer: Any = None
        self.step = 0
        self.newest: Path | None = checkpoints(self.saved)[-1] if checkpoints(self.saved) else None

    # -- the run -------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train to the end; the folder of the finished checkpoint."""
        state = None if self.newest is None else load_state(self.newest)
        if state is not None:
            check_recipe(self.output, state.recipe, self.recipe.to_dict())
        if self.final.is_dir():
            self.log.say(f"{self.final} is finished; pass --fresh to train again")
            return self.final
        self.prepare()
        if state is not None:
            self.restore(state)
        elif self.recipe.start is not None:
            self.start_from(Path(self.recipe.start))
        self.log.begin(self.step)
        try:
            with Interrupts() as interrupts:
                self.train(interrupts)
            if self.accelerator.is_main_process:
                self.export()
            self.accelerator.wait_for_everyone()
        finally:
            self.log.close()
        return self.final

    def prepare(self) -> None:
        """Load the pipeline, attach the method, open the data."""
        recipe = self.recipe
        self.family = load_family(recipe, self.device, DTYPES[self.accelerator.mixed_precision])
        ranks = Ranks(self.rank, self.world, self.accelerator.wait_for_everyone)
        self.prepared = prepare(recipe, self.family, self.output, ranks, self.log.preparing)
        if recipe.data.kind == "latents" or recipe.data.cache is not None:
            self.family.drop_text_encoders()
        torch.manual_seed(seed_of(recipe.seed, "method"))
        self.session = attach(self.family.pipe, recipe.method_config())
        self.method = self.session.method
        self.method.train().requires_grad_(False)
        transformer: Any = self.session.transformer
        if recipe.compute.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        process = noise_process(self.family.pipe.scheduler, recipe.sampling.density)
        self.objectives = Objectives(self.session, self.family, process, recipe.weights, recipe.distill.every)
        self.check_groups()
        held_out = self.prepared.held_out_indices
        self.validator = Validator(
            self.objectives,
            self.prepared.held_out,
            held_out,
            recipe.validation,
            recipe.reuse,
            recipe.seed,
            self.device,
        )

    def check_groups(self) -> None:
        known = {*self.method.groups(), "adapter"}
        for stage in self.recipe.stages:
            for name in stage.trains:
                if name not in known:
                    raise ValueError(unknown_key(name, known, f"stage {stage.name!r} of {self.method}"))

    def restore(self, state: State) -> None:
        """Take up a saved state; its optimizer, if the coming step is of the same stage."""
        self.step = state.step
        self.method.load_state_dict(state.method)
        self.method.load_tables(state.tables)
        if state.adapter:
            self.inject_adapter()
            load_adapter_state(self.session.transformer, state.adapter)
        now = moment(self.recipe.stages, self.step)
        if now is not None and now.step > 0:
            self.enter(now)
            self.optimizer.load_state_dict(state.optimizer)
        self.log.say(f"continuing {self.newest} at step {self.step} of {self.recipe.steps}")

    def start_from(self, run: Path) -> None:
        """Begin with what another run has learned.

        Its budget's moving average is its own and stays behind, as does a policy that was meant for another budget.
        """
        state = load_state(newest_of(run))
        learned = dict(self.method.named_parameters())
        if state.recipe["method"].get("budget") != self.recipe.method.get("budget"):
            other = {id(parameter) for parameter in self.method.groups().get("policy", [])}
            learned = {name: weight for name, weight in learned.items() if id(weight) not in other}
        for name, weight in learned.items():
            if name not in state.method or state.method[name].shape != weight.shape:
                raise ValueError(
                    f"start: {run} has no {name} of shape {tuple(weight.shape)}; it was trained with another method "
                    "or other router or policy options, make them the same"
                )
        self.method.load_state_dict({name: state.method[name] for name in learned}, strict=False)
        if state.adapter:
            self.inject_adapter()
            load_adapter_state(self.session.transformer, state.adapter)
        self.log.say(f"starting with the weights of {run} at its step {state.step}")

    def train(self, interrupts: Interrupts) -> None:
        recipe, mine = self.recipe, range(self.rank, self.micro_batches, self.world)
        if self.validates_after(self.step) and self.any_rank(self.log.lacks_validation(self.step)):
            self.validate()  # a run that was stopped before it could
        for loaded in load_ahead(self.prepared.feed, self.step, recipe.steps, self.micro_batches, mine):
            now = moment(recipe.stages, self.step)
            assert now is not None
            if now.step == 0:
                self.enter(now)
            began = time.perf_counter()
            numbers = self.train_step(now, loaded)
            self.step += 1
            self.log.step(self.step, now, numbers, time.perf_counter() - began)
            stage_ends = now.step + 1 == now.stage.steps
            stopping = self.any_rank(interrupts.signal is not None)
            if stage_ends or stopping or self.step % recipe.checkpoints.every == 0:
                self.save(now, numbers["loss"])
            if stopping:
                raise Interrupted(interrupts.signal or 15, self.step, self.newest)
            if self.validates_after(self.step):
                self.validate()

    def validates_after(self, step: int) -> bool:
        """At the end of every stage, and every so many steps."""
        before = moment(self.recipe.stages, step - 1) if step else None
        if before is None:
            return False
        every = self.recipe.validation.every
        return before.step + 1 == before.stage.steps or bool(every and step % every == 0)

    def any_rank(self, flag: bool) -> bool:
        if self.world == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.device), "sum") > 0)

    # -- a stage -------------------------------------------------------------------------------------

    def inject_adapter(self) -> None:
        if self.adapter is None:
            options, transformer = self.recipe.adapter, self.session.transformer
            rank, alpha, dora = options.rank, options.alpha, options.dora
            self.adapter = adapter_config(transformer, self.session.backbone, rank, alpha, dora)
            add_adapter(transformer, self.adapter, seed_of(self.recipe.seed, "adapter"))
            self.session.rehook()

    def enter(self, now: Moment) -> None:
        """Freeze everything but the stage's groups, and give them a fresh optimizer."""
        stage, rates = now.stage, self.recipe.optimizer
        if "adapter" in stage.trains:
            self.inject_adapter()
        known = {**self.method.groups(), "adapter": adapter_parameters(self.session.transformer)}
        self.method.requires_grad_(False)
        self.session.transformer.requires_grad_(False)
        self.groups = {name: known[name] for name in stage.trains}
        for parameter in self.trained():
            parameter.requires_grad_(True)
        parts = [{"params": params, "lr": rates.rate(name), "name": name} for name, params in self.groups.items()]
        self.accelerator.free_memory()
        optimizer = torch.optim.AdamW(parts, betas=rates.betas, weight_decay=rates.weight_decay)
        self.optimizer = self.accelerator.prepare(optimizer)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups.values() for parameter in group]

    # -- a step --------------------------------------------------------------------------------------

    def train_step(self, now: Moment, loaded: Loaded) -> dict[str, float]:
        """One optimizer step over the global batch; its mean losses."""
        batches = self.micro_batches_of(now, loaded)
        totals: list[dict[str, Tensor]] = []
        kept = 0.0
        for index in loaded.mine:
            batch = batches(index)
            try:
                with self.accelerator.autocast():
                    totals.append(self.objectives.backward(batch, 1 / self.micro_batches, self.accelerator.backward))
            except ValueError as error:
                raise self.not_finite(batch, error) from error
            kept += self.objectives.kept_share() / self.micro_batches
        for index, loss in zip(loaded.mine, torch.stack([t["loss"] for t in totals]).tolist(), strict=True):
            if not math.isfinite(loss):
                raise self.not_finite(batches(index))
        if now.stage.ratios == "policy":
            self.objectives.check_weights(totals[0])
        names = sorted(totals[0])
        means = torch.stack([torch.stack([t[name].float() for t in totals]).sum() for name in names])
        means = torch.cat([means / self.micro_batches, means.new_tensor([kept])])
        if self.world > 1:
            means = self.accelerator.reduce(means, "sum")
            sum_gradients(self.trained(), self.accelerator)
        norm = self.update(now)
        *losses, keep = means.tolist()
        return {**dict(zip(names, losses, strict=True)), "keep": keep, "gradient": norm, **self.method.readings()}

    def micro_batches_of(self, now: Moment, loaded: Loaded) -> Any:
        """Draw the global batch and announce it to the method; a function that gives this rank's parts of it."""
        recipe, count = self.recipe, self.micro_batches
        seed, sampling = recipe.seed, recipe.sampling
        process, family = self.objectives.process, self.family
        quantiles = strata(seed, self.step, count)
        timesteps = [process.timestep(q, family.tokens(r.grid)) for q, r in zip(quantiles, loaded.refs, strict=True)]
        ratios: list[float | None] = [None] * count
        if now.stage.ratios == "stratified":
            low, high, groups = sampling.ratio_min, sampling.ratio_max, sampling.ratio_groups
            ratios = [*stratified_ratios(seed, self.step, count, low, high, groups)]
        progress = self.step / max(1, recipe.steps - 1)
        befores = [self.before(t, r.grid, i) for i, (t, r) in enumerate(zip(timesteps, loaded.refs, strict=True))]
        explorations = [exploration(now, recipe.temperatures, self.step, progress, i, ratios[i]) for i in range(count)]
        torch.manual_seed(seed_of(seed, "batch", self.step))
        self.method.exploration = explorations[0]
        self.method.begin_batch(timesteps)

        def batch(index: int) -> MicroBatch:
            latents, text = self.prepared.feed.encode(loaded.mine[index].result())
            generator = generator_of(seed, "noise", self.step, index)
            noise = torch.randn(latents.shape, generator=generator)
            dropped = torch.rand(len(latents), generator=generator) < sampling.caption_dropout
            drawn = seed_of(seed, "method", self.step, index)
            made = MicroBatch(latents, noise, text, timesteps[index], drawn, explorations[index], befores[index])
            made = made.to(self.device)
            return made.with_empty(dropped.to(self.device), family.empty)

        return batch

    def before(self, timestep: float, grid: tuple[int, int], index: int) -> Before | None:
        """An earlier moment of a micro-batch's sampling run, for methods that reuse updates."""
        if not self.method.needs_earlier:
            return None
        reuse, key = self.recipe.reuse, ("age", self.step, index)
        ago = int(torch.randint(1, reuse.oldest + 1, (), generator=generator_of(self.recipe.seed, *key)))
        tokens = self.family.tokens(grid)
        return Before(self.objectives.process.earlier(timestep, ago / reuse.steps, tokens), float(ago))

    def update(self, now: Moment) -> float:
        """Clip, step, and clear; the gradient's norm before clipping."""
        factor = now.stage.rate_factor(now.step)
        for part in self.optimizer.param_groups:
            part["lr"] = self.recipe.optimizer.rate(part["name"]) * factor
        clip = self.recipe.optimizer.clip or math.inf
        norm = float(self.accelerator.clip_grad_norm_(self.trained(), clip))
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise NonFiniteError(f"the gradient of {not_finite_of(self.groups)} is not finite", self.step, self.newest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def not_finite(self, batch: MicroBatch, error: ValueError | None = None) -> Exception:
        """What to raise: where values stopped being finite, or the error itself if they did not."""
        with self.accelerator.autocast():
            where = diagnose(self.objectives, batch)
        if where is None and error is not None:
            return error
        return NonFiniteError(where or "the loss is not finite", self.step, self.newest)

    # -- files ---------------------------------------------------------------------------------------

    def save(self, now: Moment, loss: float) -> None:
        if self.accelerator.is_main_process:
            self.newest = save_state(
                self.saved,
                State(
                    step=self.step,
                    stage=now.stage.name,
                    recipe=self.recipe.to_dict(),
                    method={name: t.detach().cpu().contiguous() for name, t in self.method.state_dict().items()},
                    tables=self.method.tables(),
                    optimizer=self.optimizer.state_dict(),
                    adapter={} if self.adapter is None else adapter_state(self.session.transformer),
                    loss=loss,
                ),
                self.recipe.checkpoints.keep,
            )
        self.accelerator.wait_for_everyone()

    def validate(self) -> None:
        if self.accelerator.is_main_process:
            with self.accelerator.autocast():
                self.log.validation(self.step, self.validator.measure())
                self.validator.pictures(self.output / "pictures", self.step)
        self.accelerator.wait_for_everyone()

    def export(self) -> None:
        """Write what `shiva.attach` reads, and the run's numbers."""
        self.method.eval()
        self.method.finish()
        temporary = self.output / ".writing-checkpoint"
        shutil.rmtree(temporary, ignore_errors=True)
        ShivaCheckpoint.of(
            self.method,
            base_model=self.recipe.model.path,
            budget=getattr(self.method.config, "budget", None),
            adapter_config=self.adapter,
            adapter_weights=None if self.adapter is None else adapter_state(self.session.transformer),
        ).save_pretrained(temporary)
        write_atomically(self.output / "metrics.json", to_json(self.log.summary(self.recipe, self.method)))
        rename_into_place(temporary, self.final)
        self.log.say(f"done: shiva.attach(pipe, {str(self.final)!r})")
