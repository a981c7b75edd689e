"""Slices as varlen calls: exactly the slices' cells, disjoint rows in a call, few calls, quickly."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.kernels.attention.flash.calls import UNBOUNDED, VarlenCall
from longctx.kernels.attention.flash.calls import slices_to_calls as translate_table
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from tests.longctx.kernels.attention.kernel_cases import any_slices, band_matrix

ROWS = 14


def translate(slices, **options):
    return translate_table(slice_table(slices), **options)


def rows_of(rows, total):
    return torch.arange(total)[rows]


def sequences(call: VarlenCall, total):
    """(query rows, key rows, visible [sq, sk]) of each sequence, as a flash kernel does."""
    q_rows, k_rows = rows_of(call.queries, total), rows_of(call.keys, total)
    assert len(q_rows) == call.num_queries == int(call.cu_seqlens_q[-1])
    assert len(k_rows) == call.num_keys == int(call.cu_seqlens_k[-1])
    assert len(q_rows.unique()) == len(q_rows), "query rows of a call must be disjoint"
    assert len(k_rows.unique()) == len(k_rows), "key rows of a call must be disjoint"
    assert {call.cu_seqlens_q.dtype, call.cu_seqlens_k.dtype} == {torch.int32}
    bounds_q, bounds_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for n in range(len(bounds_q) - 1):
        q, k = q_rows[bounds_q[n] : bounds_q[n + 1]], k_rows[bounds_k[n] : bounds_k[n + 1]]
        sq, sk = len(q), len(k)
        assert 0 < sq <= call.max_seqlen_q
        assert 0 < sk <= call.max_seqlen_k
        distance = torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)
        visible = torch.ones(sq, sk, dtype=torch.bool)
        if call.left != UNBOUNDED:
            visible &= distance <= call.left
        if call.right != UNBOUNDED:
            visible &= distance >= -call.right
        assert visible.any(1).all(), "a row without a key must not reach a kernel"
        yield q, k, visible


def covered(calls, total=ROWS):
    seen = torch.zeros(total, total, dtype=torch.int64)
    touched = torch.zeros(total, dtype=torch.bool)
    for call in calls:
        assert call.left >= UNBOUNDED
        assert call.right >= UNBOUNDED
        rows = rows_of(call.queries, total)
        assert call.is_first == (not touched[rows].any())
        touched[rows] = True
        for q, k, visible in sequences(call, total):
            seen[q[:, None], k] += visible
    return seen


slice_lists = st.lists(any_slices(ROWS), max_size=6)


@given(slice_lists)
@settings(max_examples=150, deadline=None)
def test_calls_cover_exactly_the_slices(slices):
    wanted = band_matrix(slices, ROWS, ROWS)
    assert torch.equal(covered(translate(slices)), wanted)
    assert torch.equal(covered(translate(slices, relative_positions=True)), wanted)


@given(slice_lists)
@settings(max_examples=100, deadline=None)
def test_distances_follow_the_rows(slices):
    """Σ over the cells of a distance is the slices' own."""
    exact, found = torch.zeros(ROWS, ROWS), torch.zeros(ROWS, ROWS)
    for p in slices:
        distance = p.step * (torch.arange(ROWS)[:, None] - torch.arange(ROWS)) + p.offset
        exact += distance * band_matrix([p], ROWS, ROWS)
    for call in translate(slices, relative_positions=True):
        for n, (q, k, visible) in enumerate(sequences(call, ROWS)):
            here = call.steps[n] * (torch.arange(len(q))[:, None] - torch.arange(len(k))) + call.offsets[n]
            found[q[:, None], k] += here * visible
    torch.testing.assert_close(found, exact)


def documents(*lengths, hi=None):
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return tuple(AttentionSlice(a, b, a, b, 0, hi) for a, b in pairwise(starts))


def test_documents_are_one_call_on_slices():
    (call,) = translate(documents(5, 1, 7, 1))
    assert (call.queries, call.keys) == (slice(0, 14), slice(0, 14))
    assert (call.left, call.right, call.is_first) == (UNBOUNDED, 0, True)
    assert call.cu_seqlens_q.tolist() == [0, 5, 6, 13, 14]
    (call,) = translate(documents(5, 1, 7, 1, hi=2))  # short documents join the window of the long ones
    assert (call.left, call.right) == (2, 0)


def test_gaps_are_gathered():
    (call,) = translate((AttentionSlice(0, 3, 4, 6), AttentionSlice(5, 6, 9, 12)))
    assert rows_of(call.queries, 20).tolist() == [0, 1, 2, 5]
    assert rows_of(call.keys, 20).tolist() == [4, 5, 9, 10, 11]


def test_overlapping_rectangles_are_calls_of_their_own():
    """A document's chunks that see growing prefixes of another rank's rows; chunks that see the same keys are one."""
    slices = [AttentionSlice(0, 3, 0, 2), AttentionSlice(3, 6, 0, 2), AttentionSlice(6, 9, 0, 4)]
    calls = translate(slices)
    assert len(calls) == 2
    assert torch.equal(covered(calls), band_matrix(slices, ROWS, ROWS))
    # neighbouring keys of the same rows are one sequence
    slices = [AttentionSlice(0, 3, 0, 2), AttentionSlice(0, 3, 2, 7)]
    (call,) = translate(slices)
    assert call.cu_seqlens_k.tolist() == [0, 7]


@pytest.mark.parametrize("chunk", [2, 5])
def test_windows_over_chunks_take_few_calls(chunk):
    """Chunks of one document against another rank's rows of it, a window wider than a chunk: overlapping bands."""
    window, total = 11, 60
    slices = []
    for n in range(0, total // chunk):
        q, start = n * chunk, 2 * n * chunk + chunk  # every other chunk of the document is here, the rest there
        for m in range(n + 1):
            offset = (start - q) - (2 * m * chunk - m * chunk)
            slices.append(
                AttentionSlice(q, q + chunk, m * chunk, m * chunk + chunk, -offset, window - 1 - offset, 1, offset)
            )
    calls = translate(slices)
    assert torch.equal(covered(calls, total), band_matrix(slices, total, total))
    assert len(calls) <= 8


def test_many_kinds_of_windows_are_few_calls():
    """Twenty off-diagonal corners of different sizes need no call each."""
    slices = [AttentionSlice(20 * n, 20 * n + 10, 20 * n, 20 * n + 18, None, n - 6) for n in range(20)]
    assert len(translate(slices)) <= 4
    assert torch.equal(covered(translate(slices), 420), band_matrix(slices, 420, 420))


def test_translation_is_quick_and_cached():
    slices = documents(*([37, 1, 200, 13] * 500))
    translate(documents(3))
    start = time.thread_time()
    calls = translate(slices)
    first = time.thread_time() - start
    start = time.thread_time()
    assert translate(slices) is calls
    again = time.thread_time() - start
    assert len(calls) == 1
    assert first < 0.1, f"{first:.3f} s for 2000 documents"  # about 0.006 s on an idle core
    assert again < 0.001
