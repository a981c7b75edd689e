"""``Trainer``: a run's loop, from its origin to its last step."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from launcher.checkpoint.resume import remove_checkpoint_leftovers, set_aside_newer
from launcher.checkpoint.retention import VALIDATION_LOSS
from launcher.cluster.launch_commands import ours
from launcher.metrics.metrics_writer import LogSchedule, RecordWriter
from launcher.metrics.record import DISCARDED_FILE, METRICS_FILE, Record, missing_steps, truncate_after
from launcher.metrics.trackers.tracker_threads import Trackers, open_trackers
from launcher.run_folder import write_config_and_environment
from launcher.training.hooks.message_checksums import check_validation_messages
from launcher.training.hooks.plan_watch import PlanWatch, comparison_line
from launcher.training.hooks.replica_watch import ReplicaWatch
from launcher.training.run_state import Progress, TrainingRun
from launcher.training.run_stop import Stopping, any_rank_requested_stop
from launcher.training.train_step import TrainStep
from launcher.training.validation import TextSampler, validate
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import TrainingError
from parallel.comm.world import broadcast_object, on_rank_0
from parallel.runtime.listening import is_one_machine

log = logging.getLogger(__name__)


class Trainer:
    """Loop over one run's steps, validations and checkpoints."""

    def __init__(self, run: TrainingRun, *, train_step: TrainStep | None = None) -> None:
        """Prepare the loop; callers may pass their own ``train_step``."""
        self.run, self.progress = run, run.progress
        self._train_step = train_step or TrainStep(run)
        self._sampler = None
        if run.validation is not None and run.config.validation.sample_tokens:
            self._sampler = TextSampler(run)
        self._loss: float | None = None
        self._validation_losses: dict[int, float] = {}
        """Last validation loss by its step, if it was finite."""
        self._stopping = Stopping(run)
        self.is_in_store = True
        """True if the run's store has its last checkpoint, once the run is done; always True without a store."""

    def train(self) -> str | None:
        """Run the remaining steps, validating and saving as configured, and write the report. Collective.

        Return a message for the user if the run was asked to stop before its end, and has saved; otherwise None.
        """
        run, config, last = self.run, self.run.config, self.run.config.last_step
        self.progress = self._stopping.clear_finished_validation(self.progress)
        if self.progress.step >= last and not self.progress.validation_due:
            self.is_in_store = _leave_as_it_is(run, self.progress.step)
            return None
        self._open_folder()
        run.stop.begin_steps()
        lines = LogSchedule(
            total_steps=config.train.steps,
            first_step=self.progress.step,
            last_step=last,
            every=config.run.log_every,
        )
        records = RecordWriter(
            run.folder, lines, is_rank_0=run.is_rank_0, trackers=_open_trackers(run, self.progress.step)
        )
        with closing(run.prefetcher), records as writer:
            if run.origin.kind == "resumed":
                writer.write({"kind": "event", "event": "resume", "step": self.progress.step})
            writer.write(run.expected.record(self.progress.step))
            # The curve's first point: the loss before this run changes the weights.
            if config.validation.rows and (run.origin.kind == "started" or self.progress.validation_due):
                self._validate(writer)
            while self.progress.step < last and not self.progress.stop_requested:
                self._take_recorded_step(writer)
                # Validate before saving: an existing checkpoint has all records up to its step.
                if config.validation.rows and config.validates_after(self.progress.step):
                    self._validate(writer)
                if self.progress.stop_requested or config.saves_after(self.progress.step):
                    writer.set_activity("saving a checkpoint")
                    self._save()
            if self._stopping.ends(self.progress):
                run.saver.finish()
                return self._stopping.end(self.progress, writer, self._save)
            self._compare_with_plan(writer)
        self.is_in_store = _finish(run, self.progress.step)
        return None

    def take_step(self) -> Record:
        """Take one optimizer step and return its record; raise TrainingError if the run must end. Collective."""
        self.progress, record = self._train_step(self.progress)
        # The last step counts as agreed as well: ranks wait for the work after it.
        if self.progress.stop_requested or self.progress.step == self.run.config.last_step:
            self.run.stop.set_accepted()
        return record

    def _open_folder(self) -> None:
        """Truncate the folder's history to this process's first step, and write this process's config to it."""
        run = self.run
        # Only now, after every check that could reject this start: a rejected start changes no file.
        if run.origin.continues:
            on_rank_0(lambda: _rewind(run, self.progress.step))
        if run.is_rank_0:
            write_config_and_environment(run.folder, run.config, run.mesh, run.engine.num_parameters)
        run.saver.kept.begin()

    def _take_recorded_step(self, writer: RecordWriter) -> None:
        """Take a step and write its record, even if the step failed."""
        try:
            record = self.take_step()
            writer.write(record)
            # All records up to a checkpoint's step are written before it is committed.
            loss = math.nan if record["loss"] is None else record["loss"]
            self.run.saver.after_step(record["step"], loss)
            self._stopping.saved(self.run.saver.seconds)
            # A skipped step, or one without counted tokens, does not show the current loss.
            if "skipped" not in record and record["loss"] is not None:
                self._loss = loss
        except TrainingError as error:
            if error.record is not None:
                writer.write(dict(error.record))
            raise

    def _validate(self, writer: RecordWriter) -> None:
        """Compute the held-out loss and write its record, unless a stop interrupts it. Collective."""
        run = self.run
        writer.set_activity("validating")
        assert run.validation is not None
        record = validate(
            run.engine.model,
            run.validation.shares(run.place, run.place_source),
            run.device,
            seq_len=run.config.data.seq_len,
            vocab_size=run.model.head_rows or run.model.classes,
            bytes_per_token=run.validation.bytes_per_token,
            source_names=run.validation.source_names,
            should_stop=lambda: self.progress.stop_requested or any_rank_requested_stop(run.stop),
        )
        check_validation_messages(run, self.progress.step)
        # Do not delay a stop: the process that resumes the run validates first.
        self.progress = dataclasses.replace(self.progress, stop_requested=record is None, validation_due=record is None)
        if record is None:
            return
        if self._sampler is not None:
            record["sample"] = self._sampler.sample()
        # Only the newest one can belong to the next checkpoint.
        self._validation_losses.clear()
        if record["loss"] is None and run.is_rank_0:
            log.warning(
                "The validation rows have no target tokens, so there is no loss. More rows may have some: "
                "validation.rows=N."
            )
        if record["loss"] is not None and math.isfinite(record["loss"]):
            self._validation_losses[self.progress.step] = record["loss"]
        writer.write({**record, "step": self.progress.step})

    def _compare_with_plan(self, writer: RecordWriter) -> None:
        plan = self._train_step.hook(PlanWatch)
        if plan is not None:
            comparison = plan.comparison_record(self.progress.step)
            writer.write(comparison)
            log.info("%s", comparison_line(comparison))

    def _save(self) -> None:
        """Start to save a checkpoint, and wait for it if it is the last one. Collective."""
        run, step = self.run, self.progress.step
        replicas = self._train_step.hook(ReplicaWatch)
        sums = [] if replicas is None else replicas.before_save(step)
        with run.stop.saving:
            run.saver.save(
                step=step,
                training=_training_state(run, self.progress, self._validation_losses),
                loss=self._loss,
                sums=sums,
                # No step follows that could overlap with the save.
                wait=self.progress.stop_requested or step == run.config.last_step,
            )
        self._stopping.saved(run.saver.seconds)


def _open_trackers(run: TrainingRun, step: int) -> Trackers:
    """Open the trackers, on rank 0, for a run that continues from ``step``."""
    config = run.config
    if not run.is_rank_0:
        return Trackers()
    first_step = 0
    if run.origin.kind == "resumed":
        first_step = step + 1
    return open_trackers(
        config.run.trackers,
        run.folder,
        project=config.run.tracker_project,
        config=dataclasses.asdict(config),
        first_step=first_step,
    )


def _training_state(run: TrainingRun, progress: Progress, validation_losses: Mapping[int, float]) -> dict[str, Any]:
    """Return the state a resumed run needs in addition to weights and moments, and values that decide its retention."""
    # No other value depends on world size or ZeRO stage: these two are stored for people to read.
    return {
        **progress.state(),
        "loader": run.prefetcher.state_dict(),
        "world_size": run.mesh.world_size,
        "zero_stage": run.engine.stage,
        "model_type": run.model_type,
        VALIDATION_LOSS: validation_losses.get(progress.step),
        "config": dataclasses.asdict(run.config),
    }


def _leave_as_it_is(run: TrainingRun, step: int) -> bool:
    """Log that the run is finished, without writing files; return True if the store has its last checkpoint."""
    log.info("Nothing to do: the run is at step %d of %d. Raise train.steps to continue.", step, run.config.last_step)
    run.saver.kept.begin()
    return broadcast_object(run.saver.kept.leave())


def _finish(run: TrainingRun, step: int) -> bool:
    """Wait for the last checkpoint, write the report, and log both paths. Collective.

    Return True if the run's store has that checkpoint, or if there is no store.
    """
    run.saver.finish()
    is_in_store = broadcast_object(run.saver.kept.leave())
    if not run.is_rank_0:
        return is_in_store
    # matplotlib takes a second to import, which would delay the first step.
    from launcher.report.page import write_report

    report = write_report(run.folder)
    newest = list_checkpoints(run.folder)[-1]
    log.info("Done: %d steps. Checkpoint %s, report %s.", step, newest, report)
    for line in _next_lines(run, step):
        log.info("Next: %s", line)
    return is_in_store


def _next_lines(run: TrainingRun, step: int) -> list[str]:
    """Return commands that sample from, evaluate and export the trained model, with folders named after this step."""
    folder, model = run.folder, run.config.model
    export = ours("convert", "--to", "hf", folder, folder / f"hf_{step:06d}")
    if model.image.is_used:
        return _next_lines_of_images(run, step, export)
    if not model.causal or model.encoder_layers:
        return [export]
    of_model: list[object] = ["--checkpoint", folder]
    if is_one_machine() and run.mesh.world_size > 1:
        of_model += ["--ranks", run.mesh.world_size]
    generate = ours("generate", *of_model, "--prompt", "The", "--max-new-tokens", 40)
    task_flags = ["--tasks", "passkey,ppl", "--lengths", run.config.data.seq_len]
    return [generate, ours("evaluate", *of_model, *task_flags, "--output", folder / f"evaluation_{step:06d}"), export]


def _next_lines_of_images(run: TrainingRun, step: int, export: str) -> list[str]:
    """Return commands that draw with a model of pixels, evaluate it on held-out images if any, and export it."""
    data, model, lines, tasks = run.config.data.train, run.config.model, [], []
    if run.config.validation.rows and run.config.data.validation:
        data = run.config.data.validation
    if model.predicts_tokens:
        tasks.append("pixels")
        drawn = run.folder / f"continued_{step:06d}.png"
        sampling = "--temperature", 1, "--samples", 4
        lines.append(ours("generate", "--checkpoint", run.folder, "--data", data, *sampling, "--output", drawn))
    if model.classes:
        tasks.append("classes")
    output = run.folder / f"evaluation_{step:06d}"
    asked = ",".join(tasks)
    lines.append(ours("evaluate", "--checkpoint", run.folder, "--tasks", asked, "--data", data, "--output", output))
    lines.append(export)
    return lines


def _rewind(run: TrainingRun, step: int) -> None:
    """Set aside results after this step, which will be redone. The process may be killed at any point."""
    if run.origin.restarts:
        # Discard records from step 0, too.
        step = -1
    remove_checkpoint_leftovers(run.folder)
    # Checkpoints go first: metrics may be newer than the newest checkpoint, never older.
    set_aside_newer(run.folder, step)
    moved = truncate_after(run.folder, step)
    if not run.origin.restarts:
        _say_missing_rows(run, step)
        return
    log.info(
        "An earlier start of this run ended before its first checkpoint: the run starts from scratch, and %d lines "
        "from %s were moved to %s.",
        moved,
        METRICS_FILE,
        run.folder / DISCARDED_FILE,
    )


def _say_missing_rows(run: TrainingRun, step: int) -> None:
    newest = list_checkpoints(run.folder)
    missing = missing_steps(run.folder, step)
    if not missing or not newest or int(newest[-1].name.removeprefix("step_")) != step:
        return
    steps = ", ".join(str(r.start) if len(r) == 1 else f"{r.start} to {r.stop - 1}" for r in missing[:_MISSING_NAMED])
    if len(missing) > _MISSING_NAMED:
        steps += ", …"
    log.warning(
        "%s lacks steps %s, which checkpoint %s includes: a failing file system may have lost them. The weights are "
        "intact; curves and reports have a gap there.",
        run.folder / METRICS_FILE,
        steps,
        newest[-1].name,
    )


_MISSING_NAMED = 5
"""Limit on gaps named in a warning."""
