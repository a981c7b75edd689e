from __future__ import annotations

import pytest

from data_pipeline.prepare.duplicates.rule import DuplicateRule, shares_a_band
from longctx.errors import DataError


@pytest.mark.parametrize("similarity", [0.1, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("permutations", [64, 128, 300])
def test_pairs_at_the_threshold_are_compared(similarity: float, permutations: int):
    bands, rows = DuplicateRule(kind="near", similarity=similarity, permutations=permutations).bands()
    assert bands * rows <= permutations
    assert shares_a_band(similarity, bands, rows) >= 0.99
    # One value more in a band, and too many would be missed.
    if rows < permutations:
        assert shares_a_band(similarity, permutations // (rows + 1), rows + 1) < 0.99


def test_the_default_is_what_every_release_did():
    assert DuplicateRule().options() == {}
    assert not DuplicateRule().finds
    assert DuplicateRule(kind="exact").options() == {"duplicates": {"kind": "exact"}}
    near = {"kind": "near", "similarity": 0.8, "shingles": "9 characters", "permutations": 128}
    assert DuplicateRule(kind="near", shingles="characters").options() == {"duplicates": near}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "all"}, r"duplicates=all is not known. Try keep, together, exact, near"),
        ({"kind": "near", "shingles": "lines"}, r"shingles=lines is not known. Try words, characters"),
        ({"kind": "near", "similarity": 0.05}, r"similarity=0.05 must be from 0.1 to 1"),
        ({"kind": "near", "similarity": float("nan")}, r"similarity=nan must be"),
        ({"kind": "near", "permutations": 8}, r"permutations=8 must be from 16 to 4096"),
        ({"kind": "near", "shingle_size": 0}, r"shingle_size=0 must be from 1 to 1000. Try 5"),
        ({"kind": "exact", "similarity": 0.7}, r"duplicates=exact looks for none.\nAsk for near"),
        ({"shingle_size": 3}, r"duplicates=keep looks for none"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str):
    with pytest.raises(DataError, match=message):
        DuplicateRule(**options)
