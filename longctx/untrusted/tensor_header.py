"""The header of a safetensors file, as a stranger may have written it: which tensors lie where in the file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from longctx.untrusted.reading import shown

# Dtypes that no reader takes have a size too: their ranges are checked like the others'.
_ITEM_BYTES: dict[str, int] = dict.fromkeys(("F64", "I64", "U64"), 8)
_ITEM_BYTES |= dict.fromkeys(("F32", "I32", "U32"), 4)
_ITEM_BYTES |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
_ITEM_BYTES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
_MOST_NAME, _MOST_DIMS, _MOST_SIZE = 400, 16, 2**64


@dataclass(frozen=True)
class Entry:
    """One tensor: bytes ``start`` to ``stop`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_entries(header: Any, begin: int, size: int) -> dict[str, Entry]:
    """The tensors of a header, in a file of ``size`` bytes whose values begin at byte ``begin``.

    ValueError, a line long, for keys, dtypes, shapes or ranges that cannot be right, and unless the tensors follow one
    another up to the end of the file.
    """
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    # Free text, and no tensor.
    header.pop("__metadata__", None)
    entries = {name: _entry(name, fields, begin, size) for name, fields in header.items()}
    _check_cover(entries, begin, size)
    return entries


def _entry(name: str, fields: Any, begin: int, size: int) -> Entry:
    """A tensor's entry, checked; its byte offsets count from the beginning of the file."""
    if not name or len(name) > _MOST_NAME:
        raise ValueError(f"its header names a tensor {shown(name)}, and a name has 1 to {_MOST_NAME} characters")
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
    return Entry(kind, tuple(shape), start, stop)


def _is_sizes(value: Any) -> bool:
    """Whether a value is a short list of whole numbers of at least 0; ``True`` is none."""
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return False
    return all(type(v) is int and 0 <= v < _MOST_SIZE for v in value)


def _check_cover(entries: dict[str, Entry], begin: int, size: int) -> None:
    """ValueError unless the tensors follow one another, from the header to the end of the file."""
    at, before = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < at:
            raise ValueError(f"{before} and {name} overlap")
        if entry.start > at:
            raise ValueError(f"{before} and {name} leave bytes between them to nobody")
        at, before = entry.stop, name
    if at != size:
        raise ValueError(f"{size - at} bytes after {before} belong to nobody")
