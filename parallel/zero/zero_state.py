"""Masters, moments and buffers as ranges in the full model's tensors: read from and written to a partition.

A tensor is filled range by range; ranks that hold the same one share the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx.checkpoint_format import is_buffer
from longctx.config import ModelConfig
from longctx.kernels.quantized_weights import PackedLayout, fill_packed
from longctx.model.decoder import Decoder
from longctx.model.layers.initialize import InitialTensor, initial_buffer
from parallel.comm.communicator import Communicator
from parallel.comm.process_groups import ProcessGroup, world_group
from parallel.zero.model_tensors import ModelTensors
from parallel.zero.optimizer import MASTER, set_steps
from parallel.zero.partition import Partition

BLOCK_VALUES = 1 << 24
"""Values in flight at a time: 64 MiB in float32, however large the tensor is."""

Read = Callable[[int, Tensor], None]
"""(start, out) fills the flat tensor ``out``, of any dtype and on any device, with float32 values from ``start``."""

ReadRange = Callable[[str, str, int, Tensor], None]
"""(tensor name, role, start, out) fills the flat tensor ``out``, of any dtype and on any device."""


class StatePiece(NamedTuple):
    """Flat range in one tensor, for one role."""

    name: str
    role: str
    start: int
    numel: int

    def of(self, values: Tensor) -> OwnedRange:
        """Return this range with the first ``numel`` entries in ``values``."""
        return OwnedRange(self.name, self.role, self.start, values[: self.numel])


class OwnedRange(NamedTuple):
    """Values that this rank owns, for one tensor and role: flat, not copied."""

    name: str
    role: str
    start: int
    values: Tensor


def owned_pieces(decoder: Decoder, partition: Partition, tensors: ModelTensors) -> list[StatePiece]:
    """List this rank's ranges over masters, moments and buffers, without reading; all ranks together cover each value
    once.
    """
    pieces = []
    # Buffers are full on every rank: distribute their ownership, so that no rank writes them all.
    for index, (name, buffer) in enumerate(decoder.named_buffers()):
        if tensors.answers_for(index, name):
            pieces.append(StatePiece(name, MASTER, 0, buffer.numel()))
    for group in _owned_groups(decoder, partition):
        for name, p in group:
            extent = partition.extent(name, p)
            start = tensors.first_value(name) + extent.start
            pieces.extend(StatePiece(name, role, start, extent.numel) for role in partition.roles(name))
    return pieces


def read_state(decoder: Decoder, partition: Partition, tensors: ModelTensors) -> Generator[OwnedRange]:
    """Yield the values for ``owned_pieces``, in order, as fp32; those from disk stay valid until the next request.

    The caller must exhaust or close the iterator before training continues.
    """
    pieces = iter(owned_pieces(decoder, partition, tensors))
    for index, (name, buffer) in enumerate(decoder.named_buffers()):
        if tensors.answers_for(index, name):
            yield next(pieces).of(buffer.detach().float().flatten())
    for number, group in enumerate(_owned_groups(decoder, partition)):
        with partition.in_memory(number, moments=True):
            for name, p in group:
                values = partition.part(name, p, partition.roles(name))
                for role in partition.roles(name):
                    yield next(pieces).of(values[role].detach())


def _owned_groups(decoder: Decoder, partition: Partition) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the partition's groups, without parameters that another rank provides or that have no values here."""
    indices = {name: index for index, (name, _) in enumerate(decoder.named_parameters())}
    for group in partition.groups():
        yield [
            (name, p)
            for name, p in group
            if partition.answers_for(indices[name], name) and partition.extent(name, p).numel
        ]


@torch.no_grad()
def write_state(
    decoder: Decoder, partition: Partition, tensors: ModelTensors, read: ReadRange, *, step: int, moments: bool
) -> None:
    """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimizer steps. Collective.

    Over all ranks every value is read once: each rank reads its ranges of masters and moments, and the weights that
    forward reads are computed from the masters. Frozen weights are read as they are, or quantized as they are read.
    Without ``moments`` the optimizer is reset.
    """
    steps_taken = step if moments else 0
    # Buffers are full on every rank.
    for name, buffer in decoder.named_buffers():
        fill(buffer.view(-1), _reader(read, name, MASTER, 0), shared_by=world_group())
    for name, p in partition.frozen():
        first, start = tensors.first_value(name), partition.working_start(p)
        own = partition.working_part(name, p).data.view(-1)
        if name in decoder.layouts:
            values = _quantizing_reader(_reader(read, name, MASTER, first), decoder.layouts[name], start)
        else:
            values = _reader(read, name, MASTER, first + start)
        fill(own, values, shared_by=partition.working_replicas(name))
    for number, group in enumerate(partition.groups()):
        with partition.in_memory(number, moments=moments, writes=True):
            for name, p in group:
                extent = partition.extent(name, p)
                first = tensors.first_value(name) + extent.start
                roles = partition.roles(name) if moments else (MASTER,)
                for role, values in partition.part(name, p, roles).items():
                    own = values.data[: extent.numel]
                    fill(own, _reader(read, name, role, first), shared_by=partition.replicas(name))
    partition.refresh_weights()
    set_steps(partition.inner, steps_taken)


def _reader(read: ReadRange, name: str, role: str, first: int) -> Read:
    """Return a reader for one tensor and role, with offsets relative to ``first``."""
    return lambda start, out: read(name, role, first + start, out)


def _quantizing_reader(read: Read, layout: PackedLayout, first: int) -> Read:
    """Return a reader for a quantized tensor's bytes, with offsets relative to ``first``; ``read`` reads its values.

    Each range of bytes is computed from the values in its blocks alone, a few at a time.
    """
    return lambda start, out: fill_packed(out, layout, read, start=first + start)


def fill(out: Tensor, read: Read, *, shared_by: ProcessGroup | None = None) -> None:
    """Fill the flat tensor ``out`` from ``read``.

    If the ranks in ``shared_by`` fill equal tensors, each reads one part once and receives the others' parts.
    Collective within ``shared_by``.
    """
    if shared_by is not None and shared_by.size() > 1:
        _fill_together(out, read, shared_by)
        return
    for start in range(0, out.numel(), BLOCK_VALUES):
        read(start, out[start : start + BLOCK_VALUES])


def _fill_together(out: Tensor, read: Read, group: ProcessGroup) -> None:
    """Fill cooperatively: each rank reads one part; the last parts may be shorter or empty."""
    ranks, rank = group.size(), group.rank()
    part_numel = -(-out.numel() // ranks)
    block_numel = min(part_numel, -(-BLOCK_VALUES // ranks))
    # An all-gather needs equal sizes: values past the end are ignored.
    dtype = torch.float32
    if not out.is_floating_point():
        dtype = out.dtype  # bytes of a quantized weight
    own = torch.zeros(block_numel, dtype=dtype, device=out.device)
    gathered = torch.empty(ranks, block_numel, dtype=dtype, device=out.device)
    parts = [out[number * part_numel : (number + 1) * part_numel] for number in range(ranks)]
    for start in range(0, part_numel, block_numel):
        count = len(parts[rank][start : start + block_numel])
        if count:
            read(rank * part_numel + start, own[:count])
        Communicator().all_gather(own, group, operation="gathering the model's weights", out=gathered)
        for part, values in zip(parts, gathered, strict=True):
            block = part[start : start + block_numel]
            block.copy_(values[: len(block)])


class InitialWeights:
    """Initial weights for a full model, read like a checkpoint: each range is generated on request."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: Mapping[str, torch.Size],
        *,
        seed: int,
        dtype: torch.dtype,
        unrounded: Collection[str] = (),
    ) -> None:
        """Store the full model's parameter shapes. Masters start with values rounded to ``dtype``, like weights.

        ``unrounded`` names the weights that are quantized, from float32.
        """
        self._config, self._shapes, self._seed, self._dtype = config, shapes, seed, dtype
        self._unrounded = unrounded
        self._name, self._tensor = "", InitialTensor("", 0, config, seed)

    def read(self, name: str, role: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with values from the flattened tensor, from index ``start``."""
        if is_buffer(name):
            out.fill_(initial_buffer(name))
            return
        # Ranges arrive tensor by tensor, so keep the generator: it caches the section in which a range ends.
        if name != self._name:
            self._tensor = InitialTensor(name, self._shapes[name].numel(), self._config, self._seed)
            self._name = name
        values = self._tensor.read(start, len(out))
        if name not in self._unrounded:
            values = values.to(self._dtype)
        out.copy_(values)
