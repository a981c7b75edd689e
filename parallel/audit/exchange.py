"""Samples on their way to the ranks that compute them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parallel.audit.alike import Assigned
from parallel.audit.sample import Header, Sample
from parallel.runtime.communicate import named_collective
from parallel.runtime.groups import control_group
from parallel.runtime.process import gather_objects


def exchange(sample: Sample | None, assigned: Sequence[Assigned], rank: int) -> dict[int, Sample]:
    """The samples that this rank is to compute again, by the rank whose they are. Collective.

    They travel through the machines' memory, also those of GPUs: a few times in a thousand steps.
    """
    own: Header | None = None
    if sample is not None and not sample.is_alone:
        own = sample.header
    # Everybody knows what comes, and from whom, before the first byte travels.
    headers: list[Header | None] = gather_objects(own)
    if len(headers) == 1:
        return {}
    arriving = {
        victim: torch.empty(header.num_bytes, dtype=torch.uint8)
        for victim, header in enumerate(headers)
        if header is not None and rank in _auditors_of(header, assigned[victim])
    }

    def travel() -> None:
        group, pending = control_group(), []
        for victim, data in arriving.items():
            pending.append(dist.irecv(data, victim, group=group))
        if own is not None and sample is not None:
            data = sample.bytes()
            for auditor in _auditors_of(own, assigned[rank]):
                pending.append(dist.isend(data, auditor, group=group))
        for request in pending:
            if request is not None:
                request.wait()

    named_collective(travel, "sending what is audited to other ranks")
    found = {}
    for victim, data in arriving.items():
        header = headers[victim]
        assert header is not None
        found[victim] = header.sample(data)
    return found


def _auditors_of(header: Header, assigned: Assigned) -> tuple[int, ...]:
    """The ranks that can look at such a call."""
    if assigned.exact or header.is_bounded:
        return assigned.auditors
    return ()
