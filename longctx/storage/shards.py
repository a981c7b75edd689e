"""Write weights into safetensors files of bounded size, shard by shard."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longctx.errors import CheckpointError
from longctx.storage.safetensors import SafetensorsWriter

_BLOCK_VALUES = 1 << 24


class ShardWriter:
    """Writes tensors into safetensors files of about ``shard_bytes``, as they come: memory holds none of them.

    A shard is read back as soon as it is full, which finds a disk that changes bytes. ``finish`` names the files.
    """

    def __init__(self, folder: Path, stem: str, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes={shard_bytes} must be positive, for example 5_000_000_000.")
        self.folder, self.stem, self.shard_bytes = folder, stem, shard_bytes
        self.total_bytes = 0
        self._shard: SafetensorsWriter | None = None
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor."""
        tensor = tensor.detach().to("cpu")
        self.add_flat(name, tensor.reshape(-1), tensor.dtype, tuple(tensor.shape))

    def add_flat(self, name: str, values: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Take a tensor by its flattened values, cast to ``dtype`` a block at a time."""
        if values.numel() != torch.Size(shape).numel():
            raise ValueError(f"{name}: {values.numel()} values for shape {shape}")
        num_bytes = values.numel() * dtype.itemsize
        shard = self._shard_for(name, num_bytes)
        # Cast block by block: a copy of a whole tensor in another dtype would double its memory.
        shard.add(name, dtype, shape, values.split(_BLOCK_VALUES))
        self._shards[-1].append(name)
        self.total_bytes += num_bytes

    def finish(self) -> dict[str, str]:
        """Tensor -> file name; a single shard is called ``STEM.safetensors``."""
        if not self._shards:
            # A model without tensors is a file without tensors.
            self._shard_for("", 0)
        self._close()
        # Only now is their number known, which stands in every name.
        count = len(self._shards)
        file_of: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"{self.stem}.safetensors"
            if count > 1:
                file = f"{self.stem}-{number:05d}-of-{count:05d}.safetensors"
            self._unnamed(number).rename(self.folder / file)
            file_of |= dict.fromkeys(names, file)
        return file_of

    def _shard_for(self, name: str, num_bytes: int) -> SafetensorsWriter:
        """The open shard, or a new one when this tensor would make it too large."""
        shard = self._shard
        if shard is not None and shard.num_tensors:
            is_full = shard.data_bytes + num_bytes > self.shard_bytes
            if is_full or not shard.fits_header(name):
                self._close()
        if self._shard is None:
            self._shards.append([])
            self._shard = SafetensorsWriter(self._unnamed(len(self._shards)))
        return self._shard

    def _close(self) -> None:
        """Finish the open shard."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()

    def _unnamed(self, number: int) -> Path:
        """The path of a shard before ``finish`` gives it its name."""
        return self.folder / f"{self.stem}-{number:05d}.safetensors.partial"
