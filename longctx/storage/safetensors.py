"""One safetensors file: a reader that trusts nothing in it, and a writer that holds one tensor at a time.

The layout is eight bytes with the header's length, a JSON header (name -> dtype, shape, byte range), then the tensors'
bytes. Files are read with plain reads: mapped pages would stay in resident memory until the mapping ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from longctx.errors import CheckpointError
from longctx.tensor_bytes import as_bytes
from longctx.untrusted.reading import parse_json
from longctx.untrusted.tensor_header import Entry, header_entries

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that fit the fp32 masters without loss."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads."""
_MOST_HEADER_VALUES = 8_000_000
"""Each tensor has some eight."""
BLOCK_BYTES = 16 * 2**20
RESERVED_BYTES = 2**20
"""Bytes reserved for the header, which is written last: enough for the names of some 7,000 tensors."""


class SafetensorsFile:
    """The tensors of one file by name. Opening reads and checks the header alone.

    CheckpointError names the file, and the tensor where there is one: for a header longer than the file, a key given
    twice, ranges past the end, ranges that overlap or leave bytes to nobody, shapes that do not fit their range.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._entries = _read_entries(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error

    def names(self) -> list[str]:
        """Every tensor."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as the header has it."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype; CheckpointError for one that training could not take without loss."""
        kind = self._entries[name].dtype
        if kind not in DTYPES:
            raise CheckpointError(f"{name} in {self.path} is {kind}; supported: {sorted(DTYPES)}, nothing quantised.")
        return DTYPES[kind]

    def read(self, name: str) -> Tensor:
        """The tensor, in memory of its own."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        content = content_of(tensor)
        at = 0
        for block in self._blocks(name):
            content[at : at + len(block)] = block
            at += len(block)
        return tensor

    def hash(self, name: str) -> str:
        """xxh3-128 of the tensor's bytes, without holding the tensor."""
        digest = xxhash.xxh3_128()
        for block in self._blocks(name):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, name: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes in blocks, all in the same memory: a block is gone when the next one is asked for."""
        entry = self._entries[name]
        left = entry.stop - entry.start
        block = memoryview(bytearray(min(BLOCK_BYTES, left)))
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start)
                while left:
                    read = file.readinto(block[: min(left, len(block))])
                    if not read:
                        raise OSError("the file ends early")
                    left -= read
                    yield block[:read]
        except OSError as error:
            raise CheckpointError(f"{name} in {self.path} cannot be read: {error}.") from error


def _read_entries(path: Path) -> dict[str, Entry]:
    """The header's entries; ValueError says what is wrong with it."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size < 8:
            raise ValueError(f"it has {size} bytes, which is no safetensors file")
        header_bytes = int.from_bytes(file.read(8), "little")
        # Before it is read: a wrong number would ask for all memory.
        if header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header claims {header_bytes} bytes, the file has {size}")
        header = parse_json(file.read(header_bytes), most_values=_MOST_HEADER_VALUES)
    return header_entries(header, 8 + header_bytes, size)


class SafetensorsWriter:
    """Writes one file, tensor by tensor as they come; ``close`` adds the header in front of them.

    The header's size is not known before, so ``RESERVED_BYTES`` are reserved (spaces fill what it does not need);
    ``fits_header`` says when they are used up. In small files the data moves up to the header at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data_bytes = 0
        self.hashes: dict[str, str] = {}
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = 100
        self._file = path.open("w+b")
        self._file.seek(RESERVED_BYTES)

    def fits_header(self, name: str) -> bool:
        """Whether the header can take another tensor of this name."""
        return self._header_bytes + _entry_bytes(name) <= RESERVED_BYTES

    def add(self, name: str, dtype: torch.dtype, shape: Iterable[int], values: Iterable[Tensor]) -> None:
        """Write a tensor that comes in pieces, on the CPU, whose flattened values follow one another."""
        start = self.data_bytes
        digest = xxhash.xxh3_128()
        for piece in values:
            content = content_of(piece.to(dtype))
            digest.update(content)
            self._file.write(content)
            self.data_bytes += len(content)
        self.hashes[name] = digest.hexdigest()
        fields = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, self.data_bytes]}
        self._header[name] = fields
        self._header_bytes += _entry_bytes(name)

    def close(self) -> None:
        """Write the header. Afterwards the file is whole."""
        header = json.dumps(self._header, separators=(",", ":"), ensure_ascii=False).encode()
        header_bytes = RESERVED_BYTES - 8
        # A small file would be mostly reserved space; moving a block costs little.
        if self.data_bytes <= BLOCK_BYTES:
            header_bytes = math.ceil(len(header) / 8) * 8
            self._move_data_to(8 + header_bytes)
        self._file.seek(0)
        self._file.write(header_bytes.to_bytes(8, "little") + header.ljust(header_bytes))
        self._file.close()

    def _move_data_to(self, start: int) -> None:
        """Move the data, one block at most, towards the beginning of the file."""
        self._file.seek(RESERVED_BYTES)
        data = self._file.read()
        self._file.seek(start)
        self._file.write(data)
        self._file.truncate()


def _entry_bytes(name: str) -> int:
    """An upper bound on what a tensor takes in the header: its name escaped, and numbers at their longest."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + 220


def content_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor; a copy only where it is not contiguous."""
    return as_bytes(tensor.contiguous()).numpy().data
