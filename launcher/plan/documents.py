"""The documents of a planned micro-batch, when the data need not exist yet."""

from __future__ import annotations

from launcher.config.resolved import ResolvedConfig
from longctx.batch import PackedDocuments


def documents_of(config: ResolvedConfig, document_tokens: int = 0) -> PackedDocuments:
    """``train.micro_batch_rows`` full rows of documents of this length; 0 is a row each."""
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    length = min(document_tokens or tokens, tokens)
    # A row's last document is shorter where the length does not divide it; no document crosses rows.
    bounds = [row * tokens + start for row in range(rows) for start in range(0, tokens, length)]
    return PackedDocuments((*bounds, rows * tokens))
