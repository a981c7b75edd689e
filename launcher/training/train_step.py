"""``TrainStep``: one optimizer step, readable from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import Tensor

from launcher.metrics.expert_load import max_violation, mean_violation
from launcher.metrics.record import Record
from launcher.metrics.throughput import (
    mfu,
    model_tflops,
    peak_device_flops,
    tokens_per_second,
    training_flops,
)
from launcher.training.hook import RunningStep, StepHook
from launcher.training.hooks import step_hooks
from launcher.training.learning_rate_schedule import learning_rate
from launcher.training.run_state import Progress, TrainingRun
from launcher.training.step_prefetch import StepData
from launcher.training.totals import StepSums, StepTotals
from longctx.errors import GradientError
from longctx.model.experts.balance import load_share, move_selection_bias_
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import Counts
from parallel.loss import sum_counts
from parallel.runtime.activity import begin
from parallel.runtime.device import device_name, peak_memory_bytes
from parallel.schedule.degrees import Degrees

H = TypeVar("H", bound=StepHook)


class TrainStep:
    """A run's optimizer steps, one per call; hooks into them are in ``launcher/training/hooks``."""

    def __init__(self, run: TrainingRun, hooks: Sequence[StepHook] | None = None) -> None:
        """Use these hooks; by default, those that the run's config requests."""
        self.run = run
        self.hooks = step_hooks(run) if hooks is None else list(hooks)

    def __call__(self, progress: Progress) -> tuple[Progress, Record]:
        """Take the next step; return the run's progress after it, and the step's record.

        A hook may refuse the update: the step is then skipped on all ranks. Collective.
        """
        run, number, started = self.run, progress.step + 1, time.perf_counter()
        # If the run hangs, each rank's current activity is reported.
        begin("waiting for data", step=number)
        with ExitStack() as scope:
            # 1. The step's rows, and this rank's shard of each micro-batch. The next step's are prefetched meanwhile.
            data, waited = run.prefetcher.next_step()
            step = RunningStep(
                number=number,
                progress=progress,
                data=data,
                data_wait_seconds=waited,
                scope=scope,
                history=progress.history,
            )

            # 2. Counts over all ranks come before the first backward: they divide each shard's part of the loss, so
            # that the step's loss is one sum over one count for any degrees and accumulation.
            begin("counting tokens")
            step.counts = sum_counts(run.engine.model.count(data.shards))
            for hook in self.hooks:
                hook.before_forward(step)
            step.sums = self.forward_backward(step)
            begin("summing the step")
            step.totals = step.sums.over_ranks(_model_flops(run, data), step.extra_sums)
            step.loss = run.engine.model.mean_loss(step.totals.sums, step.counts)
            step.lr = learning_rate(number, run.config.train)

            # 3. Weights and moments change only if no hook refuses the update and the gradient is finite.
            for hook in self.hooks:
                hook.before_update(step)
            try:
                step.grad_norm = run.engine.step(step.lr, lambda norm: not step.refusal_reason(norm))
            except GradientError as error:
                # Drop the traceback, whose frames hold the step's tensors.
                step.gradient_error = error.with_traceback(None)
            load_LE = self._balance(step)
            for hook in self.hooks:
                hook.after_update(step)
            if step.gradient_error is not None and not step.skip_reason:
                raise step.gradient_error

        # 4. The step's report. The clock stops here: metrics and checkpoints are not part of the step's time.
        record = self._record(step, seconds=time.perf_counter() - started)
        for hook in self.hooks:
            hook.before_log(step, record)
        after = Progress(step=number, expert_load_LE=load_LE, history=step.history, stop_requested=step.stop_requested)
        return after, record

    def forward_backward(self, step: RunningStep) -> StepSums:
        """Accumulate gradients over the step's micro-batches; return this rank's sums for the reported values."""
        run, sums, load_LE = self.run, StepSums(), None
        if step.progress.expert_load_LE is not None:
            load_LE = load_share(step.progress.expert_load_LE).to(run.device)
        for number, (rows, shard) in enumerate(zip(step.data.rows, step.data.shards, strict=True)):
            for each in step.before_micro_batch:
                each(number)
            # Dropout and jitter depend only on the run's seed, the step and a token's index in it, so another degree or
            # a resumed run samples the same numbers.
            training_pass = TrainingPass(
                seed=run.config.run.seed * 0x9E3779B1 + step.progress.step,
                first_tokens=run.first_tokens(rows),
                first_source_tokens=run.first_source_tokens(rows),
                expert_load_LE=load_LE,
                replay=step.routing_replay(number),
            )
            # Only one micro-batch at a time is on the device; backward frees its activations.
            loss = run.engine.forward(shard.unpack(run.device, run.engine.model.prepare), training_pass)
            run.engine.backward(run.engine.model.loss(loss, step.counts))
            sums.add(loss)
        return sums

    def hook(self, kind: type[H]) -> H | None:
        """Return the hook with this class, if the steps have one."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    def _balance(self, step: RunningStep) -> Tensor | None:
        """Move the routers' selection bias by the step's load (arXiv 2408.15664), and return the load."""
        # After the optimizer, so that forward and backward use the same bias. The next step's balance loss may also
        # read the load, or the previous step's if this one was skipped.
        run = self.run
        if not run.model.num_experts or step.gradient_error is not None:
            return step.progress.expert_load_LE
        if run.model.selection_bias_rate:
            biases = run.engine.model.network.selection_biases()
            move_selection_bias_(biases, step.totals.counts_LE, run.model.selection_bias_rate)
        return step.totals.counts_LE

    def _record(self, step: RunningStep, *, seconds: float) -> Record:
        run, counts, totals = self.run, step.counts, step.totals
        return {
            "kind": "train",
            "step": step.number,
            # Conversations longer than a row may have no counted token: there is no loss then.
            "loss": step.loss if run.engine.model.num_loss_tokens(counts) else None,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            **_speed(run, counts, totals, seconds=seconds, waited=step.data_wait_seconds),
            **source_record(step.data.after),
            **degree_record(step.data.degrees),
            **pair_record(totals, counts),
            **class_record(totals, counts),
            **preference_record(totals, counts),
            **mtp_record(totals, counts),
            **expert_record(totals, run.expert_layers, counts["tokens"]),
        }


def _model_flops(run: TrainingRun, data: StepData) -> float:
    """Return this rank's portion of the step's model FLOPs: the context group's FLOPs, divided among its ranks."""
    # From the full batch: a causal shard's attention depends on tokens on other ranks.
    head_share = run.config.head_share
    micro_batches = zip(data.lengths, data.source_lengths, strict=True)
    flops = sum(training_flops(run.model, *lengths, head_share=head_share) for lengths in micro_batches)
    return flops / run.mesh.context


def source_record(order: Mapping[str, Any]) -> Record:
    """Return the tokens taken from each source in a mixture, by the loader's state; empty for a single folder."""
    # For a single folder, ``tokens`` is the same.
    if "sources" not in order:
        return {}
    return {"source_tokens": {name: source["tokens"] for name, source in order["sources"].items()}}


def degree_record(degrees: Sequence[Degrees]) -> Record:
    """Return a train record's fields about its documents' degrees; empty if the degree is fixed."""
    if not degrees:
        return {}
    ranks = [n for of_batch in degrees for n in of_batch.ranks]
    return {
        "ranks_per_document": sum(ranks) / len(ranks),
        "most_ranks_per_document": max(ranks),
        "attention_imbalance": max(of_batch.imbalance for of_batch in degrees),
    }


def _speed(run: TrainingRun, counts: Counts, totals: StepTotals, *, seconds: float, waited: float) -> Record:
    world_size = run.mesh.world_size
    # None on a CPU, and on a GPU without a known data sheet: then there is no MFU either.
    peak_flops = peak_device_flops(device_name(run.device), run.config.train.dtype)
    if peak_flops is not None:
        peak_flops *= world_size
    return {
        "tokens": run.prefetcher.tokens_consumed,
        "tokens_per_second": tokens_per_second(counts["tokens"], seconds),
        "step_seconds": seconds,
        "data_wait_seconds": waited,
        "max_memory_bytes": peak_memory_bytes(run.device),
        "model_tflops": model_tflops(totals.flops, seconds, num_devices=world_size),
        "mfu": mfu(totals.flops, seconds, peak_flops),
    }


def pair_record(totals: StepTotals, counts: Counts) -> Record:
    """Return a train record's fields about the pair head; empty without one."""
    if "pair" not in totals.sums:
        return {}
    pairs = max(1, counts["pairs"])
    return {"pair_loss": totals.sums["pair"] / pairs, "pair_accuracy": totals.sums["right_pairs"] / pairs}


def class_record(totals: StepTotals, counts: Counts) -> Record:
    """Return a train record's fields about the class head; empty without one."""
    if "right_classes" not in totals.sums:
        return {}
    labels = max(1, counts["labels"])
    record = {"class_accuracy": totals.sums["right_classes"] / labels}
    # If classes are the only objective, their loss is the step's.
    if "class" in totals.sums:
        record["class_loss"] = totals.sums["class"] / labels
    return record


def preference_record(totals: StepTotals, counts: Counts) -> Record:
    """Return a train record's fields about preferences; empty for other objectives."""
    sums = totals.sums
    if "right_preferences" not in sums:
        return {}
    records = max(1, counts["labels"])
    record = {
        "preference_accuracy": sums["right_preferences"] / records,
        "reward_margin": sums["margin"] / records,
        "first_reward": sums["first_reward"] / records,
        "second_reward": sums["second_reward"] / records,
    }
    if "kl" in sums:
        record["reference_kl"] = sums["kl"] / records
    return record


def mtp_record(totals: StepTotals, counts: Counts) -> Record:
    """Return a train record's field about multi-token prediction; empty without it."""
    if "mtp_nll" not in totals.sums:
        return {}
    return {"mtp_loss": totals.sums["mtp_nll"] / max(1, counts["ahead"])}


def expert_record(totals: StepTotals, layers: Sequence[int], num_tokens: int) -> Record:
    """Return a train record's fields about experts, empty lists in a dense model. Formulas: ``docs/run-folder.md``.

    ``num_tokens`` is the step's, without padding.
    """
    loads, routers = totals.counts_LE.tolist(), totals.diagnostics
    # A step with only padding divides by 1, not by 0.
    tokens = max(1, num_tokens)
    chosen_L = totals.counts_LE.sum(1).clamp(min=1)
    balance_loss = router_z_loss = None
    if loads:
        balance_loss = totals.sums["balance"] / tokens / len(loads)
        router_z_loss = totals.sums["router_z"] / tokens
    return {
        "balance_loss": balance_loss,
        "router_z_loss": router_z_loss,
        "expert_layers": list(layers),
        "expert_load": loads,
        "expert_max_violation": [max_violation(counts) for counts in loads],
        "expert_mean_violation": [mean_violation(counts) for counts in loads],
        "expert_dropped_share": (routers.dropped_assignments / chosen_L).tolist(),
        "router_entropy": (routers.entropy / tokens).tolist(),
        "router_logit_rms": (routers.squared_logits / tokens).sqrt().tolist(),
    }
