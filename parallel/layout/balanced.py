"""Assignment of packed documents to ring ranks: equal token counts, even attention work, few rows to send, few runs.

Communication. A ring rank receives a document's tokens up to its own last one, except its own. All ranks together own
all tokens, so they receive Σ prefix − tokens rows, summed over (rank, document), with prefix = the document's tokens up
to the rank's last one. Hence a document on one rank costs 0 rows, and a cut at document token x costs x rows, whichever
rank takes the head. Even work demands the opposite: the last tokens in a long document must be spread. In bidirectional
attention a rank receives the full document except its own part: every cut costs the document's length.

Search. The tokens are cut into equal token chunks, equally many per rank, and assigned in two steps:

1. Start (``_assign_windows``). The unassigned chunks form a ring; each rank in turn takes the window of neighbours
   whose work is nearest to the mean. Over a full circle the windows average the mean, so one is close.
2. Improve (``_improve``). Rounds of rank pairs, as in a tournament: a pair's chunks are put in a candidate order, which
   keeps documents together and closes to a ring, and each rank takes one half. A half costs its excess work plus the
   rows that its two cuts add. All halves in several candidate orders are evaluated for all pairs in a round at once.

A heap that assigns each of the same chunks to the rank with the least work sends 3.2 to 3.9 times as many rows over 2
to 16 ranks. A heap that allows the same imbalance and prefers ranks that already have the rows sends 1.3 to 1.6 times
as many, and its work is less even (``benchmarks/layouts.py``, docs/decisions/2026-11-balanced-rows.md).

All arithmetic is on integers, with a fixed hash instead of a random generator, so all ranks compute the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from longctx.integer_hash import GOLDEN, mix64_array
from parallel.layout.zigzag import Pieces, head_and_tail

GRAIN = 128
"""Runs are multiples of this many tokens: one attention-kernel tile."""

MAX_CHUNKS = 64
"""Chunks per rank; more tokens make larger chunks."""

TOLERANCE = 25
"""A rank should have at most 1/25 more work than the mean."""

TOLERANCE_LONG = 100
"""The same if no document fits on one rank: uneven work would then save few rows."""

SOFT_RATE, HARD_RATE = 4, 512
"""Price for excess work equal to the mean, in rows, as a multiple of a rank's tokens.

Work above the mean pays the soft rate; work above the tolerance additionally pays the hard rate.
"""

ROUNDS, CANDIDATES_PER_ROUND, NUM_CANDIDATES = 36, 8, 49
"""Rounds of rank pairs, candidate orders per round, and candidate orders in total."""


def assign_tokens(num_tokens: int, degree: int, cu_seqlens: Sequence[int], *, causal: bool = True) -> list[Pieces]:
    """Assign runs of ``num_tokens`` to each of ``degree`` ring ranks; every rank gets equally many tokens.

    Runs start and end at multiples of a grain: 128 tokens if that divides a rank's token count, otherwise its largest
    divisor from 65 to 127. If there is no such divisor (e.g. for a prime), runs are multiples of 128 except one short
    run per rank; the short runs come first in the sequence. Below 1024 tokens per rank, an eighth of that count
    replaces 128. A single document is assigned head and tail if half a rank's tokens is a multiple of 128, or if the
    token count is not a multiple anyway; in equal parts if attention is not ``causal``. ``cu_seqlens`` ascends from 0
    to ``num_tokens``.
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
    """Chunks to assign: arrays over equally sized chunks, equally many per rank, in ascending order."""

    degree: int
    size: int
    """Tokens per chunk."""
    start: ndarray
    """First token; chunk 0 starts after the remainders, if there are any."""
    document: ndarray
    """Document at the first token, to which the chunk is attributed; any other document in it is shorter than the
    chunk."""
    work: ndarray
    """Keys that the chunk's queries see, over all documents in it."""
    prefix: ndarray
    """Document tokens up to the chunk's last one; all its tokens if attention is bidirectional."""
    head: ndarray
    """Document tokens in earlier chunks (or all its tokens) if the previous chunk is attributed to another document."""
    remainder_work: ndarray
    """Work in each rank's remainder, the short run that does not fill a chunk."""

    @property
    def per_rank(self) -> int:
        """Number of chunks per rank."""
        return len(self.start) // self.degree


def _grain(tokens_per_rank: int) -> int:
    """Return the run granularity in tokens."""
    aim = GRAIN
    if tokens_per_rank < 8 * GRAIN and tokens_per_rank % GRAIN:
        aim = max(1, tokens_per_rank // 8)
    # Accept divisors down to half the aim; without one, keep full grains and one short run per rank.
    for grain in range(aim, aim // 2, -1):
        if tokens_per_rank % grain == 0:
            return grain
    return aim


def whole_grains(tokens_per_rank: int) -> bool:
    """Return True if a ring rank's tokens are full grains, without a short run."""
    return tokens_per_rank % _grain(tokens_per_rank) == 0


def cut_chunks(num_tokens: int, degree: int, bounds: ndarray, *, causal: bool = True) -> Chunks:
    """Cut the tokens into chunks; ``bounds`` are the document boundaries, without empty documents."""
    tokens_per_rank = num_tokens // degree
    grain = _grain(tokens_per_rank)
    size = grain * -(-tokens_per_rank // (grain * MAX_CHUNKS))
    # Tokens that do not fill a chunk form one short run per rank; all short runs come first in the sequence.
    remainder = tokens_per_rank % size
    num_remainders = 0
    if remainder:
        num_remainders = degree
    starts = np.arange(remainder * degree, num_tokens, size)
    edges = np.concatenate([np.arange(num_remainders) * remainder, starts, [num_tokens]])
    # Count (query, key) pairs between every two neighbouring cuts, then sum them up to the chunk edges. A causal query
    # at document position p sees p + 1 keys, so positions [a, b) see (b(b + 1) − a(a + 1)) / 2.
    cut_points = np.union1d(edges, bounds)
    document_starts = bounds[np.searchsorted(bounds, cut_points[:-1], side="right") - 1]
    first, stop = cut_points[:-1] - document_starts, cut_points[1:] - document_starts
    pairs = (stop * (stop + 1) - first * (first + 1)) // 2
    lengths = np.diff(bounds)
    if not causal:
        pairs = (stop - first) * lengths[np.searchsorted(bounds, document_starts)]
    work = np.diff(np.append(0, np.cumsum(pairs))[np.searchsorted(cut_points, edges)])
    document = np.searchsorted(bounds, starts, side="right") - 1
    # Rows that a cut costs at the chunk's end and at its start: the document up to the cut, or all of it if
    # bidirectional.
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
    """Return each chunk's rank: in turn, ranks take the window of the remaining ring nearest to the mean work."""
    owner = np.empty(len(chunks.start), dtype=np.int64)
    ring, per_rank = np.arange(len(owner)), chunks.per_rank
    for rank in range(chunks.degree):
        # All window sums at once, as differences between prefix sums over the ring extended by its first window.
        work = chunks.work[ring]
        summed = np.append(0, np.cumsum(np.append(work, work[:per_rank])))
        window = summed[per_rank : per_rank + len(ring)] - summed[: len(ring)]
        # Aim at the mean of the remaining work, not of all work: later ranks then share this rank's error.
        remaining = int(work.sum() + chunks.remainder_work[rank:].sum())
        target = remaining // (chunks.degree - rank) - int(chunks.remainder_work[rank])
        first = int(np.argmin(np.abs(window - target)))
        num_wrapped = first + per_rank - len(ring)
        # Cut out in place: the ring stays in sequence order without a sort per rank.
        if num_wrapped <= 0:
            owner[ring[first : first + per_rank]] = rank
            ring = np.concatenate([ring[:first], ring[first + per_rank :]])
        else:
            owner[ring[first:]] = owner[ring[:num_wrapped]] = rank
            ring = ring[num_wrapped:first]
    return owner


class _Permutations(NamedTuple):
    """Candidate orders over all chunks; each keeps a document's chunks together."""

    chunks: ndarray
    """Chunk at [order, slot]."""
    backward: ndarray
    """True at [order, slot] if the slot's document is ordered from tail to head."""


def _candidate_permutations(chunks: Chunks) -> _Permutations:
    """Return the sequence order, then ``NUM_CANDIDATES − 1`` shuffles of its documents."""
    slots = np.arange(len(chunks.start))
    num_documents = int(chunks.document[-1]) + 1
    # SplitMix64 outputs from state 0: the same candidates on every rank and in every training run.
    state = np.arange(NUM_CANDIDATES * num_documents, dtype=np.uint64) * np.uint64(GOLDEN)
    hashes = mix64_array(state).reshape(NUM_CANDIDATES, num_documents)
    # The hash gives a document its position, and the hash's lowest bit its direction.
    rank = np.argsort(np.argsort(hashes, axis=1, kind="stable"), axis=1, kind="stable")
    reversed_documents = (hashes & np.uint64(1)).astype(bool)
    rank[0], reversed_documents[0] = np.arange(num_documents), False
    backward = reversed_documents[:, chunks.document]
    key = rank[:, chunks.document] * len(slots) + np.where(backward, len(slots) - 1 - slots, slots)
    order = np.argsort(key, axis=1, kind="stable")
    return _Permutations(order, np.take_along_axis(backward, order, 1))


class _RankPairs(NamedTuple):
    """Ranks that exchange chunks in one round: ``first[p]`` with ``second[p]``, each rank at most once."""

    first: ndarray
    second: ndarray

    def of_rank(self, degree: int) -> ndarray:
        """Return each rank's pair index; ``len(first)`` for a rank without a partner."""
        pair = np.full(degree, len(self.first), dtype=np.int16)
        pair[self.first] = pair[self.second] = np.arange(len(self.first))
        return pair


def _tournament(degree: int) -> Iterator[_RankPairs]:
    """Yield tournament rounds endlessly: in degree − 1 rounds (degree, if odd) all ranks are paired with each other
    once.
    """
    # Circle method: one seat stays fixed, the others rotate by one per round. For an odd degree the extra seat is a
    # bye.
    seats = degree + degree % 2
    while True:
        for round_number in range(seats - 1):
            table = np.append(seats - 1, (np.arange(seats - 1) + round_number) % (seats - 1))
            first, second = table[: seats // 2], table[: seats // 2 - 1 : -1]
            present = np.maximum(first, second) < degree
            yield _RankPairs(first[present], second[present])


class WorkCost(NamedTuple):
    """Price of a rank's work, in rows."""

    mean: int
    limit: int
    """Most work that a rank should have."""
    soft: int
    """Work above the mean that costs as much as one row."""
    hard: int
    """Work above the limit that costs as much as one additional row."""

    @classmethod
    def of(cls, chunks: Chunks) -> WorkCost:
        """Build the price from the chunks' total work."""
        mean = int(chunks.work.sum() + chunks.remainder_work.sum()) // chunks.degree
        tokens = chunks.per_rank * chunks.size
        some_document_fits = np.bincount(chunks.document).min() <= chunks.per_rank
        tolerance = TOLERANCE_LONG
        if some_document_fits:
            tolerance = TOLERANCE
        soft, hard = max(1, mean // (SOFT_RATE * tokens)), max(1, mean // (HARD_RATE * tokens))
        return cls(mean, mean + mean // tolerance, soft, hard)

    def in_rows(self, work: ndarray) -> ndarray:
        """Return the price of the work in rows."""
        return np.maximum(work - self.mean, 0) // self.soft + np.maximum(work - self.limit, 0) // self.hard


# Pairwise exchange as local search. Invariants: every rank keeps exactly per_rank chunks (a pair's ring is always cut
# into two equal halves), and a pair changes only if its cost strictly falls, so no sequence of exchanges can cycle.
def _improve(chunks: Chunks, owner: ndarray) -> ndarray:
    """Perform rounds of pairwise exchange and return the improved owners."""
    work_cost, permutations = WorkCost.of(chunks), _candidate_permutations(chunks)
    num_idle_rounds = 0
    for round_number, pairs in zip(range(ROUNDS), _tournament(chunks.degree), strict=False):
        # Try the sequence order in every round, and different shuffles each time.
        shuffles = 1 + (np.arange(CANDIDATES_PER_ROUND - 1) + round_number * (CANDIDATES_PER_ROUND - 1)) % (
            NUM_CANDIDATES - 1
        )
        selected = np.append(0, shuffles)
        candidates = _Permutations(permutations.chunks[selected], permutations.backward[selected])
        reassigned = _reassign(chunks, owner, pairs, candidates, work_cost)
        num_idle_rounds += 1
        if not np.array_equal(reassigned, owner):
            num_idle_rounds = 0
        owner = reassigned
        # By then every two ranks were paired twice, with different candidate orders.
        if num_idle_rounds > 2 * chunks.degree:
            break
    return owner


def _reassign(
    chunks: Chunks, owner: ndarray, pairs: _RankPairs, candidates: _Permutations, work_cost: WorkCost
) -> ndarray:
    """Give each pair its cheapest halves over all candidate orders, if they cost less; return the owners."""
    num_pairs, width, num_candidates = len(pairs.first), 2 * chunks.per_rank, len(candidates.chunks)
    pair = pairs.of_rank(chunks.degree)[owner]
    # Restrict each candidate order to each pair's chunks: [order, pair, slot].
    slot = np.argsort(pair[candidates.chunks], axis=1, kind="stable")[:, : num_pairs * width]
    rings = _Permutations(
        np.take_along_axis(candidates.chunks, slot, 1).reshape(num_candidates, num_pairs, width),
        np.take_along_axis(candidates.backward, slot, 1).reshape(num_candidates, num_pairs, width),
    )
    # Choose the half with the cheapest cuts per pair and order; run cost is computed only for that one.
    cost = _cost_of_halves(chunks, rings, pairs, work_cost)
    cut = np.argmin(cost, axis=-1)
    in_second_half = (np.arange(width) - cut[..., None]) % width >= chunks.per_rank
    to_second = np.zeros(candidates.chunks.shape, dtype=bool)  # True if a chunk goes to the pair's second rank
    np.put_along_axis(
        to_second, rings.chunks.reshape(num_candidates, -1), in_second_half.reshape(num_candidates, -1), 1
    )
    cost = np.take_along_axis(cost, cut[..., None], -1)[..., 0] + _cost_of_runs(chunks, to_second, pair, num_pairs)

    is_second = pairs.second[np.minimum(pair, num_pairs - 1)] == owner
    present = _present_cost(chunks, owner, pairs, rings, work_cost)
    present += _cost_of_runs(chunks, is_second[None], pair, num_pairs)[0]
    # A pair changes only for a lower cost: so the search terminates, and on ties chunks stay.
    best = np.argmin(cost, axis=0)
    better = np.append(cost[best, np.arange(num_pairs)] < present, False)  # the extra entry is for unpaired ranks
    mine = np.minimum(pair, num_pairs - 1)
    taken = np.where(to_second[best[mine], np.arange(len(owner))], pairs.second[mine], pairs.first[mine])
    return np.where(better[pair], taken, owner)


def _cost_of_halves(chunks: Chunks, rings: _Permutations, pairs: _RankPairs, work_cost: WorkCost) -> ndarray:
    """Return cost [order, pair, i] if the first rank takes the half that starts at slot i, and the second rank the
    rest.

    Only rows added by the cuts count. Each cut costs the prefix of the document's head, which is before the cut, or
    after it if the document is in backward order. Two cuts in one document leave both its ends on one rank, and only
    the deeper one counts.
    """
    half = chunks.per_rank
    document, work, prefix = chunks.document[rings.chunks], chunks.work[rings.chunks], chunks.prefix[rings.chunks]
    inside = document[..., 1:] == document[..., :-1]
    rows = np.zeros(prefix.shape, dtype=np.int64)  # added by a cut before each slot
    rows[..., 1:] = np.where(rings.backward[..., 1:], prefix[..., 1:], prefix[..., :-1]) * inside
    first_cut, second_cut = rows[..., :half], rows[..., half:]
    one_document = (document[..., :half] == document[..., half:]) & (first_cut > 0) & (second_cut > 0)
    cost = np.where(one_document, np.maximum(first_cut, second_cut), first_cut + second_cut)

    # All halves' work at once, as differences between prefix sums.
    num_candidates, num_pairs, width = work.shape
    summed = np.zeros((num_candidates, num_pairs, width + 1), dtype=np.int64)
    np.cumsum(work, axis=-1, out=summed[..., 1:])
    first_work = summed[..., half:-1] - summed[..., :half]
    second_work = summed[..., -1:] - first_work
    cost = cost + work_cost.in_rows(first_work + chunks.remainder_work[pairs.first][:, None])
    return cost + work_cost.in_rows(second_work + chunks.remainder_work[pairs.second][:, None])


def _cost_of_runs(chunks: Chunks, to_second: ndarray, pair: ndarray, num_pairs: int) -> ndarray:
    """Return run cost [order, pair]: one chunk of rows plus a document's head per run that ends inside a pair."""
    # Count only boundaries between chunks in one pair: all others stay unchanged in this round.
    boundaries = 1 + np.flatnonzero((pair[1:] == pair[:-1]) & (pair[1:] < num_pairs))
    order, end = np.nonzero(to_second[:, boundaries] != to_second[:, boundaries - 1])
    boundaries = boundaries[end]
    rows = chunks.size + chunks.head[boundaries]
    cost = np.bincount(order * num_pairs + pair[boundaries], rows, minlength=len(to_second) * num_pairs)
    return cost.astype(np.int64).reshape(len(to_second), num_pairs)


def _present_cost(
    chunks: Chunks, owner: ndarray, pairs: _RankPairs, rings: _Permutations, work_cost: WorkCost
) -> ndarray:
    """Return the current owners' cost [pair] on the scale of ``_cost_of_halves``; order 0 must be the sequence."""
    # A half costs the rows added by its cuts: the full prefixes minus those of the pair's documents if uncut.
    mine = np.argsort(owner, kind="stable").reshape(chunks.degree, -1)
    cost = _summed_prefixes(chunks, mine) + work_cost.in_rows(chunks.work[mine].sum(1) + chunks.remainder_work)
    return cost[pairs.first] + cost[pairs.second] - _summed_prefixes(chunks, rings.chunks[0])


def _summed_prefixes(chunks: Chunks, mine: ndarray) -> ndarray:
    """Return, for each list of ascending chunks, its documents' summed prefixes."""
    document, prefix = chunks.document[mine], chunks.prefix[mine]
    is_last = document[:, 1:] != document[:, :-1]
    return prefix[:, -1] + (prefix[:, :-1] * is_last).sum(1)


def chunk_pieces(chunks: Chunks, owner: ndarray) -> list[Pieces]:
    """Join each rank's neighbouring chunks into runs, after its remainder."""
    remainder = int(chunks.start[0]) // chunks.degree
    num_remainders = 0
    if remainder:
        num_remainders = chunks.degree
    starts = np.append(np.arange(num_remainders) * remainder, chunks.start)
    owner = np.append(np.arange(num_remainders), owner)
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    ends = np.append(starts[first[1:]], chunks.start[-1] + chunks.size)
    pieces: list[Pieces] = [[] for _ in range(chunks.degree)]
    for start, stop, rank in zip(starts[first].tolist(), ends.tolist(), owner[first].tolist(), strict=True):
        pieces[rank].append((start, stop - start))
    return pieces
