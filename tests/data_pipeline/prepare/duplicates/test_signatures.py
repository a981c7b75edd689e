"""Signatures: what they depend on, and how well they estimate the similarity that is counted shingle by shingle."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.prepare.duplicates import signatures
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import Signer, band_keys, similarity
from data_pipeline.prepare.duplicates.units import unit_hashes
from tests.data_pipeline.prepare.duplicates.oracle import edited, jaccard, shingles, sign

NEAR = DuplicateRule(kind="near")
WORDS = st.sampled_from(["a", "b", "the", "Straße", "x_1", "42", "слово", "語", "文", "ไ", "\U0001f642"])
BETWEEN = st.sampled_from([" ", "\n", ", ", " — ", "\t(", ") "])
TEXTS = st.lists(st.tuples(WORDS, BETWEEN), max_size=40).map(lambda parts: "".join(w + b for w, b in parts))


@settings(max_examples=60)
@given(TEXTS, TEXTS)
def test_texts_with_the_same_shingles_have_the_same_signature(first: str, second: str):
    found = sign([first, second], NEAR)
    # Texts without a word are told apart by their bytes: here by their numbers.
    if shingles(first) == shingles(second) != {()}:
        assert (found[0] == found[1]).all()
    elif not shingles(first) & shingles(second):
        assert similarity(found[:1], found[1:])[0] < 0.1


def test_case_spaces_and_punctuation_do_not_count_and_order_does():
    text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on"
    same = "THE QUICK  brown\nfox, jumps: over (the) lazy dog and the dog; sleeps on!"
    other = " ".join(reversed(text.split()))
    found = sign([text, same, other], NEAR)
    assert (found[0] == found[1]).all()
    assert similarity(found[:1], found[2:])[0] < 0.1


@pytest.mark.parametrize("unit", ["words", "characters"])
def test_a_word_is_the_same_wherever_it_stands(unit: str):
    points = np.frombuffer(("x" * 100 + " word 語word " + "y" * 999 + " word").encode("utf-32-le"), dtype=np.uint32)
    hashes, starts = unit_hashes(points, unit)
    if unit == "words":
        assert starts.tolist() == [0, 101, 106, 107, 112, 1112]
        assert hashes[1] == hashes[3] == hashes[5]
        assert len(set(hashes.tolist())) == 4
    else:
        assert len(starts) == 100 + 4 + 5 + 999 + 4
        assert len(set(hashes.tolist())) == len(set("xword語y"))


def test_every_text_has_a_signature_of_its_own_whatever_is_hashed_with_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = [path.read_text() for path in sorted(corpus.glob("*.py"))]
    texts[3:3] = [
        "",
        "!?",
        "one",
        "one two three",
        "語" * 300,
        "word " * 3000,
        "Ünïcödé " * 20,
        "a.b.c.d.e.f",
        "x" * 5000,
    ]
    alone = np.concatenate([sign([text], NEAR) for text in texts])
    # Alone every text has number 0: that is what texts without a word are told apart by.
    wordless = [3, 4]
    for size in (1 << 18, 20_000, 3_000):
        monkeypatch.setattr(signatures, "GROUP_CHARACTERS", size)
        found = sign(texts, NEAR)
        assert found.shape == (len(texts), 128)
        same = (found == alone).all(axis=1)
        same[wordless] = True
        # A word longer than a group is cut.
        if size < 5000:
            same[texts.index("x" * 5000)] = True
        assert same.all(), np.flatnonzero(~same)
    assert similarity(found[3:4], found[4:5])[0] < 0.1


def test_texts_come_out_as_soon_as_their_group_is_done():
    signer = Signer(NEAR)
    assert sum(len(some) for number in range(300) for some in signer.add("some words " * 200, number)) > 200
    assert len(signer._open) < 120
    # Texts of a character would else fill the memory with what is kept of each.
    signer = Signer(NEAR)
    assert sum(len(some) for number in range(5000) for some in signer.add("x", number)) > 4000


@pytest.mark.parametrize("words", [6, 30, 150, 3000])
def test_the_estimate_is_as_good_as_its_theory_says(words: int):
    draw = random.Random(words)
    pairs = []
    for _ in range(60):
        text = " ".join(f"w{draw.randrange(3000)}" for _ in range(words))
        pairs.append((text, edited(text, draw.choice([0.01, 0.03, 0.1]), draw)))
    estimates = similarity(sign([a for a, _ in pairs], NEAR), sign([b for _, b in pairs], NEAR))
    exact = np.array([jaccard(a, b) for a, b in pairs])
    # √(s(1 − s)/128) is 0.044 at most; texts of fewer shingles than values are known better, or exactly.
    assert np.sqrt(np.mean((estimates - exact) ** 2)) < 0.05
    assert abs(np.mean(estimates - exact)) < 0.02


@pytest.mark.parametrize("target", [0.9, 0.8, 0.5])
def test_pairs_of_the_corpus_are_found_as_the_s_curve_says(corpus: Path, target: float):
    """Real texts, edited until their shingles are about ``target`` alike, and found by bands and signatures."""
    draw = random.Random(17)
    rule = DuplicateRule(kind="near", similarity=target)
    texts = [path.read_text() for path in sorted(corpus.glob("*.py"))[:20]]
    pairs: list[tuple[str, str]] = []
    alike: list[float] = []
    while len(pairs) < 120:
        text = draw.choice(texts)
        begin = draw.randrange(len(text) // 2)
        text = text[begin : begin + 2500]
        other = edited(text, draw.uniform(0, 2) * (1 - target) / 8, draw)
        found = jaccard(text, other)
        if abs(found - target) < 0.12:
            pairs.append((text, other))
            alike.append(found)
    first, second = sign([a for a, _ in pairs], rule), sign([b for _, b in pairs], rule)
    bands = (band_keys(first, *rule.bands()) == band_keys(second, *rule.bands())).any(axis=1)
    near = similarity(first, second) >= target
    exact = np.array(alike)
    is_above, is_below = exact >= target + 0.05, exact <= target - 0.08
    assert is_above.sum() > 10
    assert is_below.sum() > 3
    # What is alike enough by more than the estimate's error is found, and what is less alike is not.
    assert (bands & near)[is_above].mean() > 0.9
    assert bands[exact >= target].mean() >= 0.97
    assert (bands & near)[is_below].mean() < 0.1
