"""Documents left out by length."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.documents import Document
from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.reading import Lengths
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError


@given(st.text("a\u00e9\u20ac\U0001f600", max_size=12), st.integers(0, 20), st.integers(1, 40) | st.none())
def test_bytes_are_counted_and_not_characters(text: str, least: int, most: int | None):
    if most is not None and most < least:
        most = least
    problem = Lengths(min_bytes=least, max_bytes=most).problem(Document("x", text))
    size = len(text.encode())
    expected = None
    if size < least:
        expected = "too short"
    elif most is not None and size > most:
        expected = "too long"
    assert (problem and problem.reason) == expected


def test_they_are_listed_and_are_another_source(tmp_path: Path):
    for name, text in (("a", "x"), ("b", "xx\u20ac"), ("c", "x" * 9), ("d", "x" * 10)):
        (tmp_path / name).write_text(text)
    source = open_source(tmp_path, lengths=Lengths(min_bytes=5, max_bytes=9))
    noted = []
    assert [document.name for document in source.read(noted.append)] == ["b", "c"]
    assert [(skip.name, skip.reason, skip.detail) for skip in noted] == [
        ("a", "too short", "1 bytes"),
        ("d", "too long", "10 bytes"),
    ]
    fingerprint = source.fingerprint()
    assert (fingerprint["min_bytes"], fingerprint["max_bytes"]) == (5, 9)
    # Folders of earlier releases are up to date still.
    assert not {"min_bytes", "max_bytes"} & open_source(tmp_path).fingerprint().keys()


def test_of_joined_files_the_whole_counts(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("xxxx")
    assert len(list(open_source(tmp_path, join=Join(), lengths=Lengths(min_bytes=8)))) == 1
    with pytest.raises(DataError, match="2 too short"):
        list(open_source(tmp_path, lengths=Lengths(min_bytes=8)))


@pytest.mark.parametrize("bounds", [{"min_bytes": -1}, {"max_bytes": 0}, {"min_bytes": 5, "max_bytes": 4}])
def test_bounds_that_leave_nothing_are_refused(bounds: dict):
    with pytest.raises(DataError, match="must be at least"):
        Lengths(**bounds)
