"""``TrainStep``: one optimiser step, readable from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.metrics.record import Record
from launcher.metrics.throughput import (
    mfu,
    model_tflops,
    peak_device_flops,
    tokens_per_second,
    training_flops,
)
from launcher.training.audit import StepAudit
from launcher.training.expert_record import expert_record
from launcher.training.feed import StepData
from launcher.training.learning_rate import learning_rate
from launcher.training.messages import settle_step
from launcher.training.replicas import ReplicaWatch
from launcher.training.run import Progress, Run
from launcher.training.totals import StepSums, StepTotals
from launcher.training.update import Update
from longctx.model.experts.balance import load_share, move_selection_bias_
from longctx.model.training_pass import TrainingPass
from parallel.loss import StepCounts, sum_counts
from parallel.runtime.device import device_name, peak_memory_bytes
from parallel.runtime.watch.spans import begin
from parallel.schedule.degrees import Degrees


class TrainStep:
    """Takes a run's optimiser steps, one a call."""

    def __init__(self, run: Run) -> None:
        self.run, self.audit = run, StepAudit(run)
        self.replicas = ReplicaWatch(run)

    def __call__(self, progress: Progress) -> tuple[Progress, Record]:
        """Take the next step; returns where the run then stands, and the step's record.

        A step whose router logits, loss or gradient are not finite, or a spike, is left out: TrainingError, before
        anything is changed, where that has come too often. All on every rank alike. Collective.
        """
        run, step = self.run, progress.step + 1
        started = time.perf_counter()
        # The watch names what a rank was in, should the run hang.
        begin("waiting for data", step=step)

        # 1. The step's rows, and this rank's shard of each micro-batch. ``order`` says where they begin in the data:
        # the routing files and the message about a broken step need it. The next step's are prepared meanwhile.
        data, waited = run.feed.next_step()
        order = data.order
        if run.routing.active:
            run.routing.begin(step, order, run.token_indices(data))

        # 2. Counts over all ranks come before the first backward: they divide each shard's part of the loss, so that
        # the step's loss is one sum over one count whatever the degrees and the accumulation.
        begin("counting tokens")
        counts = sum_counts(data.own_counts)
        with self.audit.watching(step, update=False):
            sums = self.forward_backward(data, counts, progress)
        # Before anything changes: a number that other ranks compute otherwise ends the run here.
        self.audit.settle(step, update=False)
        begin("summing the step")
        totals = sums.over_ranks(_model_flops(run, data), stop_asked=run.stop.is_asked(), ledger=run.mesh.ledger)
        # Nothing has changed yet: a gradient of wrong bytes must not reach the weights.
        settle_step(run, step, all_arrived=totals.all_arrived)
        self.replicas.before_update(step)

        # 3. Weights and moments change only by a step that is finite and no spike. Another is left out, on all ranks;
        # too many of them in a row end the run here.
        loss, lr = counts.mean_nll(totals.nll), learning_rate(step, run.config.train)
        update = Update(run=run, step=step, loss=loss, lr=lr, order=order, history=progress.history)
        with self.audit.watching(step, update=True):
            grad_norm, skipped, history = update.take(sums, totals)
        self.audit.settle(step, update=True)

        # 4. The step's expert load moves the selection bias (arXiv 2408.15664), after the optimiser, so that forward
        # and backward have seen one bias. The balance loss of the next step may read the load too.
        load_LE = progress.expert_load_LE
        if run.model.num_experts and not skipped:
            load_LE = totals.counts_LE
            if run.model.selection_bias_rate:
                biases = run.engine.model.decoder.selection_biases()
                move_selection_bias_(biases, load_LE, run.model.selection_bias_rate)
        run.routing.end()
        # From here on nobody writes to weights and moments until the next update.
        self.replicas.after_step(step, is_saved=totals.stop_asked or run.config.saves_after(step))

        # 5. What the step reports. The clock stops here: metrics and checkpoints are not the step's time.
        record = {
            "kind": "train",
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            **_speed(run, counts, totals, seconds=time.perf_counter() - started, waited=waited),
            **source_record(data.after),
            **degree_record(data.degrees),
            **expert_record(totals, run.expert_layers, counts.tokens),
        }
        if skipped:
            record["skipped"] = skipped
        audited = self.audit.kind_of(step)
        if audited is not None:
            record["audited"] = audited
        run.stop.step_seconds = record["step_seconds"]
        return Progress(step=step, expert_load_LE=load_LE, history=history, stop_asked=totals.stop_asked), record

    def forward_backward(self, data: StepData, counts: StepCounts, progress: Progress) -> StepSums:
        """Add up the gradients of the step's micro-batches; returns this rank's sums of what they report."""
        run, sums, load_LE = self.run, StepSums(), None
        if progress.expert_load_LE is not None:
            load_LE = load_share(progress.expert_load_LE).to(run.device)
        for number, (rows, shard) in enumerate(zip(data.rows, data.shards, strict=True)):
            if run.mesh.ledger is not None:
                run.mesh.ledger.begin(number)
            # Dropout and jitter depend on the run's seed, the step and a token's index in it, and on nothing else:
            # another degree or a resumed run draws the same numbers.
            training_pass = TrainingPass(
                seed=run.config.run.seed * 0x9E3779B1 + progress.step,
                first_tokens=run.first_tokens(rows),
                expert_load_LE=load_LE,
                replay=run.routing.replay(number),
            )
            # One micro-batch at a time is on the device; backward frees its activations.
            loss = run.engine.forward(shard.unpack(run.device), training_pass)
            run.engine.backward(counts.loss(loss, run.model))
            sums.add(loss)
        return sums


def _model_flops(run: Run, data: StepData) -> float:
    """This rank's part of the step's model FLOPs: the ranks of a sequence count it whole and divide it."""
    # From the whole batch: a causal shard's attention depends on what lies on the other ranks.
    flops = sum(training_flops(run.model, lengths) for lengths in data.lengths)
    return flops / run.mesh.context


def source_record(order: Mapping[str, Any]) -> Record:
    """Tokens that the run has taken of each source of a mixture, by the loader's state; no field of one folder."""
    # Of one folder, ``tokens`` says it.
    if "sources" not in order:
        return {}
    return {"source_tokens": {name: source["tokens"] for name, source in order["sources"].items()}}


def degree_record(degrees: Sequence[Degrees]) -> Record:
    """The fields of a train record about the degrees of its documents; none where the degree is fixed."""
    if not degrees:
        return {}
    ranks = [n for of_batch in degrees for n in of_batch.ranks]
    return {
        "ranks_per_document": sum(ranks) / len(ranks),
        "most_ranks_per_document": max(ranks),
        "attention_imbalance": max(of_batch.imbalance for of_batch in degrees),
    }


def _speed(run: Run, counts: StepCounts, totals: StepTotals, *, seconds: float, waited: float) -> Record:
    """The fields of a train record about time, memory and work."""
    world_size = run.mesh.world_size
    # None on a CPU, and on a GPU whose data sheet we do not have: then there is no MFU either.
    peak_flops = peak_device_flops(device_name(run.device), run.config.train.dtype)
    if peak_flops is not None:
        peak_flops *= world_size
    return {
        "tokens": run.feed.tokens_consumed,
        "tokens_per_second": tokens_per_second(counts.tokens, seconds),
        "step_seconds": seconds,
        "data_wait_seconds": waited,
        "max_memory_bytes": peak_memory_bytes(run.device),
        "model_tflops": model_tflops(totals.flops, seconds, num_devices=world_size),
        "mfu": mfu(totals.flops, seconds, peak_flops),
    }
