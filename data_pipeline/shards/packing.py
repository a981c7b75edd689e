"""Packed shards: zstd for the way, named beside the manifest with checksums of their own, which is what arrives.

``packed.json`` lists a file ``NNNNN.arrow.zst`` for each shard and the manifest's hash. The manifest stays as it is, so
a packed folder and its unpacked copy are the same data to a checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from data_pipeline.shards.manifest import Manifest, hash_json, read_object
from data_pipeline.stores.urls import Location
from longctx.errors import DataError

PACKED_FILE = "packed.json"
FORMAT = "longctx-packed-1"
DEFAULT_LEVEL = 3
LEVELS = range(1, 23)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.arrow\.zst")
_HASH = re.compile(r"[0-9a-f]{32}")
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """One compressed file."""

    shard: str
    """The file that it becomes."""
    file: str
    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class PackedFolder:
    """How the shards of a folder are packed."""

    manifest: str
    """Hash of the folder's manifest."""
    shards: list[PackedShard]

    def to_json(self) -> dict[str, Any]:
        """The object that is written, with its own hash."""
        body = {"format": FORMAT, "compression": "zstd", **dataclasses.asdict(self)}
        return {**body, "hash": hash_json(body)}

    @classmethod
    def load(cls, folder: Location, manifest: Manifest) -> PackedFolder:
        """Read and check ``packed.json``; DataError where it is damaged, edited, or of another manifest."""
        path = folder / PACKED_FILE
        body = read_object(path)
        recorded = body.pop("hash", None)
        try:
            is_whole = hash_json(body) == recorded
        except UnicodeEncodeError:
            is_whole = False
        if not is_whole or body.pop("format", None) != FORMAT or body.pop("compression", None) != "zstd":
            raise DataError(f"{path} was changed, or is of another release. {_ADVICE}")
        try:
            shards = [PackedShard(**entry) for entry in body.pop("shards")]
            packing = cls(shards=shards, **body)
        except TypeError as error:
            raise DataError(f"{path} lacks a field or has one too many ({error}). {_ADVICE}") from error
        # Each is whole by itself where a copy has mixed two folders.
        if packing.manifest != manifest.hash:
            raise DataError(f"{path} belongs to another manifest than the one beside it. {_ADVICE}")
        # Anybody can seal such a file: a name that leads elsewhere would read the files of others.
        for entry in shards:
            values = (entry.shard, entry.file, entry.xxh3_128)
            is_named = all(isinstance(value, str) for value in values) and _NAME.fullmatch(entry.file)
            if not is_named or not _HASH.fullmatch(entry.xxh3_128) or type(entry.bytes) is not int:
                raise DataError(f"{path} has an entry that cannot be right: {entry.file!r:.100}. {_ADVICE}")
        if [entry.shard for entry in shards] != [entry.file for entry in manifest.shards]:
            raise DataError(f"{path} does not list the shards of the manifest. {_ADVICE}")
        return packing

    def of(self, shard: str) -> PackedShard:
        """The compressed file of a shard."""
        return next(entry for entry in self.shards if entry.shard == shard)


_ADVICE = "Pack the folder again with `longctx data pack`."


def pack_shard(path: Path, to: Path, *, level: int) -> PackedShard:
    """Compress a shard into the file ``to``. The same bytes for the same shard, level and release of zstd."""
    digest = xxhash.xxh3_128()
    # The checksum of zstd's own is off: ours is listed. The size lets whoever unpacks take memory once.
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
    with path.open("rb") as source, to.open("wb") as sink:
        for block in compressor.read_to_iter(source, size=path.stat().st_size, read_size=_READ_BYTES):
            digest.update(block)
            sink.write(block)
    return PackedShard(shard=path.name, file=to.name, bytes=to.stat().st_size, xxh3_128=digest.hexdigest())
