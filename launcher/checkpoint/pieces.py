"""Write one rank's ranges into a safetensors file without holding them: a block at a time leaves its device.

The layout is eight bytes with the header's length, a JSON header (key -> dtype, shape, byte range), then the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.state import OwnedRange

BLOCK_VALUES = 1 << 22
"""Values that are in the machine's memory at a time: 16 MiB."""
ITEM_BYTES = 4
"""Of a float32 value."""


def write_pieces(path: Path, ranges: Iterable[OwnedRange]) -> str:
    """Write the ranges as float32 entries named by ``piece_key``; returns the file's xxh3-128."""
    ranges = list(ranges)
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        header = _header(ranges)
        digest.update(header)
        file.write(header)
        for one in ranges:
            for block in one.values.detach().flatten().split(BLOCK_VALUES):
                content = block.to("cpu", torch.float32).contiguous().numpy().data
                digest.update(content)
                file.write(content)
    return digest.hexdigest()


def piece_key(one: OwnedRange) -> str:
    """The name of a range in its file."""
    return f"{one.name}/{one.role}/{one.start}"


def _header(ranges: list[OwnedRange]) -> bytes:
    """What stands before the values; values begin at a multiple of eight bytes."""
    entries: dict[str, Any] = {}
    at = 0
    for one in ranges:
        stop = at + ITEM_BYTES * one.values.numel()
        entries[piece_key(one)] = {"dtype": "F32", "shape": [one.values.numel()], "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text
