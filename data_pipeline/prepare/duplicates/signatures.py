"""MinHash signatures: the fraction of equal values in two signatures estimates the Jaccard similarity of their
shingles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.units import unit_hashes
from longctx.integer_hash import mix64, mix64_array

GROUP_CHARACTERS = 1 << 18
"""Characters hashed at once: the arrays fit into a processor's cache."""
_LEAST_CHARACTERS = 64
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
_DONOR_SEED_TAG = 0x646F6E6F72
_MOST_DONORS = 1024


@dataclass(kw_only=True)
class _Open:
    """A partly hashed text."""

    name_hash: int
    """Hash that identifies a text without any unit."""
    values: np.ndarray
    """Smallest hash per bin, uint64 [permutations]."""
    last: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    """The text's last units, fewer than a shingle has."""
    has_shingles: bool = False


# MinHash (Broder, "On the resemblance and containment of documents", 1997): the smallest hash over a shingle set agrees
# between two sets with probability equal to their Jaccard similarity. Three refinements make it cheap:
#
#   * One permutation hashing (Li, Owen and Zhang, 2012): each shingle is hashed once and not once per value. The hash
#     range is divided into as many bins as a signature has values, and each value is the smallest hash in its bin.
#   * Optimal densification (Shrivastava, 2017): an empty bin copies another bin's value, in an order that is the same
#     for all texts, so that the estimate stays unbiased for short texts.
#   * b-bit minwise hashing (Li and König, 2010): only 16 bits per value are stored.
#
# Signatures depend only on the text, not on how it is split into groups; stored signatures stay comparable.
class Signer:
    """Computes signatures for a sequence of texts, long ones in text chunks. Memory is bounded by one group."""

    def __init__(self, rule: DuplicateRule) -> None:
        self._count, self._size, self._unit = rule.permutations, rule.size, rule.shingles
        self._open: list[_Open] = []
        self._group: list[tuple[int, str]] = []
        """Lower-case text chunks, each with its text's index among the open ones."""
        self._characters = 0
        numbers = np.arange(self._size, dtype=np.uint64)
        # Odd, and different for each position, so that a shingle depends on the order of its words.
        self._factors = mix64_array(numbers) | np.uint64(1)
        self._donors = _donors(self._count)
        # A different hash function per value: a text with a single shingle has the same hash in all bins, and with 16
        # bits from one function every 65,536th pair of such texts would be equal.
        self._salts = mix64_array(np.arange(self._count, dtype=np.uint64))

    def add(self, text: str, text_hash: int) -> Iterator[np.ndarray]:
        """Add a text; yield signatures, uint16 [n, permutations], for finished texts, in order."""
        self._open.append(_Open(name_hash=text_hash, values=np.full(self._count, _EMPTY)))
        for piece in _pieces(text):
            self._group.append((len(self._open) - 1, piece.lower()))
            # Give short texts a minimum weight, because each needs its kilobyte of values.
            self._characters += max(len(piece), _LEAST_CHARACTERS)
            if self._characters >= GROUP_CHARACTERS:
                self._hash_group()
                # The current text may continue.
                yield self._take(len(self._open) - 1)

    def finish(self) -> Iterator[np.ndarray]:
        """Yield the remaining signatures."""
        self._hash_group()
        yield self._take(len(self._open))

    def _hash_group(self) -> None:
        """Hash all pending text chunks at once and update the open texts' values."""
        group, self._group, self._characters = self._group, [], 0
        if not group:
            return
        # Join with newlines, so that no word spans two texts.
        points = _code_points("\n".join(piece for _, piece in group))
        ends = np.cumsum([len(piece) + 1 for _, piece in group])
        hashes, starts = unit_hashes(points, self._unit)
        texts = np.array([number for number, _ in group])[np.searchsorted(ends, starts, side="right")]
        # Only the first text can have started in an earlier group.
        first = self._open[group[0][0]]
        hashes = np.concatenate([first.last, hashes])
        texts = np.concatenate([np.full(len(first.last), group[0][0]), texts])
        self._keep_last(group, hashes, texts)
        shingles = len(hashes) - self._size + 1
        if shingles < 1:
            return
        combined = np.zeros(shingles, dtype=np.uint64)
        for place, factor in enumerate(self._factors):
            combined += hashes[place : place + shingles] * factor
        # Drop shingles that start in one text and end in the next.
        within = texts[:shingles] == texts[self._size - 1 :]
        self._lower(mix64_array(combined[within]), texts[:shingles][within])

    def _lower(self, hashes: np.ndarray, texts: np.ndarray) -> None:
        """Merge shingle hashes into their texts' values."""
        # Texts before this group's first are complete and only wait to be returned.
        first = texts[0] if len(texts) else 0
        values = np.array([text.values for text in self._open[first:]])
        parts = ((hashes >> np.uint64(32)) * np.uint64(self._count)) >> np.uint64(32)
        value_indices = (texts - first) * self._count + parts.astype(np.int64)
        # The hash's upper half selects the bin, so a bin's smallest hash is also the smallest in its hash range.
        np.minimum.at(values.reshape(-1), value_indices, hashes)
        for text, lowered in zip(self._open[first:], values, strict=True):
            text.values = lowered
        for number in texts[np.flatnonzero(np.diff(texts, prepend=-1))]:
            self._open[number].has_shingles = True

    def _keep_last(self, group: list[tuple[int, str]], hashes: np.ndarray, texts: np.ndarray) -> None:
        """Keep each text's last units, with which its next shingle starts, or all units if it has no shingle yet."""
        for number in dict.fromkeys(number for number, _ in group):
            stop = int(np.searchsorted(texts, number, side="right"))
            start = int(np.searchsorted(texts, number, side="left"))
            self._open[number].last = hashes[max(start, stop - self._size + 1) : stop]

    def _take(self, count: int) -> np.ndarray:
        """Return the signatures of the first ``count`` open texts, which are complete."""
        done, self._open = self._open[:count], self._open[count:]
        if not done:
            return np.empty((0, self._count), dtype=np.uint16)
        for text in done:
            if not text.has_shingles:
                text.values = self._short(text)
        values = np.array([text.values for text in done])
        _fill(values, self._donors)
        return (mix64_array(values ^ self._salts) >> np.uint64(48)).astype(np.uint16)

    def _short(self, text: _Open) -> np.ndarray:
        """Return the values for a text shorter than a shingle, which counts as one shingle; without units, use its text
        hash.
        """
        whole = text.name_hash
        if len(text.last):
            whole = 0
            for hash in text.last.tolist():
                whole = mix64(whole ^ hash)
        return np.full(self._count, whole, dtype=np.uint64)


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Return a hash per band and signature, uint64 [n, bands]."""
    cut = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    keys = np.zeros((len(signatures), bands), dtype=np.uint64)
    for row in range(rows):
        keys = mix64_array(keys ^ cut[:, :, row])
    return keys


def similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Estimate the similarity of two signature arrays [n, permutations], row by row, float64 [n]."""
    return np.count_nonzero(first == second, axis=1) / first.shape[1]


def _code_points(text: str) -> np.ndarray:
    """Return the characters as numbers: uint8 if all are ASCII, uint32 otherwise."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in text chunks of up to one group, cut before a space if possible; an empty text is one chunk."""
    start = 0
    while len(text) - start > GROUP_CHARACTERS:
        stop = start + GROUP_CHARACTERS
        space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
        if space > 0:
            stop = space
        yield text[start:stop]
        start = stop
    yield text[start:]


def _donors(count: int) -> np.ndarray:
    """Return, for each attempt, the bin from which each empty bin takes its value, int64 [attempts, count]."""
    tries = np.arange(_MOST_DONORS, dtype=np.uint64)[:, None] * np.uint64(count)
    hashes = mix64_array(mix64_array(tries + np.arange(count, dtype=np.uint64)) ^ np.uint64(_DONOR_SEED_TAG))
    return ((hashes >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def _fill(values: np.ndarray, donors: np.ndarray) -> None:
    """Fill every empty bin in texts [n, count] with the value of a nonempty bin."""
    found = values.copy()
    texts, parts = np.nonzero(found == _EMPTY)
    for donor in donors:
        if not len(texts):
            return
        taken = found[texts, donor[parts]]
        values[texts, parts] = taken
        # The donor may be empty too: retry with the next one.
        missing = taken == _EMPTY
        texts, parts = texts[missing], parts[missing]
    # Fallback for long signatures of texts with only one or two shingles.
    values[texts, parts] = found[texts].min(axis=1)
