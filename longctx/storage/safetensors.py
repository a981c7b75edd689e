"""safetensors files: a reader for untrusted files, the header, and writers that hold one tensor at a time.

Layout: eight bytes with the header's length, a JSON header (name -> dtype, shape, byte range), then the tensors' bytes
back to back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from longctx.errors import CheckpointError
from longctx.storage.hashed_blocks import BlockReader
from longctx.tensor_bytes import as_bytes, content_of
from longctx.untrusted.strict_json import parse_json, shown

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors dtype names that fit the fp32 master weights without loss."""
STORED = DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F64": torch.float64, "BOOL": torch.bool,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Also quantized values and buffers, which are read as stored."""
_NAMES = {dtype: name for name, dtype in STORED.items()}
# Dtypes that no reader accepts also need a size: their ranges are checked too.
_ITEM_BYTES: dict[str, int] = dict.fromkeys(("F64", "I64", "U64"), 8)
_ITEM_BYTES |= dict.fromkeys(("F32", "I32", "U32"), 4)
_ITEM_BYTES |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
_ITEM_BYTES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
_MOST_NAME, _MOST_DIMS, _MOST_SIZE = 400, 16, 2**64


# Header limits, checked before reading: a wrong length could exhaust memory.
MOST_HEADER_BYTES = 100_000_000
"""Maximum header size that the safetensors library reads."""
MOST_HEADER_VALUES = 8_000_000
"""Maximum JSON values; each tensor has some eight."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: file bytes ``start`` to ``stop``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


# --- reading --------------------------------------------------------------------------------------------------


class SafetensorsFile:
    """One file's tensors by name. Opening reads and checks only the header.

    Raise CheckpointError, naming the file and if possible the tensor, for a header longer than the file or its limits,
    a duplicate key, ranges past the end, ranges that overlap or leave gaps, and shapes that do not match their range;
    with ``hashes``, also for every changed checksum block.
    """

    def __init__(
        self,
        path: Path,
        blocks: BlockReader | None = None,
        *,
        num_bytes: int | None = None,
        hashes: str | None = None,
        header_bytes: int = MOST_HEADER_BYTES,
        header_values: int = MOST_HEADER_VALUES,
        hint: str = "",
    ) -> None:
        """Open the file.

        ``blocks`` reads it, and may read other files in its folder. ``num_bytes`` and ``hashes`` (one per block) come
        from a manifest. ``header_bytes`` and ``header_values`` limit its header. ``hint`` is the second line in the
        message about an unreadable file.
        """
        self.path, self._blocks = path, blocks or BlockReader(past_cache=False)
        try:
            # opening a pipe without a writer would hang
            if not path.is_file():
                raise FileNotFoundError("it is missing, or not a plain file")
            self._size = path.stat().st_size if num_bytes is None else num_bytes
            self._blocks.add(path, self._size, hashes)
            self._entries = self._read_header(header_bytes, header_values)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.\n{hint}".rstrip()) from error

    def names(self) -> list[str]:
        """Return all tensor names."""
        return list(self._entries)

    def entry(self, name: str) -> TensorEntry | None:
        """Return a tensor's header entry, if present."""
        return self._entries.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape from the header."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype; raise CheckpointError if training could not load it without loss."""
        kind = self._entries[name].dtype
        if kind not in DTYPES:
            raise CheckpointError(f"{name} in {self.path} is {kind}; supported: {sorted(DTYPES)}, nothing quantised.")
        return DTYPES[kind]

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the stored bytes, also for quantized values; None if no supported scheme has it."""
        return STORED.get(self._entries[name].dtype)

    def read(self, name: str) -> Tensor:
        """Read the tensor into its own memory."""
        return self._read(name, self.dtype(name))

    def read_stored(self, name: str) -> Tensor:
        """Read the tensor as stored, even if it is quantized."""
        dtype = self.stored_dtype(name)
        if dtype is None:
            raise CheckpointError(f"{name} in {self.path} is {self._entries[name].dtype}; supported: {sorted(STORED)}.")
        return self._read(name, dtype)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(self.shape(name), dtype=dtype)
        try:
            self.read_into(self._entries[name].start, as_bytes(tensor))
        except CheckpointError as error:
            raise CheckpointError(f"{name} in {error}") from error
        return tensor

    def read_into(self, start: int, out: Tensor) -> None:
        """Fill ``out``, flat uint8 on the CPU, with the file's bytes from ``start``."""
        self._blocks.read_into(self.path.name, start, out)

    def _read_header(self, most_bytes: int, most_values: int) -> dict[str, TensorEntry]:
        """Parse and check the header; raise ValueError with the problem if it is invalid."""
        if self._size < 8:
            raise ValueError(f"it has {self._size} bytes, which is not a safetensors file")
        header_bytes = int.from_bytes(self._bytes(0, 8), "little")
        most = min(self._size - 8, most_bytes)
        if header_bytes > most:
            raise ValueError(f"its header claims {header_bytes:,} bytes; the limit is {most:,}")
        header = parse_json(self._bytes(8, header_bytes), most_values=most_values)
        return header_entries(header, 8 + header_bytes, self._size)

    def _bytes(self, start: int, count: int) -> bytes:
        out = torch.zeros(count, dtype=torch.uint8)
        self.read_into(start, out)
        return out.numpy().tobytes()


def header_entries(header: Any, begin: int, size: int) -> dict[str, TensorEntry]:
    """Check a header and return its tensors, in a file with ``size`` bytes whose data starts at byte ``begin``.

    Raise ValueError, one line long, for invalid keys, dtypes, shapes or ranges, and unless the tensors are contiguous
    up to the end of the file.
    """
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    # free text, not a tensor
    header.pop("__metadata__", None)
    entries = {name: _entry(name, fields, begin, size) for name, fields in header.items()}
    _check_cover(entries, begin, size)
    return entries


def _entry(name: str, fields: Any, begin: int, size: int) -> TensorEntry:
    """Check a tensor's fields and return its entry; its byte offsets count from the start of the file."""
    if not name or len(name) > _MOST_NAME:
        raise ValueError(f"its header contains the tensor name {shown(name)}; a name has 1 to {_MOST_NAME} characters")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"its header does not describe {name} by dtype, shape and data_offsets")
    kind, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(kind, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"its header describes {name} by dtype={shown(kind)} shape={shown(shape)} data_offsets={shown(offsets)}"
        )
    start, stop = begin + offsets[0], begin + offsets[1]
    if start > stop or stop > size:
        raise ValueError(f"{name} is at bytes {offsets}, past the end of the {size - begin} bytes of data")
    if kind in _ITEM_BYTES and stop - start != math.prod(shape) * _ITEM_BYTES[kind]:
        raise ValueError(f"{name} is {kind} {shape}, which is not {stop - start} bytes")
    return TensorEntry(kind, tuple(shape), start, stop)


def _is_sizes(value: Any) -> bool:
    """Return whether a value is a short list of non-negative integers; ``True`` does not count as an integer."""
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return False
    return all(type(v) is int and 0 <= v < _MOST_SIZE for v in value)


def _check_cover(entries: dict[str, TensorEntry], begin: int, size: int) -> None:
    """Raise ValueError unless the tensors are contiguous, from the header to the end of the file."""
    # Two tensors over the same bytes, or bytes outside all tensors, could make other readers see different content.
    at, before = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < at:
            raise ValueError(f"{before} and {name} overlap")
        if entry.start > at:
            raise ValueError(f"{before} and {name} leave a gap between them")
        at, before = entry.stop, name
    if at != size:
        raise ValueError(f"{size - at} bytes after {before} belong to no tensor")


# --- writing --------------------------------------------------------------------------------------------------

RESERVED_BYTES = 2**20
"""Bytes reserved for a header that is written last: enough for some 7,000 tensor names."""
SMALL_BYTES = 16 * 2**20
"""Up to this data size the header takes only what it needs: the unused reserve would dominate the file."""
_BLOCK_VALUES = 1 << 24
"""Values cast at a time: casting a full tensor would double its memory."""


def header_fields(dtype: torch.dtype, shape: Iterable[int], start: int, stop: int) -> dict[str, Any]:
    """Return a tensor's header fields for data bytes ``start`` to ``stop``."""
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}


def encoded_header(fields: Mapping[str, Any], *, header_bytes: int | None = None) -> bytes:
    """Encode everything before the data, padded with spaces to ``header_bytes``, or to a multiple of eight."""
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if header_bytes is None:
        header_bytes = -(-len(text) // 8) * 8
    return header_bytes.to_bytes(8, "little") + text.ljust(header_bytes)


class SafetensorsWriter:
    """Writer for one file, tensor by tensor; ``close`` adds the header in front.

    ``RESERVED_BYTES`` are reserved for the header, whose size is not known in advance; ``fits_header`` checks that they
    suffice.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.data_bytes, self.num_tensors = path, 0, 0
        self._digest = xxhash.xxh3_128()
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = 100
        self._file = path.open("w+b")
        self._file.seek(RESERVED_BYTES)

    def fits_header(self, name: str) -> bool:
        """Return whether the header has room for another tensor with this name."""
        return self._header_bytes + _entry_bytes(name) <= RESERVED_BYTES

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], values: Iterable[Tensor]) -> None:
        """Write a tensor given as CPU tensors that hold its flattened values in order."""
        start = self.data_bytes
        for piece in values:
            content = content_of(piece.to(dtype))
            self._digest.update(content)
            self._file.write(content)
            self.data_bytes += len(content)
        self._header[name] = header_fields(dtype, shape, start, self.data_bytes)
        self._header_bytes += _entry_bytes(name)
        self.num_tensors += 1

    def close(self) -> None:
        """Write the header and read the data back from the system's cache; the file is then complete.

        Raise CheckpointError if the data differs from the written bytes.
        """
        header = encoded_header(self._header, header_bytes=RESERVED_BYTES - 8)
        if self.data_bytes <= SMALL_BYTES:
            header = encoded_header(self._header)
            self._file.seek(RESERVED_BYTES)
            data = self._file.read()
            self._file.seek(len(header))
            self._file.write(data)
            self._file.truncate()
        self._file.seek(0)
        self._file.write(header)
        self._file.close()
        found = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            file.seek(len(header))
            while block := file.read(SMALL_BYTES):
                found.update(block)
        if found.digest() != self._digest.digest():
            raise CheckpointError(f"{self.path} reads back differently from the written data. Check the disk.")


def _entry_bytes(name: str) -> int:
    """Return an upper bound on a tensor's bytes in the header: its name escaped, and numbers at their longest."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + 220


class SafetensorsShardWriter:
    """Writer that streams tensors into safetensors files with about ``shard_bytes`` each, without holding them in
    memory.

    A full shard is read back immediately, which detects a disk that corrupts data. ``finish`` names the files.
    """

    def __init__(self, folder: Path, base_name: str, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes={shard_bytes} must be positive, for example 5_000_000_000.")
        self.folder, self.base_name, self.shard_bytes = folder, base_name, shard_bytes
        self.total_bytes = 0
        self._shard: SafetensorsWriter | None = None
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor."""
        tensor = tensor.detach().to("cpu")
        self.add_flat(name, tensor.reshape(-1), tensor.dtype, tuple(tensor.shape))

    def add_flat(self, name: str, values: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Add a tensor by its flattened values, cast to ``dtype`` one range at a time."""
        if values.numel() != torch.Size(shape).numel():
            raise ValueError(f"{name}: {values.numel()} values for shape {shape}")
        num_bytes = values.numel() * dtype.itemsize
        shard = self._shard_for(name, num_bytes)
        shard.add(name, dtype, shape, values.split(_BLOCK_VALUES))
        self._shards[-1].append(name)
        self.total_bytes += num_bytes

    def finish(self) -> dict[str, str]:
        """Return each tensor's file name; a single shard is named ``STEM.safetensors``."""
        if not self._shards:
            # a model without tensors still gets a file
            self._shard_for("", 0)
        self._close()
        # the shard count is part of every name, and only known now
        count = len(self._shards)
        file_of: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"{self.base_name}.safetensors"
            if count > 1:
                file = f"{self.base_name}-{number:05d}-of-{count:05d}.safetensors"
            self._partial_path(number).rename(self.folder / file)
            file_of |= dict.fromkeys(names, file)
        return file_of

    def _shard_for(self, name: str, num_bytes: int) -> SafetensorsWriter:
        """Return the open shard, or a new one if this tensor would make it too large."""
        shard = self._shard
        if shard is not None and shard.num_tensors:
            is_full = shard.data_bytes + num_bytes > self.shard_bytes
            if is_full or not shard.fits_header(name):
                self._close()
        if self._shard is None:
            self._shards.append([])
            self._shard = SafetensorsWriter(self._partial_path(len(self._shards)))
        return self._shard

    def _close(self) -> None:
        """Finish the open shard."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()

    def _partial_path(self, number: int) -> Path:
        """Return a shard's temporary path, until ``finish`` names it."""
        return self.folder / f"{self.base_name}-{number:05d}.safetensors.partial"
