"""Packed documents dealt to ring indices: equal tokens, even causal attention, few rows that travel, few runs.

Of a document, a ring index receives the tokens before its own last one, less its own. All indices together own all
tokens, so the rows that travel are Σ reach − tokens, over every (index, document), where reach is the place in the
document just behind the index's last token of it. A document on one index therefore costs nothing, and a cut at place x
costs x rows, whoever takes the head. Work wants the opposite: the last tokens of a long document must be spread.

Two steps. First each index in turn takes, from the chunks left over, laid on a circle, the window whose work is nearest
to the mean: windows that slide once around the circle have the mean's work on average, so one comes close. Then pairs
of indices share anew: their chunks are laid on a circle, document after document in some order, and cut into halves of
equally many chunks; a half costs only what its two ends cut. All halves of several circles are tried for all pairs of a
round at once. Everything is integer arithmetic with a fixed hash for chance, so that all ranks find the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallel.layout.zigzag import Pieces, head_and_tail

GRAIN = 128
"""Runs are multiples of this many tokens: a tile of the attention kernels."""

MOST_CHUNKS = 64
"""Chunks that an index is dealt; a longer share has larger chunks."""

TOLERANCE = 25
"""An index should have at most 1/25 more work than the mean."""

TOLERANCE_LONG = 100
"""The same where no document fits on an index whole: there is little to save by uneven work."""

MEAN_WORK, EXCESS_WORK = 4, 512
"""What work beyond the mean, and beyond the tolerance, is worth: the mean's work as often an index's tokens in rows."""

ROUNDS, CIRCLES, BANK = 36, 8, 49
"""Rounds of pairs, circles tried in each, and circles to take them from."""


def deal(num_tokens: int, degree: int, cu_seqlens: Sequence[int]) -> list[Pieces]:
    """The pieces of ``num_tokens`` that each of ``degree`` ring indices gets; every index gets equally many tokens.

    Pieces begin and end at multiples of a grain: 128 tokens when the share ``num_tokens / degree`` is such a multiple,
    else its largest divisor from 65 to 127. Where it has none (a prime, say), pieces are multiples of 128 long but for
    one short piece of each index, which lie first in the sequence. Below 1024 tokens the same holds with an eighth of
    the share in place of 128. One document is dealt head and tail where half a share is in whole grains or the share is
    no multiple of 128 anyway. ``cu_seqlens`` ascends from 0 to ``num_tokens``.
    """
    if degree == 1:
        return [[(0, num_tokens)]]
    share = num_tokens // degree
    bounds = np.unique(np.asarray(cu_seqlens, dtype=np.int64))
    if len(bounds) == 2 and share % 2 == 0 and (share % GRAIN or share % (2 * GRAIN) == 0):
        return head_and_tail(num_tokens, degree)
    chunks = _cut(num_tokens, degree, bounds)
    return _pieces(chunks, _improve(chunks, _take_windows(chunks)))


@dataclass(frozen=True)
class _Chunks:
    """What is dealt: arrays over chunks of equal size, equally many for each index, in ascending order."""

    degree: int
    size: int
    """Tokens of a chunk."""
    start: np.ndarray
    """First token; chunk 0 begins behind the odd pieces, where there are any."""
    document: np.ndarray
    """The document of the first token, which the whole chunk counts as; others in it are shorter than the chunk."""
    work: np.ndarray
    """Keys that its queries see, over all documents in it."""
    reach: np.ndarray
    """Place in the document just behind the last token of it."""
    ahead: np.ndarray
    """Tokens of the document in the chunk before, where that counts as another document's."""
    odd_work: np.ndarray
    """Work of each index's odd piece."""

    @property
    def share(self) -> int:
        """Chunks of an index."""
        return len(self.start) // self.degree


def _grain(share: int) -> int:
    """Tokens that pieces are multiples of."""
    aim = GRAIN if share >= 8 * GRAIN or share % GRAIN == 0 else max(1, share // 8)
    return next((grain for grain in range(aim, aim // 2, -1) if share % grain == 0), aim)


def _cut(num_tokens: int, degree: int, bounds: np.ndarray) -> _Chunks:
    share = num_tokens // degree
    grain = _grain(share)
    size = grain * -(-share // (grain * MOST_CHUNKS))
    odd = share % size
    starts = np.arange(odd * degree, num_tokens, size)
    edges = np.concatenate([np.arange(degree if odd else 0) * odd, starts, [num_tokens]])
    cuts = np.union1d(edges, bounds)
    begins = bounds[np.searchsorted(bounds, cuts[:-1], side="right") - 1]
    first, stop = cuts[:-1] - begins, cuts[1:] - begins
    summed = np.append(0, np.cumsum((stop * (stop + 1) - first * (first + 1)) // 2))
    work = np.diff(summed[np.searchsorted(cuts, edges)])
    document = np.searchsorted(bounds, starts, side="right") - 1
    opens = np.append(False, document[1:] != document[:-1])
    return _Chunks(
        degree,
        size,
        starts,
        document,
        work[-len(starts) :],
        np.minimum(starts + size, bounds[document + 1]) - bounds[document],
        np.where(opens, starts - bounds[document], 0),
        work[:degree] if odd else np.zeros(degree, dtype=np.int64),
    )


def _take_windows(chunks: _Chunks) -> np.ndarray:
    """The index of every chunk: one after another takes the window of the remaining circle with the mean's work."""
    owner = np.empty(len(chunks.start), dtype=np.int64)
    circle, share = np.arange(len(owner)), chunks.share
    for index in range(chunks.degree):
        work = chunks.work[circle]
        summed = np.append(0, np.cumsum(np.append(work, work[:share])))
        window = summed[share : share + len(circle)] - summed[: len(circle)]
        rest = int(work.sum() + chunks.odd_work[index:].sum())
        target = rest // (chunks.degree - index) - int(chunks.odd_work[index])
        circle = np.roll(circle, -int(np.argmin(np.abs(window - target))))
        owner[circle[:share]] = index
        circle = np.sort(circle[share:])
    return owner


class _Circles(NamedTuple):
    """Orders of all chunks, each with the chunks of a document together."""

    chunks: np.ndarray
    """[circle, place]: which chunk stands there."""
    backward: np.ndarray
    """[circle, place]: whether its document runs from tail to head."""


def _circles(chunks: _Chunks) -> _Circles:
    """The sequence itself, then ``BANK − 1`` shuffles of its documents."""
    places = np.arange(len(chunks.start))
    documents = int(chunks.document[-1]) + 1
    chance = _hash(np.arange(BANK * documents)).reshape(BANK, documents)
    rank = np.argsort(np.argsort(chance, axis=1, kind="stable"), axis=1, kind="stable")
    turned = (chance & np.uint64(1)).astype(bool)
    rank[0], turned[0] = np.arange(documents), False
    backward = turned[:, chunks.document]
    key = rank[:, chunks.document] * len(places) + np.where(backward, len(places) - 1 - places, places)
    order = np.argsort(key, axis=1, kind="stable")
    return _Circles(order, np.take_along_axis(backward, order, 1))


def _hash(numbers: np.ndarray) -> np.ndarray:
    """64 bits of each number that look like chance: the finaliser of splitmix64."""
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Pairs(NamedTuple):
    """Indices that share anew in one round: ``one[p]`` with ``other[p]``, each index at most once."""

    one: np.ndarray
    other: np.ndarray

    def of_index(self, degree: int) -> np.ndarray:
        """Each index's pair; ``len(one)`` for one that sits out."""
        pair = np.full(degree, len(self.one), dtype=np.int16)
        pair[self.one] = pair[self.other] = np.arange(len(self.one))
        return pair


def _pairings(degree: int) -> Iterator[_Pairs]:
    """Rounds of a tournament, over and over: in degree − 1 of them (degree, if odd) everyone meets everyone."""
    seats = degree + degree % 2
    while True:
        for turn in range(seats - 1):
            table = np.append(seats - 1, (np.arange(seats - 1) + turn) % (seats - 1))
            one, other = table[: seats // 2], table[: seats // 2 - 1 : -1]
            present = np.maximum(one, other) < degree
            yield _Pairs(one[present], other[present])


class _Prices(NamedTuple):
    """What work costs in rows."""

    mean: int
    most: int
    """Work that an index should have at most."""
    mild: int
    """Work beyond the mean that costs as much as one row."""
    steep: int
    """Work beyond the most that costs as much as one more row."""

    @classmethod
    def of(cls, chunks: _Chunks) -> _Prices:
        """The prices for the work of all chunks."""
        mean = int(chunks.work.sum() + chunks.odd_work.sum()) // chunks.degree
        tokens = chunks.share * chunks.size
        mild, steep = (max(1, mean // (rate * tokens)) for rate in (MEAN_WORK, EXCESS_WORK))
        fits = np.bincount(chunks.document).min() <= chunks.share
        return cls(mean, mean + mean // (TOLERANCE if fits else TOLERANCE_LONG), mild, steep)

    def rows(self, work: np.ndarray) -> np.ndarray:
        """The price of an index's work."""
        return np.maximum(work - self.mean, 0) // self.mild + np.maximum(work - self.most, 0) // self.steep


def _improve(chunks: _Chunks, owner: np.ndarray) -> np.ndarray:
    """The owners after rounds of pairs, each pair sharing anew where that costs less."""
    prices, bank = _Prices.of(chunks), _circles(chunks)
    idle = 0
    for turn, pairs in zip(range(ROUNDS), _pairings(chunks.degree), strict=False):
        tried = np.append(0, 1 + (np.arange(CIRCLES - 1) + turn * (CIRCLES - 1)) % (BANK - 1))
        shared = _share_anew(chunks, owner, pairs, _Circles(bank.chunks[tried], bank.backward[tried]), prices)
        idle = idle + 1 if np.array_equal(shared, owner) else 0
        owner = shared
        if idle > 2 * chunks.degree:
            break
    return owner


def _share_anew(chunks: _Chunks, owner: np.ndarray, pairs: _Pairs, circles: _Circles, prices: _Prices) -> np.ndarray:
    """The owners after every pair has taken the cheapest halves of its circles, where they beat what it has."""
    count, width, tried = len(pairs.one), 2 * chunks.share, len(circles.chunks)
    pair = pairs.of_index(chunks.degree)[owner]
    place = np.argsort(pair[circles.chunks], axis=1, kind="stable")[:, : count * width]
    ring = _Circles(*(np.take_along_axis(x, place, 1).reshape(tried, count, width) for x in circles))

    price = _price_of_halves(chunks, ring, pairs, prices)
    cut = np.argmin(price, axis=-1)
    outside = (np.arange(width) - cut[..., None]) % width >= chunks.share
    side = np.zeros(circles.chunks.shape, dtype=bool)  # whether a chunk goes to the pair's other index
    np.put_along_axis(side, ring.chunks.reshape(tried, -1), outside.reshape(tried, -1), 1)
    price = np.take_along_axis(price, cut[..., None], -1)[..., 0] + _price_of_runs(chunks, side, pair, count)

    now = _price_now(chunks, owner, pairs, ring, prices)
    now += _price_of_runs(chunks, (pairs.other[np.minimum(pair, count - 1)] == owner)[None], pair, count)[0]
    best = np.argmin(price, axis=0)
    better = np.append(price[best, np.arange(count)] < now, False)  # the last for indices that sit out
    mine = np.minimum(pair, count - 1)
    taken = np.where(side[best[mine], np.arange(len(owner))], pairs.other[mine], pairs.one[mine])
    return np.where(better[pair], taken, owner)


def _price_of_halves(chunks: _Chunks, ring: _Circles, pairs: _Pairs, prices: _Prices) -> np.ndarray:
    """[circle, pair, i]: the price when ``one`` takes the half that begins at place i, and ``other`` what is left.

    Rows count only what the cuts add: each cut costs the reach of the document's head, which lies before the cut, or
    behind it where the document runs backward. Two cuts of one document leave both its ends to one index, and only the
    deeper cut counts.
    """
    half = chunks.share
    document, work, reach = (x[ring.chunks] for x in (chunks.document, chunks.work, chunks.reach))
    inside = document[..., 1:] == document[..., :-1]
    rows = np.zeros(reach.shape, dtype=np.int64)
    rows[..., 1:] = np.where(ring.backward[..., 1:], reach[..., 1:], reach[..., :-1]) * inside
    first, second = rows[..., :half], rows[..., half:]
    twice = (document[..., :half] == document[..., half:]) & (first > 0) & (second > 0)
    price = np.where(twice, np.maximum(first, second), first + second)

    summed = np.zeros((*work.shape[:-1], 2 * half + 1), dtype=np.int64)
    np.cumsum(work, axis=-1, out=summed[..., 1:])
    window = summed[..., half:-1] - summed[..., :half]
    left = summed[..., -1:] - window
    odd = (chunks.odd_work[index][:, None] for index in pairs)
    return price + sum(prices.rows(work + more) for work, more in zip((window, left), odd, strict=True))


def _price_of_runs(chunks: _Chunks, side: np.ndarray, pair: np.ndarray, count: int) -> np.ndarray:
    """[circle, pair]: a chunk of rows, and the head of a document, wherever a run ends between two of one pair."""
    behind = 1 + np.flatnonzero((pair[1:] == pair[:-1]) & (pair[1:] < count))
    circle, end = np.nonzero(side[:, behind] != side[:, behind - 1])
    behind = behind[end]
    price = np.bincount(circle * count + pair[behind], chunks.size + chunks.ahead[behind], minlength=len(side) * count)
    return price.astype(np.int64).reshape(len(side), count)


def _price_now(chunks: _Chunks, owner: np.ndarray, pairs: _Pairs, ring: _Circles, prices: _Prices) -> np.ndarray:
    """[pair]: the price of the present owners, on the scale of ``_price_of_halves``; circle 0 is the sequence."""
    mine = np.argsort(owner, kind="stable").reshape(chunks.degree, -1)
    price = _reaches(chunks, mine) + prices.rows(chunks.work[mine].sum(1) + chunks.odd_work)
    return price[pairs.one] + price[pairs.other] - _reaches(chunks, ring.chunks[0])


def _reaches(chunks: _Chunks, mine: np.ndarray) -> np.ndarray:
    """Summed reach in every document of each row of ascending chunks."""
    document, reach = chunks.document[mine], chunks.reach[mine]
    return reach[:, -1] + (reach[:, :-1] * (document[:, 1:] != document[:, :-1])).sum(1)


def _pieces(chunks: _Chunks, owner: np.ndarray) -> list[Pieces]:
    """Neighbouring chunks of an index as one piece, the odd pieces before them."""
    odd = int(chunks.start[0]) // chunks.degree
    few = chunks.degree if odd else 0
    starts = np.append(np.arange(few) * odd, chunks.start)
    owner = np.append(np.arange(few), owner)
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    stops = np.append(starts[first[1:]], chunks.start[-1] + chunks.size)
    pieces: list[Pieces] = [[] for _ in range(chunks.degree)]
    for start, stop, index in zip(starts[first].tolist(), stops.tolist(), owner[first].tolist(), strict=True):
        pieces[index].append((start, stop - start))
    return pieces
