"""``PackedDocuments``: what it counts, what it accepts and what it refuses, in one wording."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.errors import ConfigError
from tests.oracles import packed_batch

lengths_of_documents = st.lists(st.integers(0, 50), max_size=20)


def bounds_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


@given(lengths_of_documents)
def test_counts_are_those_of_the_lengths(lengths):
    documents = PackedDocuments.of(bounds_of(lengths))
    assert documents.lengths == tuple(lengths)
    assert documents.num_documents == len(lengths)
    assert documents.num_tokens == sum(lengths)
    assert documents.longest == max(lengths, default=0)
    assert documents.cu_seqlens.dtype == torch.int64
    assert documents.cu_seqlens.tolist() == list(documents.bounds)


@given(lengths_of_documents)
def test_from_lengths_they_are_the_same(lengths):
    made, documents = PackedDocuments.of_lengths(lengths), PackedDocuments.of(bounds_of(lengths))
    assert vars(made) == vars(documents)
    assert (made, hash(made)) == (documents, hash(documents))


@given(lengths_of_documents, st.data())
def test_what_lies_within_is_found_document_by_document(lengths, data):
    documents = PackedDocuments.of(bounds_of(lengths))
    start = data.draw(st.integers(0, documents.num_tokens))
    stop = data.draw(st.integers(0, documents.num_tokens))
    clipped = [
        (number, max(start, first), min(stop, last)) for number, (first, last) in enumerate(pairwise(documents.bounds))
    ]
    assert documents.within(start, stop) == [(number, a, b) for number, a, b in clipped if a < b]


@given(lengths_of_documents)
def test_lists_tensors_and_itself_are_the_same_documents(lengths):
    bounds = bounds_of(lengths)
    documents = PackedDocuments.of(bounds, sum(lengths))
    for given_bounds in (
        tuple(bounds),
        torch.tensor(bounds),
        torch.tensor(bounds, dtype=torch.int32),
        np.array(bounds),
    ):
        other = PackedDocuments.of(given_bounds)
        assert other == documents
        assert hash(other) == hash(documents)
        assert all(type(bound) is int for bound in other.bounds)
    assert PackedDocuments.of(documents) is documents
    assert PackedDocuments.of(documents, sum(lengths)) is documents
    assert PackedDocuments.of(documents.cu_seqlens) == documents


@given(lengths_of_documents, lengths_of_documents)
def test_equal_are_those_of_equal_lengths_alone(one, other):
    assert (PackedDocuments.of(bounds_of(one)) == PackedDocuments.of(bounds_of(other))) == (one == other)


@given(st.lists(st.integers(-5, 60), max_size=12), st.none() | st.integers(0, 60))
def test_boundaries_ascend_from_0_to_the_end_or_are_refused(bounds, num_tokens):
    ascend = bounds[:1] == [0] and bounds == sorted(bounds)
    if ascend and num_tokens in (None, bounds[-1]):
        assert PackedDocuments.of(bounds, num_tokens).bounds == tuple(bounds)
        return
    for given_bounds in (bounds, torch.tensor(bounds, dtype=torch.int64)):
        with pytest.raises(ConfigError, match=r"cu_seqlens must ascend from 0.*\(\d+ entries\)"):
            PackedDocuments.of(given_bounds, num_tokens)


@pytest.mark.parametrize(
    ("bounds", "num_tokens", "said"),
    [
        ([0, 2.5, 8], 8, "Entry 1 is 2.5. Give a whole number"),
        (torch.tensor([[0, 8]]), 8, "Entry 0 is [0, 8]. Give a whole number"),
        (PackedDocuments.of([0, 5]), 8, "the sequence's 8 tokens; got [0, 5]"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_would_be_right(bounds, num_tokens, said):
    with pytest.raises(ConfigError) as refusal:
        PackedDocuments.of(bounds, num_tokens)
    assert said in str(refusal.value)


def test_one_document_and_rows_of_one_each():
    assert PackedDocuments.of(None, 7) == PackedDocuments.of([0, 7])
    assert PackedDocuments.of_rows(3, 4) == PackedDocuments.of([0, 4, 8, 12])
    assert PackedDocuments.of_rows(0, 4).num_tokens == 0


def test_the_hash_of_many_documents_is_computed_once(monkeypatch):
    documents, known = PackedDocuments.of_rows(1000, 1), {}
    known[documents] = "here"
    monkeypatch.setattr("longctx.batch.hash", lambda _: pytest.fail("hashed again"), raising=False)
    assert known[documents] == "here"


def is_document(batch: Batch) -> list[bool]:
    """For each document whether its first token says that it is one: none is empty here."""
    starts = torch.tensor(batch.documents.bounds[:-1])
    return (batch.document_ids.flatten()[starts] != PADDING_DOCUMENT).tolist()


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20), st.integers(0, 70))
def test_padding_is_no_document_when_the_longest_is_looked_for(kinds, more):
    lengths, is_padding = [n for n, _ in kinds], [padding for _, padding in kinds]
    longest = max((n for n, padding in kinds if not padding), default=0)
    numbers = tuple(number for number, padding in enumerate(is_padding) if padding)
    given = PackedDocuments.of_lengths(lengths, numbers)
    assert (given.longest, given.padding) == (longest, numbers)
    ids = torch.cat([torch.full((n,), -1 if padding else 3) for n, padding in kinds] or [torch.zeros(0)])
    found = PackedDocuments.of(bounds_of(lengths)).with_padding(ids[None])
    assert (found.longest, found.lengths) == (longest, given.lengths)
    assert found.padding == tuple(number for number in numbers if lengths[number]), "no token says so of an empty one"
    assert PackedDocuments.of(bounds_of(lengths)).with_padding(torch.ones(1, sum(lengths) + 1)).padding is None
    padded = given.padded(given.num_tokens + more)
    assert (padded.longest, padded.num_tokens) == (longest, given.num_tokens + more)
    assert padded.padding == (*numbers, *range(given.num_documents, padded.num_documents))


def test_padding_is_a_document_without_targets_behind_the_last_row():
    batch = packed_batch(rows=2, seq_len=12, vocab_size=9, seed=1)
    padded = batch.padded(29)
    assert padded.documents.bounds == (*batch.documents.bounds, 29)
    assert (padded.row_tokens, padded.tokens.shape) == (12, (1, 29))
    for name in ("tokens", "targets", "positions", "document_ids"):
        assert torch.equal(getattr(padded, name)[:, :24], getattr(batch, name).reshape(1, -1)), name
    assert padded.targets[0, 24:].tolist() == [IGNORED_TARGET] * 5
    assert padded.positions[0, 24:].tolist() == [0, 1, 2, 3, 4]
    assert padded.document_ids[0, 24:].tolist() == [PADDING_DOCUMENT] * 5
    assert padded.num_targets == batch.num_targets
    longest = batch.documents.longest
    assert longest == max(n for n, own in zip(batch.documents.lengths, is_document(batch), strict=True) if own)
    much = batch.padded(24 + 2 * longest + 1)
    assert much.documents.longest == longest, "what goes by the longest document goes on as it was"
    assert much.documents.lengths[-3:] == (longest, longest, 1)
    assert much.positions[0, 24:].tolist() == [*range(longest), *range(longest), 0]
    whole = batch.padded(24)
    assert whole.documents is batch.documents
    assert torch.equal(whole.tokens, batch.flatten_rows().tokens)
