"""Masters, moments and buffers as ranges of the whole model's tensors: read out of a partition, and put into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from longctx.checkpoint_format import ROLES
from longctx.model.decoder import Decoder
from parallel.zero.partition import MASTER, Partition, set_steps
from parallel.zero.tensors import ModelTensors

ReadRange = Callable[[str, str, int, int], Tensor]
"""(tensor name, role, start, count) -> flat fp32 values."""


class OwnedRange(NamedTuple):
    """Values of one tensor in one role that this rank answers for."""

    name: str
    role: str
    start: int
    values: Tensor


def read_state(decoder: Decoder, partition: Partition, tensors: ModelTensors) -> Iterator[OwnedRange]:
    """Masters, moments and buffers as fp32 ranges of the whole model's tensors: over all ranks each value once."""
    partition.prime_moments()
    # Buffers are whole on every rank: one rank answers for each, so that no rank writes them all.
    for index, (name, buffer) in enumerate(decoder.named_buffers()):
        if tensors.answers_for(index, name):
            yield OwnedRange(name, MASTER, 0, buffer.detach().float().flatten().cpu())
    for index, (name, p) in enumerate(decoder.named_parameters()):
        if not partition.answers_for(index, name):
            continue
        part = partition.part(name, p)
        if part.numel:
            start = tensors.first_value(name) + part.start
            for role in ROLES:
                yield OwnedRange(name, role, start, part.values[role].detach()[: part.numel].cpu())


def write_state(
    decoder: Decoder, partition: Partition, tensors: ModelTensors, read: ReadRange, *, step: int, moments: bool
) -> None:
    """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimiser steps.

    Collective in stage 3. Without ``moments`` the optimiser starts afresh.
    """
    partition.prime_moments()
    for name, buffer in decoder.named_buffers():
        buffer.copy_(read(name, MASTER, 0, buffer.numel()).view_as(buffer))
    roles, steps_taken = (MASTER,), 0
    if moments:
        roles, steps_taken = ROLES, step
    for name, p in decoder.named_parameters():
        first, part = tensors.first_value(name), partition.part(name, p)
        if part.numel:
            for role in roles:
                part.values[role].data[: part.numel].copy_(read(name, role, first + part.start, part.numel))
        if not partition.weight_is_master:
            # The weights that forward reads follow their masters; DeepSpeed would only do so after its next step.
            num_local = tensors.local[name].numel()
            partition.set_weight(p, lambda name=name, first=first, n=num_local: read(name, MASTER, first, n))
    set_steps(partition.inner, steps_taken)
