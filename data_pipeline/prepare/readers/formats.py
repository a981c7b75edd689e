"""Which reader and which decompressor a file needs, by the ending of its name."""

from __future__ import annotations

from data_pipeline.prepare.documents import Format

_KINDS = {
    ".jsonl": "lines",
    ".jsonlines": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_COMPRESSIONS = {
    ".gz": ".gz",
    ".gzip": ".gz",
    ".bz2": ".bz2",
    ".xz": ".xz",
    ".lzma": ".xz",
    ".zst": ".zst",
    ".zstd": ".zst",
}
READABLE = f"text, {', '.join(_KINDS)}, each also {', '.join(_COMPRESSIONS)}"
"""What a source may hold, for messages."""


def find_format(name: str, *, read_as: str = "") -> Format:
    """The format of a file of this name, or the one that ``read_as`` says, ``text`` or ``json``.

    Its name says how it is decompressed in any case.
    """
    lowered = name.lower()
    packed = next((ending for ending in _COMPRESSIONS if lowered.endswith(ending)), "")
    compression = _COMPRESSIONS.get(packed, "")
    if read_as:
        return Format(read_as, compression, packed, is_meant=True)
    inner = next((ending for ending in _KINDS if lowered.removesuffix(packed).endswith(ending)), "")
    return Format(_KINDS.get(inner, "text"), compression, inner + packed)
