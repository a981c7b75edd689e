"""The order in which `make test` begins with files (``tests/conftest.py``)."""

from __future__ import annotations

from tests.conftest import LONGEST
from tests.lint.style import REPOSITORY


def test_every_file_that_is_named_is_there_and_once():
    assert all((REPOSITORY / file).is_file() for file in LONGEST)
    assert len(set(LONGEST)) == len(LONGEST)
