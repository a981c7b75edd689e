"""Which reader and which decompressor a file needs, by the ending of its name."""

from __future__ import annotations

from data_pipeline.prepare.documents import Format

_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_COMPRESSIONS = {".gz": ".gz", ".bz2": ".bz2", ".xz": ".xz", ".lzma": ".xz", ".zst": ".zst"}
READABLE = f"text, {', '.join(_KINDS)}, each also {', '.join(_COMPRESSIONS)}"
"""What a source may hold, for messages."""


def find_format(name: str, *, as_text: bool = False) -> Format:
    """The format of a file of this name; ``as_text`` reads it as plain text, decompressed if its name says so."""
    lowered = name.lower()
    packed = next((ending for ending in _COMPRESSIONS if lowered.endswith(ending)), "")
    compression = _COMPRESSIONS.get(packed, "")
    inner = ""
    if not as_text:
        inner = next((ending for ending in _KINDS if lowered.removesuffix(packed).endswith(ending)), "")
    return Format(_KINDS.get(inner, "text"), compression, inner + packed)
