"""Our checkpoint on disk: a manifest and flat pieces of named tensors. Read here, with safetensors alone.

A checkpoint folder holds ``manifest.json`` (hashed), the tokenizer's files and safetensors files. Every logical tensor
(a parameter under its Hugging Face in-memory name) exists in three fp32 roles: ``master``, ``exp_avg``, ``exp_avg_sq``.
Each role is a list of pieces that cover the flattened tensor once: whoever owned a range wrote it, so any ZeRO stage
and any number of ranks writes this format, and reads any range of it back. An imported model has masters only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.files import CHECKPOINTS, MANIFEST, hash_file, list_checkpoints

FORMAT = "longctx-checkpoint"
VERSION = 1
ROLES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A flat range of one tensor in one role, and the safetensors entry that holds it."""

    file: str
    key: str
    start: int
    numel: int


def canonical_hash(manifest: dict[str, Any]) -> str:
    """xxh3-128 of the manifest's canonical JSON, its own ``hash`` entry left out."""
    body = {k: v for k, v in manifest.items() if k != "hash"}
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def is_buffer(name: str) -> bool:
    """Whether a tensor is state without gradient and moments, float32 in any model dtype: a router's selection bias."""
    return name.endswith(".e_score_correction_bias")


class CheckpointReader:
    """A committed checkpoint, opened lazily: nothing but the manifest is read until a range is asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Read and check the manifest; CheckpointError when it is missing, damaged or of another version."""
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        self._pieces = {
            name: {role: [Piece(**p) for p in pieces] for role, pieces in entry["roles"].items()}
            for name, entry in self.manifest["tensors"].items()
        }
        self._check_roles()
        self._check_cover()
        self._open: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Optimiser steps taken when it was saved."""
        return self.manifest["step"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the run computed in; the stored masters are fp32."""
        return getattr(torch, self.manifest["dtype"])

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the ModelConfig."""
        return self.manifest["model"]

    @property
    def roles(self) -> tuple[str, ...]:
        """What is stored of every tensor: all of ``ROLES``, or the master alone in an imported model."""
        return self._roles

    def names(self) -> list[str]:
        """Logical tensors, in the model's order."""
        return list(self.manifest["tensors"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a logical tensor."""
        return tuple(self.manifest["tensors"][name]["shape"])

    def read(self, name: str, role: str = "master") -> Tensor:
        """A whole logical tensor in fp32."""
        shape = self.shape(name)
        return self.read_range(name, role, 0, torch.Size(shape).numel()).view(shape)

    def read_range(self, name: str, role: str, start: int, numel: int) -> Tensor:
        """``numel`` values of the flattened tensor from ``start``, fp32 [numel]; reads only the pieces it needs."""
        if role not in self._roles:
            raise CheckpointError(
                f"{self.folder} has no {role}: it was imported, so optimiser and schedule start anew."
            )
        if start < 0 or start + numel > torch.Size(self.shape(name)).numel():
            raise ValueError(f"values {start} to {start + numel} are not all in {name}, shape {self.shape(name)}")
        out = torch.empty(numel, dtype=torch.float32)
        for piece in self._pieces[name][role]:
            # The overlap of what is asked for and what the piece holds; safetensors reads a slice from the disk.
            lo, hi = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if lo < hi:
                out[lo - start : hi - start] = self._entry(piece)[lo - piece.start : hi - piece.start]
        return out

    def state_dict(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight, one at a time, in ``dtype`` (default: the run's); buffers in float32, as they are."""
        for name in self.names():
            values = self.read(name)
            if not is_buffer(name):
                values = values.to(dtype or self.dtype)
            yield name, values

    def verify(self, files: Iterable[str] | None = None) -> list[str]:
        """Problems found by reading the files (default: all): empty when sizes and hashes are as the manifest says."""
        problems = []
        names: Iterable[str] = self.manifest["files"]
        if files is not None:
            names = files
        for name in names:
            entry = self.manifest["files"][name]
            path = self.folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            # The size first: it is free, and a copy that was cut short is the usual damage.
            elif path.stat().st_size != entry["bytes"]:
                problems.append(f"{name} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}")
            elif hash_file(path) != entry["hash"]:
                problems.append(f"{name} is damaged: its xxh3-128 is not the manifest's")
        return problems

    def close(self) -> None:
        """Close the open files."""
        self._open.clear()

    def _entry(self, piece: Piece) -> Any:
        """The file's entry of a piece, checked against the manifest; its values are read when it is sliced."""
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.folder / piece.file, framework="pt")
            entry = self._open[piece.file].get_slice(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / piece.file} cannot be read: {error}.\n"
                "`longctx checkpoint verify` names every damaged file; resume from an older checkpoint."
            ) from error
        if entry.get_dtype() != "F32" or entry.get_shape() != [piece.numel]:
            raise CheckpointError(
                f"{piece.key} in {self.folder / piece.file} is {entry.get_dtype()} {entry.get_shape()}; "
                f"the manifest says F32 [{piece.numel}]."
            )
        return entry

    def _check_roles(self) -> None:
        """Every parameter is there in the same roles: all of them, or the master alone. Buffers have no moments."""
        found = {frozenset(roles) for name, roles in self._pieces.items() if not is_buffer(name)}
        if found not in ({frozenset(ROLES)}, {frozenset(ROLES[:1])}):
            raise CheckpointError(
                f"{self.folder}: its tensors must all have the roles {ROLES}, or all the master alone."
            )
        self._roles = tuple(role for role in ROLES if role in next(iter(found)))

    def _check_cover(self) -> None:
        """Every role of every tensor must be covered exactly once, by files of this folder that the manifest lists."""
        files = set(self.manifest["files"])
        # A manifest may come from strangers, and must not make us read elsewhere.
        strangers = sorted(name for name in files if Path(name).name != name)
        if strangers:
            raise CheckpointError(f"{self.folder}: the manifest names files outside of its folder: {strangers}.")
        for name, roles in self._pieces.items():
            for role, pieces in roles.items():
                at = 0
                # In order each piece must begin where the one before ends: no gap and no value twice.
                for piece in sorted(pieces, key=lambda p: p.start):
                    if piece.start != at or piece.numel < 0:
                        raise CheckpointError(f"{self.folder}: {name} ({role}) is not covered once at value {at}.")
                    # Nothing vouches for the bytes of a file without a hash.
                    if piece.file not in files:
                        raise CheckpointError(f"{self.folder}: {name} ({role}) lies in the unlisted file {piece.file}.")
                    at += piece.numel
                if at != torch.Size(self.shape(name)).numel():
                    raise CheckpointError(f"{self.folder}: {name} ({role}) ends at value {at}.")


def model_config(reader: CheckpointReader) -> ModelConfig:
    """The config of the checkpoint's model; ConfigError when another release wrote keys that this one does not know."""
    return ModelConfig.from_dict(reader.model)


def find_checkpoint(folder: str | Path) -> Path:
    """A checkpoint folder as it is; of a run folder, the committed checkpoint with the highest step."""
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return folder
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist.")
    committed = list_checkpoints(folder)
    if not committed:
        raise CheckpointError(
            f"{folder} is neither a checkpoint (no {MANIFEST}) nor a run with {CHECKPOINTS}/step_NNNNNN."
        )
    return committed[-1]


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its format, version and hash checked."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a longctx checkpoint.")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{path} has format version {manifest.get('version')}; this release reads {VERSION}.")
    if manifest.get("hash") != canonical_hash(manifest):
        raise CheckpointError(f"{path} is damaged: its hash does not match. Use another checkpoint of the run.")
    return manifest
