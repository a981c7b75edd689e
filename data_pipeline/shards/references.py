"""Log-likelihoods of preferences' replies under a reference model, in one Arrow file beside the shards.

``references.arrow`` is an Arrow IPC file with one record batch: columns ``first`` and ``second`` (float64), a row per
record of the folder, in its order: each reply's summed log-likelihood given its prompt, in nats. The schema's metadata
names the shards (the manifest's hash), the origin of the numbers and their checksum. The file is not part of the
manifest: it may be written again, for another reference model, without changing the data's identity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.shards.manifest import REFERENCES_FILE, Manifest, hash_json, take_hash
from data_pipeline.stores.urls import Location
from longctx.errors import DataError
from longctx.files import convert_write_errors, write_atomically

FORMAT = "longctx-references-1"
_METADATA = b"longctx.references"
_COLUMNS = ("first", "second")
_HINT = "Remove it, and compute the references again."


@dataclass(frozen=True)
class References:
    """Log-likelihoods under a reference model for all records in a folder."""

    sums_N2: np.ndarray
    """Summed log-likelihood of each record's first and second reply, float64 [N, 2], nats."""
    origin: Mapping[str, Any]
    """Origin of the numbers, as given to ``write_references``."""


def write_references(folder: str | Path, sums_N2: np.ndarray, origin: Mapping[str, Any]) -> None:
    """Write the log-likelihoods for all records of a shard folder, atomically; replace those that it has.

    ``origin`` is a JSON object that identifies the reference model, such as ``weights`` (fingerprint), ``tokenizer``,
    ``template`` and ``date``; readers compare it. Raise DataError for a folder without preferences, another number of
    records, or a number that is not finite.
    """
    place = Path(folder)
    manifest = Manifest.load(place)
    if not manifest.is_preferences:
        raise DataError(f"{place} contains no preferences. Build some with `longctx data build --kind preferences`.")
    sums = np.ascontiguousarray(sums_N2, np.float64)
    if sums.shape != (manifest.documents, 2):
        raise DataError(f"{place} has {manifest.documents} records, but the references have shape {list(sums.shape)}.")
    if not np.isfinite(sums).all():
        record = int(np.flatnonzero(~np.isfinite(sums).all(axis=1))[0])
        raise DataError(f"the reference model's log-likelihoods of record {record} are {sums[record].tolist()}.")
    body = {"format": FORMAT, "manifest": manifest.hash, "origin": dict(origin), "xxh3_128": _checksum(sums)}
    body["hash"] = hash_json(body)
    fields = [pa.field(name, pa.float64(), nullable=False) for name in _COLUMNS]
    schema = pa.schema(fields, metadata={_METADATA: json.dumps(body, ensure_ascii=False).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(column) for column in sums.T], schema=schema))
    with convert_write_errors(place):
        write_atomically(place / REFERENCES_FILE, sink.getvalue().to_pybytes())


def read_references(folder: Location, manifest: Manifest) -> References | None:
    """Return the log-likelihoods in a shard folder, None if it has none.

    Read completely, 16 bytes per record. Raise DataError if the file is damaged or belongs to other shards.
    """
    path = folder / REFERENCES_FILE
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            table = pa.ipc.open_file(pa.py_buffer(file.read())).read_all()
        body = json.loads((table.schema.metadata or {})[_METADATA])
        sums_N2 = np.stack([table.column(name).to_numpy() for name in _COLUMNS], axis=1)
    except (OSError, pa.ArrowException, LookupError, ValueError) as error:
        raise DataError(f"{path} cannot be read as references ({error}). {_HINT}") from error
    is_valid = isinstance(body, dict) and take_hash(body) and body.get("format") == FORMAT
    if not is_valid or sums_N2.dtype != np.float64 or _checksum(sums_N2) != body.get("xxh3_128"):
        raise DataError(f"{path} is damaged: its checksum does not match. {_HINT}")
    # An intact file may come from another folder, or from this one before it was built again.
    if body["manifest"] != manifest.hash or len(sums_N2) != manifest.documents:
        raise DataError(
            f"{path} belongs to other shards: it has {len(sums_N2)} records of manifest {body['manifest']}, the folder "
            f"{manifest.documents} of manifest {manifest.hash}. {_HINT}"
        )
    return References(sums_N2, body["origin"])


def _checksum(sums_N2: np.ndarray) -> str:
    """Return the xxh3_128 checksum of the numbers."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(sums_N2, np.float64).tobytes())
