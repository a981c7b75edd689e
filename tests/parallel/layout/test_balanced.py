"""Balanced layouts: equal tokens, even work, few rows that travel, whole documents, boundaries on the grain."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layout.balanced import GRAIN, assign_tokens, cut_chunks, whole_grains
from parallel.layout.sequence import SequenceLayout
from parallel.layout.tokens_per_rank import rows_at_once, tokens_on_ranks
from tests.helpers import lines_run

# Rows of 65,536 tokens packed from the standard library: documents of many sizes, one long, two long.
PACKED = {
    "many": "4239 8291 5012 2009 5138 2944 4001 9482 7036 694 6583 1541 1847 697 413 1387 2336 1377 353 142 14",
    "one long": "4871 4804 2234 1762 2946 460 2831 9389 759 2207 20628 7941 1538 791 1360 161 314 346 130 45 19",
    "several": "8496 1764 2456 13258 8104 1775 17131 871 8806 709 663 1014 406 82 1",
    "two long": "30627 32138 1246 1471 54",
}


def bounds(lengths):
    return [0, *np.cumsum([int(n) for n in lengths.split()]).tolist()]


def work_and_rows(layout, cu_seqlens, *, causal=True):
    """For each rank the query-key pairs it computes and the rows it needs of others, token by token."""
    cu, work, rows = np.asarray(cu_seqlens), [], []
    for rank in range(layout.degree):
        tokens = layout.indices(rank).numpy()
        document = np.searchsorted(cu, tokens, side="right") - 1
        seen = tokens - cu[document] + 1 if causal else np.diff(cu)[document]
        work.append(int(seen.sum()))
        rows.append(sum(int(seen[document == d].max()) for d in np.unique(document)) - len(tokens))
    return work, rows


def figures(kind, num_tokens, degree, cu_seqlens, *, causal=True):
    """Imbalance and rows of all ranks."""
    layout = SequenceLayout.build(kind, num_tokens, degree, cu_seqlens, causal=causal)
    work, rows = work_and_rows(layout, cu_seqlens, causal=causal)
    return max(work) * degree / sum(work), sum(rows)


GRAINS = st.one_of(st.integers(1, 20), st.sampled_from([65, 131, 192])).map(lambda n: 128 * n)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.one_of(st.integers(1, 300), GRAINS), st.data())
def test_every_rank_gets_equally_many_tokens_in_whole_grains(degree, share, data):
    tokens = degree * share
    cu_seqlens = sorted([0, *data.draw(st.lists(st.integers(0, tokens), max_size=12)), tokens])
    assigned = assign_tokens(tokens, degree, cu_seqlens)
    assert assigned == assign_tokens(tokens, degree, sorted(set(cu_seqlens))), "empty documents change nothing"
    assert [sum(count for _, count in pieces) for pieces in assigned] == [share] * degree
    everything = sorted(piece for pieces in assigned for piece in pieces)
    assert [start for start, _ in everything] == [0, *np.cumsum([count for _, count in everything])[:-1].tolist()]
    for pieces in assigned:
        assert all(a + n < b for (a, n), (b, _) in pairwise(pieces)), "ascending, not adjoining"
        if share % 128 == 0:
            assert all(start % 128 == count % 128 == 0 for start, count in pieces)


@given(st.integers(2, 5), st.integers(1, 40), st.booleans(), st.data())
def test_chunks_know_their_work(degree, share, causal, data):
    tokens = degree * share
    cu_seqlens = sorted({0, *data.draw(st.lists(st.integers(0, tokens), max_size=8)), tokens})
    chunks = cut_chunks(tokens, degree, np.asarray(cu_seqlens), causal=causal)
    document = torch.repeat_interleave(torch.tensor(cu_seqlens).diff())
    mask = document[:, None] == document
    seen = (mask.tril() if causal else mask).sum(1)
    first = int(chunks.start[0])
    assert chunks.work.tolist() == seen[first:].view(-1, chunks.size).sum(1).tolist()
    odd = seen[:first].view(degree, -1).sum(1) if first else torch.zeros(degree)
    assert chunks.remainder_work.tolist() == odd.tolist()
    assert len(chunks.start) == chunks.per_rank * degree


def test_packed_rows_are_even_and_send_little():
    """Against zigzag within every document, which is even too and sends ¾ of what a plain ring does."""
    for degree in (8, 16):
        measured = {name: figures("balanced", 65_536, degree, bounds(row)) for name, row in PACKED.items()}
        for name, (imbalance, rows) in measured.items():
            assert imbalance <= 1.05, (name, degree)
            assert rows <= 0.5 * 0.75 * 65_536 * (degree - 1), (name, degree)
        zigzag = [figures("zigzag", 65_536, degree, bounds(row)) for row in PACKED.values()]
        assert min(imbalance for imbalance, _ in zigzag) > 1.15, "these rows need dealing"
        # Zigzag of the whole row sends little because it is uneven; we are even and send less.
        assert sum(rows for _, rows in measured.values()) <= 0.9 * sum(rows for _, rows in zigzag), degree


def test_packed_rows_of_both_sides_are_even_and_send_little():
    """By their own work, n² a document, of which causal layouts know nothing."""
    for degree in (8, 16):
        measured = {
            name: figures("balanced", 65_536, degree, bounds(row), causal=False) for name, row in PACKED.items()
        }
        assert all(imbalance <= 1.05 for imbalance, _ in measured.values()), degree
        zigzag = {}
        for name, row in PACKED.items():
            layout = SequenceLayout.build("zigzag", 65_536, degree, bounds(row))
            work, rows = work_and_rows(layout, bounds(row), causal=False)
            zigzag[name] = max(work) * degree / sum(work), sum(rows)
        assert min(imbalance for imbalance, _ in zigzag.values()) > 1.05, "these rows need dealing"
        sent = [sum(rows for _, rows in figures.values()) for figures in (measured, zigzag)]
        assert sent[0] <= 0.85 * sent[1], degree


@pytest.mark.parametrize(("tokens", "degree"), [(65_536, 8), (8 * 8191, 8), (15, 3)])
def test_one_document_of_both_sides_is_cut_once_a_rank(tokens, degree):
    layout = SequenceLayout.build("balanced", tokens, degree, causal=False)
    assert layout.runs == SequenceLayout.build("contiguous", tokens, degree).runs
    assert figures("balanced", tokens, degree, [0, tokens], causal=False)[0] == 1.0


@pytest.mark.parametrize(
    ("tokens", "degree"), [(65_536, 2), (65_520, 3), (65_520, 5), (65_520, 7), (65_536, 8), (65_536, 16), (4096, 8)]
)
def test_one_document_is_assigned_head_and_tail(tokens, degree):
    layout = SequenceLayout.build("balanced", tokens, degree)
    assert layout.runs == SequenceLayout.build("zigzag", tokens, degree).runs
    assert figures("balanced", tokens, degree, [0, tokens])[0] <= 1.001


@pytest.mark.parametrize("tokens", [13 * 39 * 128, 8 * 8191])
def test_one_document_that_does_not_halve_is_even_too(tokens):
    assert figures("balanced", tokens, 13 if tokens % 13 == 0 else 8, [0, tokens])[0] <= 1.02


def test_rows_of_one_batch_stay_apart():
    """Two rows of one document over 8 ranks travel as zigzag's would with 4 ranks a row."""
    imbalance, rows = figures("balanced", 65_536, 8, [0, 32_768, 65_536])
    assert imbalance == 1.0
    assert rows == 2 * figures("zigzag", 32_768, 4, [0, 32_768])[1]


def test_documents_that_fit_stay_whole():
    equal = SequenceLayout.build("balanced", 65_536, 8, [8192 * i for i in range(9)])
    assert equal.runs == SequenceLayout.build("contiguous", 65_536, 8).runs
    assert figures("balanced", 65_536, 8, [4096 * i for i in range(17)]) == (1.0, 0)


def test_a_million_tokens_of_two_thousand_documents_over_64_ranks():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 2000)
    cu_seqlens = [0, *(np.cumsum(lengths) / lengths.sum() * (1 << 20)).astype(int).tolist()[:-1], 1 << 20]
    # Once a batch, and no loop goes over tokens.
    assert lines_run(lambda: SequenceLayout.build("balanced", 1 << 20, 64, cu_seqlens)) < (1 << 20) // 10
    layout = SequenceLayout.build("balanced", 1 << 20, 64, cu_seqlens)
    work, _ = work_and_rows(layout, cu_seqlens)
    assert max(work) * 64 / sum(work) <= 1.05
    assert sum(len(runs) for runs in layout.runs) <= 5 * 64


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 4), st.integers(1, 9000))
def test_ranks_hold_equally_many_and_no_more_than_they_may(seq_len, ring, ulysses, tokens_per_rank):
    ranks = ring * ulysses
    rows = rows_at_once(seq_len, ranks, tokens_per_rank)
    assert rows * seq_len <= ranks * tokens_per_rank < (rows + 1) * seq_len
    if not rows:
        return
    tokens = tokens_on_ranks(rows * seq_len, ranks, ulysses=ulysses, tokens_per_rank=tokens_per_rank)
    each, rest = divmod(tokens, ranks)
    assert not rest
    assert each <= tokens_per_rank
    assert 0 <= tokens - rows * seq_len < ranks * (1 + GRAIN)
    # The least number of whole grains, or the least number where there is no room for them.
    least = -(-rows * seq_len // ranks)
    in_grains = [n for n in range(least, each + 1) if whole_grains(n * ulysses)]
    assert in_grains == [each] or (in_grains == [] and each == least)
    layout = SequenceLayout.build("balanced", tokens, ranks, [0, rows * seq_len, tokens], ulysses)
    assert {layout.num_local(rank) for rank in range(ranks)} == {each}


@pytest.mark.parametrize(
    ("tokens", "ranks", "ulysses", "most", "padded"),
    [
        (8192, 4, 1, 8192, 8192),
        (4096, 3, 1, 2048, 3 * 1368),  # 1366 is twice a prime; 1368 is 19 grains of 72
        (4096, 3, 1, 1366, 3 * 1366),  # no room for two more
        (4096, 6, 2, 2048, 6 * 684),  # two ranks hold the 1368 of a ring rank
        (7, 2, 1, 8, 8),
        (7, 1, 1, 8, 7),
    ],
)
def test_examples_of_rows_side_by_side(tokens, ranks, ulysses, most, padded):
    assert tokens_on_ranks(tokens, ranks, ulysses=ulysses, tokens_per_rank=most) == padded
