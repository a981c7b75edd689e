"""Layouts by example and by property."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.errors import ConfigError
from parallel.layout import KINDS, SequenceLayout


def test_contiguous_and_zigzag_by_example():
    assert SequenceLayout.build("contiguous", 12, 3).ranges == (((0, 4),), ((4, 8),), ((8, 12),))
    assert SequenceLayout.build("zigzag", 12, 3).ranges == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 6), (6, 8)))


@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(1, 9), st.integers(0, 1))
def test_join_inverts_split(kind, degree, part, dim):
    tokens = 2 * degree * part
    layout = SequenceLayout.build(kind, tokens, degree)
    x = torch.arange(tokens * 3).view(*((tokens, 3) if dim == 0 else (3, tokens)))
    parts = [layout.split(x, rank, dim) for rank in range(degree)]
    assert {p.shape[dim] for p in parts} == {tokens // degree}
    assert [layout.num_local(r) for r in range(degree)] == [tokens // degree] * degree
    assert torch.equal(layout.join(parts, dim), x)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zigzag", 1000, 3), "Try 996 or 1002"),
        (("contiguous", 2, 3), "Try 3 tokens"),
        (("striped", 12, 2), "not built yet"),
        (("spiral", 12, 2), "contiguous"),
        (("zigzag", 12, 2, None, 2), "ulysses"),
        (("zigzag", 0, 2), "needs tokens"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        SequenceLayout.build(*arguments)


def test_a_tensor_of_another_length_is_refused():
    with pytest.raises(ValueError, match="flatten the rows"):
        SequenceLayout.build("zigzag", 12, 3).split(torch.zeros(2, 6), 0, 1)
