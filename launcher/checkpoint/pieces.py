"""Write one rank's ranges into a safetensors file without holding them: a block at a time leaves its device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longctx.checkpoint_manifest import VALUE_BYTES
from longctx.storage.hashed_file import HashedWriter, Written
from longctx.storage.safetensors import encoded_header, header_fields

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.state import Piece

BLOCK_VALUES = 1 << 22
"""Values that leave their device at a time: 16 MiB."""


def write_pieces(path: Path, pieces: Sequence[Piece], values: Iterable[Tensor]) -> Written:
    """Write the values of the pieces as float32 entries named by ``piece_key``, onto the disk.

    Values are taken one piece after the other: each may be gone when the next is asked for.
    """
    with HashedWriter(path) as file:
        file.write(_header(pieces))
        for one, tensor in zip(pieces, values, strict=True):
            assert tensor.numel() == one.numel, f"{piece_key(one)} has {tensor.numel()} values"
            for block in tensor.detach().flatten().split(BLOCK_VALUES):
                if block.numel():
                    file.write(block.to("cpu", torch.float32).contiguous().numpy().data)
        return file.close()


def piece_key(one: Piece) -> str:
    """The name of a range in its file."""
    return f"{one.name}/{one.role}/{one.start}"


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return what stands before the values; values begin at a multiple of eight bytes."""
    entries: dict[str, Any] = {}
    at = 0
    for one in pieces:
        stop = at + VALUE_BYTES * one.numel
        entries[piece_key(one)] = header_fields(torch.float32, [one.numel], at, stop)
        at = stop
    return encoded_header(entries)
