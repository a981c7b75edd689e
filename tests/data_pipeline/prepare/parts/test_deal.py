from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.documents import File, whole
from data_pipeline.prepare.parts import deal
from data_pipeline.prepare.parts.deal import deal_parts, hash_parts, part_bytes


@given(sizes=st.lists(st.integers(0, 50)), most=st.integers(1, 60))
def test_parts_are_the_source_in_order_and_no_larger_than_they_must_be(sizes: list[int], most: int):
    pieces = [whole(File(Path(f"/{n}"), str(n), size)) for n, size in enumerate(sizes)]
    parts = deal_parts(pieces, most)
    assert [piece for part in parts for piece in part.pieces] == pieces
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(len(part.pieces) == 1 or part.size <= most for part in parts)
    # The next part's first piece did not fit any more.
    for part, following in itertools.pairwise(parts):
        assert part.size + following.pieces[0].size > most
    assert hash_parts(parts) == hash_parts(deal_parts(pieces, most))


def test_the_hash_tells_parts_apart():
    pieces = [whole(File(Path(f"/{n}"), str(n), 10)) for n in range(4)]
    hashes = {hash_parts(deal_parts(pieces[:count], 20)) for count in range(5)}
    assert len(hashes) == 5


def test_a_shard_of_any_size_finds_text_for_it_in_a_part():
    assert part_bytes(1000) == deal.PART_BYTES
    assert part_bytes(1 << 28) == 1 << 30
