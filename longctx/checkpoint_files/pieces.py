"""The safetensors files of a checkpoint: their headers compared with the manifest, and the values of their pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.checkpoint_files.blocks import BlockReader
from longctx.checkpoint_manifest import VALUE_BYTES, Piece
from longctx.errors import CheckpointError
from longctx.files import check_link
from longctx.tensor_bytes import as_bytes
from longctx.untrusted.reading import parse_json
from longctx.untrusted.tensor_header import Entry, header_entries

_HEADER_BYTES, _ENTRY_BYTES = 2 * 2**20, 1024
"""What the header of a file of pieces takes at most: what a writer reserves, and for each piece."""
_FEW_VALUES, _ENTRY_VALUES = 100_000, 16
"""Values of JSON in it at most: a few that are no piece's, and for each piece."""
_SCRATCH_VALUES = 1 << 20
"""Values on their way into memory that a file cannot be read into."""
_ADVICE = "Take another checkpoint; `longctx checkpoint verify` says whether it is whole."


class PieceFiles:
    """The files that hold the pieces of a checkpoint, opened when they are first needed."""

    def __init__(
        self, folder: Path, files: dict[str, dict[str, Any]], pieces: Iterable[Piece], *, past_cache: bool
    ) -> None:
        """``files`` are the manifest's entries, ``pieces`` all that lie in them.

        Files that are read once go ``past_cache``: it would cost time, and memory that others use.
        """
        self.folder, self._files = folder, files
        self._num_pieces = Counter(piece.file for piece in pieces)
        self._entries: dict[str, dict[str, Entry]] = {}
        self._blocks = BlockReader(past_cache=past_cache)

    def place(self, piece: Piece) -> int:
        """The first byte of a piece in its file; CheckpointError where it is not there as the manifest says."""
        entry = self._opened(piece.file).get(piece.key)
        if entry is None:
            raise CheckpointError(f"{self.folder / piece.file} has no tensor {piece.key}. {_ADVICE}")
        if (entry.dtype, entry.shape) != ("F32", (piece.numel,)):
            raise CheckpointError(
                f"{piece.key} in {self.folder / piece.file} is {entry.dtype} {list(entry.shape)}; "
                f"the manifest says F32 [{piece.numel}]."
            )
        return entry.start

    def read_into(self, file: str, start: int, out: Tensor) -> None:
        """Fill ``out``, flat, of any dtype and on any device, with float32 values of a file from byte ``start``.

        ``place`` has opened it. CheckpointError where the bytes are not those that were written: none of them is used.
        """
        if out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous():
            self._blocks.read_into(file, start, as_bytes(out))
            return
        scratch = torch.empty(min(_SCRATCH_VALUES, len(out)))
        for at in range(0, len(out), len(scratch)):
            values = scratch[: len(out) - at]
            self._blocks.read_into(file, start + VALUE_BYTES * at, as_bytes(values))
            out[at : at + len(values)].copy_(values)

    def close(self) -> None:
        """Close the files."""
        self._entries.clear()
        self._blocks.close()

    def _opened(self, file: str) -> dict[str, Entry]:
        """The entries of a file by key; CheckpointError where it is not one of this manifest."""
        if file not in self._entries:
            if problem := link_problem(self.folder, file):
                raise CheckpointError(problem)
            try:
                self._entries[file] = self._read_header(file)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{self.folder / file} cannot be read: {error}.\n"
                    "`longctx checkpoint verify` names every damaged file; resume from an older checkpoint."
                ) from error
        return self._entries[file]

    def _read_header(self, file: str) -> dict[str, Entry]:
        """Open a file and read its header; ValueError or OSError where it is none."""
        path, listed = self.folder / file, self._files[file]
        # To open a pipe that nobody writes to would hang.
        if not path.is_file():
            raise FileNotFoundError("it is missing, or no plain file")
        self._blocks.add(path, listed["bytes"], listed.get("blocks"))
        length = torch.zeros(8, dtype=torch.uint8)
        self._blocks.read_into(file, 0, length)
        header_bytes, num_pieces = int.from_bytes(bytes(length.tolist()), "little"), self._num_pieces[file]
        # Whatever a stranger says, before memory is taken for it.
        if header_bytes > _HEADER_BYTES + num_pieces * _ENTRY_BYTES or 8 + header_bytes > listed["bytes"]:
            raise ValueError(
                f"it has a header of {header_bytes:,} bytes, and the manifest names {num_pieces:,} pieces in it"
            )
        header = torch.zeros(header_bytes, dtype=torch.uint8)
        self._blocks.read_into(file, 8, header)
        content = parse_json(header.numpy().tobytes(), most_values=_FEW_VALUES + num_pieces * _ENTRY_VALUES)
        return header_entries(content, 8 + header_bytes, listed["bytes"])


def link_problem(folder: Path, file: str) -> str:
    """What is wrong with a file that is a link: it must not make us read elsewhere. Empty where all is well."""
    if (folder / file).is_symlink():
        try:
            check_link(folder, file, CheckpointError)
        except CheckpointError as error:
            return str(error)
    return ""
