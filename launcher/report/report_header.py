"""Report head: the run's progress, key metrics, and remarks to read before trusting its curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import median

from launcher.metrics.expert_load import DEAD_AFTER_STEPS
from launcher.metrics.goodput.account import effective_share
from launcher.metrics.metrics_console import short_number
from launcher.metrics.record import DISCARDED_FILE, METRICS_FILE, Record
from launcher.report import expert_report, report_plots
from launcher.report.audits import audit_warnings
from launcher.report.html import KeyMetric
from launcher.report.report_run import RunData
from launcher.report.report_text import duration, format_number, known, mean, perplexity
from launcher.wording import format_count
from longctx.errors import DataError

_RECENT_STEPS = 20
"""Steps averaged for the recent training loss."""
_ETA_STEPS = 100
"""Latest steps from which the remaining time is estimated."""


def completed_share(run: RunData) -> float | None:
    """Return the completed share of the planned steps, 0 to 1; None if the plan is unknown."""
    if not run.total_steps:
        return None
    if not run.train:
        return 0.0
    return min(1.0, run.train[-1]["step"] / run.total_steps)


def state(run: RunData) -> str:
    """Return ``finished …``, ``at step N of M`` or ``no step yet``."""
    if not run.train:
        return "no step yet"
    last, total = run.train[-1]["step"], run.total_steps
    if total is None:
        return f"at step {last:,}"
    if last >= total:
        return f"finished: {last:,} steps"
    left = seconds_left(run)
    # The report may be read long after the run was logged, so the time left is as of then.
    text = f"at step {last:,} of {total:,}"
    if left is None:
        return text
    return f"{text}, about {duration(left)} left when it was logged"


def seconds_left(run: RunData) -> float | None:
    """Estimate seconds until the last step from the latest steps, including validations and checkpoints."""
    if run.total_steps is None or not run.train:
        return None
    latest = run.train[-_ETA_STEPS:]
    # A resume pauses between two steps: use only steps after the latest one.
    resumed = max(run.resumed_steps, default=0)
    latest = [record for record in latest if record["step"] > resumed]
    _, ends = _moments(latest)
    steps = [record["step"] for record in latest if "time" in record]
    if len(ends) < 2 or steps[-1] <= steps[0]:
        return None
    return max(0, run.total_steps - steps[-1]) * (ends[-1] - ends[0]) / (steps[-1] - steps[0])


def key_metrics(run: RunData) -> list[KeyMetric]:
    """Return the most important metrics, without those that have no data."""
    return _loss_metrics(run) + _speed_metrics(run)


def _loss_metrics(run: RunData) -> list[KeyMetric]:
    found = []
    if run.train:
        losses = [record["loss"] for record in run.train[-_RECENT_STEPS:]]
        found.append(
            KeyMetric(
                label="Training loss",
                value=format_number(mean(losses)),
                note=f"mean of the last {format_count(len(losses), 'step')}; the last one {format_number(losses[-1])}",
            )
        )
    if run.validation_records:
        last = run.validation_records[-1]
        loss, entropy = last["loss"], last.get("unigram_entropy")
        found.append(
            KeyMetric(
                label="Validation loss", value=format_number(loss), note=f"nats per token, at step {last['step']:,}"
            )
        )
        # A diverged loss has no perplexity.
        if loss is not None and math.isfinite(loss):
            found.append(KeyMetric(label="Perplexity", value=perplexity(loss), note="e to the validation loss"))
        if last.get("bits_per_byte") is not None:
            note = "independent of the tokenizer"
            found.append(KeyMetric(label="Bits per byte", value=format_number(last["bits_per_byte"]), note=note))
        # The entropy puts the loss into perspective: a model without any context would reach it.
        if loss is not None and entropy is not None:
            note = "predicting by frequency alone"
            found.append(KeyMetric(label="Unigram entropy", value=format_number(entropy), note=note))
            note = "nats below the unigram entropy"
            if entropy <= loss:
                note = "nats: not better than frequency alone yet"
            found.append(KeyMetric(label="Learned from context", value=format_number(entropy - loss), note=note))
    return found


def _speed_metrics(run: RunData) -> list[KeyMetric]:
    """Return tokens, speed, time and memory; medians, because a process compiles and warms up in its first steps."""
    found = []
    if run.train and run.train[-1].get("tokens") is not None:
        tokens = run.train[-1]["tokens"]
        found.append(KeyMetric(label="Tokens", value=short_number(tokens), note=f"{tokens:,}"))
    speeds = known(run.train, "tokens_per_second")
    if speeds:
        found.append(KeyMetric(label="Tokens per second", value=short_number(median(speeds)), note="median, all ranks"))
    work = known(run.train, "model_tflops")
    if work:
        unit, rate = "TFLOP/s", median(work)
        # A CPU run would show as 0.00.
        if rate < 0.1:
            unit, rate = "GFLOP/s", rate * 1000
        found.append(KeyMetric(label=unit, value=f"{rate:.3g}", note="model FLOPs per device, median"))
    used = known(run.train, "mfu")
    if used:
        found.append(KeyMetric(label="MFU", value=f"{median(used):.1%}", note="model FLOPs utilisation, median"))
    starts, ends = _moments(run.records)
    if ends:
        note = f"of it {duration(sum(known(run.train, 'step_seconds')))} in steps"
        found.append(KeyMetric(label="Wall time", value=duration(max(ends) - min(starts)), note=note))
    trained = run.goodput.seconds()
    share = effective_share(trained)
    if share is not None:
        note = (
            f"of {duration(run.goodput.wall - trained['paused'])}, {format_count(len(run.goodput.attempts), 'attempt')}"
        )
        found.append(KeyMetric(label="Effective training time", value=f"{share:.1%}", note=note))
    memory = max(known(run.train, "max_memory_bytes"), default=0)
    # A device that cannot report its peak memory logs 0.
    if memory:
        found.append(KeyMetric(label="Peak memory", value=f"{memory / 2**30:.1f} GiB", note="of rank 0"))
    return found


def _moments(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return each record's start and end in seconds since 1970; a record is written after its step."""
    ends, starts = [], []
    for record in records:
        if "time" not in record:
            continue
        try:
            end = datetime.fromisoformat(record["time"]).timestamp()
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{METRICS_FILE}, step {record['step']}: time={record['time']!r} is not an ISO time."
            ) from error
        ends.append(end)
        # A validation records no duration: it takes place between two steps.
        starts.append(end - (record.get("step_seconds") or 0.0))
    return starts, ends


def run_warnings(run: RunData) -> list[str]:
    """Return remarks that a reader must know before trusting the curves."""
    found = audit_warnings(run.audits)
    empty = [r["step"] for r in run.train if r["loss"] is None]
    if empty:
        found.append(f"No target tokens in {format_count(len(empty), 'step')}, first at step {empty[0]:,}.")
    non_finite_steps = [r["step"] for r in run.train if r["loss"] is not None and not math.isfinite(r["loss"])]
    if non_finite_steps:
        found.append(
            f"The loss was not finite in {format_count(len(non_finite_steps), 'step')}, first at step "
            f"{non_finite_steps[0]:,}."
        )
    skipped = [r["step"] for r in run.train if "skipped" in r]
    if skipped:
        were = "was" if len(skipped) == 1 else "were"
        found.append(f"{format_count(len(skipped), 'step')} {were} skipped, first step {skipped[0]:,}.")
    if run.resumed_steps:
        steps = ", ".join(f"{step:,}" for step in run.resumed_steps)
        found.append(f"Resumed at step {steps}; dotted green lines mark it.")
    if run.num_discarded:
        rows = format_count(run.num_discarded, "row")
        found.append(f"{rows} from repeated steps are in {DISCARDED_FILE} and are not shown.")
    routed = expert_report.routed_records(run.train)
    dead = []
    if routed:
        dead = expert_report.dead_experts(routed)
    if dead:
        found.append(
            f"Without a token for {DEAD_AFTER_STEPS} steps or more: {format_count(len(dead), 'expert')}, named below."
        )
    # Thinned curves hide single spikes, so the reader must know.
    if len(run.train) > report_plots.MAX_POINTS:
        size = math.ceil(len(run.train) / report_plots.MAX_POINTS)
        found.append(f"Each point of a curve is the mean of {size} steps.")
    return found
