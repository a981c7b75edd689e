from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.parts.source_parts import hash_parts, part_bytes, split_into_parts
from data_pipeline.prepare.source_items import File, full_piece


@given(sizes=st.lists(st.integers(0, 50)), most=st.integers(1, 60))
def test_parts_are_the_source_in_order_and_no_larger_than_they_must_be(sizes: list[int], most: int):
    pieces = [full_piece(File(Path(f"/{n}"), str(n), size)) for n, size in enumerate(sizes)]
    parts = split_into_parts(pieces, most)
    assert [piece for part in parts for piece in part.pieces] == pieces
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(len(part.pieces) == 1 or part.size <= most for part in parts)
    # The next part's first piece did not fit any more.
    for part, following in itertools.pairwise(parts):
        assert part.size + following.pieces[0].size > most
    assert hash_parts(parts) == hash_parts(split_into_parts(pieces, most))


def test_the_hash_tells_parts_apart():
    pieces = [full_piece(File(Path(f"/{n}"), str(n), 10)) for n in range(4)]
    hashes = {hash_parts(split_into_parts(pieces[:count], 20)) for count in range(5)}
    assert len(hashes) == 5


def test_a_shard_of_any_size_finds_text_for_it_in_a_part():
    assert part_bytes(1000) == source_parts.PART_BYTES
    assert part_bytes(1 << 28) == 1 << 30
