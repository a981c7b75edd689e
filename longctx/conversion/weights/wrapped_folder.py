"""A multi-part model's weights, under the names of a standalone text model."""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.conversion.weights.weights_folder import WeightsFolder
from longctx.families.wrapped import Wrapper


class WrappedFolder(WeightsFolder):
    """Folder view that presents the text model as a standalone one; tensors from other parts keep their names."""

    def __init__(self, disk: WeightsFolder, wrapper: Wrapper) -> None:
        """Wrap ``disk``, the folder as stored."""
        self.folder, self._disk = disk.folder, disk
        # Within one model type, names depend on the writer; each folder uses one naming.
        self.name_map = wrapper.select_name_map(disk.names())
        self._stored = {self.name_map.plain(name): name for name in disk.names()}

    def files(self) -> set[str]:
        return self._disk.files()

    def names(self) -> set[str]:
        """Return all tensor names, as next to a standalone text model."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._disk.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._disk.dtype(self._stored[name])

    def read(self, name: str) -> Tensor:
        return self._disk.read(self._stored[name])

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return self._disk.stored_dtype(self._stored[name])

    def read_stored(self, name: str) -> Tensor:
        return self._disk.read_stored(self._stored[name])
