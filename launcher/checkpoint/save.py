"""Write the files of a checkpoint (format: ``longctx/checkpoint_format.py``).

Every rank writes the ranges it owns into one safetensors file in a hidden folder. Rank 0 writes the manifest and
renames the folder. Until that rename the previous checkpoint is the newest one, even if a process is killed. All ranks
must see the same folder: on a cluster, a shared file system. No function here is collective, so a thread may call it.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import platform
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from launcher.checkpoint.names import hidden_folder, set_aside
from longctx.checkpoint_format import FORMAT, MANIFEST, VERSION, canonical_hash
from longctx.checkpoint_manifest import VALUE_BYTES
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.files import list_checkpoints, sync_path, write_synced
from longctx.storage.hashed_file import HashedWriter, Written, read_back
from longctx.storage.safetensors import encoded_header, header_fields
from parallel.comm.messages.sums import Sum, is_sum_of

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.state import Piece

BLOCK_VALUES = 1 << 22
"""Values that leave their device at a time: 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Files that no step changes. Every checkpoint of a run has them, stored once if the disk supports hard links."""

    origin: Path
    """The checkpoint that the run goes on from."""
    files: Mapping[str, Mapping[str, Any]]
    """What its manifest says of them, by name."""

    def put_into(self, folder: Path, run_folder: Path) -> list[WrittenFile]:
        """Link or copy them from the run's newest checkpoint, or from the origin, and return the written files."""
        # The origin may be gone by now, but a run always has a checkpoint left.
        sources = [*list_checkpoints(run_folder)[::-1], self.origin]
        return [self._put(folder, name, entry, sources) for name, entry in self.files.items()]

    def _put(self, folder: Path, name: str, entry: Mapping[str, Any], sources: Sequence[Path]) -> WrittenFile:
        found = (one / name for one in sources if _has_size(one / name, entry["bytes"]))
        source, path = next(found, None), folder / name
        if source is None:
            raise CheckpointError(
                f"{name}, which holds other parts of the imported model, is neither in {self.origin} nor in a "
                "checkpoint of the run.\nPut it back, then go on with --run.resume latest."
            )
        try:
            path.hardlink_to(source)
        except OSError:
            # Another file system, or one without links.
            shutil.copyfile(source, path)
            sync_path(path)
            _check_read_back(path, entry["hash"])
        return WrittenFile(name, entry["bytes"], entry["hash"], block_hashes=entry.get("blocks", ""))


def _has_size(path: Path, num_bytes: int) -> bool:
    """Return whether the path is a regular file of this size."""
    return path.is_file() and path.stat().st_size == num_bytes


class WrittenFile(NamedTuple):
    """One written file and its manifest entry."""

    name: str
    num_bytes: int
    hash: str
    pieces: Sequence[tuple[str, str, dict[str, Any]]] = ()
    """(tensor, role, where its values lie in the file)."""
    block_hashes: str = ""
    """Of the blocks of a file with pieces."""

    def entry(self) -> dict[str, Any]:
        """Return the manifest entry for its bytes."""
        entry: dict[str, Any] = {"bytes": self.num_bytes, "hash": self.hash}
        if self.block_hashes:
            entry["blocks"] = self.block_hashes
        return entry


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a checkpoint's manifest besides its list of files."""

    step: int
    model: ModelConfig
    shapes: Mapping[str, torch.Size]
    """Of every parameter and buffer of the whole model."""
    roles: Mapping[str, Sequence[str]]
    """What is kept of each: of a buffer, which is no parameter, its value and no moments."""
    dtype: torch.dtype
    training: Mapping[str, Any]
    tokenizer_files: Mapping[str, bytes]
    """Copied along: a checkpoint is of use without its run's data."""
    carried: Carried | None = None
    """Tensors of an imported model's other parts, if it has any."""


def write_rank_file(
    folder: Path, rank: int, pieces: Sequence[Piece], values: Iterable[Tensor], sums: Sequence[Sum] = ()
) -> WrittenFile:
    """Write a rank's values into one file and sync it. Raise CheckpointError unless it reads back the same.

    Values are taken one piece at a time, so views of ZeRO's state leave the device in parts. With ``sums``, one per
    piece, raise CheckpointError if values have changed since they were summed.
    """
    path = folder / f"rank_{rank:05d}.safetensors"
    if sums:
        values = _unchanged(rank, pieces, values, sums)
    written = write_pieces(path, pieces, values)
    _check_read_back(path, written.hash)
    listed = []
    for one in pieces:
        where = {"file": path.name, "key": piece_key(one), "start": one.start, "numel": one.numel}
        listed.append((one.name, one.role, where))
    return WrittenFile(path.name, written.num_bytes, written.hash, listed, written.block_hashes)


def write_pieces(path: Path, pieces: Sequence[Piece], values: Iterable[Tensor]) -> Written:
    """Write the values of the pieces as float32 entries named by ``piece_key``, and sync the file.

    Values are taken one piece at a time: each may be freed when the next is requested.
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
    """Return the name of a range in its file."""
    return f"{one.name}/{one.role}/{one.start}"


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return the file's header; the values after it start at a multiple of eight bytes."""
    entries: dict[str, Any] = {}
    at = 0
    for one in pieces:
        stop = at + VALUE_BYTES * one.numel
        entries[piece_key(one)] = header_fields(torch.float32, [one.numel], at, stop)
        at = stop
    return encoded_header(entries)


def commit(target: Path, files: Sequence[WrittenFile], contents: Contents, records: Sequence[Path] = ()) -> str:
    """Write the remaining files, rename the folder to its final name, and return the manifest's hash.

    The rename creates the checkpoint. Every file must be on disk by then. ``records``, the run's append-only files, are
    synced first: otherwise a checkpoint could survive without the records up to its step.
    """
    partial, listed = hidden_folder(target), list(files)
    for name, content in contents.tokenizer_files.items():
        listed.append(_write_beside(partial / name, content))
    if contents.carried is not None:
        listed += contents.carried.put_into(partial, target.parent.parent)
    manifest = _manifest(contents, listed)
    text = json.dumps(manifest).encode()
    path = partial / MANIFEST
    path.write_bytes(text)
    # Before the rename: a power cut must not leave a committed folder with an empty manifest.
    sync_path(path)
    _check_read_back(path, xxhash.xxh3_128_hexdigest(text))
    sync_path(partial)
    for record in filter(Path.exists, records):
        sync_path(record)
        sync_path(record.parent)
    # The run has saved this step before, and was then resumed from an earlier checkpoint.
    if target.exists():
        set_aside(target)
    partial.rename(target)
    # A rename is on the disk when its parent folder is.
    sync_path(target.parent)
    return manifest["hash"]


def _unchanged(rank: int, pieces: Sequence[Piece], values: Iterable[Tensor], sums: Sequence[Sum]) -> Iterator[Tensor]:
    """Yield the values, each after comparing it with its sum."""
    for one, tensor, total in zip(pieces, values, sums, strict=True):
        if not is_sum_of(total, tensor.contiguous()):
            raise CheckpointError(
                f"{one.name} ({one.role}) of rank {rank} is not what the last update left there: bits have changed "
                "while it was saved.\n"
                f"The memory of {socket.gethostname()} fails: go on elsewhere with --run.resume latest. Earlier "
                "checkpoints are untouched."
            )
        yield tensor


def _check_read_back(path: Path, written: str) -> None:
    """Raise CheckpointError unless the file's xxh3-128 is that of the written bytes."""
    found = read_back(path)
    if found != written:
        raise CheckpointError(
            f"{path.name} is not what was written: read back, its xxh3-128 is {found}, and it was {written}.\n"
            f"The disk of {path.parent.parent} or this machine's memory fails: go on elsewhere with --run.resume "
            "latest. Earlier checkpoints are untouched."
        )


def _write_beside(path: Path, content: bytes) -> WrittenFile:
    """Write a file next to the pieces and return its manifest entry."""
    write_synced(path, content)
    digest = xxhash.xxh3_128_hexdigest(content)
    _check_read_back(path, digest)
    return WrittenFile(path.name, len(content), digest)


def _manifest(contents: Contents, files: Sequence[WrittenFile]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": contents.step,
        "dtype": str(contents.dtype).removeprefix("torch."),
        "model": dataclasses.asdict(contents.model),
        "tensors": _tensor_table(contents, files),
        "files": {file.name: file.entry() for file in files},
        "training": dict(contents.training),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    manifest["hash"] = canonical_hash(manifest)
    return manifest


def _tensor_table(contents: Contents, files: Sequence[WrittenFile]) -> dict[str, Any]:
    """Return every tensor's shape and, for each of its roles, the pieces that hold it."""
    table: dict[str, Any] = {}
    for name, shape in contents.shapes.items():
        table[name] = {"shape": list(shape), "roles": {role: [] for role in contents.roles[name]}}
    for file in files:
        for name, role, piece in file.pieces:
            table[name]["roles"][role].append(piece)
    return table


def explained(error: OSError | CheckpointError, target: Path) -> CheckpointError:
    """Return the error for the user, with advice; a CheckpointError is returned unchanged."""
    if isinstance(error, CheckpointError):
        return error
    run_folder = target.parent.parent
    if not run_folder.is_dir():
        return CheckpointError(
            f"{run_folder} is gone: somebody has removed or renamed the run's folder, and its checkpoints with it.\n"
            "Put it back, then go on with --run.resume latest; without it the run begins anew."
        )
    advice = "Mend that"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "The disk is full: free some space, or set checkpoint.keep_last lower"
    return CheckpointError(
        f"the checkpoint could not be written to {target.parent}: {error}.\n"
        f"{advice}, then go on with --run.resume latest. Earlier checkpoints are untouched."
    )
