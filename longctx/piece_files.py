"""The safetensors files of a checkpoint: their headers compared with the manifest, and the values of their pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.checkpoint_manifest import VALUE_BYTES, Piece
from longctx.errors import CheckpointError
from longctx.files import check_link
from longctx.storage.blocks import BlockReader
from longctx.storage.safetensors import HeaderLimits, SafetensorsFile
from longctx.tensor_bytes import as_bytes

_HEADER_BYTES, _ENTRY_BYTES = 2 * 2**20, 1024
"""What the header of a file of pieces takes at most: what a writer reserves, and for each piece."""
_FEW_VALUES, _ENTRY_VALUES = 100_000, 16
"""Values of JSON in it at most: a few that are no piece's, and for each piece."""
_SCRATCH_VALUES = 1 << 20
"""Values on their way into memory that a file cannot be read into."""
_ADVICE = "`longctx checkpoint verify` names every damaged file; resume from an older checkpoint."


class PieceFiles:
    """The files that hold the pieces of a checkpoint, opened when they are first needed."""

    def __init__(
        self, folder: Path, files: dict[str, dict[str, Any]], pieces: Iterable[Piece], *, past_cache: bool
    ) -> None:
        """``files`` are the manifest's entries, ``pieces`` all that lie in them.

        Files that are read once go ``past_cache``: it would cost time, and memory that others use.
        """
        self.folder, self._listed = folder, files
        self._num_pieces = Counter(piece.file for piece in pieces)
        self._files: dict[str, SafetensorsFile] = {}
        self._blocks = BlockReader(past_cache=past_cache)

    def place(self, piece: Piece) -> int:
        """Return the first byte of a piece in its file; CheckpointError unless it is there as the manifest says."""
        entry = self._opened(piece.file).entry(piece.key)
        if entry is None:
            raise CheckpointError(
                f"{self.folder / piece.file} has no tensor {piece.key}. Take another checkpoint; "
                "`longctx checkpoint verify` says whether it is whole."
            )
        if (entry.dtype, entry.shape) != ("F32", (piece.numel,)):
            raise CheckpointError(
                f"{piece.key} in {self.folder / piece.file} is {entry.dtype} {list(entry.shape)}; "
                f"the manifest says F32 [{piece.numel}]."
            )
        return entry.start

    def read_into(self, file: str, start: int, out: Tensor) -> None:
        """Fill ``out``, flat, of any dtype and on any device, with float32 values of a file from byte ``start``.

        ``place`` has opened it. CheckpointError if the bytes are not those that were written: none of them is used.
        """
        opened = self._files[file]
        if out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous():
            opened.read_into(start, as_bytes(out))
            return
        scratch = torch.empty(min(_SCRATCH_VALUES, len(out)))
        for at in range(0, len(out), len(scratch)):
            values = scratch[: len(out) - at]
            opened.read_into(start + VALUE_BYTES * at, as_bytes(values))
            out[at : at + len(values)].copy_(values)

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._blocks.close()

    def _opened(self, file: str) -> SafetensorsFile:
        """Return a file of this manifest, its header read; CheckpointError for a link, a size or a header that lies."""
        if file not in self._files:
            if problem := link_problem(self.folder, file):
                raise CheckpointError(problem)
            listed, num_pieces = self._listed[file], self._num_pieces[file]
            # Whatever a stranger says, before memory is taken for it.
            limits = HeaderLimits(_HEADER_BYTES + num_pieces * _ENTRY_BYTES, _FEW_VALUES + num_pieces * _ENTRY_VALUES)
            self._files[file] = SafetensorsFile(
                self.folder / file,
                self._blocks,
                num_bytes=listed["bytes"],
                hashes=listed.get("blocks"),
                limits=limits,
                advice=_ADVICE,
            )
        return self._files[file]


def link_problem(folder: Path, file: str) -> str:
    """Return what is wrong with a file that is a link: it must not make us read elsewhere. Empty if all is well."""
    if (folder / file).is_symlink():
        try:
            check_link(folder, file, CheckpointError)
        except CheckpointError as error:
            return str(error)
    return ""
