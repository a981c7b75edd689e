"""Decisions over whole corpora, compared with what all pairs say."""

from __future__ import annotations

import itertools
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.prepare.duplicates import duplicate_groups as groups_module
from data_pipeline.prepare.duplicates import signed as corpus_module
from data_pipeline.prepare.duplicates.decide import Decision, are_held_out, decide, is_held_out
from data_pipeline.prepare.duplicates.duplicate_groups import find_copies, find_groups
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule, shares_a_band
from data_pipeline.prepare.duplicates.outcome import save_outcome
from data_pipeline.prepare.duplicates.signatures import band_keys, similarity
from data_pipeline.prepare.duplicates.signed import SignedCorpus, SignedPart, SignedRecord, SignedWriter
from longctx.errors import DataError
from tests.data_pipeline.prepare.duplicates.oracle import edited, sign

NEAR = DuplicateRule(kind="near")
FRACTION = 0.4


def signed(folder: Path, texts: Sequence[str], rule: DuplicateRule, cuts: Sequence[int] = ()) -> SignedCorpus:
    """The texts as a corpus of parts that end at these places."""
    borders = [0, *sorted(cuts), len(texts)]
    parts = []
    for number, (start, stop) in enumerate(itertools.pairwise(borders)):
        writer = SignedWriter(folder / str(number), rule)
        for at in range(start, stop):
            writer.add(f"{at}.txt", texts[at])
        assert writer.finish() == SignedRecord.load(folder / str(number))
        parts.append(SignedPart(folder / str(number), stop - start, rule))
    return SignedCorpus(parts)


def families(seed: int, count: int, changes: float = 0.03) -> list[str]:
    """Texts of which some are copies of others, and some edited ones, in chains; and some very short ones."""
    draw = random.Random(seed)
    texts: list[str] = ["", "!", "a", "a b", "a  b!"]
    for _ in range(count):
        kind = draw.random()
        if kind < 0.3 or len(texts) < 8:
            texts.append(" ".join(f"w{draw.randrange(900)}" for _ in range(draw.choice([4, 7, 40, 120]))))
        elif kind < 0.5:
            texts.append(draw.choice(texts))
        else:
            texts.append(edited(draw.choice(texts), draw.uniform(0, changes), draw))
    draw.shuffle(texts)
    return texts


def check(texts: list[str], rule: DuplicateRule, found: Decision) -> None:
    """Everything that must hold of a decision, pair by pair."""
    signatures = sign(texts, rule)
    removal = found.removal
    removed = set(removal.documents.tolist())
    stays = [number for number in range(len(texts)) if number not in removed]
    assert removal.documents.tolist() == sorted(removed)
    # Of equal texts exactly one stays, or none where a similar one does.
    assert len({texts[number] for number in stays}) == len(stays)
    for document, kept, is_exact, alike in zip(
        removal.documents, removal.kept, removal.is_exact, removal.similarity, strict=True
    ):
        assert kept not in removed
        assert is_exact == (texts[document] == texts[kept])
        if is_exact:
            assert kept < document
            assert alike == 1
        else:
            assert alike == similarity(signatures[[document]], signatures[[kept]])[0] >= rule.similarity
            size, kept_size = len(texts[document].encode()), len(texts[kept].encode())
            assert (kept_size, -kept) > (size, -document)
    # Similar texts that are compared do not both stay, and do not fall on different sides.
    keys = band_keys(signatures, *rule.bands())
    sides = {number: is_held_out(hash_of(texts[number]), FRACTION) for number in stays}
    sides.update(zip(found.assigned.tolist(), found.is_held_out.tolist(), strict=True))
    assert set(sides) == set(stays)
    for first in range(len(texts)):
        others = np.arange(first + 1, len(texts))
        near = similarity(np.repeat(signatures[[first]], len(others), axis=0), signatures[others]) >= rule.similarity
        near &= (keys[others] == keys[first]).any(axis=1)
        for second in others[near].tolist():
            assert first in removed or second in removed


def hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.8]), st.lists(st.integers(0, 45), max_size=3))
def test_a_decision_holds_for_every_pair_and_does_not_depend_on_the_parts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, threshold: float, cuts: list[int]
):
    rule = DuplicateRule(kind="near", similarity=threshold)
    texts = [text for text in families(seed, 40) if text]
    folder = tmp_path_factory.mktemp("signed")
    found = decide(signed(folder / "a", texts, rule), rule, FRACTION)
    check(texts, rule, found)
    cuts = [min(cut, len(texts)) for cut in cuts]
    other = decide(signed(folder / "b", texts, rule, cuts), rule, FRACTION)
    assert all((a == b).all() for a, b in zip(arrays(found), arrays(other), strict=True))


def arrays(found: Decision) -> list[np.ndarray]:
    removal = found.removal
    return [removal.documents, removal.kept, removal.is_exact, removal.similarity, found.assigned, found.is_held_out]


def test_groups_fall_on_one_side_whether_they_are_kept_or_not(tmp_path: Path):
    texts = [text for text in families(3, 200) if len(text) > 3]
    together = DuplicateRule(kind="together")
    corpus = signed(tmp_path, texts, together, [50, 50, 90])
    found = decide(corpus, together, FRACTION)
    assert not len(found.removal.documents)
    sides = {number: is_held_out(hash_of(text), FRACTION) for number, text in enumerate(texts)}
    before = dict(sides)
    sides.update(zip(found.assigned.tolist(), found.is_held_out.tolist(), strict=True))
    signatures = sign(texts, together)
    keys = band_keys(signatures, *together.bands())
    crossed = moved = 0
    for first in range(len(texts)):
        for second in range(first):
            if similarity(signatures[[first]], signatures[[second]])[0] >= 0.8 and (keys[first] == keys[second]).any():
                crossed += before[first] != before[second]
                moved += 1
                assert sides[first] == sides[second]
    # By their own hashes many of these pairs would stand on both sides.
    assert moved / 2 > crossed > 10
    # And both sides get groups.
    assert 0 < found.is_held_out.mean() < 1


def test_of_equal_texts_the_first_stays_and_nothing_else_goes(tmp_path: Path):
    texts = families(5, 150)
    rule = DuplicateRule(kind="exact")
    found = decide(signed(tmp_path, texts, rule, [3, 70]), rule, FRACTION)
    first = {text: texts.index(text) for text in texts}
    expected = [number for number, text in enumerate(texts) if first[text] != number]
    assert found.removal.documents.tolist() == expected
    assert found.removal.kept.tolist() == [first[texts[number]] for number in expected]
    assert found.removal.is_exact.all()
    assert found.largest_group == max(texts.count(text) for text in texts)
    assert not len(found.assigned)


def test_texts_whose_hashes_agree_in_64_bits_are_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rule = DuplicateRule(kind="exact")
    corpus = signed(tmp_path, ["a", "b", "a", "cc", "b"], rule)
    facts = np.array(corpus.parts[0].document_rows)
    facts["low"] = 7
    monkeypatch.setattr(SignedPart, "document_rows", property(lambda _: facts))
    assert find_copies(corpus).tolist() == [0, 1, 0, 3, 1]
    facts["high"] = 7
    # And the lengths differ still.
    assert find_copies(corpus).tolist() == [0, 0, 0, 3, 0]


def test_a_chain_keeps_its_ends(tmp_path: Path):
    """A resembles B and B resembles C, but A does not resemble C: B goes, and both others stay on one side."""
    words = [f"w{number}" for number in range(400)]
    chain = [" ".join(words[start : start + 200]) + " end" * extra for start, extra in ((0, 9), (12, 0), (24, 5))]
    rule = DuplicateRule(kind="near", similarity=0.85)
    found = decide(signed(tmp_path, chain, rule), rule, FRACTION)
    assert found.removal.documents.tolist() == [1]
    assert found.assigned.tolist() == [0, 2]
    assert len(set(found.is_held_out.tolist())) == 1
    assert (found.num_groups, found.largest_group) == (1, 3)


def test_slices_of_keys_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = families(9, 200)
    corpus = signed(tmp_path, texts, NEAR, [100, 130])
    whole = decide(corpus, NEAR, FRACTION)
    assert len(whole.removal.documents) > 50
    monkeypatch.setattr(corpus_module, "SLICE_DOCUMENTS", 40)
    monkeypatch.setattr(groups_module, "_PAIRS_AT_ONCE", 3)
    monkeypatch.setattr("data_pipeline.prepare.duplicates.decide._AT_ONCE", 3)
    sliced = decide(corpus, NEAR, FRACTION)
    assert all((a == b).all() for a, b in zip(arrays(whole), arrays(sliced), strict=True))


def test_a_corpus_of_one_text_and_many_copies_takes_no_time(tmp_path: Path):
    texts = ["the same licence text over and over again " * 20] * 600 + [f"{n} " * 8 for n in range(900)]
    found = decide(signed(tmp_path, texts, NEAR, [400]), NEAR, FRACTION)
    assert found.removal.documents.tolist() == list(range(1, 600))
    assert found.largest_group == 600


def test_parts_beyond_what_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A corpus of a terabyte has four thousand parts; most systems let a process open a thousand files."""
    texts = [f"{number} {' some words of a text' * (number % 7)}" for number in range(40)]
    corpus = signed(tmp_path / "signed", texts, NEAR, range(1, 40))
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(corpus_module, "_MAPPED_NAMES", 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 22, most))
    try:
        corpus = SignedCorpus(corpus.parts)
        found = save_outcome(tmp_path / "decided", corpus, decide(corpus, NEAR, FRACTION))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert found.counts.near_documents > 5
    assert found.documents == [1] * 40


@pytest.mark.parametrize("texts", [[], ["only one"], ["", ""]])
@pytest.mark.parametrize("kind", ["exact", "near", "together"])
def test_small_corpora(tmp_path: Path, texts: list[str], kind: str):
    rule = DuplicateRule(kind=kind)
    found = decide(signed(tmp_path, texts, rule, [0, len(texts)]), rule, FRACTION)
    expected = [1] if len(texts) == 2 and rule.removes else []
    assert found.removal.documents.tolist() == expected


def test_sides_at_once_are_sides_one_by_one():
    hashes = np.random.default_rng(0).integers(0, 2**64, 500, dtype=np.uint64)
    for fraction in (0, 0.05, 0.5, 0.999):
        expected = [is_held_out(value, fraction) for value in hashes.tolist()]
        assert are_held_out(hashes, fraction).tolist() == expected


@pytest.mark.parametrize(
    "file", ["documents.bin", "signatures.bin", "bands.bin", "names.bin", "ends.bin", "signed.json"]
)
def test_a_damaged_part_has_no_record(tmp_path: Path, file: str):
    signed(tmp_path, families(1, 20), NEAR)
    path = tmp_path / "0" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert SignedRecord.load(tmp_path / "0") is None
    path.unlink()
    assert SignedRecord.load(tmp_path / "0") is None


def test_all_that_share_a_band_are_compared_and_not_only_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first of a run resembles nobody; of the others two and two resemble one another, and share no other band."""
    bands, rows = NEAR.bands()
    draw = np.random.default_rng(0)
    signatures = draw.integers(0, 1 << 16, (5, NEAR.permutations), dtype=np.uint16)
    for first, second in ((1, 3), (2, 4)):
        signatures[second] = signatures[first]
        signatures[second, rows - 1 : bands * rows : rows] += 1
    signatures[:, :rows] = 7
    corpus = signed(tmp_path, ["a", "b", "c", "d", "e"], NEAR)
    keys = np.ascontiguousarray(band_keys(signatures, bands, rows).T)
    monkeypatch.setattr(SignedPart, "signatures", property(lambda _: signatures))
    monkeypatch.setattr(SignedPart, "bands", property(lambda _: keys))
    assert find_groups(corpus, np.arange(5), NEAR).tolist() == [0, 1, 2, 1, 2]


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
        ({"kind": "exact", "similarity": 0.7}, r"duplicates=exact does not detect these.\nSet --duplicates near"),
        ({"shingle_size": 3}, r"duplicates=keep does not detect these"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str):
    with pytest.raises(DataError, match=message):
        DuplicateRule(**options)
