"""Masters, moments and buffers as ranges of the whole model's tensors: read out of a partition, and put into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.checkpoint_format import ROLES
from longctx.model.decoder import Decoder
from parallel.zero.fill import Read, fill
from parallel.zero.partition import MASTER, Partition, set_steps
from parallel.zero.tensors import ModelTensors

ReadRange = Callable[[str, str, int, int], Tensor]
"""(tensor name, role, start, count) -> flat fp32 values."""


class OwnedRange(NamedTuple):
    """Values of one tensor in one role that this rank answers for, flat and where they are held: not a copy."""

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
            yield OwnedRange(name, MASTER, 0, buffer.detach().float().flatten())
    for index, (name, p) in enumerate(decoder.named_parameters()):
        if not partition.answers_for(index, name):
            continue
        part = partition.part(name, p)
        if part.numel:
            start = tensors.first_value(name) + part.start
            for role in ROLES:
                yield OwnedRange(name, role, start, part.values[role].detach()[: part.numel])


@torch.no_grad()
def write_state(
    decoder: Decoder, partition: Partition, tensors: ModelTensors, read: ReadRange, *, step: int, moments: bool
) -> None:
    """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimiser steps. Collective.

    Over all ranks every value is read once: each rank reads its ranges of masters and moments, the weights that forward
    reads are made of the masters. Without ``moments`` the optimiser starts afresh.
    """
    roles, steps_taken = (MASTER,), 0
    if moments:
        roles, steps_taken = ROLES, step
        partition.prime_moments()
    # Buffers are whole on every rank.
    for name, buffer in decoder.named_buffers():
        fill(buffer.view(-1), _reader(read, name, MASTER, 0), shared_by=dist.group.WORLD)
    for name, p in decoder.named_parameters():
        part = partition.part(name, p, roles)
        first = tensors.first_value(name) + part.start
        for role, values in part.values.items():
            own = values.data[: part.numel]
            fill(own, _reader(read, name, role, first), shared_by=partition.replicas(name))
    partition.refresh_weights()
    set_steps(partition.inner, steps_taken)


def _reader(read: ReadRange, name: str, role: str, first: int) -> Read:
    """Reads one tensor in one role, counted from its value ``first``."""
    return lambda start, count: read(name, role, first + start, count)
