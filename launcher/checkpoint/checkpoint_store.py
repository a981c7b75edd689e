"""A run's checkpoints in an object store, named as in its folder: ``checkpoints/step_NNNNNN``.

A store cannot rename, so the manifest, written last and removed first, turns objects into a checkpoint. Every file is
hashed while it is sent, and read back before the manifest is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.stores.client import list_objects, open_object, remove, upload, write_object
from data_pipeline.stores.urls import ObjectPath
from launcher.checkpoint.names import folder_of, hidden_folder, make_empty, set_aside, step_of
from launcher.checkpoint.retention import RetentionCandidate
from launcher.config.run_config_rules import store_place
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, PROOF_FILE, CheckpointReader
from longctx.checkpoint_manifest import check_manifest, parse_proof
from longctx.conversion.checkpoint_checks import check_manifest_tensors
from longctx.errors import CheckpointError, ConfigError, DataError, LongCtxError
from longctx.files import convert_write_errors, sync_path, write_synced
from longctx.untrusted.strict_json import parse_json

_READ_BYTES = 16 << 20
_MOST_MANIFEST_BYTES, _MOST_PROOF_BYTES = 1 << 30, 1 << 14
_OBJECT = re.compile(r"step_(\d{6,})/([^/]+)")
_ADDRESS = re.compile(rf"(.+)/{CHECKPOINTS}/step_(\d{{6,}})")
Seen = Callable[[int], None]
"""Called with the bytes transferred since the last call; an exception cancels the transfer."""


def ignore_progress(count: int) -> None:
    """Ignore transfer progress."""


class StoredCheckpoint:
    """One step's objects in a store: a checkpoint if they include a manifest."""

    def __init__(self, place: ObjectPath, sizes: dict[str, int]) -> None:
        """Wrap the objects below ``place``; ``sizes`` maps their names to bytes."""
        self.place, self.sizes = place, sizes

    @property
    def is_complete(self) -> bool:
        """True if it has a manifest."""
        return MANIFEST in self.sizes

    @property
    def num_bytes(self) -> int:
        """Total size over all objects."""
        return sum(self.sizes.values())

    def manifest(self) -> dict[str, Any]:
        """Return the checked manifest. Raise CheckpointError if it is damaged or invalid."""
        path = self.place / MANIFEST
        # As on disk, the files that a manifest describes limit its own size: a forged one cannot exhaust memory.
        tensor_bytes = sum(size for name, size in self.sizes.items() if name.endswith(".safetensors"))
        size = self.sizes.get(MANIFEST, 0)
        if size > min((16 << 20) + 2 * tensor_bytes, _MOST_MANIFEST_BYTES):
            raise CheckpointError(f"{path} has {size:,} bytes: too large for a longctx manifest.")
        try:
            content = parse_json(self.read(MANIFEST), most_values=500_000 + size // 20)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        return check_manifest(content, path)

    def proof(self) -> dict[str, Any] | None:
        """Return the proof, or None if it is missing. Raise CheckpointError if it is damaged."""
        if PROOF_FILE not in self.sizes:
            return None
        return parse_proof(self.read(PROOF_FILE, _MOST_PROOF_BYTES))

    def candidate(self, step: int) -> RetentionCandidate:
        """Return its candidate for retention; an unreadable one has no loss and is not proved."""
        folder = folder_of(Path(), step)
        try:
            manifest, proof = self.manifest(), self.proof()
        except CheckpointError:
            return RetentionCandidate(folder=folder, step=step)
        is_stable = proof is not None and proof.get("manifest") == manifest["hash"]
        return RetentionCandidate.from_training(folder, step, manifest["training"], is_stable=is_stable)

    def verify(self, *, seen: Seen = ignore_progress) -> list[str]:
        """Read all objects and return the problems; empty if every hash matches."""
        try:
            manifest = self.manifest()
            check_manifest_tensors(manifest, str(self.place))
        except LongCtxError as error:
            return [str(error)]
        problems = []
        try:
            self.proof()
        except CheckpointError as error:
            problems.append(str(error))
        for name, entry in manifest["files"].items():
            try:
                self.check(name, entry, seen)
            except CheckpointError as error:
                problems.append(str(error))
        # No hash covers an unlisted object, so it is reported too.
        known = {MANIFEST, PROOF_FILE, *manifest["files"]}
        return problems + [f"{name} is not in the manifest: remove it" for name in sorted(self.sizes.keys() - known)]

    def receive(self, name: str, entry: dict[str, Any], to: Path, seen: Seen = ignore_progress) -> None:
        """Download an object into a file. Raise CheckpointError unless it matches the manifest's entry."""
        with to.open("wb") as file:
            self.check(name, entry, seen, file.write)
        sync_path(to)

    def discard(self) -> None:
        """Remove the manifest, so that the objects are no checkpoint any more; ``remove`` deletes them too."""
        remove(self.place / MANIFEST)

    def remove(self) -> None:
        """Remove all objects, the manifest first."""
        self.discard()
        for name in self.sizes:
            remove(self.place / name)

    def read(self, name: str, most_bytes: int = -1) -> bytes:
        """Return an object's bytes, at most ``most_bytes``. Raise CheckpointError if it does not exist."""
        try:
            with open_object(self.place / name) as content:
                return content.read(most_bytes)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.place / name} is missing.") from error

    def check(
        self,
        name: str,
        entry: dict[str, Any],
        seen: Seen = ignore_progress,
        take: Callable[[bytes], Any] = lambda block: None,
    ) -> None:
        """Read an object and pass its bytes to ``take``. Raise CheckpointError unless they match the manifest entry."""
        place, digest, size = self.place / name, xxhash.xxh3_128(), 0
        try:
            with open_object(place) as content:
                # One extra byte detects an object that is too long, without reading all of it.
                while block := content.read(min(_READ_BYTES, entry["bytes"] + 1 - size)):
                    size += len(block)
                    if size > entry["bytes"]:
                        break
                    digest.update(block)
                    take(block)
                    seen(len(block))
        except FileNotFoundError as error:
            raise CheckpointError(f"{place} is missing.") from error
        if (size, digest.hexdigest()) != (entry["bytes"], entry["hash"]):
            raise CheckpointError(f"{place} is damaged: its size or xxh3-128 differs from the manifest's.")


class CheckpointStore:
    """A run's checkpoints at an address. Methods raise DataError if the store refuses or cannot be reached."""

    def __init__(self, place: ObjectPath) -> None:
        self.place = place
        self._sent: dict[str, set[str]] = {}
        """Verified file names per manifest hash, so that an interrupted send can continue."""

    def __str__(self) -> str:
        return str(self.place)

    def steps(self) -> dict[int, StoredCheckpoint]:
        """Return all steps with objects in the store, including unfinished ones, oldest first."""
        found: dict[int, dict[str, int]] = {}
        for name, size in list_objects(self.place / CHECKPOINTS).items():
            if match := _OBJECT.fullmatch(name):
                found.setdefault(int(match[1]), {})[match[2]] = size
        return {step: self._stored(step, found[step]) for step in sorted(found)}

    def checkpoints(self) -> dict[int, StoredCheckpoint]:
        """Return the committed checkpoints by step, oldest first."""
        return {step: stored for step, stored in self.steps().items() if stored.is_complete}

    def of_step(self, step: int) -> StoredCheckpoint:
        """Return a step's objects; empty if the store has no such step."""
        return self.steps().get(step, self._stored(step, {}))

    # Commit without a rename: object stores have no atomic rename for a prefix, but write single objects atomically.
    # Invariant: if a manifest is visible, all files that it lists are complete and were read back. It is therefore
    # written last, and ``discard`` removes it before any other object changes.
    def send(self, folder: Path, *, seen: Seen = ignore_progress) -> None:
        """Copy a committed checkpoint to the store, the manifest last; skip it if it is already there.

        Raise CheckpointError if a local file is damaged or missing; the checkpoint is then not committed in the store.
        After a failure, another call continues with the files not yet verified.
        """
        reader = CheckpointReader(folder)
        # From the folder's name: an imported checkpoint's manifest has step 0 in any run.
        text, stored = (folder / MANIFEST).read_bytes(), self.of_step(step_of(folder))
        if stored.is_complete:
            if stored.read(MANIFEST) == text:
                return
            # It belongs to a history that this run has left.
            stored.discard()
        done = self._sent.setdefault(reader.manifest["hash"], set())
        for name, entry in reader.manifest["files"].items():
            if name in done and stored.sizes.get(name) == entry["bytes"]:
                continue
            _send_file(folder / name, entry, stored.place / name, seen)
            try:
                stored.check(name, entry, seen)
            except CheckpointError as error:
                # The local file is intact, so another attempt may help.
                raise DataError(f"{error} It was just uploaded.") from error
            done.add(name)
        # From here on it is a checkpoint: readers ignore objects without a manifest.
        write_object(stored.place / MANIFEST, text)
        del self._sent[reader.manifest["hash"]]

    def send_proof(self, folder: Path) -> None:
        """Copy a checkpoint's proof to the store, if the checkpoint is there."""
        stored = self.of_step(step_of(folder))
        if stored.is_complete:
            write_object(stored.place / PROOF_FILE, (folder / PROOF_FILE).read_bytes())

    def fetch(self, step: int, run_folder: Path, *, seen: Seen = ignore_progress) -> Path:
        """Copy a checkpoint into the run's folder, replacing one with the same step, and return its folder.

        Raise CheckpointError if a stored file is damaged or missing; the run's folder is then unchanged.
        """
        stored, target = self.of_step(step), folder_of(run_folder, step)
        manifest, partial = stored.manifest(), hidden_folder(target)
        # Check first: do not copy a checkpoint that no run could load.
        check_manifest_tensors(manifest, str(stored.place))
        with convert_write_errors(target, CheckpointError):
            # The run's folder may be missing, for example after a disk was lost.
            partial.parent.mkdir(parents=True, exist_ok=True)
            make_empty(partial)
            for name, entry in manifest["files"].items():
                stored.receive(name, entry, partial / name, seen)
            write_synced(partial / MANIFEST, stored.read(MANIFEST))
            if PROOF_FILE in stored.sizes:
                write_synced(partial / PROOF_FILE, stored.read(PROOF_FILE, _MOST_PROOF_BYTES))
            # Treat it as untrusted: any writer may have put it there.
            CheckpointReader(partial).check_entries()
            sync_path(partial)
            if target.exists():
                set_aside(target)
            partial.rename(target)
            sync_path(target.parent)
        return target

    def _stored(self, step: int, sizes: dict[str, int]) -> StoredCheckpoint:
        return StoredCheckpoint(self.place / CHECKPOINTS / f"step_{step:06d}", sizes)


def _send_file(path: Path, entry: dict[str, Any], to: ObjectPath, seen: Seen) -> None:
    """Upload a checkpoint file, hashing it on the way so that damaged bytes never pass for the file.

    Raise CheckpointError if the file is missing or does not match the manifest's entry.
    """
    digest, size = xxhash.xxh3_128(), 0

    def see(block: bytes) -> None:
        nonlocal size
        digest.update(block)
        size += len(block)
        seen(len(block))

    try:
        upload(path, to, each=see)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if (size, digest.hexdigest()) != (entry["bytes"], entry["hash"]):
        raise CheckpointError(f"{path} is damaged: its xxh3-128 differs from the manifest's.")


def store_at(address: str) -> CheckpointStore:
    """Return the store at the address ``checkpoint.store``. Raise ConfigError if the address is invalid."""
    return CheckpointStore(store_place(address))


def check_unused(store: CheckpointStore) -> None:
    """Raise ConfigError if a new run's store already has checkpoints or is not writable."""
    try:
        steps = store.checkpoints()
        # A readable store may not be writable, and a missing bucket lists as empty.
        probe = store.place / CHECKPOINTS / ".writable"
        write_object(probe, b"x")
        remove(probe)
    except DataError as error:
        raise ConfigError(f"checkpoint.store: {error}") from error
    if steps:
        raise ConfigError(
            f"checkpoint.store={store} already holds checkpoints, the newest at step {max(steps)}.\n"
            f"Resume from them (--run.resume latest), or set another folder: {store}-2"
        )


def find_address(address: str) -> tuple[CheckpointStore, int | None]:
    """Return the run's store at an address, and the step if the address names a single checkpoint."""
    match = _ADDRESS.fullmatch(address.rstrip("/"))
    if match is None:
        return CheckpointStore(store_place(address, "the address")), None
    return CheckpointStore(store_place(match[1], "the address")), int(match[2])


def find_run(address: str) -> CheckpointStore:
    """Return the run's store at an address. Raise CheckpointError if the address names a single checkpoint."""
    store, step = find_address(address)
    if step is not None:
        raise CheckpointError(f"{address} is a checkpoint, not a run. Give {store}, which contains checkpoints/.")
    return store
