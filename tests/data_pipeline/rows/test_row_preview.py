"""What a survey says of rows: the counts of the loader's own, and the work that its ranks will have."""

from __future__ import annotations

import numpy as np
import pytest

from data_pipeline.loader import build_loader
from data_pipeline.rows.micro_batches import MicroBatches
from data_pipeline.rows.order import FolderOrder
from data_pipeline.rows.row_preview import preview_rows
from data_pipeline.rows.row_reader import RowReader
from data_pipeline.shards.reader import ShardSet
from tests.data_pipeline.lengths import write_lengths

SEQ_LEN, RANKS, ROWS = 128, 3, 12


def cost(lengths) -> int:
    return sum(n * (50 + n) for n in lengths)


@pytest.fixture(scope="module")
def shards(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    lengths = [1 + (37 * n * n) % 300 for n in range(200)]
    return write_lengths(tmp_path_factory.mktemp("survey") / "shards", tokenizer, lengths)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("options", [{}, {"cost": cost}])
def test_the_work_is_that_of_the_loaders_ranks(shards: ShardSet, options, lockstep):
    dealt = MicroBatches.assign(ROWS, most_rows=2, data_degree=RANKS)
    found = preview_rows(
        FolderOrder(shards, SEQ_LEN),
        RowReader(shards, SEQ_LEN),
        dealt,
        cost,
        documents=1 << 20,
        sync_per_micro_batch=lockstep,
    )
    factors = found.work.balanced if options else found.work.in_order
    assert len(factors) == found.packing.rows // ROWS
    loaders = [
        build_loader(
            shards.folder,
            seq_len=SEQ_LEN,
            rows_per_step=ROWS,
            micro_batch_rows=2,
            data_rank=rank,
            data_degree=RANKS,
            sync_per_micro_batch=lockstep,
            **options,
        )
        for rank in range(RANKS)
    ]
    for factor in factors:
        work = np.array([[cost(documents.lengths) for documents in loader.next_documents()] for loader in loaders])
        # What ranks wait for: the busiest one of the step, or of each micro-batch.
        waited = work.max(0).sum() if lockstep else work.sum(1).max()
        assert factor == pytest.approx(waited * RANKS / work.sum())
        for loader in loaders:
            for _ in range(loader.micro_batches_per_step):
                next(loader)


def test_tokens_by_length_are_all_tokens_of_the_rows(shards: ShardSet):
    found = preview_rows(
        FolderOrder(shards, SEQ_LEN),
        RowReader(shards, SEQ_LEN),
        MicroBatches.assign(1, most_rows=1),
        cost,
        documents=1 << 20,
        steps=10**6,
    )
    assert sum(found.piece_tokens.values()) == shards.num_tokens
    exponents = [int(key.removeprefix("2^")) for key in found.piece_tokens]
    assert exponents == sorted(exponents)
    assert exponents[0] == 0
    # A full row is the longest piece.
    assert exponents[-1] == 7
    assert found.steps_of_epoch == found.packing.rows
    assert set(found.work.in_order) == {1.0}


def test_an_epoch_shorter_than_a_step_has_no_work_to_compare(shards: ShardSet):
    found = preview_rows(
        FolderOrder(shards, SEQ_LEN),
        RowReader(shards, SEQ_LEN),
        MicroBatches.assign(10**5, most_rows=1, data_degree=2),
        cost,
        documents=1,
    )
    assert found.work.in_order == found.work.balanced == []
    assert 0 < found.steps_of_epoch < 1
