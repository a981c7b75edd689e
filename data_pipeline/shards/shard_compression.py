"""Packed shards: compressed with zstd for transfer, and listed with the compressed files' checksums.

``packed.json`` lists a file ``NNNNN.arrow.zst`` per shard and the manifest's hash. The manifest is unchanged, so
checkpoints treat a packed folder and its unpacked copy as the same data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from data_pipeline.shards.manifest import SHARD_NAME, Manifest, hash_json, read_json_object, take_hash
from data_pipeline.stores.urls import Location
from longctx.errors import DataError
from longctx.untrusted.untrusted_schema import HASH, integer_between, list_of, record, text

PACKED_FILE = "packed.json"
FORMAT = "longctx-packed-1"
DEFAULT_LEVEL = 3
LEVELS = range(1, 23)
_SHARD = record(
    {
        "shard": SHARD_NAME,
        "file": text(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.arrow\.zst", "name of a packed shard in this folder"),
        "bytes": integer_between(),
        "xxh3_128": HASH,
    }
)
_CHECK = record({"manifest": HASH, "shards": list_of(_SHARD)})
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class CompressedShard:
    """One compressed file."""

    shard: str
    """File name after unpacking."""
    file: str
    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class CompressedFolder:
    """List of a folder's compressed shards."""

    manifest: str
    """Hash of the folder's manifest."""
    shards: list[CompressedShard]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object to write, with its own hash."""
        body = {"format": FORMAT, "compression": "zstd", **dataclasses.asdict(self)}
        return {**body, "hash": hash_json(body)}

    @classmethod
    def load(cls, folder: Location, manifest: Manifest) -> CompressedFolder:
        """Read and check ``packed.json``; raise DataError if it is damaged, edited, or belongs to another manifest."""
        path = folder / PACKED_FILE
        body = read_json_object(path)
        if not take_hash(body) or body.pop("format", None) != FORMAT or body.pop("compression", None) != "zstd":
            raise DataError(f"{path} was changed, or written by another release. {_REPACK_HINT}")
        # A valid hash does not prove origin: a name that leads elsewhere would read other files.
        try:
            _CHECK(body, "")
        except ValueError as error:
            raise DataError(f"{path}: {error}. {_REPACK_HINT}") from error
        shards = [CompressedShard(**entry) for entry in body.pop("shards")]
        packing = cls(shards=shards, **body)
        # Both files are intact even if a copy has mixed two folders, so compare the hashes.
        if packing.manifest != manifest.hash:
            raise DataError(f"{path} does not match the manifest in the same folder. {_REPACK_HINT}")
        if [entry.shard for entry in shards] != [entry.file for entry in manifest.shards]:
            raise DataError(f"{path} does not list the manifest's shards. {_REPACK_HINT}")
        return packing

    def of(self, shard: str) -> CompressedShard:
        """Return a shard's compressed file."""
        return next(entry for entry in self.shards if entry.shard == shard)


_REPACK_HINT = "Pack the folder again with `longctx data pack`."


def compress_shard(path: Path, to: Path, *, level: int) -> CompressedShard:
    """Compress a shard into the file ``to``; deterministic for a given shard, level and zstd release."""
    digest = xxhash.xxh3_128()
    # zstd's own checksum is off, since ours is listed. The recorded size lets the reader allocate memory once.
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
    with path.open("rb") as source, to.open("wb") as sink:
        for block in compressor.read_to_iter(source, size=path.stat().st_size, read_size=_READ_BYTES):
            digest.update(block)
            sink.write(block)
    return CompressedShard(shard=path.name, file=to.name, bytes=to.stat().st_size, xxh3_128=digest.hexdigest())
