"""Hugging Face weight folders, read tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.weights.json_files import read_checkpoint_json
from longctx.conversion.weights.pickled import PickledFile
from longctx.errors import CheckpointError
from longctx.files import check_link
from longctx.storage.hashed_blocks import BlockReader
from longctx.storage.safetensors import SafetensorsFile
from longctx.untrusted.strict_json import check_fetched, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = "pytorch_model.bin"
_SAFE = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth")
_MAX_NAME_BYTES = 255
"""File name limit on common file systems, in bytes."""
_INDEX_END = ".index.json"
_NOT_WEIGHTS = ("training_args.bin", "optimizer.", "scheduler.", "rng_state")
"""Prefixes of files that transformers' Trainer leaves next to the weights."""


class WeightsFolder:
    """Tensors in a Hugging Face folder by name; a tensor is read on request and not kept.

    Weights are the files in the folder's only index, or otherwise its only weights file. They are safetensors, with any
    name; if there are none, a pickle (``.bin``, ``.pt``), from which only tensors are read. Raise CheckpointError,
    naming the file, if an index does not list exactly its files' contents, or leads out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, SafetensorsFile | PickledFile] = {}
        self._blocks = BlockReader(past_cache=False)
        self._source = found = _find_weights(folder)
        if found.endswith(_INDEX_END):
            self._file_of = self._read_index(found)
        else:
            self._file_of = dict.fromkeys(self._names(found), found)

    def files(self) -> set[str]:
        """Return the names of the files that tensors are read from, including the index."""
        return set(self._file_of.values()) | {self._source}

    def names(self) -> set[str]:
        """Return all tensor names on disk."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the file."""
        return self._open(self._file_of[name]).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype; raise CheckpointError if training could not load it without loss."""
        return self._open(self._file_of[name]).dtype(name)

    def read(self, name: str) -> Tensor:
        """Return the tensor as on disk, in its own memory."""
        return self._open(self._file_of[name]).read(name)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype, quantised or not; None if no supported scheme has it."""
        file = self._open(self._file_of[name])
        if isinstance(file, PickledFile):
            return file.dtype(name)
        return file.stored_dtype(name)

    def read_stored(self, name: str) -> Tensor:
        """Return the tensor's bytes as stored, quantised or not."""
        file = self._open(self._file_of[name])
        if isinstance(file, PickledFile):
            return file.read(name)
        return file.read_stored(name)

    def _read_index(self, index: str) -> dict[str, str]:
        """Return each tensor's file from the index, checked against the files' actual contents."""
        path = self.folder / index
        weight_map = read_checkpoint_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{path} has no weight_map from tensor names to file names.")
        if not weight_map:
            raise CheckpointError(f"{path} has an empty weight_map.")
        # A safetensors index must not make us open a pickle.
        kinds = _PICKLED
        if index.endswith(_SAFE + _INDEX_END):
            kinds = (_SAFE,)
        names_by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            names_by_file.setdefault(file, set()).add(name)
        # Check all names before reading any content.
        for file in sorted(names_by_file):
            resolve_weights_path(self.folder, file, named_by=path, kinds=kinds)
        for file, names in sorted(names_by_file.items()):
            # A partial list would drop weights without an error.
            actual = set(self._names(file))
            if names != actual:
                raise CheckpointError(
                    f"{path} and {file} disagree: only in the index {format_names(names - actual)}; "
                    f"only in the file (or listed elsewhere) {format_names(actual - names)}."
                )
        return weight_map

    def _names(self, file: str) -> list[str]:
        """Return one file's tensor names."""
        return self._open(file).names()

    def _open(self, file: str) -> SafetensorsFile | PickledFile:
        """Return the opened file; its header is read once."""
        if file not in self._files:
            path = resolve_weights_path(self.folder, file, named_by=self.folder, kinds=(_SAFE, *_PICKLED))
            check_is_fetched(path)
            if file.endswith(_SAFE):
                self._files[file] = SafetensorsFile(path, self._blocks)
            else:
                self._files[file] = PickledFile(path)
        return self._files[file]


def check_is_fetched(path: Path) -> None:
    """Raise CheckpointError for a Git LFS pointer in place of a file."""
    try:
        check_fetched(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def has_standard_names(folder: Path) -> bool:
    """Return True if transformers finds the folder's weights, which it does only under these names."""
    return any((folder / name).exists() for name in (WEIGHTS, INDEX, PICKLED_WEIGHTS, PICKLED_WEIGHTS + _INDEX_END))


def _find_weights(folder: Path) -> str:
    """Return the folder's index, or its only weights file; raise CheckpointError if there are several, or none."""
    names = sorted(path.name for path in folder.iterdir())
    for kinds, single in (((_SAFE,), WEIGHTS), (_PICKLED, PICKLED_WEIGHTS)):
        files = [n for n in names if n.endswith(kinds) and not n.startswith(_NOT_WEIGHTS)]
        indices = [n for n in names if n.endswith(tuple(kind + _INDEX_END for kind in kinds))]
        # Standard names first, as in transformers; otherwise any single index or file is accepted.
        standard = [n for n in (single + _INDEX_END, single) if n in names]
        if len(standard) > 1:
            raise CheckpointError(f"{folder} has both {standard[1]} and {standard[0]}: delete the wrong one.")
        found = standard or indices or files
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} has several weight files, but no index: {format_names(found)}.\nKeep one, or add {INDEX}."
            )
        if found:
            return found[0]
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}, nor other weight files.")


def resolve_weights_path(folder: Path, file: str, *, named_by: Path, kinds: tuple[str, ...] = ("",)) -> Path:
    """Return ``folder / file`` for a plain name with one of the endings ``kinds`` and a target within the folder.

    Otherwise raise CheckpointError, naming the file that lists this one (``named_by``). An index is untrusted: it must
    not redirect reads. A Hugging Face cache stores every file as a link into its own blobs, so such links are allowed.
    """
    is_plain = Path(file).name == file and "\\" not in file and "\0" not in file and len(file) <= _MAX_NAME_BYTES
    if not is_plain or not file.endswith(kinds):
        raise CheckpointError(f"{named_by} lists {shown(file)}, which is not a {kinds[0]} file in its folder.")
    check_link(folder, file, CheckpointError)
    if (folder / file).is_dir():
        raise CheckpointError(f"{folder / file} is a folder.")
    if not (folder / file).is_file():
        raise CheckpointError(f"{folder / file} is not a plain file.")
    return folder / file
