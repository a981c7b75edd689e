"""Exchange of samples with the ranks that recompute them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel.audit.call_sample import CallSample
from parallel.audit.rank_comparison import AuditAssignment
from parallel.audit.tensor_copies import from_bytes, joined_bytes
from parallel.comm.communicator import Communicator
from parallel.comm.process_groups import control_group
from parallel.comm.world import gather_objects


def exchange(
    samples: Sequence[CallSample], assigned: Sequence[AuditAssignment], rank: int
) -> dict[int, dict[int, CallSample]]:
    """Return the samples that this rank must recompute, by source rank and index. Collective.

    Samples pass through CPU memory, including those from GPUs: this happens a few times in a thousand steps.
    """
    # Keep samples that ranks with other bits cannot check.
    sent = {n: x for n, x in enumerate(samples) if not x.is_alone and (assigned[rank].exact or x.is_bounded)}
    # Headers first: every rank then knows all samples and senders, and can allocate receive buffers.
    headers: list[dict[int, CallSample]] = gather_objects({n: x.without_values() for n, x in sent.items()})
    receive_buffers = {
        victim: torch.empty(sum(x.nbytes for header in of_victim.values() for x in header.tensors), dtype=torch.uint8)
        for victim, of_victim in enumerate(headers)
        if of_victim and rank in assigned[victim].auditors
    }

    sent_to: dict[int, list[torch.Tensor]] = {}
    if sent:
        data = joined_bytes([x for sample in sent.values() for x in sample.tensors])
        sent_to = {peer: [data] for peer in assigned[rank].auditors}
    received = {victim: [data] for victim, data in receive_buffers.items()}
    if len(headers) > 1:
        Communicator().send_recv(sent_to, received, control_group(), operation="sending samples for the audit").wait()
    return {victim: _unpacked(headers[victim], data) for victim, data in receive_buffers.items()}


def _unpacked(headers: dict[int, CallSample], data: torch.Tensor) -> dict[int, CallSample]:
    values = iter(from_bytes(data, [x for header in headers.values() for x in header.tensors]))
    return {n: header.with_tensors([next(values) for _ in header.tensors]) for n, header in headers.items()}
