"""Our loader, and bare copies from a memory map: an upper limit for any loader of 32-bit or 64-bit ids."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.delivering.contender import Contender, Delivery, Tokens
from data_pipeline.loader import Loader, build_loader
from data_pipeline.rows.row_batches import Share
from data_pipeline.shards.reader import ShardSet, shard_tokens
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch

SHARDS = "shards"
"""Shard folder within a corpus folder."""
STEP_TOKENS = 1 << 20
"""Tokens per step, in micro-batches with one row each."""
BATCH_TOKENS = 1 << 16
"""Tokens per micro-batch, if it has several rows."""
OURS, OURS_CHECKED, OURS_UNPACKED = "longctx", "longctx, checked before", "longctx, checked before, unpacked"
OURS_BATCHED = f"longctx, checked before, micro-batches of {BATCH_TOKENS:,} tokens"
COPY, WIDE_COPY = "bare copy to int32", "bare copy to int64"


def whole(documents: PackedDocuments) -> Share:
    """Place all tokens of a micro-batch on one rank."""
    return Share(documents, [(0, documents.num_tokens, 1)], None)


def deliver(loader: Loader) -> Iterator[CompactBatch]:
    """Yield rows in the order in which a training step takes them."""
    while True:
        yield loader.take(whole).share


def _open_ours(shards: ShardSet, seq_len: int, rows_at_once: int = 1) -> Delivery:
    rows_per_step = max(1, STEP_TOKENS // seq_len)
    loader = build_loader(shards, seq_len=seq_len, rows_per_step=rows_per_step, micro_batch_rows=rows_at_once)
    return Delivery(deliver(loader), loader.state_dict, rows_at_once)


def open_ours(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open as in a training run's first epoch: each checksum block is verified when it is first read."""
    return _open_ours(ShardSet.open(corpus / SHARDS), seq_len)


@cache
def _checked(folder: Path) -> ShardSet:
    """Open a shard folder and verify every checksum block."""
    shards = ShardSet.open(folder)
    for number in range(len(shards.manifest.shards)):
        shard_tokens(shards, number)
    return shards


def open_ours_checked(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open as in a training run's later epochs: no checksum block is verified again."""
    return _open_ours(_checked(corpus / SHARDS), seq_len)


def open_ours_batched(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with several short rows per micro-batch, as a training run with short rows has them."""
    return _open_ours(_checked(corpus / SHARDS), seq_len, max(1, BATCH_TOKENS // seq_len))


def open_ours_unpacked(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with batches unpacked to what a training step on the CPU computes on."""
    delivery = _open_ours(_checked(corpus / SHARDS), seq_len)
    return Delivery((batch.unpack() for batch in delivery.rows), delivery.state)


def _open_copy(corpus: Path, seq_len: int, dtype: type) -> Delivery:
    ids = Tokens.load(corpus).ids()
    at = 0

    def rows() -> Iterator[torch.Tensor]:
        nonlocal at
        while True:
            if at + seq_len + 1 > len(ids):
                at = 0
            # The token after the last one is its target.
            yield torch.from_numpy(ids[at : at + seq_len + 1].astype(dtype))
            at += seq_len

    return Delivery(rows(), lambda: at)


def open_copy(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Yield rows in file order."""
    return _open_copy(corpus, seq_len, np.int32)


def open_wide_copy(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Yield the same in int64."""
    return _open_copy(corpus, seq_len, np.int64)


_GIVES = "tokens uint16 as in the shards, one behind each run; boundaries"

HERE = (
    Contender(COPY, open_copy, "tokens int32, one of them more: shifted, they are the targets", "end to end, cut"),
    Contender(WIDE_COPY, open_wide_copy, "the same, int64", "end to end, cut"),
    Contender(OURS, open_ours, f"{_GIVES}; checksums compared", "best fit"),
    Contender(OURS_CHECKED, open_ours_checked, _GIVES, "best fit"),
    Contender(OURS_BATCHED, open_ours_batched, _GIVES, "best fit"),
    Contender(
        OURS_UNPACKED, open_ours_unpacked, "tokens, targets, positions, document ids int64; boundaries", "best fit"
    ),
)
