"""A trace as text: one screen per question, separating traced values from arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.plan.estimate import RunEstimate
from launcher.plan.memory_estimate import gib
from launcher.plan.planned_world import RankKind
from launcher.plan.screen import Rows, describe_run
from launcher.trace.rank_trace import RankTrace
from launcher.trace.trace import RunTrace


def trace_header(run: RunTrace) -> str:
    """Describe the traced run in a few lines."""
    kernel, (major, minor) = run.config.parallel.kernel, run.capability
    description = describe_run(run.config, run.world, run.document_tokens)
    return f"{description}; attention traced as {kernel}, for compute capability {major}.{minor}"


def trace_memory_rows(run: RunTrace, planned: RunEstimate) -> Rows:
    """Return table rows with bytes by kind, one per rank, and the planned peak."""
    # The peak is one sum: bytes held throughout, plus the larger of forward with backward and the optimizer's
    # temporaries.
    column_names = ["rank", "weights", "gradients", "optimizer", "kept", "kept on host", "passing", "peak", "planned"]
    column_names += ["operators", "host waits"]
    rows = []
    for trace, rank in zip(run.traces, planned.ranks, strict=True):
        b, peak = trace.bytes, rank.bytes.peak
        state = (b.weights + b.gathered, b.gradients + b.reduction, b.optimizer)
        sizes = [gib(n) for n in (*state, b.kept, b.kept_on_host, b.passing, b.peak)]
        plan = f"{gib(peak)} ({peak / b.peak - 1:+.1%})"
        rows.append([f"{trace.rank}", *sizes, plan, f"{trace.operators:,}", f"{_num_waits(trace)}"])
    return column_names, rows


def link_rows(run: RunTrace) -> Rows:
    """Return table rows with a micro-batch's traffic, one per rank and link."""
    rows = []
    for trace in run.traces:
        for link in trace.links:
            sent, received = gib(link.sent_bytes), gib(link.received_bytes)
            rows.append([f"{trace.rank}", link.what, link.link, sent, received, f"{link.messages:,}"])
    return ["rank", "what", "link", "sent", "received", "messages"], rows


def trace_notes(run: RunTrace) -> list[str]:
    """Return notes that complete the tables: each rank's role, the code line at its peak, all host waits."""
    lines: list[str] = []
    for kind, trace in zip(run.kinds, run.traces, strict=True):
        lines.append(_peak(kind, trace))
        lines.extend(_waits(trace))
    return [*lines, "", *_NOTES]


_NOTES = (
    "kept, kept on host, passing, operators, host waits and links are traced over one micro-batch's forward and "
    "backward, on tensors without data.",
    "weights, gradients and optimizer are computed from the model's shapes, ZeRO's partitions and its buffers for "
    "gathering weights and reducing gradients. links exclude DeepSpeed's messages for them.",
    "planned is the peak that `plan` computes without --trace.",
    "Other ranks are assumed to agree, and experts to be chosen equally often. Attention's backward workspace is "
    "computed. Other kernels' workspaces, NCCL buffers (about 1 GiB), the CUDA context and allocator fragmentation "
    "are extra.",
    "kept on host is pinned memory for activations that train.store=host moves off the device until backward; peak "
    "is the device's.",
    "Blocks are traced with train.compile=off: a compiler saves other activations for backward.",
    "Once per step, after backward, the host waits for the logged metrics and the gradient norm.",
)


def _peak(kind: RankKind, trace: RankTrace) -> str:
    where = trace.peak_place or "PyTorch's own backward"
    return f"{kind.describe()}: forward and backward peak at {trace.peak_operator}, {where}"


def _waits(trace: RankTrace) -> Sequence[str]:
    lines = [
        f"  host wait, {wait.times} times per micro-batch: {wait.place} ({wait.operator}): {wait.why}"
        for wait in trace.host_waits
    ]
    if not trace.is_whole:
        lines.append("  The trace ends at that wait: later operations are not counted.")
    return lines


def _num_waits(trace: RankTrace) -> int:
    return sum(wait.times for wait in trace.host_waits)
