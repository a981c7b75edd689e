"""Batches beside a plain reading of their pieces, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.rows.pack import Piece, Row
from data_pipeline.rows.row_batches import Share, build_batch, build_share
from data_pipeline.shards import reader
from data_pipeline.shards.reader import Corpus, ShardSet
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments
from longctx.compact_batch import CompactBatch, DocumentEnd
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.lengths import write_lengths

LENGTHS = (1, 2, 7, 63, 64, 65, 200, 3, 128, 31, 1)


@pytest.fixture(scope="module", params=[False, True], ids=["all count", "some count"])
def odd(request, built: Path, tmp_path_factory) -> ShardSet:
    """Documents of odd lengths in several shards."""
    folder = tmp_path_factory.mktemp("odd") / "shards"
    return write_lengths(folder, load_tokenizer(built), list(LENGTHS), shard_tokens=300, masked=request.param)


@st.composite
def some_rows(draw) -> tuple[list[Row], int]:
    """Rows of pieces anywhere in their documents, with padding behind them, and the rows' length."""
    row_tokens = draw(st.integers(1, 150))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row, left = [], row_tokens
        while left and draw(st.integers(0, 4)):
            document = draw(st.integers(0, len(LENGTHS) - 1))
            start = draw(st.integers(0, LENGTHS[document] - 1))
            stop = min(LENGTHS[document], start + draw(st.integers(1, left)))
            row.append((document, start, stop))
            left -= stop - start
        rows.append(Row.of(row))
    return rows, row_tokens


def mask_of(corpus: ShardSet, document: int) -> list[bool]:
    """Whether each token of a document counts."""
    length = len(corpus.document(document))
    bounds = corpus.target_runs(document)
    if bounds is None:
        return [True] * length
    runs = bounds.reshape(-1, 2).tolist()
    return [any(start <= place < stop for start, stop in runs) for place in range(length)]


def plain_tokens(corpus: ShardSet, rows: list[Row], row_tokens: int) -> list[tuple[int, int, int, int]]:
    """Token, target, position and document of each token of the rows."""
    found, number = [], 0
    for row in rows:
        for document, start, stop in row:
            ids, counts = corpus.document(document).tolist(), mask_of(corpus, document)
            for place in range(start, stop):
                target = IGNORED_TARGET
                if place + 1 < len(ids) and counts[place + 1]:
                    target = ids[place + 1]
                found.append((ids[place], target, place - start, number))
            number += 1
        missing = row_tokens - sum(stop - start for _, start, stop in row)
        if missing:
            found += [(corpus.padding, IGNORED_TARGET, place, PADDING_DOCUMENT) for place in range(missing)]
            number += 1
    return found


def check_both_ways(compact: CompactBatch) -> None:
    """What a GPU looks up is what the CPU copies."""
    copied, each = compact.copied(), compact.unpack_by_lookup("cpu")
    assert list(copied) == list(each)
    assert all(torch.equal(copied[name], each[name]) for name in copied)


@settings(deadline=None, max_examples=150)
@given(case=some_rows())
def test_a_batch_is_what_its_pieces_are(odd, case):
    rows, row_tokens = case
    compact = build_batch(odd, rows, row_tokens)
    batch, wanted = compact.unpack(), plain_tokens(odd, rows, row_tokens)
    columns = (batch.tokens, batch.targets, batch.positions, batch.document_ids)
    assert all(x.shape == (len(rows), row_tokens) and x.dtype == torch.int64 for x in columns)
    assert list(zip(*(x.flatten().tolist() for x in columns), strict=True)) == wanted
    assert compact.num_targets == batch.num_targets
    assert [compact.num_mtp_targets(n) for n in (1, 3)] == [batch.num_mtp_targets(n) for n in (1, 3)]
    assert compact.num_tokens == sum(document >= 0 for _, _, _, document in wanted)
    check_both_ways(compact)


@settings(deadline=None, max_examples=150)
@given(case=some_rows(), data=st.data())
def test_a_share_is_its_tokens_of_that(odd, case, data):
    rows, row_tokens = case
    total = len(rows) * row_tokens
    # Disjoint runs, each with a step of its own.
    runs, at = [], 0
    while at < total and data.draw(st.integers(0, 3)):
        start = data.draw(st.integers(at, total - 1))
        step = data.draw(st.integers(1, 4))
        count = data.draw(st.integers(1, 1 + (total - 1 - start) // step))
        runs.append((start, count, step))
        at = start + (count - 1) * step + 1
    compact, _ = build_share(odd, rows, row_tokens, lambda documents: Share(documents, runs, None))
    wanted = plain_tokens(odd, rows, row_tokens)
    batch = compact.unpack()
    columns = (batch.tokens, batch.targets, batch.positions, batch.document_ids)
    own = [wanted[start + nth * step] for start, count, step in runs for nth in range(count)]
    assert list(zip(*(x.flatten().tolist() for x in columns), strict=True)) == own
    assert compact.num_targets == batch.num_targets
    assert [compact.num_mtp_targets(n) for n in (1, 3)] == [batch.num_mtp_targets(n) for n in (1, 3)]
    assert compact.num_tokens == sum(document >= 0 for _, _, _, document in own)
    documents = {document for _, _, _, document in wanted} - {-1}
    lengths = compact.documents.lengths
    assert set(range(len(lengths))) - set(compact.documents.padding or ()) >= documents
    assert compact.documents.longest == max((lengths[number] for number in documents), default=0)
    check_both_ways(compact)


def test_each_document_says_its_source(odd):
    corpus = Corpus((odd, odd, odd))
    first = odd.num_documents
    rows = [Row.of([(first + 6, 0, 20), (3, 2, 9)]), Row.of([(2 * first + 2, 0, 7)]), Row()]
    batch = build_batch(corpus, rows, 30).unpack()
    assert batch.sources is not None
    assert batch.sources.tolist() == [1, 0, -1, 2, -1, -1]
    assert build_batch(odd, [Row.of([(3, 0, 9)])], 30).unpack().sources is None


@settings(deadline=None, max_examples=60)
@given(case=some_rows(), folders=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_documents_of_several_folders_come_in_their_order(odd, case, folders):
    rows, row_tokens = case
    of_piece = cycle(folders)
    strewn = [
        Row.of((next(of_piece) * len(LENGTHS) + document, start, stop) for document, start, stop in row) for row in rows
    ]
    one, several = build_batch(odd, rows, row_tokens), build_batch(Corpus((odd, odd, odd)), strewn, row_tokens)
    for name in ("ids", "spans", "ends", "bounds"):
        assert torch.equal(getattr(one, name), getattr(several, name))


@dataclass(frozen=True)
class TypedShards:
    """Documents of which each is read in a type of its own, as those that are filled in are beside others."""

    shards: ShardSet
    types: tuple[type, ...]
    padding: int = 3
    first_documents: tuple[int, ...] = (0,)
    is_masked: bool = False

    def counted(self, index: int) -> None:
        return None

    def check_files(self, documents) -> None:
        self.shards.check_files(documents)

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        return self.shards.lengths_of(documents)

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        return self.shards.slice(index, start, stop).astype(self.types[index % len(self.types)])

    def slices(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        return [self.slice(document, start, stop) for document, start, stop in pieces]


@settings(deadline=None, max_examples=60)
@given(case=some_rows(), types=st.lists(st.sampled_from([np.uint16, np.uint32, np.int32]), min_size=1, max_size=4))
@pytest.mark.parametrize("step", [1, 3])
def test_ids_are_the_same_whatever_types_they_are_read_in(odd, case, types, step):
    rows, row_tokens = case
    run = (0, 1 + (len(rows) * row_tokens - 1) // step, step)
    typed = TypedShards(odd, tuple(types), odd.padding)
    found, wanted = (
        build_share(shards, rows, row_tokens, lambda documents: Share(documents, [run], None))[0]
        for shards in (typed, odd)
    )
    assert found.ids.dtype in (torch.uint16, torch.int32)
    assert torch.equal(found.ids.long(), wanted.ids.long())


def test_each_file_is_looked_at_once_for_a_batch(odd, monkeypatch):
    looked_at: list[str] = []

    def watched(shard, entry) -> bool:
        looked_at.append(shard.path.name)
        return True

    rows = [Row.of((document, 0, 1) for document in (*range(len(LENGTHS)), 0, 10))] * 3
    build_batch(odd, rows, 13)
    monkeypatch.setattr(reader, "_is_current", watched)
    build_batch(odd, rows, 13)
    assert sorted(looked_at) == sorted(entry.file for entry in odd.manifest.shards)


def test_there_is_no_document_before_the_first(odd):
    with pytest.raises(IndexError):
        odd.slices([(-1, 0, 1)])
    with pytest.raises(IndexError):
        odd.slices([(0, 0, 1), (len(LENGTHS), 0, 1)])


def test_the_largest_ids_are_looked_up_and_copied():
    """Above 32,767 the bits of an unsigned number are those of a negative one."""
    ids, documents = [0, 32_767, 32_768, 65_535, 1, 7], PackedDocuments((0, 2, 5))
    for dtype in (torch.uint16, torch.int32):
        compact = CompactBatch(
            ids=torch.tensor(ids, dtype=dtype),
            spans=torch.tensor([[0, 5, 1, 0]]),
            ends=torch.tensor([DocumentEnd.COMPLETE, DocumentEnd.CUT], dtype=torch.uint8),
            bounds=documents.cu_seqlens,
            documents=documents,
            shape=(1, 5),
            num_targets=4,
            num_tokens=5,
        )
        check_both_ways(compact)
        batch = compact.unpack()
        assert batch.tokens.tolist() == [ids[:5]]
        assert batch.targets.tolist() == [[32_767, IGNORED_TARGET, 65_535, 1, 7]]


def test_two_bytes_a_token_travel(odd):
    rows = [Row.of([(6, 0, 200)])] * 50
    compact = build_batch(odd, rows, 200)
    batch = compact.unpack()
    unpacked = sum(x.nbytes for x in (batch.tokens, batch.targets, batch.positions, batch.document_ids))
    runs = 0
    if compact.target_runs is not None:
        runs = compact.target_runs.nbytes
    assert compact.nbytes - runs < 2.5 * batch.tokens.numel()
    assert unpacked == 32 * batch.tokens.numel()
