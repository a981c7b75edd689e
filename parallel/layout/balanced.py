"""Assignment of packed documents to ring ranks: equal tokens, even attention, few rows to send, few runs.

From a document, a ring rank receives the tokens before its own last one, except its own. All ranks together own all
tokens, so the number of rows sent is Σ prefix − tokens, over every (rank, document), with prefix the number of the
document's tokens up to the rank's last one. A document on one rank therefore costs nothing, and a cut at token x of a
document costs x rows, whichever rank takes the head. Even work needs the opposite: the last tokens of a long document
must be spread. If attention is bidirectional, a rank receives all of a document but its own part: every cut costs the
full document.

The tokens are cut into chunks of one size, equally many for each rank, and assigned in two steps:

1. Start (``_assign_windows``). The remaining chunks form a ring; each rank in turn takes the window of neighbours
   whose work is nearest to the mean. Windows that slide once around have the mean's work on average, so one is close.
2. Improve (``_improve``). Rounds of pairs: the chunks of two ranks are put in a candidate order, document after
   document, which closes to a ring, and each rank takes one half of it. The cost of a half is its excess work, and
   only the rows that its two cuts add. All halves of several candidate orders are tried for all pairs of a round at
   once.

The search pays: the same chunks from a heap, each to the rank with the least work, send 3.2 to 3.9 times its rows over
2 to 16 ranks; a heap that allows the same imbalance and prefers ranks that have the rows, 1.3 to 1.6 times, and is less
even (``benchmarks/layouts.py``, docs/decisions/2026-11-balanced-rows.md).

Everything is integer arithmetic, with a fixed hash in place of a random generator, so that all ranks find the same
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from longctx.mixing import GOLDEN, mix64_array
from parallel.layout.zigzag import Pieces, head_and_tail

GRAIN = 128
"""Runs are multiples of this many tokens: a tile of the attention kernels."""

MAX_CHUNKS = 64
"""Chunks of a rank; more tokens make larger chunks."""

TOLERANCE = 25
"""A rank should have at most 1/25 more work than the mean."""

TOLERANCE_LONG = 100
"""The same where no document fits on a rank whole: there is little to save by uneven work."""

SOFT_RATE, HARD_RATE = 4, 512
"""Price of as much work again as the mean, in rows, as a multiple of a rank's tokens.

Work beyond the mean pays the soft rate; work beyond the tolerance pays the hard rate too.
"""

ROUNDS, ORDERS_PER_ROUND, NUM_ORDERS = 36, 8, 49
"""Rounds of pairs, candidate orders tried in each, and candidate orders in all."""


def assign(num_tokens: int, degree: int, cu_seqlens: Sequence[int], *, causal: bool = True) -> list[Pieces]:
    """Return the pieces of ``num_tokens`` for each of ``degree`` ring ranks; every rank gets equally many tokens.

    Pieces begin and end at multiples of a grain: 128 tokens if a rank's tokens are a multiple of 128, else their
    largest divisor from 65 to 127. If there is none (as for a prime), pieces are multiples of 128 long except one short
    piece of each rank; these pieces come first in the sequence. Below 1024 tokens per rank the same holds with an
    eighth of them instead of 128. A single document is assigned head and tail if half of a rank's tokens is a multiple
    of 128, or if they are no multiple of 128 anyway; it is assigned in equal parts if attention is not ``causal``.
    ``cu_seqlens`` ascends from 0 to ``num_tokens``.
    """
    if degree == 1:
        return [[(0, num_tokens)]]
    tokens_per_rank = num_tokens // degree
    bounds = np.unique(np.asarray(cu_seqlens, dtype=np.int64))
    halves = tokens_per_rank % 2 == 0
    in_grains = tokens_per_rank % GRAIN == 0
    halves_in_grains = tokens_per_rank % (2 * GRAIN) == 0
    if len(bounds) == 2 and not causal:
        # Every query sees equally many keys.
        return [[(rank * tokens_per_rank, tokens_per_rank)] for rank in range(degree)]
    if len(bounds) == 2 and halves and (halves_in_grains or not in_grains):
        return head_and_tail(num_tokens, degree)
    chunks = cut_chunks(num_tokens, degree, bounds, causal=causal)
    return chunk_pieces(chunks, _improve(chunks, _assign_windows(chunks)))


@dataclass(frozen=True)
class Chunks:
    """Chunks to assign: arrays over chunks of equal size, equally many for each rank, in ascending order."""

    degree: int
    size: int
    """Tokens of a chunk."""
    start: ndarray
    """First token; chunk 0 begins behind the remainders, where there are any."""
    document: ndarray
    """The document of the first token, which the whole chunk counts as; others in it are shorter than the chunk."""
    work: ndarray
    """Keys that its queries see, over all documents in it."""
    prefix: ndarray
    """Tokens of the document up to the last one in the chunk; all of them if attention is of both sides."""
    head: ndarray
    """Tokens of the document in the chunk before (or all), where that one counts as another document's."""
    remainder_work: ndarray
    """Work of each rank's remainder, the short piece that is no whole chunk."""

    @property
    def per_rank(self) -> int:
        """Number of chunks of a rank."""
        return len(self.start) // self.degree


def _grain(tokens_per_rank: int) -> int:
    """Return the number of tokens that pieces are multiples of."""
    aim = GRAIN
    if tokens_per_rank < 8 * GRAIN and tokens_per_rank % GRAIN:
        aim = max(1, tokens_per_rank // 8)
    for grain in range(aim, aim // 2, -1):
        if tokens_per_rank % grain == 0:
            return grain
    return aim


def whole_grains(tokens_per_rank: int) -> bool:
    """Return whether a ring rank's tokens are full grains, without a short piece."""
    return tokens_per_rank % _grain(tokens_per_rank) == 0


def cut_chunks(num_tokens: int, degree: int, bounds: ndarray, *, causal: bool = True) -> Chunks:
    """Cut the tokens into chunks; ``bounds`` are those of the documents, without empty ones."""
    tokens_per_rank = num_tokens // degree
    grain = _grain(tokens_per_rank)
    size = grain * -(-tokens_per_rank // (grain * MAX_CHUNKS))
    # The tokens of a rank that do not fill a chunk are one short piece; those of all ranks come first in the sequence.
    remainder = tokens_per_rank % size
    num_remainders = 0
    if remainder:
        num_remainders = degree
    starts = np.arange(remainder * degree, num_tokens, size)
    edges = np.concatenate([np.arange(num_remainders) * remainder, starts, [num_tokens]])
    # Work between every two neighbouring cuts, then summed up to the edges.
    cuts = np.union1d(edges, bounds)
    begins = bounds[np.searchsorted(bounds, cuts[:-1], side="right") - 1]
    first, stop = cuts[:-1] - begins, cuts[1:] - begins
    pairs = (stop * (stop + 1) - first * (first + 1)) // 2
    lengths = np.diff(bounds)
    if not causal:
        pairs = (stop - first) * lengths[np.searchsorted(bounds, begins)]
    work = np.diff(np.append(0, np.cumsum(pairs))[np.searchsorted(cuts, edges)])
    document = np.searchsorted(bounds, starts, side="right") - 1
    # Cost of a cut there in rows: the document up to it, or all of it if queries see both sides.
    prefix, head = np.minimum(starts + size, bounds[document + 1]) - bounds[document], starts - bounds[document]
    if not causal:
        prefix, head = lengths[document], np.where(head, lengths[document], 0)
    remainder_work = np.zeros(degree, dtype=np.int64)
    if remainder:
        remainder_work = work[:degree]
    opens = np.append(False, document[1:] != document[:-1])
    return Chunks(
        degree,
        size,
        starts,
        document,
        work[num_remainders:],
        prefix=prefix,
        head=np.where(opens, head, 0),
        remainder_work=remainder_work,
    )


def _assign_windows(chunks: Chunks) -> ndarray:
    """Return the rank of every chunk: each rank in turn takes the window of the remaining ring with the mean's work."""
    owner = np.empty(len(chunks.start), dtype=np.int64)
    ring, per_rank = np.arange(len(owner)), chunks.per_rank
    for rank in range(chunks.degree):
        # Sums of all windows at once: differences of running sums, over the ring and once more its beginning.
        work = chunks.work[ring]
        summed = np.append(0, np.cumsum(np.append(work, work[:per_rank])))
        window = summed[per_rank : per_rank + len(ring)] - summed[: len(ring)]
        # The mean of the remaining work, not of all: the ranks after this one share its error.
        remaining = int(work.sum() + chunks.remainder_work[rank:].sum())
        target = remaining // (chunks.degree - rank) - int(chunks.remainder_work[rank])
        first = int(np.argmin(np.abs(window - target)))
        beyond = first + per_rank - len(ring)
        # Cut out in place: the ring stays in the order of the sequence without a sort for every rank.
        if beyond <= 0:
            owner[ring[first : first + per_rank]] = rank
            ring = np.concatenate([ring[:first], ring[first + per_rank :]])
        else:
            owner[ring[first:]] = owner[ring[:beyond]] = rank
            ring = ring[beyond:first]
    return owner


class _Orders(NamedTuple):
    """Candidate orders of all chunks, each with the chunks of a document together."""

    chunks: ndarray
    """[order, slot]: which chunk stands there."""
    backward: ndarray
    """[order, slot]: whether its document runs from tail to head."""


def _candidate_orders(chunks: Chunks) -> _Orders:
    """Return the sequence itself, then ``NUM_ORDERS − 1`` shuffles of its documents."""
    slots = np.arange(len(chunks.start))
    num_documents = int(chunks.document[-1]) + 1
    # The first outputs of the generator that starts at 0.
    state = np.arange(NUM_ORDERS * num_documents, dtype=np.uint64) * np.uint64(GOLDEN)
    hashes = mix64_array(state).reshape(NUM_ORDERS, num_documents)
    # The hashes decide a document's position, and their lowest bit whether it runs backward.
    rank = np.argsort(np.argsort(hashes, axis=1, kind="stable"), axis=1, kind="stable")
    reversed_documents = (hashes & np.uint64(1)).astype(bool)
    rank[0], reversed_documents[0] = np.arange(num_documents), False
    backward = reversed_documents[:, chunks.document]
    key = rank[:, chunks.document] * len(slots) + np.where(backward, len(slots) - 1 - slots, slots)
    order = np.argsort(key, axis=1, kind="stable")
    return _Orders(order, np.take_along_axis(backward, order, 1))


class _RankPairs(NamedTuple):
    """Ranks that exchange chunks in one round: ``first[p]`` with ``second[p]``, each rank at most once."""

    first: ndarray
    second: ndarray

    def of_rank(self, degree: int) -> ndarray:
        """Return each rank's pair; ``len(first)`` for one that sits out."""
        pair = np.full(degree, len(self.first), dtype=np.int16)
        pair[self.first] = pair[self.second] = np.arange(len(self.first))
        return pair


def _tournament(degree: int) -> Iterator[_RankPairs]:
    """Yield a tournament's rounds over and over: in degree − 1 of them (degree, if odd) each rank meets each other."""
    # The circle method: the last seat stays, the others move on by one in each round.
    seats = degree + degree % 2
    while True:
        for round_number in range(seats - 1):
            table = np.append(seats - 1, (np.arange(seats - 1) + round_number) % (seats - 1))
            first, second = table[: seats // 2], table[: seats // 2 - 1 : -1]
            present = np.maximum(first, second) < degree
            yield _RankPairs(first[present], second[present])


class WorkCost(NamedTuple):
    """Cost of a rank's work in rows."""

    mean: int
    limit: int
    """Work that a rank should have at most."""
    soft: int
    """Work beyond the mean that costs as much as one row."""
    hard: int
    """Work beyond the limit that costs as much as one more row."""

    @classmethod
    def of(cls, chunks: Chunks) -> WorkCost:
        """Return the cost for the work of all chunks."""
        mean = int(chunks.work.sum() + chunks.remainder_work.sum()) // chunks.degree
        tokens = chunks.per_rank * chunks.size
        some_document_fits = np.bincount(chunks.document).min() <= chunks.per_rank
        tolerance = TOLERANCE_LONG
        if some_document_fits:
            tolerance = TOLERANCE
        soft, hard = max(1, mean // (SOFT_RATE * tokens)), max(1, mean // (HARD_RATE * tokens))
        return cls(mean, mean + mean // tolerance, soft, hard)

    def in_rows(self, work: ndarray) -> ndarray:
        """Return the cost of a rank's work."""
        return np.maximum(work - self.mean, 0) // self.soft + np.maximum(work - self.limit, 0) // self.hard


def _improve(chunks: Chunks, owner: ndarray) -> ndarray:
    """Return the owners after rounds of pairs, in which each pair takes other halves if these cost less."""
    work_cost, orders = WorkCost.of(chunks), _candidate_orders(chunks)
    unchanged = 0
    for round_number, pairs in zip(range(ROUNDS), _tournament(chunks.degree), strict=False):
        # The sequence itself in every round, and other shuffles each time.
        shuffles = 1 + (np.arange(ORDERS_PER_ROUND - 1) + round_number * (ORDERS_PER_ROUND - 1)) % (NUM_ORDERS - 1)
        tried = np.append(0, shuffles)
        tried_orders = _Orders(orders.chunks[tried], orders.backward[tried])
        reassigned = _reassign(chunks, owner, pairs, tried_orders, work_cost)
        unchanged += 1
        if not np.array_equal(reassigned, owner):
            unchanged = 0
        owner = reassigned
        # By then every two ranks have met twice, with other orders each time.
        if unchanged > 2 * chunks.degree:
            break
    return owner


def _reassign(chunks: Chunks, owner: ndarray, pairs: _RankPairs, orders: _Orders, work_cost: WorkCost) -> ndarray:
    """Return the owners after every pair has taken the cheapest halves of its candidate orders if these cost less."""
    num_pairs, width, tried = len(pairs.first), 2 * chunks.per_rank, len(orders.chunks)
    pair = pairs.of_rank(chunks.degree)[owner]
    # Each pair's chunks, in the order in which they stand in a candidate order.
    slot = np.argsort(pair[orders.chunks], axis=1, kind="stable")[:, : num_pairs * width]
    rings = _Orders(
        np.take_along_axis(orders.chunks, slot, 1).reshape(tried, num_pairs, width),
        np.take_along_axis(orders.backward, slot, 1).reshape(tried, num_pairs, width),
    )
    # The half with the cheapest cuts for each pair and order; the cost of runs is computed only for this one.
    cost = _cost_of_halves(chunks, rings, pairs, work_cost)
    cut = np.argmin(cost, axis=-1)
    in_second_half = (np.arange(width) - cut[..., None]) % width >= chunks.per_rank
    to_second = np.zeros(orders.chunks.shape, dtype=bool)  # whether a chunk goes to the pair's second rank
    np.put_along_axis(to_second, rings.chunks.reshape(tried, -1), in_second_half.reshape(tried, -1), 1)
    cost = np.take_along_axis(cost, cut[..., None], -1)[..., 0] + _cost_of_runs(chunks, to_second, pair, num_pairs)

    is_second = pairs.second[np.minimum(pair, num_pairs - 1)] == owner
    present = _present_cost(chunks, owner, pairs, rings, work_cost)
    present += _cost_of_runs(chunks, is_second[None], pair, num_pairs)[0]
    # A pair changes only for less, so the search ends, and chunks stay if two choices cost the same.
    best = np.argmin(cost, axis=0)
    better = np.append(cost[best, np.arange(num_pairs)] < present, False)  # the last for ranks that sit out
    mine = np.minimum(pair, num_pairs - 1)
    taken = np.where(to_second[best[mine], np.arange(len(owner))], pairs.second[mine], pairs.first[mine])
    return np.where(better[pair], taken, owner)


def _cost_of_halves(chunks: Chunks, rings: _Orders, pairs: _RankPairs, work_cost: WorkCost) -> ndarray:
    """Return [order, pair, i]: the cost if the first rank takes the half from slot i on, and the second the rest.

    Only rows that the cuts add count: each cut costs the prefix of the document's head, which is before the cut, or
    after it if the document runs backward. Two cuts of one document leave both its ends to one rank, and only the
    deeper cut counts.
    """
    half = chunks.per_rank
    document, work, prefix = chunks.document[rings.chunks], chunks.work[rings.chunks], chunks.prefix[rings.chunks]
    inside = document[..., 1:] == document[..., :-1]
    rows = np.zeros(prefix.shape, dtype=np.int64)  # that a cut before each slot adds
    rows[..., 1:] = np.where(rings.backward[..., 1:], prefix[..., 1:], prefix[..., :-1]) * inside
    first_cut, second_cut = rows[..., :half], rows[..., half:]
    one_document = (document[..., :half] == document[..., half:]) & (first_cut > 0) & (second_cut > 0)
    cost = np.where(one_document, np.maximum(first_cut, second_cut), first_cut + second_cut)

    # Work of every half at once, as differences of running sums.
    orders, num_pairs, width = work.shape
    summed = np.zeros((orders, num_pairs, width + 1), dtype=np.int64)
    np.cumsum(work, axis=-1, out=summed[..., 1:])
    first_work = summed[..., half:-1] - summed[..., :half]
    second_work = summed[..., -1:] - first_work
    cost = cost + work_cost.in_rows(first_work + chunks.remainder_work[pairs.first][:, None])
    return cost + work_cost.in_rows(second_work + chunks.remainder_work[pairs.second][:, None])


def _cost_of_runs(chunks: Chunks, to_second: ndarray, pair: ndarray, num_pairs: int) -> ndarray:
    """Return [order, pair]: a chunk of rows, and a document's head, for each run that ends between a pair's ranks."""
    # Only between chunks of one pair: other neighbours do not change in this round.
    behind = 1 + np.flatnonzero((pair[1:] == pair[:-1]) & (pair[1:] < num_pairs))
    order, end = np.nonzero(to_second[:, behind] != to_second[:, behind - 1])
    behind = behind[end]
    rows = chunks.size + chunks.head[behind]
    cost = np.bincount(order * num_pairs + pair[behind], rows, minlength=len(to_second) * num_pairs)
    return cost.astype(np.int64).reshape(len(to_second), num_pairs)


def _present_cost(chunks: Chunks, owner: ndarray, pairs: _RankPairs, rings: _Orders, work_cost: WorkCost) -> ndarray:
    """Return [pair]: the cost of the present owners, on the scale of ``_cost_of_halves``; order 0 is the sequence."""
    # A half costs the rows that its cuts add: the full prefixes, less those of the pair's documents without a cut.
    mine = np.argsort(owner, kind="stable").reshape(chunks.degree, -1)
    cost = _summed_prefixes(chunks, mine) + work_cost.in_rows(chunks.work[mine].sum(1) + chunks.remainder_work)
    return cost[pairs.first] + cost[pairs.second] - _summed_prefixes(chunks, rings.chunks[0])


def _summed_prefixes(chunks: Chunks, mine: ndarray) -> ndarray:
    """Return, for each list of ascending chunks, the sum of the prefixes of its documents."""
    document, prefix = chunks.document[mine], chunks.prefix[mine]
    is_last = document[:, 1:] != document[:, :-1]
    return prefix[:, -1] + (prefix[:, :-1] * is_last).sum(1)


def chunk_pieces(chunks: Chunks, owner: ndarray) -> list[Pieces]:
    """Join neighbouring chunks of a rank into pieces, with the remainders before them."""
    remainder = int(chunks.start[0]) // chunks.degree
    num_remainders = 0
    if remainder:
        num_remainders = chunks.degree
    starts = np.append(np.arange(num_remainders) * remainder, chunks.start)
    owner = np.append(np.arange(num_remainders), owner)
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    stops = np.append(starts[first[1:]], chunks.start[-1] + chunks.size)
    pieces: list[Pieces] = [[] for _ in range(chunks.degree)]
    for start, stop, rank in zip(starts[first].tolist(), stops.tolist(), owner[first].tolist(), strict=True):
        pieces[rank].append((start, stop - start))
    return pieces
