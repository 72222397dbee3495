"""The loop: one for all stages and all trained methods, on accelerate."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shiva.api import attach
from shiva.checkpoint import ShivaCheckpoint, write_atomically, write_image
from shiva.files import to_json
from shiva.training import process
from shiva.training import state as states
from shiva.training.adapter import RunAdapter
from shiva.training.cache import Ranks
from shiva.training.call import begin_batch, blocks_of, check_groups, finish, learner
from shiva.training.draws import MicroBatch, Moment, draw_batch, moment, seed_of
from shiva.training.families import load_family
from shiva.training.feed import Loaded, load_ahead, prepare
from shiva.training.log import Log
from shiva.training.objectives import NonFiniteError, Objectives, not_finite_of, process_of
from shiva.training.recipe import Recipe
from shiva.training.start import Start, part_of, read_start
from shiva.training.state import State
from shiva.training.validation import Validator

MOST_SKIPPED = 20
"""So many halvings bring the scale of fp16 from its start to below 1; what is not finite then is so at any."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


class Trainer:
    """A training run in a folder: `run()` begins it, or continues it after its newest state."""

    def __init__(self, recipe: Recipe, output: Path):
        self.recipe, self.output = recipe, output
        self.final = output / "checkpoint"
        self.accelerator = process.make_accelerator(
            process.choose_precision(recipe.compute.precision), output, recipe.logging.wandb
        )
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.main, self.device = self.accelerator.is_main_process, self.accelerator.device
        self.micro_batches = recipe.sampling.micro_batches
        if self.micro_batches % self.world:
            raise ValueError(
                f"a global batch of {self.micro_batches} micro-batches cannot be shared by {self.world} ranks; "
                "change sampling.batch or sampling.micro_batch"
            )
        self.sharding = process.sharding_of(self.accelerator, recipe)
        self.log = Log(output, self.accelerator, recipe)
        self.groups: dict[str, list[nn.Parameter]] = {}
        self.optimizer: Any = None
        self.step = 0
        self.skipped = 0
        """Steps in a row whose gradient was not finite, which a scaler of fp16 leaves out."""
        self.newest: Path | None = None
        """The state to go back to."""

    # -- the run -------------------------------------------------------------------------------------

    def run(self, fresh: bool = False) -> Path:
        """Train to the end; the folder of the finished checkpoint. `fresh` discards what an earlier run left."""
        with states.locked(self.output) if self.main else contextlib.nullcontext():
            if self.main:
                states.clean(self.output, fresh=fresh)
            self.accelerator.wait_for_everyone()
            found = states.newest_state(self.output, self.log.say)
            if found is not None:
                states.check_recipe(self.output, found[1].recipe, self.recipe.to_dict())
            if self.final.is_dir():
                self.log.say(f"{self.final} is finished; pass --fresh to train again")
                return self.final
            anew = found is None and self.recipe.start is not None
            start = read_start(str(self.recipe.start), self.log.say) if anew else None  # before the data is encoded
            self.prepare()
            if found is not None:
                self.restore(*found)
            elif start is not None:
                self.start_from(start)
            self.log.begin(self.step)
            with contextlib.closing(self.log):
                with process.noted_signals() as signals:
                    self.train(signals)
                if self.main:
                    self.export()
                self.accelerator.wait_for_everyone()
        return self.final

    def prepare(self) -> None:
        """Load the pipeline, attach the method, open the data."""
        recipe = self.recipe
        self.family = load_family(recipe.model, DTYPES[self.accelerator.mixed_precision])
        torch.manual_seed(seed_of(recipe.seed, "method"))
        self.session = attach(self.family.pipe, recipe.method_config())
        self.method = learner(self.session)
        self.adapter = RunAdapter(self.session, recipe.adapter, seed_of(recipe.seed, "adapter"))
        check_groups(self.method, recipe.stages, recipe.optimizer.rates)
        transformer: Any = self.session.transformer
        if recipe.compute.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        if self.sharding is not None:
            self.adapter.put_in()  # later its layers would be made from shares of weights
            self.sharding.shard(transformer, blocks_of(self.session).values(), self.adapter.parameters())
        self.family.pipe.to(self.device)
        self.method.to(self.device).train().requires_grad_(False)
        ranks = Ranks(self.rank, self.world, self.accelerator.wait_for_everyone)
        with self.session.disabled():
            self.prepared = prepare(recipe, self.family, self.output, ranks, self.log.preparing)
        if recipe.data.kind == "latents" or recipe.data.cache is not None:
            self.family.drop_text_encoders()
        with self.session.disabled():
            dense_steps = getattr(learner(self.session).config, "dense_steps", ())
            grid = self.prepared.held_out.grid(self.prepared.held_out_indices[0])  # all have about one area
            noise = process_of(self.family, recipe.sampling, grid, dense_steps)
        self.objectives = Objectives(self.session, self.family, noise, recipe.weights, recipe.distill.every)
        measured = (self.prepared.held_out, self.prepared.held_out_indices, recipe.validation, recipe.reuse)
        self.validator = Validator(self.objectives, *measured, recipe.seed, self.device)

    def restore(self, folder: Path, state: State) -> None:
        """Take up a saved state; its optimizer, if the coming step is of the same stage."""
        self.newest, self.step = folder, state.step
        if self.main:
            states.prune(folder, self.recipe.checkpoints.keep)
        self.method.load_state_dict(state.method)
        self.adapter.load(state.adapter)
        optimizer, scaler = dict(state.optimizer), self.accelerator.scaler
        scale = optimizer.pop("scaler", None)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        now = moment(self.recipe.stages, self.step)
        if now is not None and now.step > 0:
            self.enter(now)
            self.optimizer.load_state_dict(optimizer)
        self.log.say(f"continuing {self.newest} at step {self.step} of {self.recipe.steps}")

    def start_from(self, start: Start) -> None:
        """Begin with what another run has learned, or a checkpoint holds."""
        shared, adapter = start.weights_for(self.method), start.adapter_for(self.recipe.adapter)
        self.method.load_state_dict({**self.method.state_dict(), **shared})
        self.adapter.load(adapter)
        parts = [*sorted({part_of(name) for name in shared}), *(["adapter"] if adapter else [])]
        self.log.say(f"starting with {', '.join(parts)} of {start.source}")
        before, now = start.base_model, self.recipe.model.path
        if adapter and before is not None and Path(before).name != Path(now).name:
            self.log.say(
                f"its adapter was trained on {before}, and this run is of {now}: if those are other weights, start "
                "from a copy of the checkpoint without its adapter folder"
            )

    def train(self, signals: list[int]) -> None:
        """All steps that are left, or those until a signal comes."""
        recipe, mine = self.recipe, range(self.rank, self.micro_batches, self.world)
        if self.validates_after(self.step) and process.any_rank(
            self.log.lacks_validation(self.step), self.accelerator
        ):
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
            stopping = process.any_rank(bool(signals), self.accelerator)
            if now.last or stopping or self.step % recipe.checkpoints.every == 0:
                self.save(now)
            if stopping:
                raise process.Interrupted((*signals, 15)[0], self.step, self.newest)
            if self.validates_after(self.step):
                self.validate()

    def validates_after(self, step: int) -> bool:
        """At the end of every stage, and every so many steps."""
        before = moment(self.recipe.stages, step - 1) if step else None
        every = self.recipe.validation.every
        return before is not None and (before.last or bool(every and step % every == 0))

    # -- a stage -------------------------------------------------------------------------------------

    def enter(self, now: Moment) -> None:
        """Freeze everything but the stage's groups, and give them a fresh optimizer."""
        stage, rates = now.stage, self.recipe.optimizer
        if "adapter" in stage.trains:
            self.adapter.switch_on()
        known = {**self.method.groups(), "adapter": self.adapter.parameters()}
        self.method.requires_grad_(False)
        self.session.transformer.requires_grad_(False)
        self.groups = {name: known[name] for name in stage.trains}
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        parts = [{"params": params, "lr": rates.rate(name), "name": name} for name, params in self.groups.items()]
        self.accelerator.free_memory()
        adamw = torch.optim.AdamW(parts, betas=rates.betas, weight_decay=rates.weight_decay)
        self.optimizer = self.accelerator.prepare_optimizer(adamw)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups.values() for parameter in group]

    # -- a step --------------------------------------------------------------------------------------

    def train_step(self, now: Moment, loaded: Loaded) -> dict[str, float]:
        """One optimizer step over the global batch; its mean losses."""
        recipe, count = self.recipe, self.micro_batches
        tokens = [self.family.tokens(ref.grid) for ref in loaded.refs]
        draws = draw_batch(recipe, self.objectives.process, now, self.step, tokens, self.method.needs_earlier)
        timesteps, seed = [draw.timestep for draw in draws], seed_of(recipe.seed, "batch", self.step)
        begin_batch(self.session, draws[0].exploration, timesteps, seed)

        def micro_batch(index: int) -> MicroBatch:
            latents, text = self.prepared.feed.encode(loaded.mine[index].result())
            dropout = recipe.sampling.caption_dropout
            return draws[index].micro_batch(latents, text, self.family.empty, dropout, self.device)

        totals, kept = [], 0.0
        for index in loaded.mine:
            batch = micro_batch(index)
            try:
                with self.accelerator.autocast():
                    losses, keep = self.objectives.backward(batch, 1 / count, self.accelerator.backward)
            except ValueError as error:
                raise self.not_finite(batch, error) from error
            totals.append(losses)
            kept += keep / count
        names = sorted(totals[0])
        means = torch.stack([torch.stack([t[name].float() for t in totals]).sum() for name in names])
        means = torch.cat([means / count, means.new_tensor([kept])])
        if self.world > 1:
            means = self.accelerator.reduce(means, "sum")
        numbers = dict(zip([*names, "keep"], means.tolist(), strict=True))
        if not math.isfinite(numbers["loss"]):  # on every rank, wherever it came from
            own = (i for i, t in zip(loaded.mine, totals, strict=True) if not t["loss"].isfinite())
            raise self.not_finite(micro_batch(next(own, min(loaded.mine))))
        if self.world > 1:
            process.sum_gradients(self.parameters(), self.accelerator)
        norm = self.update(now)
        return {**numbers, "gradient": norm, **self.method.readings()}

    def update(self, now: Moment) -> float:
        """Clip, step, and clear; the gradient's norm before clipping."""
        factor = now.stage.rate_factor(now.step)
        for part in self.optimizer.param_groups:
            part["lr"] = self.recipe.optimizer.rate(part["name"]) * factor
        self.accelerator.unscale_gradients()
        norm = float(nn.utils.clip_grad_norm_(self.parameters(), self.recipe.optimizer.clip or math.inf))
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        if self.skipped > (0 if self.accelerator.scaler is None else MOST_SKIPPED):
            raise NonFiniteError(f"the gradient of {not_finite_of(self.groups)} is not finite", self.step, self.newest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def not_finite(self, batch: MicroBatch, error: ValueError | None = None) -> Exception:
        """What to raise: where values stopped being finite, or the error itself if they did not."""
        with self.accelerator.autocast():  # one rank alone cannot run what is sharded
            where = self.objectives.diagnose(batch) if self.sharding is None else None
        if where is None and error is not None:
            return error
        return NonFiniteError(where or "the loss is not finite", self.step, self.newest)

    # -- files ---------------------------------------------------------------------------------------

    def save(self, now: Moment) -> None:
        if self.main:
            method = {name: t.detach().cpu().contiguous() for name, t in self.method.state_dict().items()}
            scaler = self.accelerator.scaler
            scale = {} if scaler is None else {"scaler": scaler.state_dict()}
            optimizer = {**self.optimizer.state_dict(), **scale}
            learned = (method, optimizer, self.adapter.weights())
            state = State(self.step, self.recipe.to_dict(), *learned)
            states.save_state(self.output / "states", state, self.recipe.checkpoints.keep)
        self.accelerator.wait_for_everyone()
        self.newest = states.state_folder(self.output / "states", self.step)

    def validate(self) -> None:
        """By the main process, and by all where they hold a share of the weights each; the record is last."""
        if self.main or self.sharding is not None:
            with self.accelerator.autocast():
                measured, pictures = self.validator.measure(), self.validator.pictures()
        if self.main:
            for name, picture in pictures.items():
                write_image(self.output / "pictures" / f"{name}-{self.step:08d}.png", picture)
            self.log.validation(self.step, measured)
        self.accelerator.wait_for_everyone()

    def export(self) -> None:
        """Write what `shiva.attach` reads, and the run's numbers."""
        finish(self.session)
        checkpoint = ShivaCheckpoint.of(
            self.method,
            base_model=self.recipe.model.path,
            budget=getattr(self.method.config, "budget", None),
            adapter_config=self.adapter.config if self.adapter.on else None,
            adapter_weights=self.adapter.weights() or None,
        )
        write_atomically(self.output / "metrics.json", to_json(self.log.summary(self.method)))
        with states.written_whole(self.final) as temporary:
            checkpoint.save_pretrained(temporary)
        self.log.say(f"done: shiva.attach(pipe, {str(self.final)!r})")
