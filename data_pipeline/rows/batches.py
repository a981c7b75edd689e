"""Build a ``Batch`` from packed rows: tokens, shifted targets, positions, documents."""

from __future__ import annotations

import numpy as np
import torch

from data_pipeline.shards.reader import ShardSet
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments

Pieces = list[tuple[int, int, int]]
"""One row: document, start, stop of each piece."""


def build_batch(shards: ShardSet, rows: list[Pieces], seq_len: int) -> Batch:
    """Rows of pieces as a ``Batch`` [len(rows), seq_len]; a row without pieces is all padding.

    Reads only the pieces, and one token beyond each that was cut: that token is the target of the piece's last one.
    """
    num_tokens = len(rows) * seq_len
    shards.check_files({document for row in rows for document, _, _ in row})
    # Everything starts as padding, and each piece overwrites its part.
    tokens = np.full(num_tokens, shards.manifest.padding, dtype=np.int64)
    targets = np.full(num_tokens, IGNORED_TARGET, dtype=np.int64)
    bounds, is_padding = _bounds(rows, seq_len)
    for number, row in enumerate(rows):
        first = number * seq_len
        for document, start, stop in row:
            # One token more than the piece has, unless the document ends here: the last target of a document's end
            # stays ignored, that of a cut is the next token.
            ids = shards.slice(document, start, stop + 1)
            tokens[first : first + stop - start] = ids[: stop - start]
            # Shifted here, before any rank cuts the row: a target may lie on another rank than its token.
            targets[first : first + len(ids) - 1] = ids[1:]
            first += stop - start
    # Padding is a document of its own for attention, and no document for losses and routers.
    sizes = np.diff(bounds)
    document_ids = np.where(is_padding, PADDING_DOCUMENT, np.arange(len(sizes)))
    # Positions restart with each piece, also with one that continues a document: its row does not hold the beginning.
    positions = np.arange(num_tokens) - np.repeat(bounds[:-1], sizes)
    shape = (len(rows), seq_len)
    return Batch(
        tokens=torch.from_numpy(tokens.reshape(shape)),
        targets=torch.from_numpy(targets.reshape(shape)),
        positions=torch.from_numpy(positions.reshape(shape)),
        document_ids=torch.from_numpy(np.repeat(document_ids, sizes).reshape(shape)),
        documents=PackedDocuments.of(bounds),
    )


def documents_of(rows: list[Pieces], seq_len: int) -> PackedDocuments:
    """The documents of such a batch; nothing is read."""
    return PackedDocuments.of(_bounds(rows, seq_len)[0])


def _bounds(rows: list[Pieces], seq_len: int) -> tuple[list[int], list[bool]]:
    """Boundaries of pieces and of the padding behind a row's last one, and which of them are padding."""
    bounds: list[int] = [0]
    is_padding: list[bool] = []
    for number, row in enumerate(rows, start=1):
        for _, start, stop in row:
            bounds.append(bounds[-1] + stop - start)
            is_padding.append(False)
        if bounds[-1] < number * seq_len:
            bounds.append(number * seq_len)
            is_padding.append(True)
    return bounds, is_padding
