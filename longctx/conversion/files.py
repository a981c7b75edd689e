"""Folders of safetensors: read tensor by tensor with every name accounted for, written shard by shard and read back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longctx.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that fit the fp32 masters without loss."""


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by name; only headers are read until a tensor is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._index() if (folder / INDEX).exists() else self._single_file()

    def names(self) -> set[str]:
        """Every tensor on disk."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as the header has it."""
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype; CheckpointError for one that training could not take without loss."""
        kind = self._open(self._file_of[name]).get_slice(name).get_dtype()
        if kind not in DTYPES:
            path = self.folder / self._file_of[name]
            raise CheckpointError(f"{name} in {path} is {kind}; supported: {sorted(DTYPES)}, no quantised weights.")
        return DTYPES[kind]

    def read(self, name: str) -> Tensor:
        """The tensor as it lies on disk."""
        self.dtype(name)
        try:
            return self._open(self._file_of[name]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{name} in {self.folder / self._file_of[name]} cannot be read: {error}.") from error

    def _index(self) -> dict[str, str]:
        """Tensor -> file from the index, checked against what each file really holds."""
        if (self.folder / WEIGHTS).exists():
            raise CheckpointError(f"{self.folder} has both {WEIGHTS} and {INDEX}: delete the one that is not meant.")
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map of tensor names to file names.")
        files = sorted(set(weight_map.values()))
        for file in files:  # all names before any content
            checked_path(self.folder, file)
        for file in files:
            listed, held = {n for n, f in weight_map.items() if f == file}, set(self._open(file).keys())
            if listed != held:
                raise CheckpointError(
                    f"{self.folder / INDEX} and {file} disagree: only in the index {listing(listed - held)}; "
                    f"only in the file (or listed elsewhere) {listing(held - listed)}."
                )
        return weight_map

    def _single_file(self) -> dict[str, str]:
        if not (self.folder / WEIGHTS).exists():
            raise CheckpointError(_no_weights(self.folder))
        return dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = checked_path(self.folder, file)
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}.") from error
        return self._files[file]


def checked_path(folder: Path, file: str) -> Path:
    """``folder / file`` for a plain safetensors name whose target lies in the folder; CheckpointError otherwise.

    An index comes from strangers: it must not make us read elsewhere. Links into the blobs of the same Hugging Face
    cache are how that cache stores every file, so they are allowed.
    """
    if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
        raise CheckpointError(f"{folder / INDEX} names {file!r}, which is no safetensors file of its own folder.")
    allowed = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        allowed.append((folder.absolute().parents[1] / "blobs").resolve())
    target = (folder / file).resolve()
    if target.parent not in allowed:
        raise CheckpointError(f"{folder / file} leads out of its folder, to {target}. Copy the file instead.")
    if not target.is_file():
        raise CheckpointError(f"{folder / file} is missing.")
    return folder / file


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if not pickles:
        return f"{folder} has neither {WEIGHTS} nor {INDEX}."
    return (
        f"{folder} holds its weights as pickle ({listing(pickles)}), which can run any code when it is loaded.\n"
        "Save it as safetensors first, where you trust it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)."
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError when it is missing, damaged, no object, or names a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"it names {listing({key for key in keys if keys.count(key) > 1})} twice")
        return dict(pairs)

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Readable JSON, keys in the given order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ShardWriter:
    """Collects tensors into safetensors files of about ``shard_bytes``, so memory holds one shard at a time.

    ``finish`` gives the files their final names and reads every tensor back: a disk that lies is found here.
    """

    def __init__(self, folder: Path, stem: str, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes={shard_bytes} must be positive, for example 5_000_000_000.")
        self.folder, self.stem, self.shard_bytes = folder, stem, shard_bytes
        self.total_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._facts: dict[str, tuple[torch.dtype, torch.Size, str]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is on disk when its shard is full."""
        tensor = tensor.detach().to("cpu").contiguous()
        if self._pending and self._pending_bytes + tensor.nbytes > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes
        self._facts[name] = (tensor.dtype, tensor.shape, hash_tensor(tensor))

    def finish(self) -> dict[str, str]:
        """Tensor -> file name, after everything was read back; a single shard is called ``STEM.safetensors``."""
        if self._pending or not self._shards:
            self._flush()
        count, file_of = len(self._shards), {}
        for number, names in enumerate(self._shards, start=1):
            file = f"{self.stem}.safetensors" if count == 1 else f"{self.stem}-{number:05d}-of-{count:05d}.safetensors"
            path = self._unnamed(number).rename(self.folder / file)
            self._check(path, names)
            file_of |= dict.fromkeys(names, file)
        return file_of

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        save_file(self._pending, self._unnamed(len(self._shards)), metadata={"format": "pt"})
        self._pending, self._pending_bytes = {}, 0

    def _unnamed(self, number: int) -> Path:
        return self.folder / f"{self.stem}-{number:05d}.safetensors.partial"

    def _check(self, path: Path, names: list[str]) -> None:
        with safe_open(path, framework="pt") as shard:
            for name in names:
                tensor = shard.get_tensor(name)
                if (tensor.dtype, tensor.shape, hash_tensor(tensor)) != self._facts[name]:
                    raise CheckpointError(f"{name} did not come back from {path} as it was written. Check the disk.")


def hash_tensor(tensor: Tensor) -> str:
    """xxh3-128 of a contiguous CPU tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def listing(names: Any, limit: int = 12) -> str:
    """Some names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" … and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return (", ".join(ordered[:limit]) or "none") + more


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name, synced, when the block ends well; else it vanishes.

    CheckpointError when the target already holds something, or the disk fails.
    """
    staging = target.with_name(f".{target.name}.partial.{os.getpid()}")
    try:
        if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise CheckpointError(
                f"{target} already exists and is not an empty folder. Name another output, or remove it."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        try:
            yield staging
            for path in (*staging.iterdir(), staging):
                _sync(path)
            staging.rename(target)
            _sync(target.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        hint = (
            "Free some space." if getattr(error, "errno", None) == errno.ENOSPC else "Choose another place or mend it."
        )
        raise CheckpointError(f"{target} could not be written: {error}. Nothing is left of it.\n{hint}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
