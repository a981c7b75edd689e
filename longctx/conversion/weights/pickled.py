"""``torch.save`` weights (``.bin``, ``.pt``, ``.pth``): only tensors are unpickled, so no code in a file runs."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.errors import CheckpointError
from longctx.storage.safetensors import DTYPES

REMAP_AFTER_BYTES = 64 * 2**20
"""Bytes to read through one mapping before the file is mapped again.

Pages that were read count as resident memory until their mapping is closed.
"""


class PickledFile:
    """Tensors in one ``torch.save`` file by name; the file is memory-mapped, and a tensor is read on request.

    Tensors that share storage (tied weights) are read one by one, each into its own memory. Raise CheckpointError,
    naming the file, unless it is a dict of dense CPU tensors and contains all their storages.
    """

    def __init__(self, path: Path, *, remap_after_bytes: int = REMAP_AFTER_BYTES) -> None:
        """Map the file and check all entries without reading tensors; map it again per ``remap_after_bytes`` read."""
        self.path = path
        self._remap_after_bytes = remap_after_bytes
        self._read_bytes = 0
        self._tensors = _load(path)
        _check_records(path, self._tensors)

    def names(self) -> list[str]:
        """Return all tensor names."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype; raise CheckpointError if training could not load it without loss."""
        dtype = self._tensors[name].dtype
        if dtype not in DTYPES.values():
            raise CheckpointError(f"{name} in {self.path} is {dtype}; supported: {sorted(DTYPES)}.")
        return dtype

    def read(self, name: str) -> Tensor:
        """Return a contiguous copy of the tensor in its own memory; raise CheckpointError as ``dtype`` does."""
        # Check the dtype before copying.
        self.dtype(name)
        if self._read_bytes > self._remap_after_bytes:
            # Free the old mapping before making a new one.
            self._tensors = {}
            self._read_bytes = 0
            self._tensors = _load(self.path)
        # The copy detaches the tensor from the mapping and from shared storage.
        tensor = self._tensors[name].clone(memory_format=torch.contiguous_format)
        self._read_bytes += tensor.nbytes
        return tensor


def _load(path: Path) -> dict[str, Tensor]:
    """Map the file and return its tensors by name; raise CheckpointError if it is not a plain dict of tensors."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} cannot be read: it has 0 bytes.")
    try:
        # weights_only=True unpickles with torch's own interpreter. It calls only constructors on its allowlist, for
        # tensors and plain containers, and rejects any other name without importing it.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # A hostile file may raise any exception.
        raise CheckpointError(_rejection_message(path, str(error))) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not a dict of tensors.")
    for name, value in content.items():
        _check_entry(path, name, value)
    # Parameters become plain tensors.
    return {name: value.detach() for name, value in content.items()}


def _check_entry(path: Path, name: Any, value: Any) -> None:
    """Raise CheckpointError unless an entry is a named, dense CPU tensor within its storage."""
    if not isinstance(name, str):
        raise CheckpointError(f"{path} has the tensor name {name!r}, which is not text.")
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{name} in {path} is a {type(value).__name__}, not a tensor.\n"
            "Save the model's own state dict: torch.save(model.state_dict(), …)."
        )
    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        raise CheckpointError(f"{name} in {path} is {value.layout} on {value.device}; supported: dense, not quantised.")
    # Sizes and strides come from the pickle, and a view beyond the storage would read other memory. Offset and strides
    # count elements.
    steps = ((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    last_element = value.storage_offset() + sum(steps)
    if value.numel() and (last_element + 1) * value.element_size() > value.untyped_storage().nbytes():
        raise CheckpointError(f"{name} in {path} reaches past the end of its storage.")


def _check_records(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless the zip archive has an uncompressed record of each storage's size.

    ``torch.load`` takes a mapped storage's size from the pickle: with a shorter record it would read into the next one.
    """
    # Keyed by address, because tied tensors share one storage. A storage does not name its record, so compare how often
    # each size occurs.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values() if t.numel()}
    try:
        with zipfile.ZipFile(path) as archive:
            records = [info for info in archive.infolist() if "/data/" in info.filename]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    # A compressed record cannot be mapped.
    mappable = Counter(info.file_size for info in records if info.compress_type == zipfile.ZIP_STORED)
    missing = Counter(storages.values()) - mappable
    if missing:
        raise CheckpointError(
            f"{path} is damaged: a tensor needs an uncompressed record of {min(missing)} bytes, which is missing."
        )


def _rejection_message(path: Path, reason: str) -> str:
    """Return our message for a file that ``torch.load`` rejected with the message ``reason``."""
    # GLOBAL is the pickle opcode that imports a name.
    global_match = re.search(r"GLOBAL ([\w.]+)", reason)
    if global_match:
        return (
            f"{path} is a pickle that imports {global_match[1]}; only tensors are loaded from pickles. "
            "No code was executed.\nGet the weights as safetensors."
        )
    if "mmap can only be used" in reason:
        return (
            f"{path} is not a zip archive: it is damaged, or in torch's format from before 1.6, which cannot be "
            "memory-mapped.\n"
            "Save an intact one again: torch.save(torch.load(FILE, weights_only=True), FILE)."
        )
    # torch puts hints around the actual message, including how to disable the safe reader: keep its first sentence.
    detail = reason.rpartition("WeightsUnpickler error:")[2].strip()
    if not detail:
        return f"{path} cannot be read as tensors: it is damaged."
    sentence = detail.splitlines()[0].partition(". ")[0].removesuffix(".")
    return f"{path} cannot be read as tensors: {sentence[:200]}."
