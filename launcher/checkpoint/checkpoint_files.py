"""Write a checkpoint's files (format: ``longctx/checkpoint_format.py``).

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
from parallel.comm.messages.message_checksum import Sum, is_sum_of

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.zero_state import StatePiece

BLOCK_VALUES = 1 << 22
"""Values copied off the device at a time: 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class StaticFiles:
    """Files that training never changes. Every checkpoint has them, stored once if the disk supports hard links."""

    origin: Path
    """Checkpoint that the run continues."""
    files: Mapping[str, Mapping[str, Any]]
    """Its manifest entries for these files, by name."""

    def put_into(self, folder: Path, run_folder: Path) -> list[WrittenFile]:
        """Link or copy the files from the run's newest checkpoint or from the origin, and return the written files."""
        # The origin may be gone by now, but a run always keeps a checkpoint.
        sources = [*list_checkpoints(run_folder)[::-1], self.origin]
        return [self._put(folder, name, entry, sources) for name, entry in self.files.items()]

    def _put(self, folder: Path, name: str, entry: Mapping[str, Any], sources: Sequence[Path]) -> WrittenFile:
        found = (one / name for one in sources if _has_size(one / name, entry["bytes"]))
        source, path = next(found, None), folder / name
        if source is None:
            raise CheckpointError(
                f"{name}, a file with other parts of the imported model, is missing from {self.origin} and from the "
                "run's checkpoints.\nRestore it, then resume with --run.resume latest."
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
    """Return True if the path is a regular file with this size."""
    return path.is_file() and path.stat().st_size == num_bytes


class WrittenFile(NamedTuple):
    """One written file and its manifest entry."""

    name: str
    num_bytes: int
    hash: str
    pieces: Sequence[tuple[str, str, dict[str, Any]]] = ()
    """(tensor, role, location in the file)."""
    block_hashes: str = ""
    """Hashes of the checksum blocks, for a file with slices."""

    def entry(self) -> dict[str, Any]:
        """Return the file's manifest entry."""
        entry: dict[str, Any] = {"bytes": self.num_bytes, "hash": self.hash}
        if self.block_hashes:
            entry["blocks"] = self.block_hashes
        return entry


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything in a checkpoint's manifest except its file list."""

    step: int
    model: ModelConfig
    shapes: Mapping[str, torch.Size]
    """Shape per parameter and buffer in the full model."""
    roles: Mapping[str, Sequence[str]]
    """Roles kept per tensor: a buffer has a value but no moments."""
    dtype: torch.dtype
    training: Mapping[str, Any]
    tokenizer_files: Mapping[str, bytes]
    """Copied along, so that the checkpoint is usable without the run's data."""
    static_files: StaticFiles | None = None
    """Tensors from an imported model's other parts, if it has any."""
    base: Mapping[str, str] | None = None
    """Manifest entry for the checkpoint with the frozen weights; None if all are in this one."""


def write_rank_file(
    folder: Path, rank: int, pieces: Sequence[StatePiece], values: Iterable[Tensor], sums: Sequence[Sum] = ()
) -> WrittenFile:
    """Write a rank's values into one file and sync it. Raise CheckpointError unless it reads back the same.

    Values are taken one slice at a time, so views into ZeRO's state leave the device slice by slice. With ``sums``, one
    checksum per slice, raise CheckpointError if values have changed since these were computed.
    """
    path = folder / f"rank_{rank:05d}.safetensors"
    # A generator: each value is verified just before it is written, and read once.
    if sums:
        values = _validated_values(rank, pieces, values, sums)
    written = write_pieces(path, pieces, values)
    _check_read_back(path, written.hash)
    locations = []
    for one in pieces:
        location = {"file": path.name, "key": piece_key(one), "start": one.start, "numel": one.numel}
        locations.append((one.name, one.role, location))
    return WrittenFile(path.name, written.num_bytes, written.hash, locations, written.block_hashes)


def write_pieces(path: Path, pieces: Sequence[StatePiece], values: Iterable[Tensor]) -> Written:
    """Write the slices' values as float32 entries named by ``piece_key``, and sync the file.

    Values are taken one slice at a time: each may be freed when the next is requested.
    """
    with HashedWriter(path) as file:
        file.write(_header(pieces))
        for one, tensor in zip(pieces, values, strict=True):
            assert tensor.numel() == one.numel, f"{piece_key(one)} has {tensor.numel()} values"
            for block in tensor.detach().flatten().split(BLOCK_VALUES):
                if block.numel():
                    file.write(block.to("cpu", torch.float32).contiguous().numpy().data)
        return file.close()


def piece_key(one: StatePiece) -> str:
    """Return a range's key in its file."""
    return f"{one.name}/{one.role}/{one.start}"


def _header(pieces: Sequence[StatePiece]) -> bytes:
    """Build the file's header; the values after it start 8-byte aligned."""
    entries: dict[str, Any] = {}
    at = 0
    for one in pieces:
        stop = at + VALUE_BYTES * one.numel
        entries[piece_key(one)] = header_fields(torch.float32, [one.numel], at, stop)
        at = stop
    return encoded_header(entries)


# Commit protocol. A folder is a checkpoint if and only if it has its final name, and one atomic rename gives it that
# name.
#
# Invariant: whenever a process is killed or power fails, every folder with a final name is complete, and each byte that
# its manifest lists is on the disk. File systems may reorder a rename and earlier writes ("All File Systems Are Not
# Created Equal", Pillai et al., OSDI 2014), so each stage is synced before the next one starts:
#
#   1. the ranks' tensor files (synced before this call), then tokenizer files and carried files
#   2. the manifest, read back after the sync, and the hidden folder's own entries
#   3. the run's append-only records, so that a checkpoint never survives without the records up to its step
#   4. the rename, and the parent folder, which stores the new name
def commit(target: Path, files: Sequence[WrittenFile], contents: Contents, records: Sequence[Path] = ()) -> str:
    """Write the remaining files, rename the folder to its final name, and return the manifest's hash.

    All rank files must be on disk. ``records``, the run's append-only files, are synced before the rename.
    """
    partial, written_files = hidden_folder(target), list(files)
    for name, content in contents.tokenizer_files.items():
        written_files.append(_write_extra_file(partial / name, content))
    if contents.static_files is not None:
        written_files += contents.static_files.put_into(partial, target.parent.parent)
    manifest = _manifest(contents, written_files)
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
    # The run saved this step before, and was then resumed from an earlier checkpoint.
    if target.exists():
        set_aside(target)
    partial.rename(target)
    # A rename is durable once its parent folder is synced.
    sync_path(target.parent)
    return manifest["hash"]


def _validated_values(
    rank: int, pieces: Sequence[StatePiece], values: Iterable[Tensor], sums: Sequence[Sum]
) -> Iterator[Tensor]:
    """Yield the values, each after verifying its checksum."""
    for one, tensor, total in zip(pieces, values, sums, strict=True):
        if not is_sum_of(total, tensor.contiguous()):
            raise CheckpointError(
                f"{one.name} ({one.role}) of rank {rank} has a checksum mismatch: its bits changed in memory between "
                "the last update and the save.\n"
                f"The memory of {socket.gethostname()} is faulty: resume elsewhere with --run.resume latest. Earlier "
                "checkpoints are unchanged."
            )
        yield tensor


def _check_read_back(path: Path, written: str) -> None:
    """Raise CheckpointError unless the file's xxh3-128 matches the written bytes."""
    found = read_back(path)
    if found != written:
        raise CheckpointError(
            f"{path.name} has a checksum mismatch: its xxh3-128 is {found} when read back, not {written}.\n"
            f"The disk of {path.parent.parent} or this machine's memory is faulty: resume elsewhere with --run.resume "
            "latest. Earlier checkpoints are unchanged."
        )


def _write_extra_file(path: Path, content: bytes) -> WrittenFile:
    """Write and verify a file next to the slices; return its name, size and hash."""
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
    if contents.base is not None:
        manifest["base"] = dict(contents.base)
    # Last, because the hash covers all keys above.
    manifest["hash"] = canonical_hash(manifest)
    return manifest


def _tensor_table(contents: Contents, files: Sequence[WrittenFile]) -> dict[str, Any]:
    """Return each tensor's shape and, per role, the slices that hold it."""
    table: dict[str, Any] = {}
    # Frozen weights have no roles: they are the base's.
    for name, roles in contents.roles.items():
        table[name] = {"shape": list(contents.shapes[name]), "roles": {role: [] for role in roles}}
    for file in files:
        for name, role, piece in file.pieces:
            table[name]["roles"][role].append(piece)
    return table


def as_checkpoint_error(error: OSError | CheckpointError, target: Path) -> CheckpointError:
    """Return the error for the user, with a hint; a CheckpointError is returned unchanged."""
    if isinstance(error, CheckpointError):
        return error
    run_folder = target.parent.parent
    # A removed run folder also shows as a write error, but needs another remedy.
    if not run_folder.is_dir():
        return CheckpointError(
            f"{run_folder} is missing: the run's folder was removed or renamed, with its checkpoints.\n"
            "Restore it, then resume with --run.resume latest; without it the run restarts from step 0."
        )
    hint = "Fix that"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "The disk is full: free some space, or lower checkpoint.keep_last"
    return CheckpointError(
        f"the checkpoint could not be written to {target.parent}: {error}.\n"
        f"{hint}, then resume with --run.resume latest. Earlier checkpoints are unchanged."
    )
