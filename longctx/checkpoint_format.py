"""Our checkpoint on disk: a manifest and flat pieces of named tensors. Read here, with safetensors alone.

A checkpoint folder holds ``manifest.json`` (hashed), the tokenizer's files and safetensors files. Every logical tensor
(a parameter under its Hugging Face in-memory name) exists in three fp32 roles: ``master``, ``exp_avg``, ``exp_avg_sq``.
Each role is a list of pieces that cover the flattened tensor once: whoever owned a range wrote it, so any ZeRO stage
and any number of ranks writes this format, and reads any range of it back. An imported model has masters only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longctx.architecture.size import count_parameters
from longctx.checkpoint_manifest import (
    FORMAT,
    PROVED,
    ROLES,
    VERSION,
    Piece,
    Pieces,
    canonical_hash,
    is_buffer,
    num_values,
    read_manifest,
    read_pieces,
    read_proof,
    refuse_deepspeed,
)
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.files import CHECKPOINTS, MANIFEST, check_link, hash_file, list_checkpoints

__all__ = [
    "CHECKPOINTS",
    "FORMAT",
    "MANIFEST",
    "PROVED",
    "ROLES",
    "VERSION",
    "CheckpointReader",
    "canonical_hash",
    "find_checkpoint",
    "is_buffer",
    "list_checkpoints",
    "model_config",
]


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEADER_BYTES, _ENTRY_BYTES = 2 * 2**20, 1024
"""What the header of a file of pieces takes at most: what a writer reserves, and for each piece."""
_SPARE_VALUES = 2**20
"""By how many values tensors may fall short of a model before they are compared with it name by name."""
_ADVICE = "Take another checkpoint; `longctx checkpoint verify` says whether it is whole."


class CheckpointReader:
    """A committed checkpoint, opened lazily: nothing but the manifest is read until a range is asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Read and check the manifest; CheckpointError when it is missing, damaged, made up or of another version."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._pieces = read_pieces(self.manifest, self.folder / MANIFEST)
        self._roles = _common_roles(self._pieces, self.folder)
        self._num_pieces = Counter(
            piece.file for roles in self._pieces.values() for found in roles.values() for piece in found
        )
        self._open: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Optimiser steps taken when it was saved."""
        return self.manifest["step"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the run computed in; the stored masters are fp32."""
        return _DTYPES[self.manifest["dtype"]]

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
        # The overlap of what is asked for and what each piece holds.
        needed: list[tuple[int, int, Piece, Any]] = []
        for piece in self._pieces[name][role]:
            lo, hi = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if lo < hi:
                needed.append((lo, hi, piece, self._entry(piece)))
        # Only now: every piece is there, in its size, so that no manifest alone can ask for memory.
        out = torch.empty(numel, dtype=torch.float32)
        for lo, hi, piece, entry in needed:
            # safetensors reads a slice from the disk.
            out[lo - start : hi - start] = entry[lo - piece.start : hi - piece.start]
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
        problems: list[str] = []
        if files is None:
            files, problems = self.manifest["files"], _proof_problem(self.folder)
        for name in files or ():
            entry = self.manifest["files"][name]
            path = self.folder / name
            if link := _link_problem(self.folder, name):
                problems.append(link)
            elif not path.is_file():
                problems.append(f"{name} is missing")
            # The size first: it is free, and a copy that was cut short is the usual damage.
            elif path.stat().st_size != entry["bytes"]:
                problems.append(f"{name} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}")
            elif hash_file(path) != entry["hash"]:
                problems.append(f"{name} is damaged: its xxh3-128 is not the manifest's")
        return problems

    def check_entries(self) -> None:
        """CheckpointError unless every piece is in its file, in its size; headers alone are read."""
        for roles in self._pieces.values():
            for found in roles.values():
                for piece in found:
                    self._entry(piece)
        self.close()

    def unlisted(self) -> list[str]:
        """Names in the folder that no hash vouches for: neither the manifest nor what it lists nor a proof."""
        known = {MANIFEST, PROVED}.union(self.manifest["files"])
        # A proof that is being written, or was when its writer was killed.
        half = f".{PROVED}."
        return sorted(p.name for p in self.folder.iterdir() if p.name not in known and not p.name.startswith(half))

    def close(self) -> None:
        """Close the open files."""
        self._open.clear()

    def _opened(self, file: str) -> Any:
        """A file of pieces, its header read. OSError or CheckpointError where it is not one of this manifest."""
        if file not in self._open:
            if problem := _link_problem(self.folder, file):
                raise CheckpointError(problem)
            # To open a pipe that nobody writes to would hang.
            if not (self.folder / file).is_file():
                raise FileNotFoundError("it is missing, or no plain file")
            # The library takes any header of up to 100 MB, and several times as much memory.
            with (self.folder / file).open("rb") as content:
                header_bytes = int.from_bytes(content.read(8), "little")
            num_pieces = self._num_pieces[file]
            if header_bytes > _HEADER_BYTES + num_pieces * _ENTRY_BYTES:
                raise CheckpointError(
                    f"{self.folder / file} has a header of {header_bytes:,} bytes, and the manifest names "
                    f"{num_pieces:,} pieces in it. {_ADVICE}"
                )
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file]

    def _entry(self, piece: Piece) -> Any:
        """The file's entry of a piece, checked against the manifest; its values are read when it is sliced."""
        try:
            entry = self._opened(piece.file).get_slice(piece.key)
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


def _common_roles(pieces: Pieces, folder: Path) -> tuple[str, ...]:
    """The roles that every parameter is there in: all of them, or the master alone. Buffers have no moments."""
    found = {frozenset(roles) for name, roles in pieces.items() if not is_buffer(name)}
    of_buffers = {frozenset(roles) for name, roles in pieces.items() if is_buffer(name)}
    if found not in ({frozenset(ROLES)}, {frozenset(ROLES[:1])}) or not of_buffers <= {frozenset(ROLES[:1])}:
        raise CheckpointError(
            f"{folder}: its tensors must all have the roles {ROLES}, or all the master alone, as buffers have."
        )
    return tuple(role for role in ROLES if role in next(iter(found)))


def _link_problem(folder: Path, file: str) -> str:
    """What is wrong with a file that is a link: it must not make us read elsewhere. Empty where all is well."""
    if (folder / file).is_symlink():
        try:
            check_link(folder, file, CheckpointError)
        except CheckpointError as error:
            return str(error)
    return ""


def _proof_problem(folder: Path) -> list[str]:
    """What is wrong with the file that says what proves a checkpoint."""
    try:
        read_proof(folder)
    except CheckpointError as error:
        return [str(error)]
    return []


def model_config(reader: CheckpointReader) -> ModelConfig:
    """The config of the checkpoint's model; ConfigError when another release wrote keys that this one does not know.

    CheckpointError for a config of far more than the manifest's tensors: whoever builds such a model to compare the two
    would wait, or run out of memory.
    """
    config = ModelConfig.from_dict(reader.model)
    check_size(config, [reader.shape(name) for name in reader.names()], str(reader.folder / MANIFEST))
    return config


def check_size(config: ModelConfig, shapes: Collection[tuple[int, ...]], where: str) -> None:
    """CheckpointError, by arithmetic alone, for a config that tensors of these shapes are much too small for.

    Names and shapes are compared later, and named one by one: this bounds what that costs.
    """
    held = sum(num_values(shape) for shape in shapes)
    if config.num_layers > len(shapes):
        raise CheckpointError(f"{where}: its model has {config.num_layers:,} layers, and only {len(shapes):,} tensors.")
    meant = sum(count_parameters(config).values())
    if meant > 2 * held + _SPARE_VALUES:
        raise CheckpointError(f"{where}: its model has {meant:,} parameters, and its tensors only {held:,} values.")


def find_checkpoint(folder: str | Path) -> Path:
    """A checkpoint folder as it is; of a run folder, the committed checkpoint with the highest step."""
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return folder
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist.")
    committed = list_checkpoints(folder)
    if not committed:
        refuse_deepspeed(folder)
        raise CheckpointError(
            f"{folder} is neither a checkpoint (no {MANIFEST}) nor a run with {CHECKPOINTS}/step_NNNNNN."
        )
    return committed[-1]
