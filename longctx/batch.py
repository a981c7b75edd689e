"""What the data pipeline hands to the model: rows of packed documents, targets already shifted.

Axes: B rows, T tokens a row; a small t is one rank's shard of T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longctx.documents import PackedDocuments

IGNORED_TARGET = -100
"""Target of a token whose prediction is not counted: a document's last token and padding."""

PADDING_DOCUMENT = -1
"""Entry of ``Batch.document_ids`` for padding tokens."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows of documents, ready to be split between ranks token by token.

    All four per-token tensors have shape [B, T] (or [B, t] after a split) and are cut together, so targets and
    positions never depend on where a shard ends. ``documents`` stay global.
    """

    tokens: Tensor
    """Token ids, int64."""
    targets: Tensor
    """The token that follows in the same document, int64; ``IGNORED_TARGET`` where there is none."""
    positions: Tensor
    """Position of the token in its document, int64, restarting from 0 at every entry of ``cu_seqlens``."""
    document_ids: Tensor
    """Index of the token's document in ``documents``, int64; ``PADDING_DOCUMENT`` for padding."""
    documents: PackedDocuments
    """The documents, or pieces of some, of the flattened B·T tokens. Attention never crosses a boundary, and every
    multiple of T is one. Padding at a row's end is a document of its own."""
    row_tokens: int = 0
    """Length of the rows that were laid end to end in one; 0 while each is a row of its own."""
    placement: Any = None
    """Where the tokens of all ranks live (``parallel.layout.SequenceLayout``), of a batch that was split between them;
    None of a whole one."""

    @property
    def cu_seqlens(self) -> Tensor:
        """The boundaries of ``documents``: int64 [num_documents + 1] on the CPU, ascending from 0 to B·T."""
        return self.documents.cu_seqlens

    @property
    def num_targets(self) -> int:
        """Tokens whose prediction counts in the loss."""
        return int((self.targets != IGNORED_TARGET).sum())

    def flatten_rows(self) -> Batch:
        """The same tokens as one row [1, B·T]: the shape that a sequence layout splits."""
        flat = self.map_tokens(lambda x: x.reshape(1, -1))
        # Experts' capacity is counted by rows, so their length is remembered; flat twice is flat once.
        return replace(flat, row_tokens=self.row_tokens or self.tokens.shape[1])

    def map_tokens(self, change) -> Batch:
        """A batch whose four per-token tensors went through ``change``; ``documents`` stay as they are."""
        # One list of names: a tensor that was cut without the others would shift targets against tokens.
        names = ("tokens", "targets", "positions", "document_ids")
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def to(self, device: torch.device) -> Batch:
        """The per-token tensors on ``device``; ``documents`` stay on the CPU, where schedules are built."""
        return self.map_tokens(lambda x: x.to(device, non_blocking=True))
