"""On-disk checkpoint format and its reader: a manifest, and flat slices of named tensors in safetensors files.

A checkpoint folder holds ``manifest.json`` (hashed), the tokenizer's files and safetensors files. Every logical tensor
(a parameter under its Hugging Face in-memory name) exists in three fp32 roles: ``master``, ``exp_avg``, ``exp_avg_sq``.
Each role is a list of slices that cover the flattened tensor exactly once. The rank that owns a range writes it, so any
ZeRO stage and any world size can write this format and read back any range. An imported model only has masters.

A checkpoint of adapters holds only their tensors, and names the checkpoint with the frozen weights (``base``), from
which the reader reads all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.architecture.size import count_parameters
from longctx.checkpoint_manifest import (
    FORMAT,
    PROOF_FILE,
    ROLES,
    VALUE_BYTES,
    VERSION,
    CheckpointPiece,
    Pieces,
    canonical_hash,
    is_buffer,
    num_values,
    read_manifest,
    read_pieces,
    read_proof,
    reject_other_formats,
    where_to_get,
)
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.files import CHECKPOINTS, MANIFEST, check_link, hash_file, list_checkpoints, size_problem
from longctx.storage.hashed_blocks import BlockReader, describe_file
from longctx.storage.safetensors import SafetensorsFile
from longctx.tensor_bytes import as_bytes

__all__ = [
    "CHECKPOINTS",
    "FORMAT",
    "MANIFEST",
    "PROOF_FILE",
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
_SIZE_TOLERANCE = 2**20
"""How many values tensors may be short of a model before the name-by-name comparison."""
_HEADER_BYTES, _ENTRY_BYTES = 2 * 2**20, 1024
"""Header size limits for a safetensors file: the writer's reserve, and per tensor slice."""
_FEW_VALUES, _ENTRY_VALUES = 100_000, 16
"""JSON value limits for its header: a few that belong to no slice, and per slice."""
_SCRATCH_VALUES = 1 << 20
"""Staging buffer size, in values, for destinations that a file cannot be read into."""
_HINT = "`longctx checkpoint verify` names every damaged file; resume from an older checkpoint."


class CheckpointReader:
    """A committed checkpoint, opened lazily: only the manifest is read until a range is requested."""

    def __init__(self, folder: str | Path, *, past_cache: bool = False) -> None:
        """Read and check the manifest; raise CheckpointError if it is missing, damaged, forged or has another version.

        ``past_cache`` bypasses the page cache, which is faster if each value is read once.
        """
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._pieces = read_pieces(self.manifest, self.folder / MANIFEST)
        self._roles = _common_roles(self._pieces, self.folder)
        pieces = (piece for roles in self._pieces.values() for found in roles.values() for piece in found)
        self._files = PieceFiles(self.folder, self.manifest["files"], pieces, past_cache=past_cache)
        self.base: CheckpointReader | None = None
        """The checkpoint with the frozen weights; None if this one holds all."""
        if "base" in self.manifest:
            self.base = _open_base(self.folder, self.manifest["base"], past_cache=past_cache)

    @property
    def step(self) -> int:
        """Optimizer steps taken before saving."""
        return self.manifest["step"]

    @property
    def dtype(self) -> torch.dtype:
        """The run's compute dtype; the stored master weights are fp32."""
        return _DTYPES[self.manifest["dtype"]]

    @property
    def model(self) -> dict[str, Any]:
        """ModelConfig fields."""
        return self.manifest["model"]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles stored for every parameter; an imported model only has the master."""
        return self._roles

    def roles_of(self, name: str) -> tuple[str, ...]:
        """Return the roles stored for a tensor: tensors updated by Muon have a single moment."""
        if self._is_of_base(name):
            return ROLES[:1]
        return tuple(role for role in ROLES if role in self._pieces[name])

    def names(self) -> list[str]:
        """Return all logical tensor names, in the model's order; a base's before the adapters'."""
        names = list(self.manifest["tensors"])
        if self.base is None:
            return names
        return list(dict.fromkeys(self.base.names() + names))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a logical tensor's shape."""
        if self.base is not None and self._is_of_base(name):
            return self.base.shape(name)
        return tuple(self.manifest["tensors"][name]["shape"])

    def read(self, name: str, role: str = "master") -> Tensor:
        """Read a full logical tensor in fp32."""
        shape = self.shape(name)
        return self.read_range(name, role, 0, torch.Size(shape).numel()).view(shape)

    def read_range(self, name: str, role: str, start: int, numel: int) -> Tensor:
        """Read ``numel`` values of the flattened tensor from ``start``, fp32 [numel]."""
        # Check that every slice exists with its size before allocating, so that a forged manifest cannot exhaust
        # memory.
        if self.base is not None and self._is_of_base(name):
            return self.base.read_range(name, role, start, numel)
        locations = self._locate_values(name, role, start, numel)
        out = torch.empty(numel, dtype=torch.float32)
        self._fill(out, start, locations)
        return out

    def read_into(self, name: str, role: str, start: int, out: Tensor) -> None:
        """Fill ``out``, flat, with any dtype and device, with values of the flattened tensor from ``start``.

        Only the needed checksum blocks are read; if the manifest has block hashes, each block is hashed before use.
        Raise CheckpointError if the file is damaged there: values filled before are correct, the remaining ones
        untouched.
        """
        if self.base is not None and self._is_of_base(name):
            self.base.read_into(name, role, start, out)
        else:
            self._fill(out, start, self._locate_values(name, role, start, len(out)))

    def state_dict(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight, one at a time, in ``dtype`` (default: the run's); buffers stay in float32."""
        for name in self.names():
            values = self.read(name)
            if not is_buffer(name):
                values = values.to(dtype or self.dtype)
            yield name, values

    def verify(self, files: Iterable[str] | None = None) -> list[str]:
        """Read the files (default: all) and return the problems; empty if sizes and hashes match."""
        problems: list[str] = []
        if files is None:
            files, problems = self.manifest["files"], self.proof_problems()
        for name in files or ():
            # size first: it is free to check, and a truncated copy is the most common damage
            problem = self._size_problem(name) or _hash_problem(self.folder / name, self.manifest["files"][name])
            problems += [problem] * bool(problem)
        return problems

    def proof_problems(self) -> list[str]:
        """Return the problems with the file that holds the checkpoint's proof; empty if there are none."""
        try:
            read_proof(self.folder)
        except CheckpointError as error:
            return [str(error)]
        return []

    def size_problems(self) -> list[str]:
        """Return the problems with missing files and file sizes, a base's too, without reading any file."""
        problems = [problem for problem in map(self._size_problem, self.manifest["files"]) if problem]
        if self.base is not None:
            problems += [f"{self.base.folder / problem}" for problem in self.base.size_problems()]
        return problems

    def check_entries(self) -> None:
        """Raise CheckpointError unless every slice is in its file with its size; only headers are read."""
        for roles in self._pieces.values():
            for found in roles.values():
                for piece in found:
                    self._files.place(piece)
        self.close()

    def extra_files(self) -> list[str]:
        """Return folder entries without a hash: neither the manifest, nor listed in it, nor a proof."""
        known = {MANIFEST, PROOF_FILE}.union(self.manifest["files"])
        # a proof that is being written, or was when its writer was killed
        half = f".{PROOF_FILE}."
        return sorted(p.name for p in self.folder.iterdir() if p.name not in known and not p.name.startswith(half))

    def close(self) -> None:
        """Close the open files."""
        self._files.close()
        if self.base is not None:
            self.base.close()

    def _is_of_base(self, name: str) -> bool:
        return self.base is not None and name not in self._pieces

    def _size_problem(self, name: str) -> str:
        """Check a file without reading it and return the problem; empty if there is none."""
        path, num_bytes = self.folder / name, self.manifest["files"][name]["bytes"]
        if link := link_problem(self.folder, name):
            return link
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} {size_problem(path, num_bytes)}"
        return ""

    def _locate_values(self, name: str, role: str, start: int, numel: int) -> list[_Place]:
        """Locate a range's values in the files; raise CheckpointError if the role is not stored."""
        if role not in self._pieces[name]:
            raise CheckpointError(
                f"{self.folder} has no {role}: it was imported, so optimizer state and schedule start from scratch."
            )
        if start < 0 or start + numel > torch.Size(self.shape(name)).numel():
            raise ValueError(f"values {start} to {start + numel} are not all in {name}, shape {self.shape(name)}")
        found = []
        # overlap between the requested range and each slice
        for piece in self._pieces[name][role]:
            lo, hi = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if lo < hi:
                first = self._files.place(piece) + VALUE_BYTES * (lo - piece.start)
                found.append(_Place(lo, hi, piece.file, first))
        return found

    def _fill(self, out: Tensor, start: int, locations: Iterable[_Place]) -> None:
        for place in locations:
            self._files.read_into(place.file, place.first, out[place.lo - start : place.hi - start])


def base_entry(base: CheckpointReader, run_folder: Path) -> dict[str, str]:
    """Return the manifest entry that names a run's base: its folder, relative to a checkpoint if it is in the run."""
    path, run_folder = base.folder.absolute(), run_folder.absolute()
    named = str(path)
    if path.is_relative_to(run_folder):
        # Two levels up from CHECKPOINTS/step_NNNNNN, so that the run's folder can be moved.
        named = str(Path("../..") / path.relative_to(run_folder))
    return {"folder": named, "hash": base.manifest["hash"]}


def _open_base(folder: Path, entry: dict[str, str], *, past_cache: bool) -> CheckpointReader:
    """Open the checkpoint that the adapters in ``folder`` belong to; raise CheckpointError if it is another one."""
    where = folder / entry["folder"]
    if not (where / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} holds adapters, and their base is missing: {where}.\nMove it there again, or import "
            f"the model there again: longctx convert --from hf MODEL {where}"
        )
    # Before it is opened: a forged one might name itself.
    if "base" in read_manifest(where):
        raise CheckpointError(f"{folder}: its base {where} holds adapters itself. Merge those into a base first.")
    base = CheckpointReader(where, past_cache=past_cache)
    if base.manifest["hash"] != entry["hash"]:
        raise CheckpointError(
            f"{folder} holds adapters for another base: {where} has the manifest hash {base.manifest['hash']}, and "
            f"they were trained on {entry['hash']}.\nPut their own base there."
        )
    return base


class PieceFiles:
    """The files that hold a checkpoint's tensor slices, opened on first use."""

    def __init__(
        self, folder: Path, files: dict[str, dict[str, Any]], pieces: Iterable[CheckpointPiece], *, past_cache: bool
    ) -> None:
        """Set the manifest's ``files`` entries and all slices (``pieces``) in them.

        ``past_cache`` suits files that are read once: caching them costs time, and memory that others need.
        """
        self.folder, self._file_entries = folder, files
        self._num_pieces = Counter(piece.file for piece in pieces)
        self._files: dict[str, SafetensorsFile] = {}
        self._blocks = BlockReader(past_cache=past_cache)

    def place(self, piece: CheckpointPiece) -> int:
        """Return a slice's first byte in its file; raise CheckpointError unless it matches the manifest."""
        entry = self._open_file(piece.file).entry(piece.key)
        if entry is None:
            raise CheckpointError(
                f"{self.folder / piece.file} has no tensor {piece.key}. Use another checkpoint; "
                "check it with `longctx checkpoint verify`."
            )
        if (entry.dtype, entry.shape) != ("F32", (piece.numel,)):
            raise CheckpointError(
                f"{piece.key} in {self.folder / piece.file} is {entry.dtype} {list(entry.shape)}; "
                f"the manifest lists F32 [{piece.numel}]."
            )
        return entry.start

    def read_into(self, file: str, start: int, out: Tensor) -> None:
        """Fill ``out``, flat, with any dtype and device, with a file's float32 values from byte ``start``.

        ``place`` must have opened the file. Raise CheckpointError if the bytes differ from those written; those are
        never used.
        """
        tensor_file = self._files[file]
        if out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous():
            tensor_file.read_into(start, as_bytes(out))
            return
        scratch = torch.empty(min(_SCRATCH_VALUES, len(out)))
        for at in range(0, len(out), len(scratch)):
            values = scratch[: len(out) - at]
            tensor_file.read_into(start + VALUE_BYTES * at, as_bytes(values))
            out[at : at + len(values)].copy_(values)

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._blocks.close()

    def _open_file(self, file: str) -> SafetensorsFile:
        """Open a listed file and read its header; raise CheckpointError for a bad link, size or header."""
        if file not in self._files:
            if problem := link_problem(self.folder, file):
                raise CheckpointError(problem)
            file_entry, num_pieces = self._file_entries[file], self._num_pieces[file]
            self._files[file] = SafetensorsFile(
                self.folder / file,
                self._blocks,
                num_bytes=file_entry["bytes"],
                hashes=file_entry.get("blocks"),
                # limits as for any untrusted file, before allocating memory for it
                header_bytes=_HEADER_BYTES + num_pieces * _ENTRY_BYTES,
                header_values=_FEW_VALUES + num_pieces * _ENTRY_VALUES,
                hint=_HINT,
            )
        return self._files[file]


def link_problem(folder: Path, file: str) -> str:
    """Describe a link that leads out of the folder, which must not redirect reads; empty if there is no problem."""
    if (folder / file).is_symlink():
        try:
            check_link(folder, file, CheckpointError)
        except CheckpointError as error:
            return str(error)
    return ""


def _hash_problem(path: Path, entry: dict[str, Any]) -> str:
    """Read all of a file and return the problem; empty if it matches the manifest's ``entry``."""
    try:
        if "blocks" in entry:
            found = describe_file(path)
        else:
            found = {"hash": hash_file(path)}
    except OSError as error:
        # a failing disk shows up here first
        return f"{path.name} cannot be read: {error.strerror or error}"
    if found["hash"] != entry["hash"]:
        return f"{path.name} is damaged: its xxh3-128 differs from the manifest's"
    # loading compares these checksum blocks' hashes, not the one above
    if found.get("blocks") != entry.get("blocks"):
        return f"{path.name} is damaged: a checksum block's xxh3-128 differs from the manifest's"
    return ""


class _Place(NamedTuple):
    """Location of values ``lo`` to ``hi`` from a flattened tensor: a file, and the first byte in it."""

    lo: int
    hi: int
    file: str
    first: int


def _common_roles(pieces: Pieces, folder: Path) -> tuple[str, ...]:
    """Return the roles that every parameter has: only the master, or also one or two moments. Buffers only have the
    master.
    """
    found = {frozenset(roles) for name, roles in pieces.items() if not is_buffer(name)}
    of_buffers = {frozenset(roles) for name, roles in pieces.items() if is_buffer(name)}
    alone, trained = frozenset(ROLES[:1]), {frozenset(ROLES[:2]), frozenset(ROLES)}
    if not (found == {alone} or (found and found <= trained)) or not of_buffers <= {alone}:
        raise CheckpointError(
            f"{folder}: either all parameters have only the master, or all have {' and '.join(ROLES[:2])} "
            f"(and {ROLES[2]}); buffers have only the master."
        )
    return tuple(role for role in ROLES if all(role in roles for roles in found))


def model_config(reader: CheckpointReader) -> ModelConfig:
    """Return the checkpoint's model config; raise ConfigError if another release wrote keys unknown to this one.

    Raise CheckpointError if the config is far larger than the manifest's tensors: building such a model for comparison
    could take long, or run out of memory.
    """
    config = ModelConfig.from_dict(reader.model)
    check_model_size(config, [reader.shape(name) for name in reader.names()], str(reader.folder / MANIFEST))
    return config


def check_model_size(config: ModelConfig, shapes: Collection[tuple[int, ...]], where: str) -> None:
    """Raise CheckpointError, by arithmetic alone, if a config is much larger than tensors with these shapes.

    Names and shapes are compared later, one by one: this bounds the cost of that comparison.
    """
    held = sum(num_values(shape) for shape in shapes)
    if config.num_layers > len(shapes):
        raise CheckpointError(f"{where}: the model has {config.num_layers:,} layers, but only {len(shapes):,} tensors.")
    num_parameters = sum(count_parameters(config).values())
    if num_parameters > 2 * held + _SIZE_TOLERANCE:
        raise CheckpointError(
            f"{where}: the model has {num_parameters:,} parameters, but its tensors only {held:,} values."
        )


def find_checkpoint(folder: str | Path) -> Path:
    """Return a checkpoint folder as is; for a run folder, return the committed checkpoint with the highest step."""
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return folder
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist.{where_to_get(folder)}")
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        reject_other_formats(folder)
        raise CheckpointError(
            f"{folder} is neither a checkpoint (no {MANIFEST}), nor a run with {CHECKPOINTS}/step_NNNNNN, nor a "
            "Hugging Face folder with config.json."
        )
    return checkpoints[-1]
