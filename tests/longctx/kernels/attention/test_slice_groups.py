"""Short documents of one length in one call: the groups cover a table in order, and results do not change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice, slice_groups, slice_table, table_slices

LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=12)


def documents(lengths: list[int], *, causal: bool) -> list[AttentionSlice]:
    found, start = [], 0
    for length in lengths:
        stop = start + length
        found.append(AttentionSlice(start, stop, start, stop, 0 if causal else None))
        start = stop
    return found


def one_query_each(lengths: list[int]) -> list[AttentionSlice]:
    keys = documents(lengths, causal=False)
    return [AttentionSlice(n, n + 1, one.k_start, one.k_stop) for n, one in enumerate(keys)]


@given(LENGTHS, st.sampled_from(["causal", "full", "one query each"]), st.integers(0, 20))
def test_groups_are_the_table_in_order(lengths: list[int], kind: str, max_rows: int):
    slices = one_query_each(lengths) if kind == "one query each" else documents(lengths, causal=kind == "causal")
    table, unfolded = slice_table(slices), []
    groups = slice_groups(table, max_rows)
    for group in groups:
        first, rows, keys = group.first, group.queries, group.keys
        assert group.num_slices == 1 or max(rows.stop - rows.start, keys.stop - keys.start) <= max_rows
        steps = first.q_stop - first.q_start, first.k_stop - first.k_start
        for n in range(group.num_slices):
            unfolded.append(first.shifted(queries=n * steps[0], keys=n * steps[1])._replace(offset=0))
    assert tuple(unfolded) == table_slices(table)
    if len(set(lengths)) == 1 and sum(lengths) <= max_rows:
        assert len(groups) == 1


def test_results_of_one_query_each_are_the_reference_s():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 7, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 27, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    table, scores, found = slice_table(one_query_each([5, 5, 5, 1, 1, 5, 5])), ScoreRules(scale=0.3), []
    for kernel in (CpuFlashKernel(), ReferenceKernel()):
        out, lse = kernel.forward(q, k, v, table, scores=scores)
        found.append((out, lse, *kernel.backward(q, q, k, v, out, lse, table, scores=scores)[:3]))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[5] * 9, [5, 5, 7, 5, 5, 5, 1, 1], [3]], ids=str)
def test_results_and_gradients_are_the_reference_s(lengths: list[int], causal: bool):
    generator, total = torch.Generator().manual_seed(0), sum(lengths)
    q, k, v, dout = (
        torch.randn(1, total, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    # Some keys are seen a second time, so rows of groups and of single slices are merged.
    slices = documents(lengths, causal=causal)
    again = AttentionSlice(0, total, 0, lengths[0]) if len(lengths) > 1 else None
    scores, found = ScoreRules(scale=0.3), []
    slices = [s for s in slices if again is None or s.q_start] + ([again] if again else [])
    table = slice_table(slices)
    for kernel in (CpuFlashKernel(), ReferenceKernel()):
        out, lse = kernel.forward(q, k, v, table, scores=scores)
        found.append((out, lse, *kernel.backward(dout, q, k, v, out, lse, table, scores=scores)[:3]))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= 1e-12
