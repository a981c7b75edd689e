"""The benchmark of rows side by side: its figures by hand, and its table."""

from __future__ import annotations

import torch

from benchmarks import data_plan, degrees
from longctx.batch import Batch, PackedDocuments


def one_row(bounds: list[int]) -> Batch:
    zeros = torch.zeros(1, bounds[-1], dtype=torch.int64)
    return Batch(tokens=zeros, targets=zeros, positions=zeros, document_ids=zeros, documents=PackedDocuments.of(bounds))


def test_two_documents_on_two_ranks_stay_whole():
    placed = degrees.place(one_row([0, 256, 512]), 2, 256)
    assert placed.work == [256 * 257 // 2] * 2
    assert placed.tokens == [256, 256]
    assert (placed.received, placed.ranks, placed.fewest, placed.fewest_even, placed.documents) == (0, 2, 2, 2, 2)


def test_side_by_side_and_with_fixed_degrees(tmp_path):
    data = str(data_plan.make_corpus(tmp_path / "data", 2000))
    found = degrees.measure(data, 4096, 4, 2048, 3)
    assert (found.tokens_per_rank, found.rows, found.narrow_degree, found.micro_batches) == (2048, 2, 2, 3)
    assert 1 <= found.attention_mean <= found.attention_worst <= degrees.LIMIT
    assert found.fewest <= found.fewest_even
    assert found.rows_a_token < found.wide_rows_a_token
    assert found.narrow_attention_mean > found.attention_mean
    tight = degrees.measure(data, 4096, 3, 100, 1)
    assert (tight.tokens_per_rank, tight.rows) == (1408, 1), "what a row needs, in tiles of 128"
